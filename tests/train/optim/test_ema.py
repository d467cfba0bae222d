"""The moving average of the parameters: its numbers, and its way through a run."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.run_files import steps
from flaxzoo.train.cli import main as cli
from flaxzoo.train.optim.ema import ema_of
from flaxzoo.train.optim.optimizer import make_optimizer
from flaxzoo.train.runs.metrics_log import read_metrics
from flaxzoo.train.serve.rows.settings import RowSettings
from flaxzoo.train.serve.served import open_models

from tests.support.run_folders import assert_same, everything, small_run

pytestmark = pytest.mark.usefixtures("on_one_device")

DECAY = 0.75
OPTIMIZER = train.OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=3, ema_decay=DECAY)


def test_the_average_is_that_of_optax():
    """optax.ema of the parameters, started at the initial ones, and no change of the updates."""
    params = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}}
    tx = make_optimizer(OPTIMIZER, 10)
    plain = make_optimizer(dataclasses.replace(OPTIMIZER, ema_decay=None), 10)
    state, other = tx.init(params), plain.init(params)
    assert ema_of(other) is None
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(other)) + 2
    average = optax.ema(DECAY, debias=False)
    expected: Any = optax.EmaState(count=jnp.zeros([], jnp.int32), ema=params)
    for step in range(1, 4):
        gradient = jax.tree.map(lambda x, n=step: jnp.full_like(x, n), params)
        updates, state = tx.update(gradient, state, params)
        same, other = plain.update(gradient, other, params)
        jax.tree.map(np.testing.assert_array_equal, updates, same)
        params = optax.apply_updates(params, updates)
        _, expected = average.update(params, expected)
    jax.tree.map(np.testing.assert_array_equal, ema_of(state), expected.ema)


class Read(train.Callback):
    """Keeps the average that it reads at the last evaluation."""

    def on_start(self, running):
        self.running = running

    def on_evaluation(self, step, metrics):
        self.metrics = metrics
        self.step, self.average = self.running.params(ema=True)
        assert self.running.model.config.d_model == 16


class Stop(train.Callback):
    """Ends a run with an error after its first step."""

    def on_step(self, step, metrics):
        if step == 1:
            raise ZeroDivisionError


@pytest.fixture(scope="module")
def whole(on_one_device, tmp_path_factory):
    """The configuration and the folder of a finished run, and the callback that has read it."""
    folder, read = tmp_path_factory.mktemp("averaged"), Read()
    fields = {"checkpoint_every": 100, "best_metric": "min:ema_loss"}
    config = small_run(folder, steps=4, optimizer=OPTIMIZER, **fields)
    train.train(config, folder / "whole", quiet=True, callbacks=[read])
    return config, folder / "whole", read


@pytest.mark.slow
def test_a_run_saves_resumes_evaluates_and_exports_its_average(whole, tmp_path, capsys):
    config, uninterrupted, read = whole
    with pytest.raises(ZeroDivisionError):
        train.train(config, tmp_path / "run", quiet=True, callbacks=[Stop()])
    result = train.train(config, tmp_path / "run", quiet=True)
    run = tmp_path / "run"
    assert_same(everything(run, 4), everything(uninterrupted, 4))
    average, other = (models.load(x, ema=True)[1] for x in (run, uninterrupted))
    jax.tree.map(np.testing.assert_array_equal, average, other)
    assert read.step == 4
    jax.tree.map(np.testing.assert_array_equal, average, read.average)
    stored = uninterrupted / "checkpoints" / "4" / "metrics" / "metrics"
    assert json.loads(stored.read_text())["loss"] == read.metrics["ema_loss"]
    # The last parameters have moved further than their average.
    assert result.validation is not None
    for name, ema in (("loss", False), ("ema_loss", True)):
        assert train.score_run(run, ema=ema)["loss"] == pytest.approx(result.validation[name])
    assert result.validation["ema_loss"] > result.validation["loss"]
    capsys.readouterr()
    assert cli.main(["evaluate", str(run), "--ema"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["loss"] == pytest.approx(result.validation["ema_loss"])
    assert cli.main(["export", str(run), str(tmp_path / "exported"), "--ema"]) == 0
    _, exported = models.load(tmp_path / "exported")
    jax.tree.map(np.testing.assert_array_equal, exported, average)
    # An older run has none.
    with pytest.raises(UserError, match="moving average"):
        models.load(tmp_path / "exported", ema=True)


@pytest.mark.slow
def test_an_index_and_a_server_use_the_average(whole, tmp_path, capsys):
    _, run, _ = whole
    texts = ["the cat sat", "a big red house", "some dog"]
    file, index = tmp_path / "texts.txt", tmp_path / "index"
    file.write_text("\n".join(texts))
    assert cli.main(["index", str(file), str(index), "--run", str(run), "--ema"]) == 0
    of_average = models.TextEmbedder.of_run(run, ema=True)
    opened = train.SearchIndex.open(index)
    np.testing.assert_allclose(opened.vectors, of_average.comparable(of_average(texts)), rtol=1e-6)
    # A search embeds its query with the average too, also after the run has moved.
    for options in ([], ["--run", str(run)], ["--ema"]):
        capsys.readouterr()
        assert cli.main(["search", str(index), texts[1], "--json", *options]) == 0
        first = json.loads(capsys.readouterr().out.splitlines()[0])
        assert (first["text"], first["score"]) == (texts[1], pytest.approx(1.0, abs=1e-5))
    assert cli.main(["search", str(index), texts[1], "--no-ema"]) == 2
    # The workers of a server share the parameters.
    average = models.load(run, ema=True)[1]
    served = open_models([str(run)], RowSettings(), print, ema=True)["whole"]
    jax.tree.map(np.testing.assert_array_equal, served.front.loaded[1], average)


def test_the_average_is_sharded_like_the_parameters():
    sizes = {"max_length": 8, "num_layers": 2, "d_model": 16, "num_heads": 2}
    model = models.create(models.GPTConfig(vocab_size=32, **sizes))
    mesh = train.make_mesh(train.MeshConfig(data=2, fsdp=4))
    step = train.make_sharded_step(model, train.CAUSAL, make_optimizer(OPTIMIZER, 10), mesh)
    average = ema_of(step.state.opt_state)
    assert average is not None
    shardings = [jax.tree.map(lambda x: x.sharding, x) for x in (average, step.state.params)]
    assert shardings[0] == shardings[1]


@pytest.mark.slow
def test_the_best_checkpoint_is_named(tmp_path, capsys):
    run = tmp_path / "run"
    fields = {"evaluate_every": 1, "checkpoint_every": 1, "keep_last": 1, "optimizer": OPTIMIZER}
    train.train(small_run(tmp_path, steps=3, best_metric="max:loss", **fields), run)
    losses = {row["step"]: row["loss"] for row in read_metrics(run, "validation")}
    best = max((1, 2, 3), key=losses.__getitem__)
    assert best < 3 < len(losses)  # the initial model is evaluated too, but has no checkpoint
    assert steps(run) == [best, 3]
    assert f"best checkpoint: step {best}\n" in capsys.readouterr().err
    assert f"| best checkpoint | step {best} |" in (run / "report.md").read_text()


@pytest.mark.slow
def test_a_metric_that_no_evaluation_has_is_named(tmp_path):
    config = small_run(tmp_path, steps=1, best_metric="max:f1")
    with pytest.raises(UserError, match=r"best_metric .*loss, .*'f1'"):
        train.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()  # before the first step
    with pytest.raises(UserError, match=r"best_metric .*min: .*max:"):
        dataclasses.replace(config, best_metric="f1")
