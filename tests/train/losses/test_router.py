"""The losses of a mixture's router: beside any objective, however a batch is divided."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.decoders.mixtral import MixtralConfig
from flaxzoo.models.nn.experts import batch_balance_loss
from flaxzoo.train.losses.eval_step import evaluate, make_evaluate_fn

CONFIG = MixtralConfig(
    vocab_size=32,
    max_length=16,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=24,
    num_experts=4,
    init_std=0.3,
    router_balance=0.5,
    router_z=0.25,
)
RNG = np.random.default_rng(0)
LENGTHS = np.array([12, 9, 0, 12, 5, 12, 7, 12])  # a row of filler among them
BATCH = {
    "input_ids": RNG.integers(0, 32, (8, 12)).astype(np.int32),
    "labels": RNG.integers(0, 32, (8, 12)).astype(np.int32),
    "segment_ids": (np.arange(12) < LENGTHS[:, None]).astype(np.int32),
    "position_ids": np.broadcast_to(np.arange(12, dtype=np.int32), (8, 12)),
}
OBJECTIVE = train.with_router(train.CAUSAL, CONFIG)


def stepped(config=CONFIG, objective=OBJECTIVE, **options):
    """Parameters and metrics after one step on one device."""
    model, tx = models.create(config), optax.sgd(0.1)
    state = train.init_state(models.init_params(model, jax.random.key(0)), tx)
    step = jax.jit(train.make_train_step(model.apply, objective, tx, **options))
    state, metrics = step(state, BATCH, jax.random.key(1))
    return state.params, metrics


@pytest.mark.slow
def test_losses_are_means_over_the_sequences_that_have_tokens(assert_close):
    _, metrics = stepped()
    model = models.create(CONFIG)
    params = models.init_params(model, jax.random.key(0))
    apply = jax.jit(
        lambda ids, segments: model.apply({"params": params}, ids, segment_ids=segments)
    )
    balance = []
    for row in np.flatnonzero(LENGTHS):
        router = apply(
            *(BATCH[name][row : row + 1] for name in ("input_ids", "segment_ids"))
        ).router
        own = [
            batch_balance_loss(jax.tree.map(lambda x, i=i: x[i : i + 1], router)) for i in (0, 1)
        ]
        balance.append(np.mean(own))
    assert_close(metrics["router_balance"], np.mean(balance))
    assert metrics["router_z"] > 0
    whole = metrics["next_token"] + 0.5 * metrics["router_balance"] + 0.25 * metrics["router_z"]
    assert_close(metrics["loss"], whole)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 2.0])
def test_micro_batches_and_devices_take_the_step_of_a_whole_batch(capacity, assert_close):
    """Eight devices that share sequences, parameters and experts, with and without a capacity."""
    config = dataclasses.replace(CONFIG, expert_capacity=capacity)
    expected = stepped(config)
    jax.tree.map(assert_close, stepped(config, num_micro_batches=4), expected)
    mesh = train.make_mesh(train.MeshConfig(data=1, fsdp=2, expert=4))
    model, tx = models.create(config), optax.sgd(0.1)
    sharded = train.make_sharded_step(model, OBJECTIVE, tx, mesh)
    state = sharded.init(jax.random.key(0))
    params = models.init_params(model, jax.random.key(0))
    placed = jax.tree.map(lambda x, own: jax.device_put(x, own.sharding), params, state.params)
    state = dataclasses.replace(state, params=placed)
    state, metrics = sharded.step(state, train.shard_batch(BATCH, mesh), jax.random.key(1))
    jax.tree.map(assert_close, (state.params, metrics), expected)


@pytest.mark.slow
def test_the_form_of_transformers(tmp_path, assert_close):
    """Its loss of all layers and tokens together, as `router_balance_over="batch"` trains it."""
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=5,
        router_aux_loss_coef=0.7, output_router_logits=True,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(config).eval()
    theirs.set_experts_implementation("eager")
    theirs.save_pretrained(tmp_path)
    model, params = models.load(tmp_path)
    own = dataclasses.replace(model.config, router_balance_over="batch")
    assert own.router_balance == 0.7
    objective = train.with_router(train.CAUSAL, own)
    ids, mask = torch.tensor(BATCH["input_ids"]).long(), torch.tensor(BATCH["segment_ids"])
    some = torch.tensor(LENGTHS > 0)
    ids, mask = ids[some], mask[some]
    expected = theirs(ids, attention_mask=mask, labels=torch.where(mask == 1, ids, -100))
    batch = {name: jnp.asarray(x[LENGTHS > 0]) for name, x in BATCH.items()}
    _, terms = jax.jit(lambda params: objective.apply(model.apply, params, batch))(params)
    assert_close(terms["router_balance"], expected.aux_loss.detach().numpy())
    with pytest.raises(UserError, match=r"micro_batches 2 .*floats"):
        stepped(own, objective, num_micro_batches=2)


def test_an_evaluation_is_without_them(assert_close):
    model = models.create(CONFIG)
    params = models.init_params(model, jax.random.key(0))
    found = [
        evaluate(
            jax.jit(make_evaluate_fn(model.apply, objective)),
            params,
            [BATCH],
            objective,
            num_rows=8,
        )
        for objective in (OBJECTIVE, train.CAUSAL)
    ]
    assert_close(found[0].loss, found[1].loss)
    assert found[0].means["router_balance"] >= 1


def test_a_model_without_experts_has_none():
    assert train.with_router(train.CAUSAL, models.preset("gpt2")) is train.CAUSAL


def test_an_objective_with_auxiliary_models_has_no_router_losses():
    objective = dataclasses.replace(train.CAUSAL, forward=lambda run, batch: run["model"]())
    with pytest.raises(UserError, match=r"num_experts 4 .*forward"):
        train.with_router(objective, CONFIG)
