"""A reranker after BM25 on questions about paragraphs, in SQuAD's form.

Half of the articles train the reranker, the other half judge it: no article is on both sides. A
training question has its paragraph, and four of the first paragraphs of BM25 that are not its own.
Printed are nDCG@10 and MRR@10 of BM25's first 20 paragraphs, ranked again, and nDCG@10 of BM25. Run
it on an idle machine:

    python tests/benchmarks/reranker.py squad.json.gz FOLDER --init-from MODEL --seed 0

Further options are options of `flaxzoo train rerank`, such as `--epochs 2`.
"""

import argparse
import gzip
import json
from pathlib import Path

NUM_NEGATIVES = 4
FIRST = 20
"""The paragraphs of BM25 that negatives are from."""


def prepare(source: Path, folder: Path) -> tuple[Path, Path]:
    """Writes the questions of every second article with negatives, and the other articles.

    Returns:
        The JSON lines to train on, and the articles to judge with, in SQuAD's form.
    """
    from flaxzoo.train.evaluation.vectors.bm25 import bm25

    opened = gzip.open if source.suffix == ".gz" else open
    with opened(source, "rt", encoding="utf-8") as file:
        articles = sorted(json.load(file)["data"], key=lambda article: article["title"])
    folder.mkdir(parents=True, exist_ok=True)
    judge = folder / "judge.json"
    judge.write_text(json.dumps({"version": "1.1", "data": articles[1::2]}), encoding="utf-8")
    # Equal paragraphs are one document.
    pairs = [
        (question["question"], paragraph["context"])
        for article in articles[::2]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    paragraphs = list(dict.fromkeys(paragraph for _, paragraph in pairs))
    found = bm25([question for question, _ in pairs], paragraphs, FIRST)[1]
    lines = []
    for (question, paragraph), row in zip(pairs, found.tolist(), strict=True):
        others = [paragraphs[i] for i in row if i >= 0 and paragraphs[i] != paragraph]
        negatives = others[:NUM_NEGATIVES]
        lines.append({"query": question, "positive": paragraph, "negatives": negatives})
    train = folder / "train.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    train.write_text(text, encoding="utf-8")
    return train, judge


def main(given: list[str] | None = None) -> dict[str, float]:
    """Trains and judges a reranker; returns the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="questions in SQuAD's form")
    parser.add_argument("folder", type=Path, help="the folder to write to")
    parser.add_argument("--init-from", required=True, help="the model to begin with")
    parser.add_argument("--seed", default="0")
    arguments, further = parser.parse_known_args(given)
    from flaxzoo import train
    from flaxzoo.train.cli.main import main as command

    source, judge = prepare(arguments.source, arguments.folder)
    run = arguments.folder / f"run{arguments.seed}"
    options = {
        "--init-from": arguments.init_from,
        "--data.source": f"jsonl:{source}",
        "--data.sampled-negatives": "0",
        "--workdir": str(run),
        "--seed": arguments.seed,
    }
    stated = [word for option in options.items() for word in option]
    if command(["train", "rerank", *stated, *further]):
        raise SystemExit("the run failed")
    scores = train.evaluate_retrieval(run, f"squad:{judge}")
    print({name: round(scores[name], 4) for name in ("ndcg@10", "mrr@10", "bm25_ndcg@10")})
    return scores


if __name__ == "__main__":
    main()
