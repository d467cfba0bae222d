"""Objectives with two models: a generator that is trained too, and a frozen teacher."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.data import UserError
from flaxzoo.models.nn.dropout import fold_in
from flaxzoo.train.engine.sharded_step import make_init

from ...support.run_folders import assert_same, everything, small_run

pytestmark = pytest.mark.usefixtures("on_one_device")

TEACHER = models.create(
    models.GPTConfig(
        vocab_size=128, max_length=16, num_layers=1, d_model=8, num_heads=2, dropout_rate=0.5
    )
)
PARAMS = models.init_params(TEACHER, jax.random.key(7))
INPUTS = ("input_ids", "segment_ids", "position_ids")


def real(batch):
    return (batch["segment_ids"] != 0).astype(jnp.float32)


def copied_params(rng):
    del rng
    return jax.tree.map(jnp.copy, PARAMS)


def objective(trained):
    """The distance from another model's next tokens, and that model's loss if it is trained."""
    other = train.AuxiliaryModel(
        TEACHER.apply, lambda rng: jax.tree.map(jnp.copy, PARAMS), trained=trained
    )

    def forward(run, batch):
        inputs = {name: batch[name] for name in INPUTS}
        return {name: run[name](**inputs).logits[..., :8] for name in ("model", "other")}

    def terms(outputs, batch):
        student, target = (jax.nn.log_softmax(outputs[name]) for name in ("model", "other"))
        distance = jnp.sum(jnp.exp(target) * (target - student), axis=-1)
        nll = -jnp.take_along_axis(target, batch["labels"][..., None] % 8, axis=-1)[..., 0]
        weights = real(batch)
        return {"distance": jnp.sum(weights * distance), "other": jnp.sum(weights * nll)}

    return train.Objective(
        coefficients={"distance": 1.0, "other": 1.0},
        inputs=train.CAUSAL.inputs,
        counts=lambda batch: dict.fromkeys(("distance", "other"), jnp.sum(real(batch))),
        terms=terms,
        models={"other": other},
        forward=forward,
    )


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_a_run_keeps_both_models_and_resumes(trained, tmp_path):
    config = small_run(tmp_path, steps=2, checkpoint_every=1, evaluate_every=2)
    whole, killed = tmp_path / "run", tmp_path / "killed"
    result = train.train(config, whole, objective=objective(trained), quiet=True)
    assert result.validation is not None
    assert np.isfinite(result.validation["distance"])
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "2")
    (killed / "report.md").unlink()
    train.train(config, killed, objective=objective(trained), quiet=True)
    assert_same(everything(killed, 2), everything(whole, 2))
    assert any("other" in name for name in everything(whole, 2)) == trained  # moments
    held = "auxiliary" if trained else "frozen"
    assert (whole / "checkpoints" / "2" / held).is_dir()
    model, params = models.load(tmp_path / "run")  # the model of the run alone
    assert params.keys() == models.init_params(model, jax.random.key(0)).keys()


@pytest.mark.slow
def test_only_trained_models_have_a_gradient_and_dropout():
    model = models.create(models.GPTConfig(
        vocab_size=128, max_length=16, num_layers=1, d_model=16, num_heads=2, dropout_rate=0.0
    ))  # fmt: skip
    ids = np.arange(16, dtype=np.int32).reshape(2, 8)
    batch = {
        "input_ids": ids,
        "labels": ids + 1,
        "segment_ids": np.ones_like(ids),
        "position_ids": np.tile(np.arange(8, dtype=np.int32), (2, 1)),
    }
    tx = optax.sgd(0.1)
    losses = {}
    for trained in (True, False):
        learned = objective(trained)
        auxiliary, frozen = learned.initial_models(jax.random.key(1))
        params = models.init_params(model, jax.random.key(0))
        state = train.init_state(params, tx, frozen, auxiliary)
        step = jax.jit(train.make_train_step(model.apply, learned, tx))
        for key in range(2):
            losses[trained, key] = float(step(state, batch, jax.random.key(key))[1]["other"])
        after, metrics = step(state, batch, jax.random.key(1))
        part = after.auxiliary if trained else after.frozen["auxiliary"]
        same = jax.tree.map(np.array_equal, part["other"], PARAMS)
        assert all(jax.tree.leaves(same)) == (not trained)
        in_parts = train.make_train_step(model.apply, learned, tx, num_micro_batches=2)
        _, again = jax.jit(in_parts)(state, batch, jax.random.key(1))
        assert float(again["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    assert losses[True, 0] != losses[True, 1]  # another dropout
    assert losses[False, 0] == losses[False, 1]


def test_an_auxiliary_model_has_none_of_the_keys_of_the_models_parts():
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 2)
    seen = {}

    def running(name):
        def apply_fn(params, *, ids, rng=None):
            seen[name] = jax.random.key_data(rng)  # pyright: ignore[reportArgumentType]
            return ids

        return apply_fn

    learned = train.Objective(
        coefficients={},
        inputs=lambda batch: {},
        counts=lambda batch: {},
        terms=lambda outputs, batch: {},
        models={
            name: train.AuxiliaryModel(running(name), lambda rng: {}, trained=True) for name in "ab"
        },
        forward=lambda run, batch: [run[name](ids=jnp.zeros(2)) for name in ("model", "a", "b")],
    )
    params = {"auxiliary": {"a": {}, "b": {}}}
    learned.outputs(running("model"), params, {}, rng=keys)
    # Small numbers are of layers, of encoder and decoder, of choices, and of the rows of a pair.
    parts = [jax.random.key_data(fold_in(keys, number)) for number in range(4)]
    used = np.stack([*seen.values(), *parts])
    assert len(np.unique(used.reshape(-1, 2), axis=0)) == 2 * len(used)


def test_adapters_and_auxiliary_models_exclude_each_other():
    model = models.create(TEACHER.config)
    adapter = models.make_lora(models.LoRAConfig(rank=2), model)
    with pytest.raises(UserError, match="other"):
        make_init(model, objective(trained=True), optax.sgd(0.1), adapter)
