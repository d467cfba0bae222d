import pytest
from flaxzoo.train.plan.hardware import CHIPS, parse_topology


@pytest.mark.parametrize(
    ("name", "slices", "devices"),
    [("v5e:4x4", 1, 16), ("v5p:8x8x8", 1, 512), ("4*v6e:16x16", 4, 1024), ("cpu:512", 1, 512)],
)
def test_names(name, slices, devices):
    topology = parse_topology(name)
    assert (topology.name, topology.slices, topology.num_devices) == (name, slices, devices)
    assert (topology.chip is None) == name.startswith("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p:3x3x3", r"v5p has no shape 3x3x3: .*2x2x1, 2x2x2"),
        ("v5e:4x4x4", "v5e has no shape 4x4x4"),
        ("v5litepod-8", "its chips are v5e:2x4; give a chip"),
        ("v5p-16", "its chips are v5p:2x2x2; give a chip"),
        ("a100:8", "for a GPU there is flaxzoo bench"),
        ("v9:2x2", r"topology 'v9:2x2' is unknown: give a chip \(v4, v5e, v5p, v6e\)"),
        ("v5p", "is unknown"),
        ("", "is unknown"),
        ("0*v6e:2x2", "give from 1 to 64 slices"),
        ("999*v6e:2x2", "give from 1 to 64 slices"),
        ("cpu:0", "virtual devices from 1 to 4096"),
        ("cpu:2x2", "virtual devices from 1 to 4096"),
        ("2*cpu:8", "virtual devices from 1 to 4096"),
    ],
)
def test_a_topology_that_would_end_the_compiler_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(name)


@pytest.mark.parametrize("kind", CHIPS)
def test_every_shape_has_an_axis_per_dimension_of_the_torus(kind):
    dimensions = {len(parse_topology(f"{kind}:{shape}").shape) for shape in CHIPS[kind].shapes}
    assert dimensions == {2 if kind.endswith("e") else 3}
