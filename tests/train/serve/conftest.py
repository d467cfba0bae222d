"""A server of a tiny language model."""

import pytest
from flaxzoo import train
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer

from ...support.server import closing_sessions, running

TEXT = "the small dog sleeps below a red house; is it big or small? größer 日本語 😀 yes or no. "


@pytest.fixture(scope="session")
def run_folder(tiny, tmp_path_factory):
    """A run of a tiny GPT with a vocabulary of bytes and a few words."""
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    tokenizer = train_tokenizer([TEXT * 9], TokenizerConfig("byte-bpe", 300))
    model = tiny(vocab_size=tokenizer.vocab_size, max_length=128, d_model=32)
    train.save_run(folder, model.model, model.params, tokenizer)
    return folder


@pytest.fixture(scope="session")
def server(run_folder, tmp_path_factory):
    with running(tmp_path_factory.mktemp("logs"), run_folder, "--rows", 4) as server:
        yield server


@pytest.fixture
def closed_sessions(monkeypatch):
    with closing_sessions(monkeypatch):
        yield
