"""The benchmark of rerankers runs, at a tiny size."""

import json

import jax
import pytest
from flaxzoo import models
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece

from . import reranker

pytestmark = pytest.mark.slow

WORDS = "river bridge train station museum garden castle market".split()


def test_the_benchmark_divides_articles_and_judges_a_run(tmp_path):
    articles = [
        {"title": title, "paragraphs": [
            {"context": f"the {title} and the {word}",
             "qas": [{"id": f"{title}{word}{i}", "question": f"where is the {title} {word}",
                      "answers": [{"text": word, "answer_start": len(title) + 13}]}
                     for i in range(2)]}
            for word in WORDS if word != title]}
        for title in WORDS[:4]
    ]  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    pieces = [*WORDPIECE_SPECIALS, *WORDS, *"the and where is".split()]
    config = models.BertConfig(
        vocab_size=len(pieces), max_length=32, num_layers=1, d_model=16, num_heads=2, head="none"
    )
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    models.save(tmp_path / "model", model, params)
    wordpiece(pieces, lowercase=True).save(tmp_path / "model")
    small = ["--steps", "2", "--batch-size", "8", "--data.length", "24"]
    scores = reranker.main(
        [str(tmp_path / "squad.json"), str(tmp_path / "out"),
         "--init-from", str(tmp_path / "model"), *small]
    )  # fmt: skip
    assert {"ndcg@10", "mrr@10", "bm25_ndcg@10"} <= scores.keys()
    lines = (tmp_path / "out" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    trained = {row["positive"].split()[1] for row in rows}
    judged = {a["title"] for a in json.loads((tmp_path / "out" / "judge.json").read_text())["data"]}
    assert trained | judged == {*WORDS[:4]}
    assert not trained & judged
    assert all(row["positive"] not in row["negatives"] for row in rows)
