"""Objectives by hand, with filler, and however the batch is spread."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.losses.eval_step import Evaluation, evaluate
from flaxzoo.train.losses.objective import NamedArrays

from ...support.devices import on_devices

B, T, M, V = 16, 12, 3, 48
SIZES = {"vocab_size": V, "max_length": 16, "num_layers": 1, "d_model": 32, "num_heads": 4}


def rows(rng, *shape):
    """Tokens of rows of different lengths, of at least four tokens."""
    lengths = rng.integers(4, T + 1, shape)
    mask = (np.arange(T) < lengths[..., None]).astype(np.int32)
    ids = rng.integers(0, V, (*shape, T)).astype(np.int32) * mask
    types = (np.arange(T) >= 2).astype(np.int32) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def pretraining_batch(rng):
    weights = (np.arange(M) < rng.integers(1, M + 1, (B, 1))).astype(np.int32)
    return {
        **rows(rng, B),
        "masked_positions": rng.integers(0, 4, (B, M)).astype(np.int32) * weights,
        "masked_labels": rng.integers(0, V, (B, M)).astype(np.int32) * weights,
        "masked_weights": weights,
        "next_sentence_label": rng.integers(0, 2, B).astype(np.int32),
    }


def tag_batch(rng):
    batch = rows(rng, B)
    labels = rng.integers(0, 3, (B, T))
    unpredicted = (batch["attention_mask"] == 0) | (rng.random((B, T)) < 0.3)
    return {**batch, "labels": np.where(unpredicted, -100, labels).astype(np.int32)}


def span_batch(rng):
    start, end = rng.integers(0, 4, (2, B)).astype(np.int32)
    return {**rows(rng, B), "start_positions": start, "end_positions": end}


def translation_batch(rng):
    batch = {}
    for prefix, size in (("", T), ("decoder_", T)):
        ends = rng.integers(3, size + 1, (B, 1))
        work_folder, second = np.arange(size), rng.integers(1, 3, (B, 1))
        real, later = work_folder < ends, work_folder >= second
        batch |= {
            f"{prefix}input_ids": rng.integers(0, V, (B, size)) * real,
            f"{prefix}segment_ids": (1 + later) * real,
            f"{prefix}position_ids": np.where(later, work_folder - second, work_folder) * real,
        }
    batch["labels"] = rng.integers(0, V, (B, T)) * (batch["decoder_segment_ids"] != 0)
    return {name: x.astype(np.int32) for name, x in batch.items()}


def choice_batch(rng):
    return {**rows(rng, B, 3), "labels": rng.integers(0, 3, B).astype(np.int32)}


def preference_batch(rng):
    batch = rows(rng, B, 2)
    answer = batch["attention_mask"] * (np.arange(T) >= 2)
    return {
        **{name: batch[name] for name in ("input_ids", "attention_mask")},
        "labels": rng.integers(0, V, (B, 2, T)).astype(np.int32),
        "loss_mask": answer.astype(np.int32),
        "reference_log_probs": rng.normal(-20, 3, (B, 2)).astype(np.float32),
    }


def policy_batch(rng):
    batch = {name: x[:, 0] for name, x in preference_batch(rng).items()}
    batch["advantages"] = rng.normal(size=B).astype(np.float32)
    batch["old_log_probs"] = rng.normal(-4, 1, (B, T)).astype(np.float32)
    return {name: x for name, x in batch.items() if name != "reference_log_probs"}


OBJECTIVES = {
    "pretraining": (train.PRETRAINING, pretraining_batch),
    "token_classification": (train.TAGGING, tag_batch),
    "question_answering": (train.SPAN, span_batch),
    "multiple_choice": (train.CLASSIFICATION, choice_batch),
    "translation": (train.seq2seq(train.Seq2SeqConfig(label_smoothing=0.1)), translation_batch),
    "dpo": (train.dpo(), preference_batch),
    "grpo": (train.grpo(train.GRPOConfig(loss_type="grpo")), policy_batch),
}
# engine/test_train_step.py has each axis alone, and fsdp beside tensor in micro-batches.
WAYS = {
    "rows and tensor": {"mesh": train.MeshConfig(data=2, fsdp=2, tensor=2)},
    "rows and context, micro-batches": {
        "mesh": train.MeshConfig(data=2, fsdp=1, context=4),
        "micro_batches": 2,
    },
    "shards of layers": {
        "mesh": train.MeshConfig(data=2, fsdp=4),
        "gather": "layer",
        "execution": models.Execution(remat="full"),
    },
    "pmap": {"parallel": "pmap"},
}


def model_of(head):
    if head == "translation":
        return models.EncoderDecoderConfig(**SIZES, dropout_rate=0.1)
    if head in ("dpo", "grpo"):
        return models.GPTConfig(**SIZES, dropout_rate=0.1)
    labels = ("O", "B-X", "I-X") if head == "token_classification" else ()
    return models.BertConfig(**SIZES, head=head, labels=labels, dropout_rate=0.1)


def settings(head, **fields):
    return train.TrainConfig(
        model=model_of(head),
        data=data.CausalLMData(  # not asked: batches are made here
            source="builtin:python-docs", length=T, tokenizer=data.TokenizerConfig()
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2, epsilon=1e-3, warmup_steps=1),
        steps=3,
        batch_size=B,
        **fields,
    )


@functools.cache
def trained(head, way):
    objective, make_batch = OBJECTIVES[head]
    rng = np.random.default_rng(0)
    batches = [make_batch(rng) for _ in range(3)]
    with on_devices(1 if way == "one device" else 8):
        program = compile_trainer(settings(head, **WAYS.get(way, {})), objective)
        state, metrics = program.init(), []
        for batch in batches:
            state, m = program.step(state, batch)
            metrics.append({name: float(x) for name, x in m.items()})
        # The last row only fills its batch.
        batches[-1] = {n: np.concatenate([x[:-1], 0 * x[-1:]]) for n, x in batches[-1].items()}
        evaluation = evaluate(program.evaluate, state, batches, objective, num_rows=3 * B - 1)
        return metrics, jax.device_get(state.params), evaluation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "way"),
    [
        # Span has an encoder in the first way, and others the losses of the last.
        ("pretraining", "rows and context, micro-batches"),
        ("translation", "rows and context, micro-batches"),
        ("translation", "shards of layers"),
        ("token_classification", "pmap"),
        ("question_answering", "rows and tensor"),
        ("multiple_choice", "rows and context, micro-batches"),
        ("dpo", "rows and context, micro-batches"),
        ("grpo", "rows and tensor"),
        ("grpo", "shards of layers"),  # with a frozen reference
    ],
)
def test_every_way_trains_the_same_model(head, way):
    metrics, params, evaluation = trained(head, way)
    expected_metrics, expected_params, expected = trained(head, "one device")
    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    assert evaluation.means == pytest.approx(expected.means, rel=2e-5)
    assert evaluation.counts == expected.counts
    assert evaluation.predictions.keys() == expected.predictions.keys()
    for name, ours in evaluation.predictions.items():
        assert len(ours) == 3 * B - 1
        np.testing.assert_allclose(ours, expected.predictions[name], rtol=2e-5, atol=1e-5)


def test_counts_and_filler():
    rng = np.random.default_rng(1)
    batch = pretraining_batch(rng)
    batch = {name: jnp.concatenate([x, 0 * x[:2]]) for name, x in batch.items()}
    counts = train.PRETRAINING.counts(batch)
    assert float(counts["next_sentence"]) == B
    assert float(counts["masked_token"]) == batch["masked_weights"].sum()
    choices = choice_batch(rng)
    choices = {name: jnp.concatenate([x, 0 * x[:3]]) for name, x in choices.items()}
    assert float(train.CLASSIFICATION.counts(choices)["label"]) == B


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("pretraining", "masked_weights"),
        ("question_answering", "start_positions"),
        ("translation", "decoder_segment_ids"),
    ],
)
def test_a_missing_array_of_a_batch_is_named(head, name):
    objective, make_batch = OBJECTIVES[head]
    batch = jax.tree.map(jnp.asarray, make_batch(np.random.default_rng(0)))
    del batch[name]
    with pytest.raises(data.UserError, match=f"'{name}'.*input_ids"):
        objective.checked_counts(batch)


def test_arrays_of_a_batch_pass_through_jax():
    batch = NamedArrays(b=jnp.ones(2), a=jnp.zeros(2))
    doubled = jax.jit(lambda x: jax.tree.map(lambda y: 2 * y, x))(batch)
    assert isinstance(doubled, NamedArrays)
    assert doubled["b"].tolist() == [2, 2]
    with pytest.raises(data.UserError, match="'c'"):
        doubled["c"]


def test_a_span_is_looked_for_among_real_tokens_only():
    mask = jnp.array([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    logits = jnp.array([[0.0, 1.0, 2.0, 50.0], [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    outputs = SimpleNamespace(start_logits=logits, end_logits=-logits)
    batch = {
        "attention_mask": mask,
        "start_positions": jnp.array([2, 0, -1]),
        "end_positions": jnp.array([0, 0, -1]),
    }
    terms = train.SPAN.terms(outputs, batch)
    # The second row is filler; nobody knows where the answer of the third is.
    assert float(train.SPAN.counts(batch)["start"]) == 1
    expected = np.log(np.exp([0.0, 1.0, 2.0]).sum()) - 2
    assert float(terms["start"]) == pytest.approx(expected, rel=1e-5)
    assert float(terms["start_accuracy"]) == float(terms["end_accuracy"]) == 1


def test_one_score_and_several_labels_by_hand():
    batch = {
        "attention_mask": jnp.array([[1, 1], [1, 0], [0, 0]]),
        "labels": jnp.array([1.0, -2.0, 7.0]),
    }
    outputs = SimpleNamespace(logits=jnp.array([[1.5], [0.0], [3.0]]))
    assert float(train.REGRESSION.terms(outputs, batch)["squared_error"]) == 4.25
    assert float(train.REGRESSION.counts(batch)["squared_error"]) == 2
    batch["labels"] = jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    outputs = SimpleNamespace(logits=jnp.zeros((3, 2)))
    assert float(train.MULTI_LABEL.terms(outputs, batch)["label"]) == pytest.approx(2 * np.log(2))
    assert float(train.MULTI_LABEL.counts(batch)["label"]) == 2


def test_one_logit_is_the_softmax_of_zero_and_it():
    z = jnp.array([[1.5], [-0.3], [4.0], [-6.0]])
    labels = jnp.array([1, 0, 0, 1])
    mask = jnp.array([[1, 1], [1, 0], [1, 1], [0, 0]])

    def one(z):
        batch = {"attention_mask": mask, "labels": labels[:, None].astype(jnp.float32)}
        return train.MULTI_LABEL.terms(SimpleNamespace(logits=z), batch)["label"]

    def two(z):
        batch = {"attention_mask": mask, "labels": labels}
        outputs = SimpleNamespace(logits=jnp.concatenate([jnp.zeros_like(z), z], axis=1))
        return train.CLASSIFICATION.terms(outputs, batch)["label"]

    np.testing.assert_allclose(one(z), two(z), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(one)(z), jax.grad(two)(z), rtol=1e-5, atol=1e-7)


def test_a_binary_target_has_one_output_and_the_scores_of_two_labels():
    examples = [{"text": f"text {i}", "label": label} for i, label in enumerate("ynny")]
    config = data.SequenceClassificationData(
        source=examples, target="binary", length=8, tokenizer=data.TokenizerConfig("wordpiece", 20)
    )
    model = models.create(
        models.BertConfig(**SIZES, head="sequence_classification", labels=config.labels())
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), input_ids=jnp.zeros((1, 8), int))
    assert shapes["params"]["head"]["classifier"]["kernel"].shape == (32, 1)
    split = config.whole_source(examples, config.make_tokenizer(), config.labels())
    predictions = {"logits": np.array([[2.0], [-1.0], [1.0], [-3.0]])}
    evaluation = Evaluation(0.5, {}, {}, predictions)
    scores = train.ClassificationConfig().score(evaluation, split, config)
    assert scores == {"loss": 0.5, "accuracy": 0.5, "f1": 0.5, "matthews": 0.0}
