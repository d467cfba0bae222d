"""Changed bytes on disk are found by checksums, and an older checkpoint is used."""

import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.models.checksums import find_damage
from flaxzoo.train.engine.checkpoint import Checkpoints, set_aside_damaged

from ..train.engine.test_checkpoint import assert_same, make_state, shapes_of

AS_IT_WAS = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files next to the parts, which say when and by what a checkpoint was written."""


def state_of(step):
    """Returns a state with a matrix that is stored raw, as in real models."""
    state = make_state(step)
    noise = np.random.default_rng(step).normal(size=(64, 64))
    return train.TrainState(
        state.step, {**state.params, "big": jnp.asarray(noise, jnp.float32)}, state.opt_state
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder with three checkpoints."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with Checkpoints(folder, keep_last=3, keep_best=1) as checkpoints:
        for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0)):
            checkpoints.save(state_of(step), {"step": step}, loss)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def files(checkpoint):
    return sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name not in AS_IT_WAS)


def flip(file, offset, bit=0):
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1 << bit
    file.write_bytes(raw)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def restore(run, log=lambda line: None):
    """Returns the newest intact state."""
    set_aside_damaged(run, log)
    with Checkpoints(run, keep_last=3, keep_best=1) as checkpoints:
        assert checkpoints.newest is not None
        return checkpoints.restore(checkpoints.newest, shapes_of(state_of(1)))


def test_every_flipped_bit_and_every_missing_byte_is_found(saved, tmp_path):
    draw = random.Random(0)
    assert find_damage(saved / "checkpoints" / "3") is None
    for file in files(saved / "checkpoints" / "3"):
        copy = shutil.copytree(saved / "checkpoints" / "3", tmp_path / "copy")
        same, raw = copy / file.relative_to(saved / "checkpoints" / "3"), file.read_bytes()
        for offset in {0, len(raw) - 1, *(draw.randrange(len(raw)) for _ in range(3))}:
            flip(same, offset, draw.randrange(8))
            assert find_damage(copy) is not None, (file, offset)
            same.write_bytes(raw)
        same.write_bytes(raw[:-1])
        assert find_damage(copy) is not None, file
        if file.name != "checksums.json":
            same.unlink()
            assert find_damage(copy) == f"{same.relative_to(copy)} is missing"
        shutil.rmtree(copy)


def test_the_newest_whole_checkpoint_is_used(run):
    big = max((run / "checkpoints" / "3" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    flip(big, 5000)
    position = run / "checkpoints" / "2" / "data" / "metadata"
    position.write_bytes(position.read_bytes().replace(b"2", b"3"))
    logged = []
    state, data = restore(run, logged.append)
    assert_same(state, state_of(1))
    assert data == {"step": 1}
    part = big.relative_to(run / "checkpoints" / "3")
    assert logged == [
        f"checkpoint 3 of {run} is damaged: {part} differs from its checksum; renamed to 3.damaged",
        f"checkpoint 2 of {run} is damaged: data/metadata differs from its checksum; renamed to "
        "2.damaged",
    ]
    # If the same steps are saved again and damaged, they are renamed, too.
    with Checkpoints(run, keep_last=3, keep_best=1) as checkpoints:
        checkpoints.save(state_of(2), {"step": 2}, None)
    assert names(run) == ["1", "2", "2.damaged", "3.damaged"]
    (run / "checkpoints" / "2" / "params" / "_METADATA").unlink()
    assert_same(restore(run)[0], state_of(1))
    assert names(run) == ["1", "2.damaged", "2.damaged-2", "3.damaged"]


def test_an_older_damaged_checkpoint_is_set_aside(run):
    (run / "checkpoints" / "1" / "metrics" / "metrics").write_text("{")
    assert_same(restore(run)[0], state_of(3))
    assert names(run) == ["1.damaged", "2", "3"]


def test_files_that_no_state_is_read_from_may_be_damaged(run):
    for name in AS_IT_WAS:
        flip(run / "checkpoints" / "3" / name, 20)
    assert_same(restore(run)[0], state_of(3))
    for name in AS_IT_WAS:
        (run / "checkpoints" / "3" / name).unlink()
    assert_same(restore(run)[0], state_of(3))


def test_without_an_intact_checkpoint_nothing_changes(run):
    for step in (1, 2, 3):
        flip(run / "checkpoints" / str(step) / "params" / "_METADATA", 3)
    with pytest.raises(train.RunError, match=r"every checkpoint .*damaged \(3: params/_MET"):
        set_aside_damaged(run, print)
    assert names(run) == ["1", "2", "3"]


@pytest.mark.parametrize("content", [None, "{}", "[]"])
def test_a_checkpoint_without_checksums_is_damaged(run, content):
    file = run / "checkpoints" / "3" / "checksums.json"
    file.unlink() if content is None else file.write_text(content)
    assert_same(restore(run)[0], state_of(2))
    assert names(run) == ["1", "2", "3.damaged"]


def test_parameters_are_checked_when_they_are_read(run):
    from flaxzoo.models.loading import restore_params

    shapes = shapes_of(state_of(1).params)
    flip(run / "checkpoints" / "3" / "optimizer" / "_METADATA", 3)  # not theirs
    restored = restore_params(run, 3, shapes)
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, state_of(3).params))
    flip(run / "checkpoints" / "3" / "params" / "_METADATA", 3)
    with pytest.raises(ValueError, match=r"checkpoint 3 .*damaged: params/_METADATA"):
        restore_params(run, 3, shapes)
