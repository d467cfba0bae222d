"""The benchmark of vectors and rerankers runs, at a tiny size."""

import json

import jax
import pytest
from flaxzoo import models
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece

from . import retrieval

pytestmark = pytest.mark.slow

WORDS = "river bridge train station museum garden castle market".split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Questions in SQuAD's form, and a model."""
    folder = tmp_path_factory.mktemp("files")
    articles = [
        {"title": title, "paragraphs": [
            {"context": f"the {title} and the {word}",
             "qas": [{"id": f"{title}{word}{i}", "question": f"where is the {title} {word}",
                      "answers": [{"text": word, "answer_start": len(title) + 13}]}
                     for i in range(2)]}
            for word in WORDS if word != title]}
        for title in WORDS[:4]
    ]  # fmt: skip
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    pieces = [*WORDPIECE_SPECIALS, *WORDS, *"the and where is".split()]
    config = models.BertConfig(
        vocab_size=len(pieces), max_length=32, num_layers=1, d_model=16, num_heads=2, head="none"
    )
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    models.save(folder / "model", model, params)
    wordpiece(pieces, lowercase=True).save(folder / "model")
    return folder / "squad.json", folder / "model"


@pytest.mark.parametrize("recipe", ["embed", "rerank"])
def test_the_benchmark_divides_articles_and_judges_a_run(files, recipe, tmp_path):
    negatives = 2 * (recipe == "rerank")
    small = f"--negatives {negatives} --questions 8 --steps 2 --batch-size 8".split()
    source, model = map(str, files)
    [scores] = retrieval.main([recipe, source, str(tmp_path), "--init-from", model, *small])
    assert ("before ndcg@10" in scores) == (recipe == "embed")
    assert {"ndcg@10", "mrr@10", "bm25"} <= scores.keys()
    assert scores["bound"] == 1  # each word is in few paragraphs
    read = [
        [json.loads(line) for line in (tmp_path / "0" / name).read_text().splitlines()]
        for name in ("pairs.jsonl", "judge8/corpus.jsonl", "judge8/queries.jsonl")
    ]
    trained, judged = {x["positive"] for x in read[0]}, {x["text"] for x in read[1]}
    # No article is on both sides, and all paragraphs of an article are searched.
    assert len({text.split()[1] for text in trained | judged}) == 4
    assert (len(trained), len(judged), len(read[2])) == (14, 14, 8)
    found = [x.get("negatives", []) for x in read[0]]
    assert {len(x) for x in found} == {negatives}
    assert all(x["positive"] not in texts for x, texts in zip(read[0], found, strict=True))
