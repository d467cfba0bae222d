"""`flaxzoo evaluate --data beir:` against sentence-transformers, and BM25 against its formula."""

import dataclasses
import json
import math
import re
import shutil
import warnings
from collections import Counter

import jax
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.hf.sentence_embedding import (
    EmbeddingSettings,
    Normalize,
    write_embedding_settings,
)
from flaxzoo.train.cli.main import main
from flaxzoo.train.evaluation.vectors import retrieval

pytestmark = pytest.mark.usefixtures("on_one_device")

WORDS = "the cat dog bird sat ran flew on under a mat tree query : passage".split()


def collection(seed=0, number=40):
    """Random documents; a query has half of the words of its relevant document."""
    draw = np.random.default_rng(seed)
    texts = [" ".join(draw.choice(WORDS[:12], 8)) for _ in range(number)]
    texts[7] = texts[3]
    queries = {f"q{i}": " ".join(texts[2 * i].split()[::2]) for i in range(number // 2)}
    relevant = {f"q{i}": {f"d{2 * i}": 1, f"d{(5 * i) % number}": 2} for i in range(number // 2)}
    return data.RetrievalData({f"d{i}": x for i, x in enumerate(texts)}, queries, relevant)


def random_bert(folder, head, **fields):
    """Writes a random BERT in Hugging Face's form."""
    folder.mkdir()
    pieces = [*WORDPIECE_SPECIALS, *WORDS]
    sizes = {"max_length": 32, "num_layers": 2, "d_model": 16, "num_heads": 2}
    config = models.BertConfig(vocab_size=len(pieces), head=head, **sizes, **fields)
    write_weights(folder, config, models.init_params(models.create(config), jax.random.key(0)))
    wordpiece(pieces, lowercase=True).save(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_bert(tmp_path_factory.mktemp("bert") / "body", "none")


def scores_of(capsys, *arguments):
    assert main(["evaluate", *map(str, arguments)]) == 0
    out, log = capsys.readouterr()
    (line,) = out.splitlines()
    return json.loads(line), log


def prompted_model(folder, path):
    """A model of sentence-transformers with prompts for queries and documents; writes a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sentence_transformers as st
        from sentence_transformers.sentence_transformer import modules
    parts = [modules.Transformer(str(folder), max_seq_length=12), modules.Pooling(16, "mean")]
    prompts = {"query": "query : ", "document": "passage : "}
    model = st.SentenceTransformer(
        modules=parts, device="cpu", prompts=prompts, default_prompt_name="query"
    )
    model.save(str(path))
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("measure", ["cosine", "dot"])
def test_scores_are_those_of_sentence_transformers(folder, tmp_path, capsys, monkeypatch, measure):
    model = prompted_model(folder, tmp_path / "model")
    model.similarity_fn_name = measure
    model.save(str(tmp_path / "model"))
    from sentence_transformers.sentence_transformer import evaluation

    given = collection()
    given.save(tmp_path / "beir")
    evaluator = evaluation.InformationRetrievalEvaluator(
        dict(given.queries), dict(given.documents), {q: set(d) for q, d in given.relevant.items()}
    )
    theirs = evaluator(model)
    monkeypatch.setattr(retrieval, "AT_ONCE", 13)
    ours, log = scores_of(capsys, tmp_path / "model", "--data", f"beir:{tmp_path}/beir")
    for name, value in theirs.items():
        assert ours[name.removeprefix(f"{measure}_")] == pytest.approx(value, abs=1e-6)
    further = {"graded_ndcg@10", "bm25_ndcg@10", "bm25_graded_ndcg@10"}
    assert ours.keys() == {name.removeprefix(f"{measure}_") for name in theirs} | further
    assert "40 documents, 20 queries, 39 relevant pairs" in log


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scores_in_tasks_of_mteb_are_those_of_sentence_transformers(folder, tmp_path):
    mteb = pytest.importorskip("mteb")
    from mteb.mocks import mock_tasks

    model = prompted_model(folder, tmp_path / "model")
    encoder = train.MTEBEncoder(tmp_path / "model", log=lambda _: None)
    assert isinstance(encoder, mteb.EncoderProtocol)
    options = {"cache": None, "co2_tracker": False, "show_progress_bar": False}
    kinds = ("Retrieval", "STS", "BitextMining", "Summarization", "Reranking")
    for kind in kinds:
        task = getattr(mock_tasks, f"Mock{kind}Task")
        found = [mteb.evaluate(one, task(), **options) for one in (encoder, model)]
        ours, theirs = (result.task_results[0].scores["test"][0] for result in found)
        for name, value in theirs.items():
            if isinstance(value, float):
                assert ours[name] == pytest.approx(value, abs=1e-5, nan_ok=True), (kind, name)
    assert encoder.mteb_model_meta.name == "flaxzoo/model"


def test_a_missing_package_mteb_is_reported(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(data.UserError, match=r"mteb .*pip install"):
        train.MTEBEncoder(folder)


def test_a_cross_encoder_ranks_the_documents_of_bm25_again(tmp_path, capsys, monkeypatch):
    reranker = random_bert(tmp_path / "cross", "sequence_classification", labels=("score",))
    given = collection(number=20)
    given.save(tmp_path / "beir")
    monkeypatch.setattr(retrieval, "RERANKED", 5)
    ours, log = scores_of(capsys, reranker, "--data", f"beir:{tmp_path}/beir")
    assert "first 5 documents" in log
    ids = sorted(given.documents)
    documents = [given.documents[id] for id in ids]
    scorer, right = models.PairScorer.of_run(reranker), []
    for id, query in given.queries.items():
        found = train.bm25([query], documents, 5)[1][0]
        ranked = scorer.rank(query, [documents[i] for i in found])
        names = [ids[found[one.index]] for one in ranked]
        right.append(next((1 / k for k, x in enumerate(names, 1) if x in given.relevant[id]), 0))
    assert ours["mrr@10"] == pytest.approx(np.mean(right))
    assert ours["bm25_ndcg@10"] != ours["ndcg@10"]


def test_a_distance_is_refused(folder, tmp_path, capsys):
    collection(number=10).save(tmp_path / "beir")
    settings = EmbeddingSettings(similarity="euclidean")
    for layers, status in (((), 2), ((Normalize(),), 0)):
        model = tmp_path / f"model{status}"
        shutil.copytree(folder, model)
        chosen = dataclasses.replace(settings, layers=layers)
        write_embedding_settings(model, chosen, d_model=16, max_length=12)
        assert main(["evaluate", str(model), "--data", f"beir:{tmp_path}/beir"]) == status
    assert "similarity_fn_name euclidean" in capsys.readouterr().err


def test_options_that_would_be_ignored_are_refused(folder, capsys):
    assert main(["evaluate", str(folder), "--data", "beir:x", "--num-beams", "2"]) == 2
    assert "--num-beams applies to the loss, not to --data beir:FOLDER" in capsys.readouterr().err


def test_bm25_is_its_formula():
    given = collection()
    documents, queries = [*given.documents.values(), "Dog, dog!", "…"], [*given.queries.values()]
    queries += ["zebra", "DOG zebra", ""]
    words = [re.findall(r"\w+", text.lower()) for text in documents]
    mean = sum(map(len, words)) / len(words)
    scores = np.zeros((len(queries), len(documents)))
    for i, query in enumerate(queries):
        for word in re.findall(r"\w+", query.lower()):
            number = sum(word in row for row in words)
            weight = math.log(1 + (len(words) - number + 0.5) / (number + 0.5))
            for j, row in enumerate(words):
                count = Counter(row)[word]
                length = 1.5 * (0.25 + 0.75 * len(row) / mean)
                scores[i, j] += weight * count / (count + length) if number else 0
    found, indices = train.bm25(queries, documents, 9)
    right = np.argsort(-scores.round(5), axis=1, kind="stable")[:, :9]
    best = np.take_along_axis(scores, right, 1)
    np.testing.assert_allclose(found, best, atol=1e-5)
    assert (indices == np.where(best > 0, right, -1)).all()
    with pytest.raises(data.UserError, match="one word"):
        train.bm25(["a"], ["…"])
