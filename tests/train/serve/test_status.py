"""Endpoints about the server, and errors in OpenAI's form."""

import httpx
import pytest
from flaxzoo.data.tokenizers.load import load_tokenizer
from lm_eval.utils import RemoteTokenizer

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


@pytest.mark.usefixtures("closed_sessions")
def test_lm_eval_reads_the_tokenizer(server, run_folder):
    tokenizer, text = load_tokenizer(run_folder / "tokenizer"), "the red <|endoftext|> größer"
    remote = RemoteTokenizer(f"{server.url}/v1/completions")
    assert remote.eos_token_id == tokenizer.special_ids.eos
    assert remote.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert remote.decode(remote.encode(text)) == text
    messages = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "no"}]
    rendered = remote.apply_chat_template(messages, add_generation_prompt=True)
    assert rendered == tokenizer.chat_template.render(messages, add_generation_prompt=True)
