"""Runs from end to end: stopped anywhere and taken up again, they are the run never stopped."""

import dataclasses
import functools
import inspect
import json
import math
import signal

import jax
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.engine import compile as parallel
from flaxzoo.train.engine import loop, start

from ...support.devices import on_devices
from ...support.run_folders import assert_same, everything, kept, lines, small_run

STEPS = 12
ONE_DEVICE = train.MeshConfig(data=1)
TWO_DEVICES = train.MeshConfig(data=1, fsdp=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Rows of an epoch: some 300, more than are trained on. Dropout is on."""
    return small_run(
        tmp_path_factory.mktemp("text"),
        mesh=ONE_DEVICE,
        steps=STEPS,
        evaluate_every=4,
        checkpoint_every=5,
    )


@functools.cache
def program_of(config):
    # Runs of one configuration share what they compile.
    with on_devices({ONE_DEVICE: 1, TWO_DEVICES: 2}.get(config.mesh, 8)):
        return parallel.compile_trainer(config, train.CAUSAL)


class Stop:
    """A signal during the step that is `at`; None for never."""

    def __init__(self, at):
        self.at = at

    def __call__(self, config, objective):
        program = program_of(config)

        def step(state, batch):
            if self.at is not None and int(np.ravel(state.step)[0]) + 1 == self.at:
                signal.raise_signal(signal.SIGTERM)
            return program.step(state, batch)

        return dataclasses.replace(program, step=step)


def go(config, workdir, stop=None, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "compile_trainer", Stop(stop))
        return train.train(config, workdir, quiet=True, **options)


LAYOUTS = {
    "one device": {},
    "fsdp 2": {"mesh": TWO_DEVICES},
    "pmap": {"parallel": "pmap"},
    "mixture": {"mesh": ONE_DEVICE},
}


@pytest.fixture(scope="module")
def never_stopped(config, tmp_path_factory):
    """`never_stopped(layout)`: its configuration, and the folder of its run."""

    @functools.cache
    def whole(layout):
        laid_out = dataclasses.replace(config, **LAYOUTS[layout])
        if layout == "mixture":
            source = config.data.source.removesuffix("#block")
            mixed = f"0.7*{source}#block + 0.3*{source}#line"
            data = dataclasses.replace(config.data, source=mixed)
            laid_out = dataclasses.replace(laid_out, data=data)
        workdir = tmp_path_factory.mktemp("whole") / "run"
        assert go(laid_out, workdir).finished
        return laid_out, workdir

    return whole


@pytest.mark.slow
def test_a_run_resumes_where_jax_computes_in_64_bits(never_stopped, tmp_path):
    config, whole = never_stopped("one device")
    go(config, tmp_path / "run", 3)
    jax.config.update("jax_enable_x64", True)  # as JAX_ENABLE_X64 does
    try:
        assert go(config, tmp_path / "run").finished
    finally:
        jax.config.update("jax_enable_x64", False)
    assert_same(everything(tmp_path / "run", STEPS), everything(whole, STEPS))
    assert lines(tmp_path / "run") == lines(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stops"),
    [
        ("one device", [1]),  # the first step
        ("one device", [5]),  # a checkpoint
        ("one device", [7]),  # nothing
        ("one device", [8, 12]),  # an evaluation, the last one: neither is done before saving
        # an evaluation, the last step but one
        pytest.param("one device", [3, 8, 11], marks=pytest.mark.law),
        pytest.param("fsdp 2", [3, 8], marks=pytest.mark.law),
        ("pmap", [3, 8]),
        ("mixture", [3, 8]),
    ],
)
def test_a_resumed_run_is_the_run_never_stopped(never_stopped, tmp_path, layout, stops):
    config, whole = never_stopped(layout)
    for stop in stops:
        result = go(config, tmp_path / "run", stop)
        assert (result.step, result.finished, result.signal) == (stop, False, signal.SIGTERM)
        assert max(kept(tmp_path / "run")) == stop
    assert go(config, tmp_path / "run").finished
    assert lines(tmp_path / "run") == lines(whole)
    assert_same(everything(tmp_path / "run", STEPS), everything(whole, STEPS))


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(config, tmp_path):
    go(config, tmp_path / "whole")
    layouts = [LAYOUTS["fsdp 2"], LAYOUTS["pmap"], {}]
    for fields, stop in zip(layouts, (4, 8, None), strict=True):
        go(dataclasses.replace(config, **fields), tmp_path / "run", stop)
    ours, whole = (everything(tmp_path / name, STEPS) for name in ("run", "whole"))
    assert ours.keys() == whole.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], whole[name], rtol=1e-3, atol=2e-5, err_msg=name)
    for one, other in zip(lines(tmp_path / "run"), lines(tmp_path / "whole"), strict=True):
        assert json.loads(one)["loss"] == pytest.approx(json.loads(other)["loss"], rel=1e-4)


def test_losses_decrease_and_are_logged(config, tmp_path):
    result = go(config, tmp_path / "run")
    rows = [json.loads(line) for line in lines(tmp_path / "run")]
    training = [row for row in rows if row["split"] == "train"]
    validation = [row for row in rows if row["split"] == "validation"]
    assert [row["step"] for row in training] == list(range(1, 13))
    assert [row["step"] for row in validation] == [4, 5, 8, 10, 12]
    assert set(training[0]) >= {"loss", "gradient_norm", "learning_rate", "skipped_steps"}
    schedule = train.make_schedule(config.optimizer, STEPS)
    rates = [float(schedule(step)) for step in range(STEPS)]
    assert [row["learning_rate"] for row in training] == pytest.approx(rates)
    assert validation[-1]["loss"] < validation[0]["loss"]
    last = {k: v for k, v in validation[-1].items() if k not in ("step", "split")}
    assert result.validation == last


def test_evaluation_is_what_a_plain_loop_computes(config, tmp_path):
    result = go(config, tmp_path / "run")
    assert result.validation is not None
    model, params = models.load(tmp_path / "run")
    rows = result.run.validation.examples
    total, tokens = 0.0, 0
    apply = jax.jit(lambda ids: model.apply({"params": params}, input_ids=ids).logits)
    for index in range(rows.num_examples):
        row = rows.example(0, index)
        for segment in range(1, row["segment_ids"].max() + 1):
            (here,) = np.nonzero(row["segment_ids"] == segment)
            ids = np.zeros((1, 16), np.int32)
            ids[0, : len(here)] = row["input_ids"][here]
            scores = np.asarray(apply(ids), np.float64)[0, : len(here)]
            scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
            total -= scores[np.arange(len(here)), row["labels"][here]].sum()
            tokens += len(here)
    # Each document: its characters, and the token that closes it.
    texts = config.data.validation_documents()
    assert tokens == sum(len(text) + 1 for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    expected = {
        "loss": total / tokens,
        "perplexity": math.exp(total / tokens),
        "bits_per_byte": total / math.log(2) / num_bytes,
        "tokens": tokens,
    }
    assert result.validation == pytest.approx(expected, rel=1e-5)
    scored = train.score_run(tmp_path / "run")
    assert scored == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_keeps_the_newest_and_the_best(config, tmp_path, monkeypatch):
    losses = iter([3.0, 1.0, 2.0, 2.5, *range(4, 12)])
    measured = loop.evaluate

    def evaluate(*arguments, **options):
        return dataclasses.replace(measured(*arguments, **options), loss=float(next(losses)))

    monkeypatch.setattr(loop, "evaluate", evaluate)
    config = dataclasses.replace(config, evaluate_every=1, checkpoint_every=1)
    go(config, tmp_path / "run", stop=4)
    assert kept(tmp_path / "run") == [2, 3, 4]
    go(config, tmp_path / "run")
    assert kept(tmp_path / "run") == [2, 11, 12]
    models.load(tmp_path / "run", step=2)


def test_no_resume(config, tmp_path):
    go(config, tmp_path / "run", stop=6, resume=False)  # nothing to take up: begins
    before = lines(tmp_path / "run")
    with pytest.raises(train.RunError, match=r"step 6: .*--no-res"):
        go(config, tmp_path / "run", resume=False)
    assert lines(tmp_path / "run") == before
    assert go(config, tmp_path / "run").finished


def test_a_finished_run_is_left_as_it_is(config, tmp_path):
    go(config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*") if path.is_file()}
    result = go(config, tmp_path / "run")
    assert (result.step, result.finished, result.validation) == (STEPS, True, None)
    for path in before:
        if "tensorboard" not in str(path):
            assert path.read_bytes() == before[path]
    (tmp_path / "run" / "report.md").unlink()  # killed before it was written
    go(config, tmp_path / "run")
    assert (tmp_path / "run" / "report.md").read_bytes() == before[tmp_path / "run" / "report.md"]


@pytest.mark.slow
def test_the_report_has_a_sample(config, tmp_path):
    config = dataclasses.replace(config, sample_prompt="the cat")
    result = go(config, tmp_path / "run")
    assert result.sample is not None
    assert result.sample.startswith("the cat")
    report = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert f"```text\n{result.sample}\n```" in report
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000


class Poison:
    """A program whose state is not finite after step `at`."""

    def __init__(self, at):
        self.at = at

    def __call__(self, config, objective):
        program = program_of(config)

        def step(state, batch):
            state, metrics = program.step(state, batch)
            if int(state.step) == self.at:
                state = dataclasses.replace(state, params=optax.tree.scale(math.nan, state.params))
            return state, metrics

        return dataclasses.replace(program, step=step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "checkpoint_every", "message"),
    [
        (2, 5, r"step 3 .*nan \(gradient norm nan\); no checkpoint"),
        (6, 5, r"step 7 .*nan .*step 5 .*optimizer.peak_learning"),
        # Step 8 is fine itself; what it leaves is not, and must not be kept.
        (8, 4, r"validation loss .*step 8 .*nan.*step 4 "),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(
    config, tmp_path, monkeypatch, at, checkpoint_every, message
):
    monkeypatch.setattr(start, "compile_trainer", Poison(at))
    config = dataclasses.replace(config, checkpoint_every=checkpoint_every, skip_bad_steps=0)
    with pytest.raises(train.NonFiniteLoss, match=message):
        train.train(config, tmp_path / "run", quiet=True)
    assert kept(tmp_path / "run") == ([] if at == 2 else [checkpoint_every])
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    if at != 2:
        _, params = models.load(tmp_path / "run")
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_the_name_of_a_recipe_is_refused_as_a_configuration(tmp_path):
    with pytest.raises(UserError, match=r"'quickstart' .*TrainConfig"):
        inspect.unwrap(train.train)("quickstart", tmp_path / "run")  # without the check of types
    assert not (tmp_path / "run").exists()


def test_a_signal_cuts_off_an_evaluation(config, tmp_path):
    result = go(config, tmp_path / "run", 4)  # which is to be evaluated
    rows = [json.loads(line) for line in lines(tmp_path / "run")]
    assert [row["split"] for row in rows] == ["train"] * 4
    assert (result.step, result.validation) == (4, None)
