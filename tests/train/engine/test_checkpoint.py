import asyncio
import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo.models import loading, run_files
from flaxzoo.models.checksums import find_damage
from flaxzoo.models.run_files import newest_step, steps
from flaxzoo.train import TrainState
from flaxzoo.train.engine.checkpoint import Checkpoints, set_aside_damaged
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.futures.future import CommitFuture


def make_state(step, sharding=None):
    """Arrays that differ from step to step, one of half precision."""
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    draw = np.random.default_rng(step)
    w = jax.device_put(jnp.asarray(draw.normal(size=(8, 4)), jnp.float32), sharding)
    b = jax.device_put(jnp.asarray(draw.normal(size=(8,)), jnp.bfloat16), sharding)
    return TrainState(
        jnp.int32(step), {"layer": {"w": w, "b": b}}, ({"mu": w * 3}, jnp.int32(step))
    )


def shapes_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def kept(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def save(folder, losses, last=2, best=1):
    """Saves a state for each step of {step: validation loss}."""
    with Checkpoints(folder, keep_last=last, keep_best=best) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(make_state(step), {"step": step}, loss)


def test_a_writer_that_fails_later_does_not_replace_the_first_error(tmp_path):
    async def fail():
        await asyncio.sleep(0.3)
        raise ValueError("later")

    def end_with_an_error():
        with Checkpoints(tmp_path, keep_last=2, keep_best=1):
            writers.append(CommitFuture(fail()))
            raise KeyError("first")

    writers = []
    with pytest.raises(KeyError, match="first"):
        end_with_an_error()
    (writer,) = writers
    with pytest.raises(ValueError, match="later"):
        writer.result(timeout=0)  # it has ended


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state = make_state(3)
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        assert checkpoints.newest is None
        checkpoints.save(state, {"step": 3}, None)
        checkpoints.wait()
        assert checkpoints.newest == 3
        restored, data = checkpoints.restore(3, shapes_of(state))
    assert_same(restored, state)
    assert data == {"step": 3}


@pytest.mark.slow
def test_a_state_comes_back_onto_other_devices(tmp_path):
    def sharding(*devices):
        return NamedSharding(Mesh(np.asarray(devices), ("x",)), PartitionSpec("x"))

    four, two = sharding(*jax.devices()[:4]), sharding(*jax.devices()[2:4])
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(make_state(1, four), {}, None)
    target = make_state(1, two)
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        restored, _ = checkpoints.restore(1, shapes_of(target))
    assert_same(restored, target)
    assert restored.params["layer"]["w"].sharding == two


def test_a_step_is_saved_once(tmp_path):
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        checkpoints.save(make_state(1), {}, 2.0)
        other = dataclasses.replace(make_state(9), step=jnp.int32(1))
        checkpoints.save(other, {}, None)
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, shapes_of(make_state(1)))
    assert_same(restored, make_state(1))


@pytest.mark.parametrize(
    ("losses", "last", "best", "expected"),
    [
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 5.0}, 2, 1, [2, 4, 5]),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 5.0}, 1, 2, [2, 3, 5]),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 5.0}, 2, 0, [4, 5]),
        ({1: 3.0, 2: None, 3: 2.0, 4: None, 5: None}, 1, 1, [3, 5]),
        ({1: None, 2: None, 3: None}, 2, 1, [2, 3]),
    ],
)
@pytest.mark.parametrize("stopped", [False, True])
def test_the_newest_and_the_best_are_kept(tmp_path, losses, last, best, expected, stopped):
    if stopped:  # after every step: what was best is known from disk alone
        for step, loss in losses.items():
            save(tmp_path, {step: loss}, last, best)
    else:
        save(tmp_path, losses, last, best)
    assert kept(tmp_path) == steps(tmp_path) == expected


def test_a_checkpoint_without_a_loss_logs_no_warning(tmp_path, caplog):
    save(tmp_path, {1: None, 2: 1.0})
    save(tmp_path, {3: None})
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_an_incomplete_checkpoint_is_ignored(tmp_path):
    # What a process leaves that is killed while it writes.
    save(tmp_path, {1: 3.0})
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    assert newest_step(tmp_path) == 1
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        assert checkpoints.newest == 1
        checkpoints.save(make_state(2), {}, None)
    assert kept(tmp_path) == [1, 2]


def test_folders_without_a_checkpoint_are_ignored(tmp_path):
    save(tmp_path, {15: None, 20: None})
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "99").mkdir()
    (checkpoints / "100" / "params").mkdir(parents=True)
    (checkpoints / "101").write_text("")
    (checkpoints / "0102").mkdir()
    (checkpoints / "103" / "mine").mkdir(parents=True)
    assert steps(tmp_path) == [15, 20]
    assert newest_step(tmp_path) == 20
    lines = []
    set_aside_damaged(tmp_path, lines.append)
    assert [line.split()[1] for line in lines] == ["99", "100", "103"]
    with Checkpoints(tmp_path, keep_last=2, keep_best=0) as opened:
        assert opened.newest == 20
    (checkpoints / "only").mkdir()
    empty = tmp_path / "empty"
    (empty / "checkpoints" / "99").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"checkpoints/99 "):
        newest_step(empty)


@pytest.mark.parametrize("step", [None, 15])
def test_a_checkpoint_that_training_removes_while_it_is_read(tmp_path, monkeypatch, step):
    save(tmp_path, {15: None, 20: None}, last=5)
    (tmp_path / "config.json").write_text("{}")
    shapes, later = shapes_of(make_state(15).params), []

    def removing(checkpoint, part):
        shutil.rmtree(checkpoint)
        later.append(checkpoint.name)
        if len(later) == 1:
            save(tmp_path, {25: None}, last=5)
        if len(later) == 2:
            monkeypatch.undo()
        return find_damage(checkpoint, part)

    monkeypatch.setattr(loading, "find_damage", removing)
    read = functools.partial(loading.restore_params, tmp_path, shapes=shapes)
    if step is None:
        params = run_files.read_step(tmp_path, None, lambda step: read(step))
        assert later == ["20", "25"]
        assert_same(params, make_state(15).params)
    else:
        with pytest.raises(run_files.CheckpointRemoved, match="checkpoint 15 of"):
            run_files.read_step(tmp_path, step, lambda step: read(step))
