"""Endpoints about the server, and errors in OpenAI's form."""

import httpx
import pytest
from flaxzoo.data.tokenizers.load import load_tokenizer

pytestmark = pytest.mark.integration


def test_the_server_lists_its_models_and_figures(server):
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 128)
    assert "flaxzoo_ready 1.0" in httpx.get(f"{server.url}/metrics").text


def test_texts_are_tokenized_and_decoded(server, run_folder):
    tokenizer, text = load_tokenizer(run_folder / "tokenizer"), "the größer 日本語 😀"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert ids == tokenizer.encode(text)
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"] == text
