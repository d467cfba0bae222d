"""Scores of vectors are those of sentence-transformers' evaluators on the same vectors."""

import types
import warnings
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flaxzoo import data, train
from flaxzoo.train.evaluation.vectors import nearest as nearest_file
from flaxzoo.train.evaluation.vectors.held_out import vector_scores
from flaxzoo.train.evaluation.vectors.ranking import ranking_scores
from flaxzoo.train.losses.embedding.in_batch import is_nearest
from flaxzoo.train.losses.embedding.vectors import Real, Vectors
from flaxzoo.train.losses.eval_step import Evaluation

NUMBER = 40


@pytest.fixture(scope="module")
def evaluation():
    """The evaluators of sentence-transformers, which take seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers.sentence_transformer import evaluation
    return evaluation


def cos_sim(x, y):
    return torch.nn.functional.normalize(torch.as_tensor(x), dim=-1) @ (
        torch.nn.functional.normalize(torch.as_tensor(y), dim=-1).T
    )


def vectors(seed, number=NUMBER, width=8):
    """Vectors with many equal cosines, which float32 computes exactly, and one of length 0."""
    draw = np.random.default_rng(seed)
    rows = np.zeros((number, width), np.float32)
    for row in rows[1:]:
        row[draw.choice(width, 4, replace=False)] = draw.choice(
            [-1.0, 1.0, 0.5], 4, p=[0.4, 0.5, 0.1]
        )
    return rows


def distinct(seed, number=NUMBER, width=8):
    return np.random.default_rng(seed).normal(size=(number, width)).astype(np.float32)


def model_of(**columns):
    """A model for the evaluators: text `a3` has row 3 of the vectors `a`."""

    def encode(texts, convert_to_tensor=False, convert_to_numpy=True, **_):
        rows = np.stack([columns[text[0]][int(text[1:])] for text in texts])
        if convert_to_tensor:
            return torch.tensor(rows)
        return rows if convert_to_numpy else list(torch.tensor(rows))

    return types.SimpleNamespace(
        encode=encode, encode_query=encode, encode_document=encode, model_card_data=Mock(),
        similarity_fn_name="cosine", similarity=cos_sim,
    )  # fmt: skip


def texts(column, number=NUMBER):
    return [f"{column}{i}" for i in range(number)]


def retrieval(evaluation, draw, x, y, _):
    relevant = [{int(j): 1.0 for j in draw.choice(30, 1 + i % 4, replace=False)} for i in range(25)]
    # The evaluator orders equal scores by name, which here is the order of the rows.
    names = [f"{j:02}" for j in range(30)]
    evaluator = evaluation.InformationRetrievalEvaluator(
        {f"q{i}": f"a{i}" for i in range(25)},
        {name: f"b{j}" for j, name in enumerate(names)},
        {f"q{i}": {names[j] for j in one} for i, one in enumerate(relevant)},
    )
    ours = train.retrieval_scores(x[:25], y[:30], relevant)
    return evaluator, ours, {f"cosine_{name}": name for name in ours}


def similarity(evaluation, draw, x, y, _):
    labels = draw.integers(0, 6, NUMBER) / 5
    evaluator = evaluation.EmbeddingSimilarityEvaluator(texts("a"), texts("b"), labels.tolist())
    names = {"spearman_cosine": "spearman", "pearson_cosine": "pearson"}
    return evaluator, train.similarity_scores(x, y, labels), names


def classification(evaluation, draw, x, y, _):
    labels = draw.integers(0, 2, NUMBER)
    evaluator = evaluation.BinaryClassificationEvaluator(texts("a"), texts("b"), labels.tolist())
    ours = train.pair_classification_scores(x, y, labels)
    return evaluator, ours, {f"cosine_{name}": name for name in ours}


def triplet(evaluation, draw, x, y, z):
    evaluator = evaluation.TripletEvaluator(texts("a"), texts("b"), texts("c"))
    return evaluator, train.triplet_scores(x, y, z), {"cosine_accuracy": "accuracy"}


def bitext(evaluation, draw, x, y, _):
    evaluator = evaluation.TranslationEvaluator(texts("a"), texts("b"))
    names = {
        "src2trg_accuracy": "source_to_target_accuracy",
        "trg2src_accuracy": "target_to_source_accuracy",
        "mean_accuracy": "accuracy",
    }
    return evaluator, train.bitext_scores(x, (x + y) / 2), names


def reranking(evaluation, draw, x, y, _):
    # The first query has no negatives, which the evaluator leaves out.
    parts = [(0, 3, 0), *((i, 1 + i % 3, 5 + i) for i in range(1, 12))]
    samples = [
        {"query": f"a{i}", "positive": texts("b", p), "negative": texts("b", p + n)[p:]}
        for i, p, n in parts
    ]
    scores = [cos_sim(x[[i]], y[: p + n])[0].numpy() for i, p, n in parts]
    labels = [np.arange(p + n) < p for _, p, n in parts]
    evaluator = evaluation.RerankingEvaluator(samples)
    return (
        evaluator,
        train.reranking_scores(scores, labels),
        {n: n for n in ("map", "mrr@10", "ndcg@10")},
    )


KINDS = [retrieval, similarity, classification, triplet, bitext, reranking]


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_scores_are_those_of_sentence_transformers(evaluation, kind, ties):
    make = vectors if ties else distinct
    x, y, z = (make(seed) for seed in range(3))
    # torch sorts equal scores in any order, which MRR depends on.
    if kind is reranking:
        x, y = distinct(0), distinct(1)
        y[9] = y[2] if ties else y[9]
    evaluator, ours, names = kind(evaluation, np.random.default_rng(5), x, y, z)
    second = (x + y) / 2 if kind is bitext else y
    theirs = evaluator(model_of(a=x, b=second, c=z))
    for their_name, name in names.items():
        assert ours[name] == pytest.approx(theirs[their_name], abs=1e-6), name
    assert len(names) >= len(ours) - (kind is bitext)  # whose F1 is MTEB's


def test_graded_gains_are_those_of_trec_eval():
    pytest.importorskip("pytrec_eval")
    import pytrec_eval

    draw = np.random.default_rng(0)
    ranked = np.stack([draw.permutation(20) for _ in range(6)])
    relevant = [
        {int(j): int(draw.integers(0, 4)) for j in range(0, 20, 3)} | {1: 2} for _ in ranked
    ]
    qrels = {f"q{i}": {f"d{j}": gain for j, gain in one.items()} for i, one in enumerate(relevant)}
    run = {f"q{i}": {f"d{j}": -float(k) for k, j in enumerate(row)} for i, row in enumerate(ranked)}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
    mean = np.mean([one["ndcg_cut_10"] for one in theirs.values()])
    assert ranking_scores(ranked, relevant)["graded_ndcg@10"] == pytest.approx(mean, abs=1e-9)


def test_f1_of_bitexts_is_that_of_mteb():
    from sklearn.metrics import f1_score

    x, y = distinct(0), distinct(0) + distinct(1)
    found = cos_sim(x, y).argmax(1).numpy()
    right = f1_score(np.arange(NUMBER), found, average="weighted", zero_division=0)  # pyright: ignore
    assert train.bitext_scores(x, y)["f1"] == pytest.approx(right)


def test_equal_translations_are_equally_right():
    x = distinct(0, 3)
    y = x[[1, 0, 2]]
    scores = train.bitext_scores(x, y, texts=(["a", "b", "c"], ["same", "same", "other"]))
    assert scores["source_to_target_accuracy"] == 1
    assert scores["target_to_source_accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("block", [7, 16, 1000])
def test_nearest_is_brute_force_in_any_blocks(monkeypatch, block):
    monkeypatch.setattr(nearest_file, "BLOCK", block)
    monkeypatch.setattr(nearest_file, "QUERIES", 5)
    queries, documents = vectors(0, 12), vectors(1, 90)
    scores = queries @ documents.T
    right = np.argsort(-scores, axis=1, kind="stable")
    for top_k in (1, 10, 90, 200):
        found, indices = train.nearest(queries, documents, top_k)
        assert (indices == right[:, :top_k]).all()
        assert (found == np.take_along_axis(scores, right, 1)[:, :top_k]).all()
    parts = [documents[:31], documents[31:31], documents[31:]]
    assert (train.nearest(queries, iter(parts), 10)[1] == right[:, :10]).all()


X = distinct(0, 3)
BAD = [
    (lambda: train.nearest(X, X[:, :5]), "width 8 .* got 5"),
    (lambda: train.nearest(X, X[:0]), "documents .*one row"),
    (lambda: train.nearest(X, X, 0), "top_k .*got 0"),
    (lambda: train.retrieval_scores(X, X, [{0: 1.0}]), "relevant .*1 queries, .*ranked has 3"),
    (lambda: train.retrieval_scores(X, X, [{0: 1.0}, {}, {1: 0.0}]), "relevant"),
    (lambda: train.similarity_scores(X, X[:2], [1, 2, 3]), r"got \[3, 8\] and \[2, 8\]"),
    (lambda: train.similarity_scores(X, X[::-1], [1, 1, 1]), "labels .*different"),
    (lambda: train.pair_classification_scores(X, X, [0, 2, 1]), r"0 or 1 .*\[0, 1, 2\]"),
    (lambda: train.pair_classification_scores(X, X, [1, 1, 1]), r"both values, .*3 of \[1\]"),
    (lambda: train.reranking_scores([X[0]], [np.ones(8)]), "no query .*relevant"),
    (lambda: train.reranking_scores([X[0]], [np.ones(7)]), "query 0 .*8 scores .*7 labels"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(data.UserError, match=message):
        call()


def test_each_of_several_data_sets_is_a_search(tmp_path):
    """The texts of a data set that is not the first are not numbered from 0."""
    for name in ("a", "b"):
        lines = (f'{{"anchor": "{name} {i}", "positive": "{name} has {i}"}}\n' for i in range(4))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    source = f"sets:a=jsonl:{tmp_path}/a.jsonl | b=jsonl:{tmp_path}/b.jsonl"
    config = data.EmbeddingData(source=source, tokenizer=data.TokenizerConfig(kind="words"))
    split = config.whole_source(source, config.make_tokenizer(), ())
    # Each anchor has the vector of its positive, but two texts of the second data set are swapped.
    anchors = np.eye(8, dtype=np.float32)
    found = {"anchors": anchors, "documents": anchors[[0, 1, 2, 3, 5, 4, 6, 7], None]}
    scores = vector_scores(Evaluation(0.0, {}, {}, found), split)
    assert (scores["a_accuracy@1"], scores["b_accuracy@1"], scores["accuracy@1"]) == (1, 0.5, 0.75)


def test_equal_vectors_do_not_find_the_positive():
    zeros = Vectors(jnp.zeros((4, 2)), jnp.zeros((4, 1, 2)))
    real = Real(jnp.ones(4, bool), jnp.ones((4, 1), bool))
    assert is_nearest(zeros, real, "dot").tolist() == 4 * [0.25]
