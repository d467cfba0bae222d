"""Packed rows give the same vectors, loss and gradient as rows of single texts."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import data, models, train
from flaxzoo.models.nn.pooling import POOLING_MODES, pool, pool_segments
from flaxzoo.train.losses.objective import AuxiliaryModel
from hypothesis import given, settings
from hypothesis import strategies as st

from ...support.devices import on_devices
from ...support.encoders import SIZES, VOCABULARY, WORDS

DRAW = random.Random(0)


def text(most):
    return " ".join(DRAW.choices(WORDS, k=DRAW.randint(1, most)))


# Every second example lacks the last negative.
ROWS = [
    {
        "anchor": f"{text(4)} {i}",
        "positive": f"{text(12)} {i}",
        "negatives": [text(9)] + [text(9)] * (i % 2),
    }
    for i in range(12)
]
PAIRS = [
    {"anchor": x["anchor"], "positive": x["positive"], "score": i / 12} for i, x in enumerate(ROWS)
]
LISTS = [
    {"anchor": x["anchor"], "documents": [x["positive"], x["negatives"][0]], "scores": [i / 9, 0.5]}
    for i, x in enumerate(ROWS)
]
CASES = {
    "multiple negatives": (
        ROWS,
        "bert",
        train.MultipleNegativesConfig(directions=("query_to_doc", "doc_to_doc")),
    ),
    "gist": (ROWS, "roberta", train.GISTConfig(guide="unread")),
    "triplet": (ROWS, "mpnet", train.TripletConfig()),
    "cosent": (PAIRS, "qwen3", train.CoSENTConfig(pooling=("lasttoken",), matryoshka_dims=(16, 8))),
    "distillation": (
        LISTS,
        "modernbert",
        train.DistillationConfig(pooling=("cls", "weightedmean")),
    ),
}


def data_of(rows, **fields):
    settings = {"length": 16, "validation_fraction": 0.0, "tokenizer": VOCABULARY, **fields}
    return data.EmbeddingData(source=data.Examples.of(rows), **settings)


def rows_of(source):
    split = source.train_split(source.make_tokenizer(), (), 0)
    rows = [split.examples.example(0, i) for i in range(split.examples.num_examples)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}, split


def guide_of(apply, params):
    def vectors(params, *, rows):
        return rows.pool(apply(params, **rows.inputs).last_hidden_state, ("mean",))

    return AuxiliaryModel(vectors, lambda rng: params)


def step_of(tiny_model, objective, source, batch, micro_batches):
    """The updated parameters, which show the gradient, and the metrics of a step."""
    built = objective.build(source)
    tx = optax.sgd(1.0)
    step = train.make_train_step(tiny_model.model.apply, built, tx, num_micro_batches=micro_batches)
    _, frozen = built.initial_models(jax.random.key(0))
    state = train.init_state(tiny_model.params, tx, frozen)
    # Rows of zeros are filler, so that the micro-batches are equal.
    missing = -len(batch["input_ids"]) % micro_batches
    batch = {name: np.concatenate([x, np.zeros_like(x[:missing])]) for name, x in batch.items()}
    return jax.jit(step)(state, batch, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_packed_rows_have_the_loss_and_gradient_of_single_texts(
    tiny, assert_close, monkeypatch, name, micro_batches
):
    rows, family, objective = CASES[name]
    head = "causal_lm" if family == "qwen3" else "none"
    model = tiny(family=family, head=head, vocab_size=64, max_length=96)
    guide = guide_of(model.model.apply, jax.tree.map(lambda x: x * 1.1, model.params))
    monkeypatch.setattr(
        "flaxzoo.train.objectives.embedding.base.frozen_embedder", lambda folder: guide
    )
    single, packed = data_of(rows), data_of(rows, row_length=96)
    one_by_one, many = rows_of(single)[0], rows_of(packed)[0]
    assert len(many["input_ids"]) < len(rows) <= many["text_mask"][..., 0].size
    expected, metrics = step_of(model, objective, single, one_by_one, 1)
    state, found = step_of(model, objective, packed, many, micro_batches)
    # Compare numbers relative to the norm of the gradient, which is above 100 for some losses.
    scale = max(1.0, float(metrics["gradient_norm"]))
    results = (found, state.params), (metrics, expected.params)
    jax.tree.map(lambda x, y: assert_close(x / scale, y / scale), *results)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_a_text_of_a_packed_row_has_the_vector_of_the_text_alone(assert_close, mode):
    hidden = jnp.asarray(np.random.RandomState(0).randn(1, 9, 4).astype(np.float32))
    segments = jnp.array([[1, 1, 3, 3, 3, 4, 4, 0, 0]])
    found = pool_segments(hidden, segments, 4, (mode,))
    assert found.shape == (1, 4, 4)
    for text, own in {1: slice(0, 2), 3: slice(2, 5), 4: slice(5, 7)}.items():
        alone = pool(hidden[:, own], jnp.ones((1, own.stop - own.start), int), (mode,))
        assert_close(found[:, text - 1], alone)
    assert not found[:, 1].any()


def test_the_weighted_mean_counts_the_positions_of_a_prompt_that_is_not_pooled(assert_close):
    hidden = jnp.arange(4.0)[None, :, None]
    # sentence-transformers weights the tokens of a sequence by their positions: 1, 2, 3 and 4.
    vector = pool(hidden, jnp.array([[0, 0, 1, 1]]), ("weightedmean",))
    assert_close(vector, np.array([[(2 * 3 + 3 * 4) / (3 + 4)]]))


def test_vectors_of_a_large_batch_are_means_while_gradients_are_computed():
    # A sum of products, broadcast over texts, was wrong from this size on, but only in a gradient.
    random = np.random.RandomState(0)
    hidden = random.randn(32, 256, 384).astype(np.float32)
    segments = np.sort(random.randint(1, 7, (32, 256)))
    weights = random.randn(32, 6, 384).astype(np.float32)

    def loss(hidden, segments):
        vectors = pool_segments(hidden, segments, 6)
        return jnp.sum(vectors * weights), vectors

    gradient, vectors = jax.jit(jax.grad(loss, has_aux=True))(hidden, segments)
    masks = segments[:, None] == np.arange(1, 7)[:, None]
    shares = masks / masks.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(vectors, shares @ hidden, atol=1e-5)
    np.testing.assert_allclose(gradient, shares.swapaxes(1, 2) @ weights, atol=1e-5)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(40, 90),
)
@settings(deadline=None)
def test_rows_have_every_example_once_and_no_text_twice(pairs, length):
    rows = [{"anchor": "a" * (a + 1), "positive": "b" * (b + 1)} for a, b in pairs]
    letters = data.TokenizerConfig(kind="characters")
    arrays, split = rows_of(data_of(rows, row_length=length, tokenizer=letters))
    packed = split.examples
    used = packed.members[packed.members >= 0]
    assert sorted(used.tolist()) == list(range(len(rows)))
    texts = packed.examples.text_keys
    for members, segments in zip(packed.members, arrays["segment_ids"], strict=True):
        own = texts[members[members >= 0]].ravel().tolist()
        assert len(own) == len({*own})
        # Segments are consecutive, so that positions count from 0 in each text.
        real = segments[segments > 0]
        assert (np.diff(real) >= 0).all()
        assert not segments[len(real) :].any()
    assert arrays["text_mask"].sum() == 2 * len(rows)
    assert len(packed.members) <= len(rows)


@pytest.mark.slow
def test_a_run_on_packed_rows_resumes_and_is_the_same_on_any_number_of_devices(tmp_path):
    rows = [{"anchor": f"{x['anchor']} {i}", "positive": text(20)} for i, x in enumerate(ROWS * 9)]
    config = train.TrainConfig(
        model=models.BertConfig(**{**SIZES, "max_length": 64}, head="none", dropout_rate=0.1),
        data=dataclasses.replace(data_of(rows, row_length=64), validation_fraction=0.2),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2),
        objective=train.MultipleNegativesConfig(),
        batch_size=8,
        steps=4,
        log_every=1,
    )
    train.train(config, tmp_path / "eight", quiet=True)
    with on_devices(1):
        parts = dataclasses.replace(config, micro_batches=2)
        train.train(dataclasses.replace(parts, steps=4), tmp_path / "one", quiet=True)
    eight, one = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("eight", "one")
    )
    for row, other in zip(eight, one, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"row_length": 8}, "row_length 8"),
        ({"row_length": 64, "source": "sets:a=csv:x | b=csv:y"}, "row_length 64"),
        (
            {
                "row_length": 64,
                "source": data.Examples.of([{"text": f"a {i}", "label": i % 2} for i in range(8)]),
                "tokenizer": data.TokenizerConfig(kind="characters"),
            },
            "row_length 64",
        ),
    ],
)
def test_data_that_cannot_be_packed_are_refused(fields, named):
    with pytest.raises(data.UserError, match=named):
        rows_of(dataclasses.replace(data_of(ROWS), **fields))


@pytest.mark.parametrize(
    "objective", [train.SpladeConfig(), train.SeveralConfig(), train.BatchAllTripletConfig()]
)
def test_some_objectives_read_single_texts(objective):
    with pytest.raises(data.UserError, match="row_length 64"):
        objective.check(data_of(ROWS, row_length=64))


def test_a_row_is_at_most_as_long_as_the_input_of_the_model():
    with pytest.raises(data.UserError, match=r"data\.row_length 64 .* 32"):
        train.TrainConfig(
            model=models.BertConfig(**SIZES, head="none"),
            data=data_of(ROWS, row_length=64),
            optimizer=train.OptimizerConfig(peak_learning_rate=1e-2),
            batch_size=8,
            steps=1,
        )
