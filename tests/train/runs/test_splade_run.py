"""Runs of sparse encoders: they begin with a folder of sentence-transformers, and end as one."""

import contextlib
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flaxzoo import data, models, train
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.train.cli.main import main
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses

from ...support.devices import on_devices
from ...support.encoders import OPTIMIZER, SIZES, VOCABULARY, WORDS

pytestmark = pytest.mark.slow

DRAW = random.Random(0)
PAIRS = [(" ".join(DRAW.choices(WORDS, k=4)), " ".join(DRAW.choices(WORDS, k=6))) for _ in range(8)]
DOCUMENT_WEIGHT, QUERY_WEIGHT = 0.3, 0.5


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    work_folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    pieces = [*WORDPIECE_SPECIALS, *dict.fromkeys(WORDS)]
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    layers = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(**sizes, **layers, **rates, vocab_size=len(pieces))
    config.update({"max_position_embeddings": 32, "initializer_range": 0.3})
    transformers.BertForMaskedLM(config).save_pretrained(work_folder / "plain")
    wordpiece(pieces, lowercase=True).save(work_folder / "plain")
    model = SparseEncoder(str(work_folder / "plain"), device="cpu", prompts={"query": "it saw "})
    model.save_pretrained(str(work_folder / "model"))
    return work_folder / "model"


def config_of(init_from, *, steps=1, micro_batches=1, **settings: Any):
    pairs = data.Examples.of(PAIRS)
    return train.TrainConfig(
        model=models.BertConfig(**SIZES, dropout_rate=0.0),
        data=data.EmbeddingData(
            source=pairs, validation=pairs, length=16, query_length=10, tokenizer=VOCABULARY
        ),
        objective=train.SpladeConfig(**settings),
        optimizer=OPTIMIZER,
        init_from=str(init_from),
        steps=steps,
        micro_batches=micro_batches,
        batch_size=len(PAIRS),
        log_every=1,
    )


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_the_loss_of_the_package_and_is_exported_for_it(published, tmp_path, capsys):
    run = tmp_path / "run"
    weights: dict[str, Any] = {"document_weight": DOCUMENT_WEIGHT, "query_weight": QUERY_WEIGHT}
    train.train(config_of(published, ramp_fraction=0.0, **weights), run, quiet=True)
    before, first, after = rows_of(run)
    # The loss and its gradient before the update.
    model = SparseEncoder(str(published), device="cpu")
    ranking = losses.SparseMultipleNegativesRankingLoss(model)
    loss = losses.SpladeLoss(model, ranking, DOCUMENT_WEIGHT, QUERY_WEIGHT)
    columns = [[f"it saw {a}" for a, _ in PAIRS], [b for _, b in PAIRS]]
    parts = loss([model.preprocess(texts) for texts in columns], None)
    total = torch.stack([*parts.values()]).sum()
    total.backward()
    norm = np.sqrt(
        sum(float(x.grad.square().sum()) for x in model.parameters() if x.grad is not None)
    )
    assert first["loss"] == pytest.approx(total.item(), abs=1e-5)
    assert first["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    # The evaluation has the same dimensions as the vectors of the package.
    vectors = model.encode(columns[1]).to_dense().numpy()
    assert before["document_active_dims"] == np.count_nonzero(vectors) / len(PAIRS)
    assert {"ndcg@10", "query_active_dims", "accuracy"} <= after.keys()
    assert "| document_active_dims before training |" in (run / "report.md").read_text()

    train.export_model(run, tmp_path / "exported")
    exported = SparseEncoder(str(tmp_path / "exported"), device="cpu")
    texts = columns[1]
    theirs = exported.encode(texts, prompt_name="query").to_dense().numpy()
    embedder = models.SparseEmbedder.of_run(run)
    np.testing.assert_allclose(embedder(texts, prompt_name="query"), theirs, atol=1e-5)

    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    lines = {"queries": [], "corpus": []}
    for i, (a, b) in enumerate(PAIRS):
        lines["queries"].append({"_id": f"q{i}", "text": a})
        lines["corpus"].append({"_id": f"d{i}", "title": "", "text": b})
    for name, rows in lines.items():
        (beir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(len(PAIRS)))
    (beir / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--data", f"beir:{beir}"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert scores["ndcg@10"] == pytest.approx(after["ndcg@10"])
    assert scores["corpus_active_dims"] == pytest.approx(after["document_active_dims"])


def test_micro_batches_on_one_device_equal_eight_devices_and_weights_grow(published, tmp_path):
    settings = {"ramp_steps": 2, "document_weight": DOCUMENT_WEIGHT, "query_weight": QUERY_WEIGHT}
    found = {}
    for number in (1, 4):
        config = config_of(published, steps=3, micro_batches=number, **settings)
        run = tmp_path / str(number)
        with on_devices(1) if number > 1 else contextlib.nullcontext():
            train.train(config, run, quiet=True)
        found[number] = [row for row in rows_of(run) if row["split"] == "train"]
    for whole, parts in zip(*found.values(), strict=True):
        for name in ("loss", "gradient_norm", "document_flops"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-4)
    for factor, row in zip((0.0, 0.25, 1.0), found[1], strict=True):
        flops = 0.3 * row["document_flops"] + 0.5 * row["query_flops"]
        assert row["loss"] == pytest.approx(row["splade"] + factor * flops, rel=1e-5)


def test_settings_of_dense_vectors_are_refused():
    with pytest.raises(data.UserError, match=r"pooling .*dense"):
        train.SpladeConfig(pooling=("cls",))


def test_settings_of_another_ranking_are_refused():
    with pytest.raises(data.UserError, match=r"scale 20.0 .*multiple_negatives, got margin_mse"):
        train.SpladeConfig(ranking="margin_mse", scale=20.0)
