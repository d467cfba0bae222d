"""Tiny folders of transformers, and lm-evaluation-harness's own model and ours on each."""

import os
import warnings
from typing import Any, cast

import pytest
from flaxzoo import data, models
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer

from ....support import marian
from ....support.marian_tokenizer import WORDS, WORTE, train_model, write_folder

LENGTH = 48
TEXT = "the small dog sleeps below a red house while we wait; is it big or small? yes or no. "


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_offline(tmp_path_factory):
    """The data sets of the harness are files of the test."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = train_tokenizer([TEXT * 9], TokenizerConfig("byte-bpe", 300))
    end = tokenizer.special_ids.eos
    sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=tokenizer.vocab_size, bos_token_id=end, eos_token_id=end, **sizes
        )
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    tokenizer.export(folder, max_length=LENGTH)
    return folder


@pytest.fixture(scope="session")
def marian_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian") / "model"
    # One model of both sides: the harness's own model encodes targets as sources.
    sides = [train_model([" ".join([*WORDS, *WORTE])] * 9, 90)] * 2
    write_folder(folder, sides, False)
    tokenizer = data.load_tokenizer(folder)
    size, end = tokenizer.vocab_size, tokenizer.special_ids.eos
    theirs = marian.make(
        eos_bias=-2.0,  # a stop string ends its targets
        vocab_size=size,
        max_position_embeddings=64,
        pad_token_id=size - 1,
        decoder_start_token_id=size - 1,
        eos_token_id=end,
    )
    theirs.save_pretrained(folder)
    return folder


def both(folder: Any, batch_size: int) -> Any:
    """Return the harness's own model of a folder, and ours."""
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(1)  # more would wait for each other where other tests run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends another package
        theirs = cast(Any, HFLM)(
            pretrained=str(folder), device="cpu", batch_size=batch_size, dtype="float32"
        )
    return theirs, models.harness_model(folder)


@pytest.fixture(scope="session")
def gpt2(gpt2_folder):
    return both(gpt2_folder, 4)


@pytest.fixture(scope="session")
def translator(marian_folder):
    # In a batch of texts it pads sources on the left, which moves their positions.
    return both(marian_folder, 1)
