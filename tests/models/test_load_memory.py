"""How much memory loading takes, in a process of its own: as much as what is loaded."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.init import parameter_shapes

CONFIGS = {
    "deep": models.BertConfig(
        vocab_size=1000, max_length=64, num_layers=8, d_model=512, num_heads=8, head="none"
    ),
    "of many words": models.GPTConfig(
        vocab_size=40_000, max_length=64, num_layers=1, d_model=512, num_heads=8
    ),
}

MEASURE = """
import json, sys
import jax
from flaxzoo import models, train

folder, small, how = sys.argv[1:]

def memory(name):
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

def shardings(shapes):
    return train.parameter_shardings(shapes, train.make_mesh(train.MeshConfig(fsdp=8)))

def pieces(shape, sharding, piece):
    # As on devices that have memory of their own: what they took the host has no more.
    for index in sharding.addressable_devices_indices_map(shape).values():
        piece(index)
    return jax.ShapeDtypeStruct(shape, "float32")

def load(folder):
    return models.load(folder, shardings=None if how == "one device" else shardings)[1]

load(small)  # what is imported and traced on the way
if how == "elsewhere":
    jax.make_array_from_callback = pieces
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is the present
before = memory("VmRSS")
params = load(folder)
size = sum(4 * x.size for x in jax.tree.leaves(params))
print(json.dumps([size, memory("VmHWM") - before]))
"""


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    """A model of some hundred megabytes, beside a small one of its kind."""
    config = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("models")
    for name, c in {
        "large": config,
        "small": dataclasses.replace(config, vocab_size=8, d_model=8),
    }.items():
        (folder / name).mkdir()
        shapes = parameter_shapes(models.create(c))
        ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
        write_weights(folder / name, c, ones)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize(
    ("how", "limit"), [("one device", 1.3), ("eight devices", 1.3), ("elsewhere", 0.3)]
)
def test_peak(folder, how, limit):
    command = [sys.executable, "-c", MEASURE, str(folder / "large"), str(folder / "small"), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, peak = json.loads(done.stdout)
    print(f"{how}: {peak / size:.3f} of {size / 1e6:.0f} MB")
    assert size > 80e6
    assert peak < limit * size
