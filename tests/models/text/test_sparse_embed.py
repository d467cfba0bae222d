"""Weights of tokens are those of the class SparseEncoder, in both directions."""

import json
import warnings

import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.hf.sparse_encoder import (
    SparseSettings,
    read_sparse_settings,
    write_sparse_settings,
)
from flaxzoo.models.hf.tensors.mapping import WeightsError
from flaxzoo.train.cli.main import main

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sentence_transformers import SparseEncoder

pytestmark = pytest.mark.slow

PIECES = [*WORDPIECE_SPECIALS, *"the old man went down to sea who ?".split()]
TEXTS = ["the old man went down to the sea", "who ?", "sea " * 40]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    work_folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    layers = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    config = transformers.BertConfig(**sizes, **layers, vocab_size=len(PIECES))
    config.update({"max_position_embeddings": 32, "initializer_range": 0.3})
    transformers.BertForMaskedLM(config).save_pretrained(work_folder / "plain")
    wordpiece(PIECES, lowercase=True).save(work_folder / "plain")
    model = SparseEncoder(str(work_folder / "plain"), device="cpu", prompts={"query": "who "})
    model.save_pretrained(str(work_folder / "model"))
    return work_folder / "model"


def theirs(folder, **options):
    return SparseEncoder(str(folder), device="cpu").encode(TEXTS, **options).to_dense().numpy()


def test_weights_are_those_of_the_package_also_after_import_and_export(
    published, tmp_path, assert_close
):
    embedder = models.SparseEmbedder.of_run(published)
    expected = theirs(published)
    assert 0 < np.count_nonzero(expected) < expected.size
    assert_close(embedder(TEXTS), expected)
    assert_close(embedder(TEXTS, prompt_name="query"), theirs(published, prompt_name="query"))
    assert main(["import", str(published), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert_close(theirs(tmp_path / "out"), expected)
    assert 'SparseEncoder("out")' in (tmp_path / "out" / "README.md").read_text()
    # The command writes tokens and weights.
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    arguments = ["--input", str(tmp_path / "texts.txt"), "--output"]
    output = tmp_path / "out.jsonl"
    assert main(["embed", str(tmp_path / "run"), *arguments, str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for row, values in zip(rows, expected, strict=True):
        assert list(row.values()) == sorted(row.values(), reverse=True)
        found = np.zeros(len(PIECES), np.float32)
        found[[PIECES.index(token) for token in row]] = list(row.values())
        assert_close(found, values)
    assert embedder.weights(TEXTS, top_k=2)[0] == dict(list(rows[0].items())[:2])
    assert main(["embed", str(published), *arguments, str(tmp_path / "out.npy")]) == 2


def test_a_sparse_encoder_has_no_dense_vectors(published):
    with pytest.raises(UserError, match=r"use `models\.SparseEmbedder`"):
        models.TextEmbedder.of_run(published)


def test_what_is_written_is_read_and_what_is_not_supported_is_refused(tmp_path):
    settings = SparseSettings(
        activation="log1p_relu", texts=models.EmbeddingSettings(max_length=7, prompts={"a": "b"})
    )
    write_sparse_settings(tmp_path, settings, max_length=9)
    assert read_sparse_settings(tmp_path) == settings
    file = tmp_path / "1_SpladePooling" / "config.json"
    for fields, message in (
        ({"pooling_strategy": "sum"}, "pooling_strategy 'sum'"),
        ({"activation_function": "gelu"}, "activation_function 'gelu' .*relu"),
    ):
        file.write_text(json.dumps(fields))
        with pytest.raises(WeightsError, match=message):
            read_sparse_settings(tmp_path)
