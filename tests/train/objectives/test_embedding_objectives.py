"""Objectives on vectors: the losses of their data, the default for the data, and refusals."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, train
from flaxzoo.data import UserError
from flaxzoo.models.hf.sentence_embedding import EmbeddingSettings
from flaxzoo.train.losses.embedding import in_batch, labelled, scored
from flaxzoo.train.losses.embedding.vectors import Real, Vectors, unit

A, P, N1, N2 = map(jnp.asarray, np.random.RandomState(0).randn(4, 6, 8).astype(np.float32))
Y = jnp.array([0.1, 0.9, 0.5, 0.5, 0, 1])
TEACHER = jnp.stack((Y, 1 - Y, Y * Y), axis=1)
LABELS = jnp.array([0, 0, 1, 1, 2, 2])
WHOLE = Real(jnp.ones(6, bool), jnp.ones((6, 3), bool))
GUIDE = Vectors(N2, jnp.stack((N1, P, A), axis=1))

# Settings, number of documents, scores, and the loss of each item.
CASES = {
    "multiple negatives": (
        train.MultipleNegativesConfig(scale=5.0),
        3,
        None,
        lambda v: in_batch.multiple_negatives(v, WHOLE, scale=5.0),
    ),
    "Matryoshka": (
        train.MultipleNegativesConfig(matryoshka_dims=(8, 4), matryoshka_weights=(1.0, 0.5)),
        3,
        None,
        lambda v: (
            in_batch.multiple_negatives(v, WHOLE)
            + 0.5
            * in_batch.multiple_negatives(Vectors(v.anchors[:, :4], v.documents[..., :4]), WHOLE)
        ),
    ),
    "gist": (
        train.GISTConfig(guide="unread", margin=0.1),
        3,
        None,
        lambda v: in_batch.gist(v, WHOLE, margin=0.1),
    ),
    "cosent": (
        train.CoSENTConfig(scale=10.0),
        1,
        Y,
        lambda v: scored.cosent(scored.cosine(v), Y, WHOLE.pairs, scale=10.0),
    ),
    "angle": (
        train.AngleConfig(),
        1,
        Y,
        lambda v: scored.cosent(scored.angle(v), Y, WHOLE.pairs),
    ),
    "cosine": (train.CosineConfig(), 1, Y, lambda v: scored.cosine_error(v, Y)),
    "contrastive": (
        train.ContrastiveConfig(margin=2.0),
        1,
        Y,
        lambda v: scored.contrastive(v, Y, margin=2.0),
    ),
    "triplet": (train.TripletConfig(), 3, None, scored.triplet),
    "margin_mse": (train.MarginMSEConfig(), 3, TEACHER, lambda v: scored.margin_error(v, TEACHER)),
    "distillation": (
        train.DistillationConfig(similarity="cosine"),
        3,
        TEACHER,
        lambda v: scored.distillation(v, TEACHER, WHOLE, similarity="cosine"),
    ),
    "batch_all_triplet": (
        train.BatchAllTripletConfig(margin=1.0),
        0,
        None,
        lambda v: labelled.batch_all_triplet(
            labelled.TO_EACH["euclidean"](v.anchors), LABELS, WHOLE.anchors, margin=1.0
        ),
    ),
    "batch_hard_soft_margin": (
        train.BatchHardSoftMarginConfig(distance="cosine"),
        0,
        None,
        lambda v: labelled.batch_hard_soft_margin(
            labelled.TO_EACH["cosine"](v.anchors), LABELS, WHOLE.anchors
        ),
    ),
    "a teacher": (
        train.MarginMSEConfig(teacher="unread"),
        3,
        None,
        lambda v: scored.margin_error(v, jnp.einsum("bd,bcd->bc", GUIDE.anchors, GUIDE.documents)),
    ),
}
NO_MODEL = train.AuxiliaryModel(lambda params: None, lambda rng: {})


@pytest.fixture(autouse=True)
def no_guide(monkeypatch):
    monkeypatch.setattr(
        "flaxzoo.train.objectives.embedding.base.frozen_embedder", lambda folder: NO_MODEL
    )


def mean_loss(objective, vectors, batch):
    counts, sums = objective.counts(batch), objective.terms(vectors, batch)
    objective.check_counted(objective.checked(sums, "terms"), counts)
    means = {name: sums[name] / counts[name] for name in sums}
    return sum(c * means[name] for name, c in objective.coefficients.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_mean_over_items_and_filler_is_none(name):
    settings, number, scores, loss = CASES[name]
    guide = None if settings.guide_model is None else GUIDE
    vectors = Vectors(A, jnp.stack((P, N1, N2), axis=1)[:, :number], guide)
    batch = {"anchor_mask": jnp.ones((6, 4), int), "attention_mask": jnp.ones((6, number, 4), int)}
    batch["input_ids"] = batch["attention_mask"]
    if not number:
        batch = {"anchor_mask": batch["anchor_mask"], "labels": LABELS}
    if scores is not None:
        batch["scores"] = scores
    objective = settings.build(KINDS["multiple_negatives"])
    expected = float(jnp.mean(loss(vectors)))
    assert float(mean_loss(objective, vectors, batch)) == pytest.approx(expected, rel=1e-6)
    # Two examples of zeros, whose vectors are 0.
    filled = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x[:2])]), (vectors, batch))
    found, slope = jax.value_and_grad(lambda v: mean_loss(objective, v, filled[1]))(filled[0])
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slope))
    # A loss that is a sum over rows can be accumulated over micro-batches.
    halves = [jax.tree.map(lambda x, i=i: x[i::2], (vectors, batch)) for i in (0, 1)]
    parts = [float(mean_loss(objective, *half)) for half in halves]
    assert (np.mean(parts) == pytest.approx(expected, rel=1e-5)) == (not objective.whole_batch)


def test_each_data_set_has_its_loss(tmp_path):
    rows = {"qa": {"anchor": "a", "positive": "b", "negative": "c"}, "sts": {**SCORED, "score": 1}}
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    source = " | ".join(f"{name}=jsonl:{tmp_path / name}" for name in rows)
    given = dataclasses.replace(KINDS["cosent"], source=f"sets:{source}", validation_fraction=0.0)
    chosen = train.MultipleNegativesConfig(normalize=True).of_data(given, is_default=True)
    assert chosen == train.SeveralConfig(
        normalize=True, kinds=("qa=multiple_negatives", "sts=cosent")
    )
    settings = train.SeveralConfig(kinds=("sts=cosine", "qa=multiple_negatives,scale=5"))
    settings = settings.of_data(given, is_default=False)
    objective = settings.build(given)
    # The first four examples are of one data set, and the last two of the other.
    vectors, ones = Vectors(A, jnp.stack((P, N1), axis=1)), jnp.ones((6, 2, 4), int)
    batch = {
        "anchor_mask": ones[:, 0],
        "attention_mask": ones.at[4:, 1].set(0),
        "scores": jnp.stack((Y, 0 * Y), axis=1),
        "data_set": jnp.array([0, 0, 0, 0, 1, 1]),
    }
    batch["input_ids"] = batch["attention_mask"]
    sums, counts = objective.terms(vectors, batch), objective.counts(batch)
    first, last = (jax.tree.map(lambda x, k=k: x[k], vectors) for k in (slice(4), slice(4, 6)))
    real = Real(jnp.ones(4, bool), jnp.ones((4, 2), bool))
    expected = in_batch.multiple_negatives(first, real, scale=5.0)
    assert (float(counts["qa"]), float(counts["sts"])) == (4, 2)
    assert float(sums["qa"]) == pytest.approx(float(expected.sum()), rel=1e-6)
    expected = scored.cosine_error(last, Y[4:])
    assert float(sums["sts"]) == pytest.approx(float(expected.sum()), rel=1e-6)
    for kinds, named in {
        ("other=cosent",): "other",
        ("qa=gist",): "gist",
        ("qa=triplet,scale=3",): "scale",
        ("qa=gist,guide=x", "sts=distillation,teacher=y"): "x, y",
        ("qa",): "NAME=OBJECTIVE",
        ("qa=cosent",): "cosent .*score",
    }.items():
        with pytest.raises(UserError, match=named):
            train.SeveralConfig(kinds=kinds).of_data(given, is_default=False)
    # A guide reads the texts of all data sets, and an evaluation has none.
    guided = train.SeveralConfig(kinds=("qa=gist,guide=x,margin=0.1", "sts=cosine"))
    guided = guided.of_data(given, is_default=False)
    assert (guided.guide_model, guided.build(given).models) == ("x", {"guide": NO_MODEL})
    two = Vectors(N2, jnp.stack((N1, P), axis=1))
    found = guided.build(given).terms(vectors.replace(guide=two), batch)
    first = jax.tree.map(lambda x: x[:4], vectors.replace(guide=two))
    expected = in_batch.gist(first, real, margin=0.1).sum()
    assert float(found["qa"]) == pytest.approx(float(expected), rel=1e-6)
    assert guided.for_evaluation().kinds == ("qa=multiple_negatives", "sts=cosine")
    with pytest.raises(UserError, match=r"--objective\.kinds qa=cosent sts=cosent"):
        train.CoSENTConfig().of_data(given, is_default=False)
    with pytest.raises(UserError, match="requires several data sets, got 'memory:"):
        train.SeveralConfig().of_data(KINDS["cosent"], is_default=False)


SCORED = {"sentence1": "a", "sentence2": "b"}


def test_a_vector_of_zeros_has_a_finite_gradient():
    gradient = jax.grad(lambda x: unit(x).sum())(jnp.zeros((2, 3)))
    assert np.isfinite(gradient).all()


def examples(**fields):
    rows = [{"anchor": a, "positive": b, **fields} for a, b in PAIRS]
    return data.EmbeddingData(source=data.Examples.of(rows), length=8, tokenizer=TOKENIZER)


def examples_of_texts():
    rows = [{"text": a, "label": len(a)} for pair in PAIRS for a in pair]
    return data.EmbeddingData(source=data.Examples.of(rows), length=8, tokenizer=TOKENIZER)


TOKENIZER = data.TokenizerConfig(kind="wordpiece", vocab_size=64)
PAIRS = [("a b", "b c"), ("d", "e")]
KINDS = {
    "multiple_negatives": examples(),
    "cosent": examples(score=0.5),
    "distillation": examples(negative="f", scores=[1.0, 0.5]),
    "batch_all_triplet": examples_of_texts(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_scores_of_the_data_choose_the_objective(kind):
    source = KINDS[kind]
    default = train.MultipleNegativesConfig(normalize=True, matryoshka_dims=(4, 2))
    chosen = default.of_data(source, is_default=True)
    assert (chosen.kind, chosen.normalize, chosen.matryoshka_dims) == (kind, True, (4, 2))
    if kind != "multiple_negatives":
        with pytest.raises(UserError, match=rf"--objective\.kind {kind}"):
            default.of_data(source, is_default=False)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"directions": ("doc_to_query",)}, "query_to_doc"),
        (
            {"directions": ("query_to_doc", "doc_to_doc"), "partition": "per_direction"},
            "doc_to_doc.*joint",
        ),
        ({"hardness": "hard_negatives"}, "hardness_strength 0"),
        ({"matryoshka_dims": (4,), "matryoshka_weights": (1.0, 2.0)}, "matryoshka_weights"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(settings, named):
    with pytest.raises(UserError, match=named):
        train.MultipleNegativesConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (train.TripletConfig(), "triplet .* 2 .*documents"),
        (train.MultipleNegativesConfig(matryoshka_dims=(16,)), "matryoshka_dims 16 .* 8"),
        (train.CosineConfig(), "cosine .*scores"),
        (dataclasses.replace(CASES["distillation"][0], teacher="unread"), "2 .*documents"),
    ],
)
def test_data_that_do_not_suit_are_refused(settings, named):
    batch = {"anchor_mask": jnp.ones((6, 4), int), "attention_mask": jnp.ones((6, 1, 4), int)}
    batch["input_ids"] = batch["attention_mask"]
    with pytest.raises(UserError, match=named):
        settings.build(KINDS["multiple_negatives"]).terms(Vectors(A, P[:, None]), batch)


def test_gist_needs_a_guide():
    with pytest.raises(UserError, match=r"--objective\.guide"):
        train.GISTConfig().build(KINDS["multiple_negatives"])


@pytest.mark.parametrize("objective", [train.CosineConfig(), train.ContrastiveConfig()])
def test_scores_that_no_pair_can_reach_are_refused(objective):
    assert objective.of_data(KINDS["cosent"], is_default=False) is objective
    with pytest.raises(UserError, match=rf"score 5, .*{objective.kind} "):
        objective.of_data(examples(score=5), is_default=False)


def test_prompts_that_training_left_out_are_not_kept():
    prompts = {"query": "q: ", "passage": "p: ", "other": "x"}
    settings = EmbeddingSettings(prompts=prompts, default_prompt="query")
    objective = train.MultipleNegativesConfig()
    given = dataclasses.replace(KINDS["multiple_negatives"], query_prompt="", document_prompt="")
    found = objective.vector_settings(given, settings)
    assert found.prompts == {"query": "", "passage": "", "other": "x"}
    assert found.prompt(None) == found.query_prompt == found.document_prompt == ""
    _, kept = objective.initialized_from(KINDS["multiple_negatives"], settings)
    found = objective.vector_settings(kept, settings)
    assert (found.query_prompt, found.prompt(found.document_prompt)) == ("query", "p: ")


def test_a_loss_of_dot_products_is_said_to_differ_from_evaluations():
    source = KINDS["distillation"]
    assert "dot product" in (train.DistillationConfig().loss_note(source) or "")
    for settings in ({"normalize": True}, {"similarity": "cosine"}):
        assert train.DistillationConfig(**settings).loss_note(source) is None
        stored = train.DistillationConfig(**settings).vector_settings(source, None)
        assert stored.similarity is None
    assert train.DistillationConfig().vector_settings(source, None).similarity == "dot"
    assert train.CoSENTConfig().loss_note(KINDS["cosent"]) is None


def test_scores_that_look_like_classes_are_noted_and_a_margin_is_of_one_negative():
    rows = [{"premise": a, "hypothesis": "b", "label": i} for i, a in enumerate("abc")]
    given = dataclasses.replace(KINDS["cosent"], source=data.Examples.of(rows))
    given = dataclasses.replace(given, validation=given.source)
    assert "bert-classify" in (train.CoSENTConfig().loss_note(given) or "")
    assert train.CoSENTConfig().loss_note(KINDS["cosent"]) is None
    margins = examples(negatives=["c", "d"], score=0.5)
    with pytest.raises(UserError, match=r"2 negatives .*score"):
        train.MarginMSEConfig().of_data(margins, is_default=False)
    assert train.MarginMSEConfig().of_data(examples(negative="c", score=0.5), is_default=False)


def test_a_loss_of_pairs_names_the_remedy_for_negatives():
    masks = {"anchor_mask": jnp.ones((2, 3)), "attention_mask": jnp.ones((2, 2, 3))}
    with pytest.raises(UserError, match=r"have 2: leave out .*--data\.num-negatives 0"):
        train.CosineConfig()._check_batch(masks)


@pytest.mark.parametrize("config", [train.GISTConfig, train.DistillationConfig])
def test_an_evaluation_without_the_guide_keeps_the_settings_of_vectors(config):
    settings: dict[str, Any] = {"normalize": False, "matryoshka_dims": (64, 32)}
    name = "teacher" if hasattr(config, "teacher") else "guide"
    evaluated = config(**{name: "folder"}, **settings).for_evaluation()
    assert {key: getattr(evaluated, key) for key in settings} == settings
