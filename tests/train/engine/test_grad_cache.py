"""Micro-batches of an objective that compares the examples of a batch: the step of the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.data import UserError
from flaxzoo.train.engine.sharded_step import with_batch_sharding
from flaxzoo.train.losses.embedding.in_batch import multiple_negatives
from flaxzoo.train.losses.embedding.vectors import Real, Vectors
from flaxzoo.train.plan.hlo.collectives import collective_ops
from flaxzoo.train.plan.hlo.parser import parse_hlo

B, C, T = 16, 2, 8
KEY = jax.random.key(0)
SIZES = {"vocab_size": 32, "max_length": 64, "num_layers": 1, "d_model": 16, "num_heads": 2}


def model_of(**fields):
    return models.create(models.BertConfig(**{**SIZES, **fields}, head="none"))


def inputs(ids):
    return {"input_ids": ids, "attention_mask": jnp.sign(ids)}


def forward(run, batch):
    ids = batch["input_ids"]
    anchors = run["model"](**inputs(batch["anchor_ids"])).last_hidden_state
    documents = run["model"](**inputs(ids.reshape(-1, ids.shape[-1]))).last_hidden_state
    return Vectors(anchors[:, 0], documents[:, 0].reshape(*ids.shape[:2], -1))


def real(batch):
    return Real(batch["anchor_ids"][:, 0] > 0, batch["input_ids"][:, :, 0] > 0)


def terms(vectors, batch):
    texts = real(batch)
    losses = multiple_negatives(vectors, texts, directions=("query_to_doc", "doc_to_query"))
    return {"pair": jnp.sum(jnp.where(texts.pairs, losses, 0.0))}


OBJECTIVE = train.Objective(
    coefficients={"pair": 1.0},
    inputs=lambda batch: {},
    counts=lambda batch: {"pair": jnp.sum(real(batch).pairs, dtype=jnp.float32)},
    terms=terms,
    forward=forward,
    whole_batch=True,
)


def make_batch(size=B, length=T):
    rng = np.random.default_rng(0)

    def texts(*shape):
        longest = rng.integers(2, length + 1, (*shape, 1))
        ids = rng.integers(1, 31, (*shape, length))
        return np.where(np.arange(length) < longest, ids, 0).astype(np.int32)

    batch = {"anchor_ids": texts(size), "input_ids": texts(size, C)}
    batch["input_ids"][3, 1] = 0  # without a negative
    batch["anchor_ids"][5] = batch["input_ids"][5] = 0  # filler
    return batch


def stepped(objective=OBJECTIVE, *, mesh=None, model=None, **options):
    """Parameters and metrics after a step of gradient descent, with dropout."""
    model, tx, batch = model or model_of(), optax.sgd(1.0), make_batch()
    params = models.init_params(model, jax.random.key(0))
    if mesh is None:
        step = jax.jit(train.make_train_step(model.apply, objective, tx, **options))
        state = train.init_state(params, tx)
    else:
        options["num_micro_batches"] = options.get("num_micro_batches", 1)
        made = train.make_sharded_step(model, objective, tx, train.make_mesh(mesh), **options)
        step, state = made.step, made.init(jax.random.key(0))
        placed = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), params, state.params)
        state, batch = (
            dataclasses.replace(state, params=placed),
            train.shard_batch(batch, train.make_mesh(mesh)),
        )
    state, metrics = step(state, batch, jax.random.key(1))
    return state.params, metrics


@pytest.fixture(scope="module")
def whole():
    return stepped()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_micro_batches": 4},
        {"mesh": train.MeshConfig(data=2, fsdp=2, tensor=2), "num_micro_batches": 2},
        {"mesh": train.MeshConfig(data=4, fsdp=2), "num_micro_batches": 2},
    ],
    ids=str,
)
def test_micro_batches_and_devices_take_the_step_of_the_whole_batch(options, whole):
    def same(a, b):  # the norm of the gradient is 37
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)

    jax.tree.map(same, stepped(**options), whole)


@pytest.mark.slow
def test_gradients_are_exchanged_once_and_vectors_are_exchanged_by_name():
    mesh, batch = train.make_mesh(train.MeshConfig(data=8)), make_batch()
    sharded = train.make_sharded_step(
        model_of(), OBJECTIVE, optax.sgd(1.0), mesh, num_micro_batches=2
    )
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    _, program = sharded.compile(with_batch_sharding(shapes, mesh))
    ops = collective_ops(parse_hlo(program.as_text()), 8)
    size = sum(x.nbytes for x in jax.tree.leaves(models.init_params(model_of(), KEY)))
    # Seven of eight parts of each array are sent twice, and of the vectors of documents.
    sent = sum(op.count * op.bytes_sent for op in ops if op.kind.startswith("all-reduce"))
    assert sent == pytest.approx(size * 2 * 7 / 8, rel=0.25), ops
    assert "exchanged once a step" in sharded.exchange
    assert any(op.kind == "all-gather of output vectors" for op in ops), ops


@pytest.mark.slow
def test_the_gradient_crosses_micro_batches_and_dropout_is_on(whole):
    """The loss of each micro-batch alone, and a step without dropout, are other steps."""
    alone = dataclasses.replace(OBJECTIVE, whole_batch=False)
    for other in (
        stepped(alone, num_micro_batches=4),
        stepped(model=model_of(dropout_rate=0.0)),
    ):
        assert abs(other[1]["loss"] / whole[1]["loss"] - 1) > 1e-2
        assert abs(other[1]["gradient_norm"] / whole[1]["gradient_norm"] - 1) > 1e-2


def test_texts_of_an_example_have_different_dropout():
    """Equal texts in the anchor and the document get different vectors."""
    model = model_of()
    batch = {
        k: jnp.ones((2, *s), jnp.int32) for k, s in (("anchor_ids", (T,)), ("input_ids", (1, T)))
    }
    params = models.init_params(model, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 2)
    found = OBJECTIVE.outputs(model.apply, params, batch, rng=keys)
    assert jnp.abs(found.anchors - found.documents[:, 0]).max() > 1e-2
    found = OBJECTIVE.outputs(model.apply, params, batch)
    assert jnp.abs(found.anchors - found.documents[:, 0]).max() < 1e-5


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        (
            lambda run, batch: {"table": jnp.ones((4, 3))},
            r"output\[0\]\['table'\] float32 \[4, 3\]",
        ),
        (lambda run, batch: jnp.sign(batch["anchor_ids"]), r"output\[0\] int32 \[4, 8\]"),
    ],
    ids=["not of examples", "not floats"],
)
def test_other_outputs_are_refused(outputs, named):
    """An array that has as many rows as a micro-batch by chance is not of examples."""
    with pytest.raises(UserError, match=rf"micro_batches 4 .* {named}.*micro_batches 1"):
        stepped(dataclasses.replace(OBJECTIVE, forward=outputs), num_micro_batches=4)


@pytest.mark.slow
def test_the_memory_is_that_of_a_micro_batch():
    model, tx = model_of(d_model=32), optax.sgd(1.0)
    state = jax.eval_shape(
        lambda: train.init_state(models.init_params(model, jax.random.key(0)), tx)
    )

    def memory(size, number):
        step = train.make_train_step(model.apply, OBJECTIVE, tx, num_micro_batches=number)
        batch = jax.eval_shape(lambda: make_batch(size, 32))
        found = jax.jit(step).lower(state, batch, jax.eval_shape(lambda: jax.random.key(0)))
        memory = found.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    small, cached, large = memory(8, 1), memory(64, 8), memory(64, 1)
    assert large > 4 * small
    assert cached < 1.5 * small
