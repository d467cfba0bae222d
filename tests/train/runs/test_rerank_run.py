"""Runs of rerankers: they begin with a cross-encoder of sentence-transformers, and end as one."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from flaxzoo import data, models, train
from flaxzoo.models.hf.cross_encoder import PairScoring
from sentence_transformers.cross_encoder import CrossEncoder, losses

from ...support.devices import on_devices
from ...support.encoders import SIZES, VOCABULARY, WORDS

pytestmark = pytest.mark.slow

DRAW = random.Random(0)


def text(number):
    return " ".join(DRAW.choices(WORDS, k=number))


LISTS = [
    {"query": text(3), "documents": [text(5) for _ in range(n)], "scores": [1.0, *[0.0] * (n - 1)]}
    for n in (3, 4, 2, 4, 3, 2, 4, 4)
]
LABELS = [row["scores"] for row in LISTS]


def config_of(init_from, loss="binary", **fields):
    lists = data.Examples.of(LISTS)
    return train.TrainConfig(
        model=models.BertConfig(**SIZES, head="none", dropout_rate=0.0),
        data=data.RerankData(source=lists, validation=lists, length=24, tokenizer=VOCABULARY),
        objective=train.RerankConfig(loss=loss),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2),
        init_from=None if init_from is None else str(init_from),
        batch_size=len(LISTS),
        log_every=1,
        **{"steps": 1, **fields},
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A cross-encoder with another activation and another name of its label than the defaults."""
    work_folder = tmp_path_factory.mktemp("published")
    train.train(config_of(None), work_folder / "run", quiet=True)
    model, params = models.load(work_folder / "run")
    model = models.create(dataclasses.replace(model.config, labels=("LABEL_0",)))
    tokenizer = data.load_tokenizer(work_folder / "run" / "tokenizer")
    scoring = PairScoring(activation="Identity")
    models.save(work_folder / "model", model, params, tokenizer, scoring=scoring)
    return work_folder / "model"


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def theirs(folder, loss_class):
    """The loss of the package for the same lists."""
    model = CrossEncoder(str(folder), device="cpu")
    model.eval()
    labels = [torch.tensor(row) for row in LABELS]
    columns = [[row["query"] for row in LISTS], [row["documents"] for row in LISTS]]
    if loss_class is losses.BinaryCrossEntropyLoss:
        pairs = [(query, x) for query, documents in zip(*columns, strict=True) for x in documents]
        columns, labels = list(zip(*pairs, strict=True)), torch.cat(labels)
    with torch.no_grad():
        return float(loss_class(model)(columns, labels))


@pytest.mark.parametrize(
    ("loss", "loss_class"),
    [("binary", losses.BinaryCrossEntropyLoss), ("lambda", losses.LambdaLoss)],
)
def test_a_run_learns_the_loss_of_the_package_and_is_exported_for_it(
    published, tmp_path, loss, loss_class
):
    train.train(config_of(published, loss), tmp_path / "run", quiet=True)
    before, first, after = rows_of(tmp_path / "run")
    assert [row["step"] for row in (before, first, after)] == [0, 1, 1]
    assert first["loss"] == pytest.approx(theirs(published, loss_class), abs=1e-5)
    assert {"ndcg@10", "mrr@10", "loss"} <= before.keys()
    assert "before training" in (tmp_path / "run" / "report.md").read_text()
    # The head and the activation of the initial model are kept.
    scorer = models.PairScorer.of_run(tmp_path / "run")
    assert scorer.settings.activation == "Identity"
    train.export_model(tmp_path / "run", tmp_path / "exported")
    pairs = [(row["query"], document) for row in LISTS for document in row["documents"]]
    exported = CrossEncoder(str(tmp_path / "exported"), device="cpu").predict(pairs)
    np.testing.assert_allclose(scorer.score(pairs), exported, atol=1e-5)
    found = train.predict(
        tmp_path / "run", [{"text": a, "text_b": b} for a, b in pairs], log=lambda line: None
    )
    np.testing.assert_allclose([row["score"] for row in found], exported, atol=1e-5)


@pytest.mark.parametrize("loss", ["contrast", "margin_mse"])
def test_micro_batches_on_one_device_equal_eight_devices(published, tmp_path, loss):
    config = config_of(published, loss)
    train.train(config, tmp_path / "eight", quiet=True)
    with on_devices(1):
        config = dataclasses.replace(config, micro_batches=4)
        train.train(config, tmp_path / "one", quiet=True)
    (_, one, whole), (_, two, parts) = (rows_of(tmp_path / name) for name in ("eight", "one"))
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    assert whole["loss"] == pytest.approx(parts["loss"], abs=1e-5)


def test_settings_of_another_loss_are_refused():
    with pytest.raises(data.UserError, match=r"sigma 2\.0 .*lambda .*rank_net"):
        dataclasses.replace(config_of(None), objective=train.RerankConfig(sigma=2.0))


def test_classes_of_pairs_have_the_loss_of_the_package(tmp_path):
    rows = [{"label": i % 3, "text": text(3), "text_b": text(5)} for i in range(8)]
    pairs = data.Examples.of(rows)
    config = train.TrainConfig(
        model=models.BertConfig(**SIZES, head="none", dropout_rate=0.0),
        data=data.SequenceClassificationData(
            source=pairs, validation=pairs, length=24, tokenizer=VOCABULARY
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2),
        steps=1,
        batch_size=8,
        log_every=1,
    )
    train.train(config, tmp_path / "first", quiet=True)
    train.export_model(tmp_path / "first", tmp_path / "model")
    config = dataclasses.replace(config, init_from=str(tmp_path / "model"))
    train.train(config, tmp_path / "run", quiet=True)
    learned = next(row for row in rows_of(tmp_path / "run") if row["split"] == "train")
    model = CrossEncoder(str(tmp_path / "model"), device="cpu")
    columns = [[row[name] for row in rows] for name in ("text", "text_b")]
    loss = losses.CrossEntropyLoss(model)(columns, torch.arange(8) % 3)
    loss.backward()
    norm = sum(float(x.grad.square().sum()) for x in model.parameters() if x.grad is not None)
    assert learned["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert learned["gradient_norm"] == pytest.approx(norm**0.5, rel=1e-5)
    found = models.PairScorer.of_run(tmp_path / "model").score(list(zip(*columns, strict=True)))
    np.testing.assert_allclose(found, model.predict(list(zip(*columns, strict=True))), atol=1e-5)


@pytest.mark.parametrize(
    ("row", "loss", "named"),
    [
        ({"positive": "b", "label": 2}, "binary", "bert-classify"),
        ({"positive": "b", "negatives": ["c", "d"], "score": 1}, "margin_mse", "2 negatives"),
    ],
)
def test_labels_and_margins_that_a_loss_would_misread_are_refused(row, loss, named):
    rows = data.Examples.of([{"query": "a", **row}])
    given = dataclasses.replace(config_of(None).data, source=rows, validation=rows)
    with pytest.raises(data.UserError, match=named):
        train.RerankConfig(loss=loss).of_data(given, is_default=False)
