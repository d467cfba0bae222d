"""Plans for real TPUs, by their own compiler, where it is installed."""

import importlib.util

import pytest
from flaxzoo.train import cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is not installed: pip install -e '.[tpu]'",
    ),
]
SMALL = "--model.num-layers 2 --model.d-model 128 --model.num-heads 1 --execution.remat full"


def plan(capfd, *arguments):
    status = cli.main(["plan", "quickstart", *SMALL.split(), *" ".join(arguments).split()])
    return status, capfd.readouterr().out


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v5e:1x1", ""),
        ("v4:2x2x1", "--mesh.fsdp 4"),
        ("v5p:2x2x1", "--mesh.fsdp 2 --mesh.tensor 1"),
        ("2*v6e:2x2", "--mesh.data 2 --mesh.fsdp 4"),
    ],
)
def test_a_step_that_fits(capfd, topology, mesh):
    status, out = plan(capfd, "--topology", topology, mesh)
    assert status == 0
    assert "fits: " in out
    assert "estimate, not a measurement" in out
    assert ("between slices" in out) == topology.startswith("2*")


def test_a_step_that_does_not_fit(capfd):
    status, out = plan(
        capfd, "--topology v5e:1x1 --batch-size 65536 --model.max-length 1024 --data.length 1024"
    )
    assert status == 1
    assert "does not fit: " in out
    assert "what would help: more --micro-batches" in out
