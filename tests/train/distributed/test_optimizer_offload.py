"""Optimizer state in the memory of the devices' hosts."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.train.config import differences, to_dict
from flaxzoo.train.distributed import optimizer_offload as offload
from flaxzoo.train.engine.checkpoint import Checkpoints
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.objectives.tasks import objective_of
from flaxzoo.train.plan import worker as plan_worker
from flaxzoo.train.plan.topology import parse_topology
from flaxzoo.train.runs.config_json import from_dict

MESH = train.MeshConfig(data=2, fsdp=2, tensor=2)


def program_of(config):
    return compile_trainer(config, objective_of(config))


@pytest.fixture(scope="module")
def configs(train_config):
    """The same run with its moments on the devices, and on their hosts."""
    config = train_config(mesh=MESH)
    optimizer = dataclasses.replace(config.optimizer, state_memory="host")
    return config, dataclasses.replace(config, optimizer=optimizer)


@pytest.fixture(scope="module")
def runs(configs, batches):
    """The program of each, its losses, and its last state."""
    made = []
    for config in configs:
        program = program_of(config)
        state, losses = program.init(), []
        for batch in batches:
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        made.append((program, losses, state))
    return made


def equal(one, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other
    )


@pytest.mark.slow
def test_it_changes_no_bit(runs):
    (_, losses, state), (program, offloaded_losses, offloaded) = runs
    assert losses == offloaded_losses
    equal(state, offloaded)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"device"}
    for x in jax.tree.leaves(offloaded.opt_state):
        assert x.sharding.memory_kind == ("pinned_host" if x.ndim else "device")
    assert {x.sharding.memory_kind for x in jax.tree.leaves(offloaded.params)} == {"device"}
    summary = program.memory_summary
    assert re.search(r" 0.0 KB of optimizer state \(and \d+\.\d KB in its host's memory\)", summary)


@pytest.mark.parametrize("saved", [0, 1])
def test_a_checkpoint_of_either_is_restored_as_the_other(tmp_path, runs, saved):
    _, _, state = runs[saved]
    program, _, other = runs[1 - saved]
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(state, {}, None)
        checkpoints.wait()
        restored, _ = checkpoints.restore(int(state.step), program.shapes)
    equal(restored, other)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, other)


def test_a_run_may_be_resumed_with_either(configs):
    assert differences(*configs) == {}
    assert from_dict(to_dict(configs[1])) == configs[1]


def test_a_plan_counts_it_where_it_lies(configs):
    on_device, on_host = (
        plan_worker.plan_run(c, parse_topology("cpu:8"), jax.devices(), compiled=False)
        for c in configs
    )
    assert on_device.host_bytes == 0
    assert on_host.host_bytes + on_host.optimizer_bytes == on_device.optimizer_bytes
    assert on_host.optimizer_bytes == 3 * 4  # the counts of steps


def test_devices_without_such_memory_are_named(configs):
    class Device:
        device_kind = "abacus"

        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})]

    state = program_of(configs[0]).shapes
    with pytest.raises(ValueError, match=r"abacus reaches no memory of its host \(only device\)"):
        offload.on_host(state, state, Device())


def test_pmap_has_no_part_in_it(configs):
    with pytest.raises(ValueError, match="state_memory host is for --parallel jit"):
        program_of(dataclasses.replace(configs[1], parallel="pmap", mesh=train.MeshConfig()))
