"""Steps whose loss or gradient is not finite change nothing, and end a run if there are many."""

import dataclasses
import functools
import json
import math
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.train.engine import compile as parallel
from flaxzoo.train.engine import start

from ..support.run_folders import assert_same, everything, kept, lines, small_run


def is_bad(batch):
    return jnp.any(batch["labels"] < 0)


def spoil(batch):
    """A batch with one row that is bad."""
    return {**batch, "labels": np.concatenate([-1 - batch["labels"][:1], batch["labels"][1:]])}


def loss_of(outputs, batch):
    labels = batch["labels"]
    labels = jnp.where(labels < 0, -1 - labels, labels)
    return train.CAUSAL.terms(outputs, {**batch, "labels": labels})["next_token"]


def loss_is_nan(outputs, batch):
    return {"next_token": loss_of(outputs, batch) * jnp.where(is_bad(batch), math.nan, 1.0)}


def gradient_is_nan(outputs, batch):
    loss = loss_of(outputs, batch)
    # At 0 the square root has no derivative; its value is multiplied by 0 either way.
    return {"next_token": loss + 0.0 * jnp.sqrt(jnp.where(is_bad(batch), 0.0, 1.0) * loss)}


LOSS_IS_NAN = dataclasses.replace(train.CAUSAL, terms=loss_is_nan)
GRADIENT_IS_NAN = dataclasses.replace(train.CAUSAL, terms=gradient_is_nan)
WAYS = {
    "fsdp 2, tensor 2": {"mesh": train.MeshConfig(fsdp=2, tensor=2)},
    "2 micro-batches": {"micro_batches": 2},
    "pmap": {"parallel": "pmap"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("objective", [LOSS_IS_NAN, GRADIENT_IS_NAN], ids=["loss", "gradient"])
def test_a_bad_step_counts_and_changes_nothing(train_config, batches, way, objective):
    config = train_config(**WAYS[way])
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout_rate=0.0))
    program = parallel.compile_trainer(config, objective)

    def after(*batches):
        state, metrics = program.init(), {}
        for batch in batches:
            state, metrics = program.step(state, batch)
        state = jax.device_get(state)
        return state, {name: float(value) for name, value in metrics.items()}

    good, _ = after(batches[0], batches[1])
    state, metrics = after(batches[0], spoil(batches[2]), batches[1])
    _, bad = after(batches[0], spoil(batches[2]))
    assert math.isnan(bad["gradient_norm"])
    assert math.isnan(bad["loss"]) == (objective is LOSS_IS_NAN)
    assert (int(good.step), int(state.step)) == (2, 3)
    assert math.isfinite(metrics["loss"])
    for ours, expected in ((state.params, good.params), (state.opt_state, good.opt_state)):
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_the_check_for_bad_steps_does_not_change_good_ones(train_config, batches, monkeypatch):
    def trained():
        program = parallel.compile_trainer(train_config(), train.CAUSAL)
        state = program.init()
        for batch in batches:
            state, _ = program.step(state, batch)
        return jax.device_get(state)

    looked = trained()
    monkeypatch.setattr(jax.lax, "cond", lambda condition, update, keep, *state: update(*state))
    # Two programs, whose sums the compiler may order differently: equal but for rounding.
    for x, y in zip(jax.tree.leaves(looked), jax.tree.leaves(trained()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)


STEPS = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small_run(
        tmp_path_factory.mktemp("text"),
        model={"num_layers": 1},
        mesh=train.MeshConfig(data=1),
        steps=STEPS,
        evaluate_every=100,
        checkpoint_every=5,
        skip_bad_steps=2,
    )


@pytest.fixture(scope="module")
def go(on_one_device):
    """`go(config, workdir, bad, stop)`: trains; the steps `bad` are, SIGTERM comes at `stop`."""

    @functools.cache
    def program_of(config):
        return parallel.compile_trainer(config, LOSS_IS_NAN)

    def go(config, workdir, bad, stop=None):
        def compile_trainer(config, objective):
            program = program_of(dataclasses.replace(config, skip_bad_steps=0))

            def step(state, batch):
                number = int(state.step) + 1
                if number == stop:
                    signal.raise_signal(signal.SIGTERM)
                return program.step(state, spoil(batch) if number in bad else batch)

            return dataclasses.replace(program, step=step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start, "compile_trainer", compile_trainer)
            return train.train(config, workdir)

    return go


def test_bad_steps_are_skipped_counted_and_logged(config, go, tmp_path, capsys):
    assert go(config, tmp_path / "run", bad=(4, 5, 9)).finished
    skipped = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    counted = re.findall(r"step (\d+) .*nan.* (\d) of at most 2", "\n".join(skipped))
    assert counted == [("4", "1"), ("5", "2"), ("9", "1")]
    assert len(skipped) == 3
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in lines(tmp_path / "run")]
    rows = {row["step"]: row for row in rows if row["split"] == "train"}
    assert list(rows) == [1, 2, 3, 6, 7, 8, 10, 11, 12]
    assert [row["skipped_steps"] for row in rows.values()] == [0, 0, 0, 2, 2, 2, 3, 3, 3]
    schedule = train.make_schedule(config.optimizer, STEPS)
    assert rows[12]["learning_rate"] == pytest.approx(float(schedule(12 - 1 - 3)))


def test_a_run_stopped_among_bad_steps_is_the_run_never_stopped(config, go, tmp_path):
    bad = (4, 5, 9, 10)
    assert go(config, tmp_path / "whole", bad).finished
    for stop in (4, 9):
        assert go(config, tmp_path / "run", bad, stop).step == stop
    assert go(config, tmp_path / "run", bad).finished
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert_same(everything(tmp_path / "run", STEPS), everything(tmp_path / "whole", STEPS))


def test_too_many_in_a_row_end_the_run(config, go, tmp_path):
    message = r"step 8 .*nan.* 2 skipped steps.*step 5 "
    with pytest.raises(train.NonFiniteLoss, match=message):
        go(config, tmp_path / "run", bad=(6, 7, 8))
    assert kept(tmp_path / "run") == [5]
    # The count continues after a stop.
    assert go(config, tmp_path / "run", bad=(6, 7, 8), stop=7).step == 7
    with pytest.raises(train.NonFiniteLoss, match=r"step 8 .*step 7 "):
        go(config, tmp_path / "run", bad=(6, 7, 8))
    patient = dataclasses.replace(config, skip_bad_steps=3)
    assert go(patient, tmp_path / "run", bad=(6, 7, 8)).finished
    go(patient, tmp_path / "whole", bad=(6, 7, 8))
    assert_same(everything(tmp_path / "run", STEPS), everything(tmp_path / "whole", STEPS))
