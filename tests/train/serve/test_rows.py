"""Vectors, scores, labels and translations through HTTP equal those in this process."""

import base64
import concurrent.futures
import itertools
import re

import httpx
import jax
import numpy as np
import openai
import pytest
from flaxzoo import models, train
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.models.hf.sentence_embedding import EmbeddingSettings, Normalize

from ...support.server import running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_one_device")]

TEXTS = ["the cat sat", "a dog ran to the red house", "the mat and the dog sat", "red"]
DOCUMENTS = ["a red house", "the cat", "dog dog dog dog dog dog dog"]
LONG = "dog " * 60
SIZES = {"max_length": 48, "num_layers": 1, "d_model": 16, "num_heads": 2, "init_std": 0.5}
ENCODERS = {
    "embedder": {"head": "none"},
    "classifier": {"head": "sequence_classification", "labels": ("bad", "good")},
    "tagger": {"head": "token_classification", "labels": ("O", "B-X", "I-X")},
    "reranker": {"head": "sequence_classification", "labels": ("score",)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs with random parameters, one of each kind."""
    folder = tmp_path_factory.mktemp("rows")
    words = train_tokenizer(TEXTS * 9, TokenizerConfig("wordpiece", 50))
    settings = EmbeddingSettings(
        layers=(Normalize(),), prompts={"query": "the red "}, pool_prompt=False
    )
    for name, fields in ENCODERS.items():
        config = models.BertConfig(vocab_size=words.vocab_size, **SIZES, **fields)
        save(folder / name, config, words, embedding=settings if name == "embedder" else None)
    pieces = train_tokenizer(TEXTS * 9, TokenizerConfig("byte-bpe", 270))
    sizes = {**SIZES, "max_length": 16}
    config = models.EncoderDecoderConfig(vocab_size=pieces.vocab_size, **sizes)
    save(folder / "translator", config, pieces)
    return folder


def save(folder, config, tokenizer, **fields):
    model = models.create(config)
    train.save_run(folder, model, models.init_params(model, jax.random.key(0)), tokenizer, **fields)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    names = [folder / name for name in (*ENCODERS, "translator")]
    with running(tmp_path_factory.mktemp("logs"), *names, "--warm-up-length", "0") as server:
        yield server


@pytest.fixture(scope="module")
def embedder(folder):
    return models.TextEmbedder.of_run(folder / "embedder")


def post(server, path, **body):
    found = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert found.status_code == 200, found.text
    return found.json()


def vectors(answer):
    return np.array([one["embedding"] for one in answer["data"]])


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_vectors_are_those_of_the_embedder_in_all_forms(server, embedder):
    expected, ids = embedder(TEXTS), [embedder.tokenizer.encode(text) for text in TEXTS]
    # The client asks for base64 unless it is told otherwise.
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for given, form in itertools.product((TEXTS, ids), (openai.omit, "float")):
            found = client.embeddings.create(model="embedder", input=given, encoding_format=form)
            close([one.embedding for one in found.data], expected)
            assert [one.index for one in found.data] == [0, 1, 2, 3]
            assert found.usage.prompt_tokens == sum(map(len, ids))
    for given in (TEXTS[1], ids[1]):
        close(vectors(post(server, "/v1/embeddings", model="embedder", input=given)), expected[1:2])


def test_base64_has_the_bytes_of_the_list(server):
    body = {"model": "embedder", "input": TEXTS}
    listed = vectors(post(server, "/v1/embeddings", **body))
    encoded = post(server, "/v1/embeddings", **body, encoding_format="base64")["data"]
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in encoded]
    np.testing.assert_array_equal(np.stack(decoded), listed)


def test_settings_of_vectors(server, embedder):
    body = {"model": "embedder", "input": TEXTS}
    found = vectors(post(server, "/v1/embeddings", **body, dimensions=5))
    first = embedder(TEXTS)[:, :5]
    close(found, first / np.linalg.norm(first, axis=1, keepdims=True))
    found = vectors(post(server, "/v1/embeddings", **body, prompt_name="query"))
    close(found, embedder(TEXTS, prompt_name="query"))
    found = vectors(post(server, "/v1/embeddings", model="embedder", input=LONG, truncate=True))
    close(found, embedder([LONG], log=lambda _: None))


def test_scores_are_those_of_the_scorer_in_both_forms(server, folder):
    scorer = models.PairScorer.of_run(folder / "reranker")
    ranked = scorer.rank("the red cat", DOCUMENTS)
    body = {"model": "reranker", "query": "the red cat"}
    found = post(server, "/rerank", **body, texts=DOCUMENTS, return_text=True)
    assert [one["index"] for one in found] == [one.index for one in ranked]
    assert [one["text"] for one in found] == [DOCUMENTS[one.index] for one in ranked]
    close([one["score"] for one in found], [one.score for one in ranked])
    logits = [
        one["score"] for one in post(server, "/rerank", **body, texts=DOCUMENTS, raw_scores=True)
    ]
    close(1 / (1 + np.exp(-np.array(logits))), [one.score for one in ranked])
    # Objects, and the form of Cohere.
    given = [{"text": text} for text in DOCUMENTS]
    found = post(server, "/v1/rerank", **body, documents=given, top_n=2, return_documents=True)
    assert [one["document"]["text"] for one in found["results"]] == [
        DOCUMENTS[one.index] for one in ranked[:2]
    ]
    close([one["relevance_score"] for one in found["results"]], [x.score for x in ranked[:2]])
    assert found["meta"]["warnings"] == []
    (warning,) = post(server, "/rerank", **body, documents=[LONG])["meta"]["warnings"]
    assert "48 tokens" in warning


@pytest.mark.parametrize("name", ["classifier", "tagger"])
def test_predictions_are_those_of_the_command(server, folder, name):
    expected = train.predict(folder / name, TEXTS, log=lambda _: None)
    found = post(server, "/v1/classify", model=name, input=TEXTS)
    for i, (one, other) in enumerate(zip(found["data"], expected, strict=True)):
        assert one.pop("index") == i
        assert one.pop("probabilities") == pytest.approx(other.pop("probabilities"), abs=1e-6)
        assert one == other
    assert found["notes"] == [] or name == "tagger"
    given = post(server, "/v1/classify", model="classifier", input=[{"text": LONG}])
    assert "truncated" in given["notes"][0]


def test_translations_are_those_of_the_translator(server, folder):
    translator = models.TextTranslator.of_run(folder / "translator")
    texts = ["red", " ", "the cat"]
    expected = translator(texts, num_beams=2, num_return_sequences=2, max_new_tokens=5)
    body = {"model": "translator", "input": texts}
    found = post(server, "/v1/translate", **body, num_beams=2, n=2, max_tokens=5)
    assert [one["index"] for one in found["data"]] == [0, 1, 2]
    for one, others in zip(found["data"], expected, strict=True):
        for ours, other in zip(one["translations"], others, strict=True):
            assert (ours["text"], ours["num_tokens"]) == (other.text, other.num_tokens)
            assert ours["score"] == pytest.approx(other.score, abs=1e-5)


def test_each_of_many_clients_gets_the_vectors_of_its_texts(server, embedder):
    requests = [[TEXTS[(i + j) % 4] for j in range(1 + i % 3)] for i in range(40)]
    expected = embedder(TEXTS)
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def ask(texts):
            return vectors(
                client.post("/v1/embeddings", json={"model": "embedder", "input": texts}).json()
            )

        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            for texts, found in zip(requests, pool.map(ask, requests), strict=True):
                close(found, expected[[TEXTS.index(text) for text in texts]])


BAD = [
    ("/v1/embeddings", {"input": []}, "input .*empty"),
    ("/v1/embeddings", {"input": [[]]}, r"input\[0\] .*token"),
    ("/v1/embeddings", {"input": 3}, "input must be"),
    ("/v1/embeddings", {"input": ["a", 3]}, "input must be"),
    ("/v1/embeddings", {"input": [-1]}, "input must be"),
    ("/v1/embeddings", {"input": [10**6]}, "got 1000000"),
    ("/v1/embeddings", {"input": {"text": "a"}}, "input must be"),
    ("/v1/embeddings", {"input": ["red"] * 2049}, "2,048 texts, got 2,049"),
    ("/v1/embeddings", {"input": LONG}, "48 tokens"),
    ("/v1/embeddings", {"input": "a", "dimensions": 17}, "dimensions .*16"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions .* 1"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format "),
    ("/v1/embeddings", {"input": "a", "prompt_name": "no"}, "prompt-name 'no'"),
    ("/v1/embeddings", {}, "input .*missing"),
    ("/rerank", {"query": "a", "model": "reranker"}, "documents .*texts .*missing"),
    ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "one of the two"),
    ("/rerank", {"query": "a", "texts": [], "model": "reranker"}, "texts .*empty"),
    ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, r"documents\[0\] "),
    ("/rerank", {"query": "a", "texts": [LONG], "model": "reranker"}, "the 48"),
    ("/rerank", {"query": "a", "texts": ["b"], "model": "classifier"}, "not support rerank"),
    ("/v1/classify", {"input": [{"words": "a"}], "model": "classifier"}, r"examples\[0\]"),
    ("/v1/classify", {"input": ["a", {"text": "a"}], "model": "classifier"}, r"examples\[1\]"),
    ("/v1/classify", {"input": "a", "model": "embedder"}, "not support classification"),
    ("/v1/translate", {"input": "a", "model": "translator", "num_beams": 33}, "at most 32"),
    ("/v1/translate", {"input": "a", "model": "translator", "n": 99}, "num_return_sequences"),
    ("/v1/translate", {"input": LONG, "model": "translator"}, r"input\[0\] "),
]


@pytest.mark.parametrize(("path", "body", "message"), BAD)
def test_bad_requests_are_refused_by_name(server, path, body, message):
    found = httpx.post(f"{server.url}{path}", json={"model": "embedder", **body}, timeout=120)
    assert found.status_code == 400
    assert re.search(message, found.json()["error"]["message"])
    assert httpx.get(f"{server.url}/health").status_code == 200
