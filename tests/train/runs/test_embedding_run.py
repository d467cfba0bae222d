"""Runs of vectors: they begin with a folder of sentence-transformers, and end as one."""

import dataclasses
import json
import random
import shutil

import numpy as np
import pytest
import sentence_transformers
import torch
from flaxzoo import data, models, train
from flaxzoo.models.hf.sentence_embedding import EmbeddingSettings, Normalize
from flaxzoo.train.runs.load_run import begin_with
from sentence_transformers.sentence_transformer.losses import (
    BatchAllTripletLoss,
    BatchHardTripletLossDistanceFunction,
    MultipleNegativesRankingLoss,
)

from ...support.devices import on_devices
from ...support.encoders import SIZES, VOCABULARY, WORDS

pytestmark = pytest.mark.slow

DRAW = random.Random(0)
PAIRS = [(" ".join(DRAW.choices(WORDS, k=4)), " ".join(DRAW.choices(WORDS, k=6))) for _ in range(8)]
SETTINGS = EmbeddingSettings(
    pooling=("cls",), layers=(Normalize(),), prompts={"query": "it saw ", "other": "x"}
)


def config_of(init_from, **fields):
    pairs = data.Examples.of(PAIRS)
    return train.TrainConfig(
        model=models.BertConfig(**SIZES, head="none", dropout_rate=0.0),
        data=data.EmbeddingData(
            source=pairs, validation=pairs, length=16, query_length=10, tokenizer=VOCABULARY
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2),
        init_from=None if init_from is None else str(init_from),
        batch_size=len(PAIRS),
        log_every=1,
        **{"steps": 1, **fields},
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder of sentence-transformers with other settings than the defaults."""
    work_folder = tmp_path_factory.mktemp("published")
    train.train(config_of(None, steps=1), work_folder / "run", quiet=True)
    model, params = models.load(work_folder / "run")
    tokenizer = data.load_tokenizer(work_folder / "run" / "tokenizer")
    models.save(work_folder / "model", model, params, tokenizer, embedding=SETTINGS)
    return work_folder / "model"


def test_a_run_keeps_the_settings_of_its_model_and_learns_the_loss_of_the_package(
    published, tmp_path
):
    train.train(config_of(published), tmp_path / "run", quiet=True)
    embedder = models.TextEmbedder.of_run(tmp_path / "run")
    expected = dataclasses.replace(
        SETTINGS, max_length=32, prompts={"query": "it saw ", "other": "x"}
    )
    assert embedder.settings == expected
    # The loss of the first step, before the update.
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    before, first, after = lines
    assert (before["step"], after["step"]) == (0, 1)
    assert after["ndcg@10"] > 0
    assert "| ndcg@10 before training |" in (tmp_path / "run" / "report.md").read_text()
    theirs = sentence_transformers.SentenceTransformer(str(published), device="cpu")
    loss = MultipleNegativesRankingLoss(theirs)
    columns = [[f"it saw {a}" for a, _ in PAIRS], [b for _, b in PAIRS]]
    features = [theirs.tokenize(texts) for texts in columns]
    with torch.no_grad():
        assert first["loss"] == pytest.approx(float(loss(features, None)), abs=1e-5)

    train.export_model(tmp_path / "run", tmp_path / "exported")
    exported = sentence_transformers.SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    texts = [b for _, b in PAIRS]
    ours = embedder(texts, prompt_name="query")
    np.testing.assert_allclose(ours, exported.encode(texts, prompt_name="query"), atol=1e-5)
    # The settings of the model are not needed again.
    again = train.train(config_of(published), tmp_path / "run", quiet=True)
    assert again.finished


@pytest.mark.parametrize(("stated", "length"), [(12, 12), (4096, 32)])
def test_the_default_length_is_that_of_the_model(published, tmp_path, stated, length):
    folder = tmp_path / "model"
    shutil.copytree(published, folder)
    file = folder / "sentence_bert_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_seq_length": stated}))
    assert begin_with("embed", folder).data.length == length
    # Without the settings of a model of vectors, the recipe's length.
    (folder / "modules.json").unlink()
    assert begin_with("embed", folder).data.length == 32


def test_settings_of_the_run_replace_those_of_the_model(published, tmp_path):
    # Half of the examples lack a negative.
    rows = [
        {"anchor": a, "positive": b, "negatives": [f"red {WORDS[i]}"] * (i % 2)}
        for i, (a, b) in enumerate(PAIRS)
    ]
    config = config_of(published, objective=train.MultipleNegativesConfig(pooling=("mean",)))
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(
            config.data,
            source=data.Examples.of(rows),
            query_prompt="",
            document_prompt="red ",
        ),
    )
    train.train(config, tmp_path / "run", quiet=True)
    _, first, _ = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert np.isfinite([first["loss"], first["gradient_norm"]]).all()
    assert not first["skipped_steps"]
    settings = models.TextEmbedder.of_run(tmp_path / "run").settings
    assert (settings.pooling, settings.layers) == (("mean",), (Normalize(),))
    assert settings.prompts["document"] == "red "


def test_texts_with_labels_learn_the_loss_of_the_package(published, tmp_path):
    rows = [{"text": text, "label": "ab"[i % 2]} for i, (text, _) in enumerate(PAIRS)]
    texts = data.Examples.of(rows)
    # Euclidean distances of nearly equal vectors, as a tiny model has, are inexact.
    config = config_of(published, objective=train.BatchAllTripletConfig(distance="cosine"))
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, source=texts, validation=texts)
    )
    train.train(config, tmp_path / "run", quiet=True)
    _, first, after = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert 0 <= after["label_accuracy"] <= 1
    theirs = sentence_transformers.SentenceTransformer(str(published), device="cpu")
    features = [theirs.tokenize([f"it saw {row['text']}" for row in rows])]
    with torch.no_grad():
        cosine = BatchHardTripletLossDistanceFunction.cosine_distance
        loss = BatchAllTripletLoss(theirs, cosine)(features, torch.arange(len(rows)) % 2)
    assert first["loss"] == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.filterwarnings("ignore:An input array is nearly constant")  # a tiny model
def test_several_data_sets_have_their_losses_on_any_number_of_devices(published, tmp_path):
    qa = [{"anchor": a, "positive": b} for a, b in PAIRS]
    sts = [{"sentence1": a, "sentence2": b, "score": i / 8} for i, (a, b) in enumerate(PAIRS)]
    for name, rows in {"qa": qa, "sts": sts}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"sets:qa=jsonl:{tmp_path}/qa | sts=jsonl:{tmp_path}/sts"
    config = config_of(published, steps=2, objective=train.SeveralConfig(kinds=("sts=cosine",)))
    mixed = dataclasses.replace(config.data, source=source, validation=source, mixing="round_robin")
    config = dataclasses.replace(config, data=mixed)
    train.train(config, tmp_path / "eight", quiet=True)
    with on_devices(1):
        parts = dataclasses.replace(config, micro_batches=4)
        train.train(parts, tmp_path / "one", quiet=True)
    eight, one = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("eight", "one")
    )
    eight, one = ([row for row in rows if row["split"] == "train"] for rows in (eight, one))
    assert [(row["qa"] > 0, row["sts"] > 0) for row in eight] == [(True, False), (False, True)]
    for row, other in zip(eight, one, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-4)
    # The same command goes on with the finished run, and an evaluation scores each data set.
    assert train.train(config, tmp_path / "eight", quiet=True).finished
    scores = train.score_run(tmp_path / "eight", log=lambda line: None)
    assert {"qa_ndcg@10", "sts_spearman", "ndcg@10"} <= scores.keys()
