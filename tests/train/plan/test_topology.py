from types import SimpleNamespace

import pytest
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.plan.chip import Gpu, Tpu
from flaxzoo.train.plan.chips import CHIPS
from flaxzoo.train.plan.topology import parse_topology


@pytest.mark.parametrize(
    ("name", "slices", "devices"),
    [
        ("v5e:4x4", 1, 16),
        ("v5p:8x8x8", 1, 512),
        ("4*v6e:16x16", 4, 1024),
        ("h100:8", 1, 8),
        ("2*a100-40gb:4", 2, 8),
        ("cpu:512", 1, 512),
    ],
)
def test_names(name, slices, devices):
    topology = parse_topology(name)
    assert (topology.name, topology.units, topology.num_devices) == (name, slices, devices)
    assert topology.is_virtual == name.startswith("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p:3x3x3", r"shape .*2x2x1, 2x2x2, .* got '3x3x3'"),
        ("v5e:4x4x4", r"shape .*got '4x4x4'"),
        ("v5p-16", "give a chip"),
        ("a100:16", "shape .*1, 2, 4, 8, got '16'"),
        ("a100-80gb:8", "give a chip .*a100-40gb, a100, h100"),
        ("0*h100:8", "1 to 64 hosts"),
        ("v9:2x2", r"topology 'v9:2x2' .*\(v4, v5e, v5p, v6e, l4"),
        ("v5p", "is unknown"),
        ("", "is unknown"),
        ("0*v6e:2x2", "1 to 64 slices"),
        ("999*v6e:2x2", "1 to 64 slices"),
        ("cpu:0", "1 to 4096"),
        ("cpu:2x2", "1 to 4096"),
        ("2*cpu:8", "1 to 4096"),
    ],
)
def test_a_topology_that_would_end_the_compiler_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(name)


@pytest.mark.parametrize("kind", [kind for kind, chip in CHIPS.items() if isinstance(chip, Tpu)])
def test_every_shape_has_an_axis_per_dimension_of_the_torus(kind):
    dimensions = {len(parse_topology(f"{kind}:{shape}").shape) for shape in CHIPS[kind].shapes}
    assert dimensions == {2 if kind.endswith("e") else 3}


def on_hosts(*hosts):
    return [SimpleNamespace(process_index=host) for host in hosts]


def test_what_gpus_send_to_each_other():
    """Within a host through NVLink; between hosts each GPU has an adapter."""
    h100 = CHIPS["h100"]
    assert h100.bandwidth(on_hosts(0, 0, 0, 0), (8,)) == 450e9
    assert h100.bandwidth(on_hosts(0, 1), (8,)) == 50e9
    assert h100.bandwidth(on_hosts(*[0] * 8, *[1] * 8), (8,)) == 8 * 50e9
    assert h100.crosses(on_hosts(0, 1))
    assert not h100.crosses(on_hosts(1, 1))


def test_parameters_cross_hosts_of_gpus_but_not_slices_of_tpus():
    names = "4*v6e:2x2", "4*h100:8", "cpu:8"
    assert [parse_topology(name).data_multiple for name in names] == [4, 1, 1]


def test_a_program_may_use_the_part_of_a_gpu_that_jax_takes(monkeypatch):
    names = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    h100 = CHIPS["h100"]
    assert h100.usable_memory == int(0.75 * h100.memory)
    for name in names:  # jax reads both, one at a time
        with monkeypatch.context() as patch:
            patch.setenv(name, ".9")
            assert h100.usable_memory == int(0.9 * h100.memory)
            for value in ("most", "90", "0", "nan"):
                patch.setenv(name, value)
                with pytest.raises(UserError, match=f"{name} .*got '{value}'"):
                    parse_topology("h100:1").chip.environment()


@pytest.mark.parametrize("kind", [kind for kind, chip in CHIPS.items() if isinstance(chip, Gpu)])
def test_a_gpu_is_described_to_the_compiler(kind):
    chip = CHIPS[kind]
    assert isinstance(chip, Gpu)
    text = chip.target()
    assert text.count("{") == text.count("}")
    for fact in (f"core_count: {chip.cores}\n", f"device_memory_size: {chip.memory}\n", chip.kind):
        assert fact in text
