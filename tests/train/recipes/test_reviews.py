"""The recipes on built-in reviews: trained for a moment, scored by part, sharded."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.train.config import objective_of
from flaxzoo.train.distributed import sharding
from flaxzoo.train.engine import compile as compile_module
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.evaluation.evaluate import score_run

NAMES = ("reviews-bag", "reviews-simple", "reviews", "reviews-mean")


def test_the_recipes_are_those_of_the_lecture():
    bag, simple, blocks, mean = (train.recipe(name).model for name in NAMES)
    assert (bag.num_layers, bag.positions, bag.pooling) == (0, "none", "max")
    assert (simple.num_layers, simple.attention, simple.positions) == (1, "simple", "none")
    assert (blocks.num_layers, blocks.positions) == (2, "learned")
    assert simple.pooling == blocks.pooling == "mean"
    assert mean == dataclasses.replace(bag, pooling="mean")


@pytest.mark.slow
def test_a_bag_of_words_is_scored_by_part(tmp_path):
    config = dataclasses.replace(
        train.recipe("reviews-bag"), steps=300, evaluate_every=300, checkpoint_every=300
    )
    train.train(config, tmp_path / "run")
    scores = score_run(tmp_path / "run")
    assert scores["accuracy_order"] == 0.5
    assert scores["accuracy_plain"] > 0.9
    assert scores["accuracy_negated"] > 0.9  # the maximum sees whether "not" occurs
    parts = [scores[f"accuracy_{part}"] for part in ("plain", "negated", "order")]
    assert scores["accuracy"] == pytest.approx(np.mean(parts))


@pytest.mark.slow
def test_a_mean_of_words_fails_on_negation(tmp_path):
    """The score of a mean is a sum: "not" has one score, which cannot reverse both labels."""
    config = dataclasses.replace(
        train.recipe("reviews-mean"), steps=300, evaluate_every=300, checkpoint_every=300
    )
    train.train(config, tmp_path / "run")
    scores = score_run(tmp_path / "run")
    # A sum is right about at most three of "great", "not great", "terrible" and "not terrible".
    assert scores["accuracy_plain"] + scores["accuracy_negated"] < 1.55


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:2])
def test_eight_devices_train_the_same_model(name, monkeypatch):
    recipe = train.recipe(name)
    model = dataclasses.replace(recipe.model, vocab_size=64)
    # Adam would make as much of gradients that are only rounding.
    optimizer = dataclasses.replace(recipe.optimizer, epsilon=1e-2)
    config = dataclasses.replace(recipe, model=model, optimizer=optimizer, batch_size=16, steps=10)
    rng = np.random.default_rng(0)
    batch = {
        "input_ids": rng.integers(5, 64, (16, 16)).astype(np.int32),
        "attention_mask": (np.arange(16) < rng.integers(3, 16, (16, 1))).astype(np.int32),
        "token_type_ids": np.zeros((16, 16), np.int32),
        "labels": rng.integers(0, 2, 16).astype(np.int32),
    }

    def trained(config):
        program = compile_trainer(config, objective_of(config))
        state, metrics = program.step(program.init(), batch)
        state, metrics = program.step(state, batch)
        return jax.device_get(state).params, float(metrics["loss"])

    mesh = train.MeshConfig(data=2, fsdp=2, tensor=2)
    params, loss = trained(dataclasses.replace(config, mesh=mesh))
    one = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(compile_module, "make_mesh", one)
    expected, expected_loss = trained(config)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
