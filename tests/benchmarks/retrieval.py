"""Vectors and rerankers on questions about paragraphs, in SQuAD's form, before and after training.

A seed chooses half of the articles to train on; the other half judges, and no article is on both
sides. A training question has its paragraph, and with `--negatives` the first paragraphs of BM25
that are not its own. Vectors rank all paragraphs, and a reranker ranks BM25's first 20 again:

    python tests/benchmarks/retrieval.py embed squad.json.gz FOLDER --init-from MODEL --seeds 0 1 2
    python tests/benchmarks/retrieval.py rerank squad.json.gz FOLDER --init-from MODEL --negatives 4

Further options are options of `flaxzoo train embed` or `rerank`, such as `--steps 100`. The script
writes `FOLDER/SEED/pairs.jsonl` and the collection `FOLDER/SEED/judgeN` with N questions, and runs

    flaxzoo evaluate MODEL --data beir:FOLDER/SEED/judgeN       # embed only
    flaxzoo train RECIPE --init-from MODEL --data.source jsonl:FOLDER/SEED/pairs.jsonl --workdir RUN
    flaxzoo evaluate RUN --data beir:FOLDER/SEED/judgeN

Printed are a line for each seed, and the means. The bound is the nDCG of a perfect ranking of
BM25's first 20.
"""

import argparse
import contextlib
import gzip
import io
import json
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIRST = 20
"""The paragraphs of BM25 that negatives are from, and that a reranker ranks."""


def questions_of(articles: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns each question with its paragraph."""
    return [
        (question["question"], paragraph["context"])
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def prepare(
    source: Path, folder: Path, *, seed: int, negatives: int, judged: int | None
) -> tuple[Path, float]:
    """Writes `pairs.jsonl` and a collection; returns the collection and a reranker's bound.

    Args:
        source: a file in SQuAD's form.
        folder: the folder to write to.
        seed: chooses the articles to train on.
        negatives: the number of negatives of a training question.
        judged: the number of questions that judge; all if None.
    """
    from flaxzoo import data
    from flaxzoo.data.embedding.bm25 import bm25

    opened = gzip.open if source.suffix == ".gz" else open
    with opened(source, "rt", encoding="utf-8") as file:
        articles = sorted(json.load(file)["data"], key=lambda article: article["title"])
    rng = random.Random(seed)
    rng.shuffle(articles)
    half = len(articles) // 2
    pairs, judging = questions_of(articles[:half]), questions_of(articles[half:])
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = [{"anchor": q, "positive": p} for q, p in pairs]
    if negatives:
        for record, others in zip(records, nearest_of_bm25(pairs, bm25), strict=True):
            record["negatives"] = others[:negatives]
    lines = map(json.dumps, records)
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # All paragraphs are searched, also by a part of the questions. Equal paragraphs are one.
    ids = {p: f"p{i}" for i, p in enumerate(dict.fromkeys(p for _, p in judging))}
    judged_pairs = judging if judged is None else rng.sample(judging, min(judged, len(judging)))
    judge = folder / f"judge{len(judged_pairs)}"
    if not judge.exists():
        data.RetrievalData(
            {id: paragraph for paragraph, id in ids.items()},
            {f"q{i}": question for i, (question, _) in enumerate(judged_pairs)},
            {f"q{i}": {ids[paragraph]: 1} for i, (_, paragraph) in enumerate(judged_pairs)},
        ).save(judge)
    places = bm25([question for question, _ in judged_pairs], list(ids), FIRST)[1].tolist()
    number = {paragraph: i for i, paragraph in enumerate(ids)}
    bound = statistics.mean(
        number[p] in row for (_, p), row in zip(judged_pairs, places, strict=True)
    )
    return judge, bound


def nearest_of_bm25(pairs: list[tuple[str, str]], bm25: Any) -> list[list[str]]:
    """Returns the first paragraphs of BM25 for each question, without the one it is about."""
    paragraphs = list(dict.fromkeys(paragraph for _, paragraph in pairs))
    found = bm25([question for question, _ in pairs], paragraphs, FIRST)[1].tolist()
    return [
        [paragraphs[i] for i in row if i >= 0 and paragraphs[i] != own]
        for (_, own), row in zip(pairs, found, strict=True)
    ]


def evaluate(run: str | Path, judge: Path) -> dict[str, float]:
    """Returns what `flaxzoo evaluate` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command("evaluate", str(run), "--data", f"beir:{judge}")
    return json.loads(printed.getvalue())


def command(*words: str) -> None:
    """Runs a command of flaxzoo."""
    from flaxzoo.train.cli.main import main as flaxzoo

    if flaxzoo([*words]):
        raise SystemExit(f"failed: flaxzoo {' '.join(words)}")


def main(given: list[str] | None = None) -> list[dict[str, float]]:
    """Trains and judges; returns the scores of each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=("embed", "rerank"))
    parser.add_argument("source", type=Path, help="questions in SQuAD's form")
    parser.add_argument("folder", type=Path, help="the folder to write to")
    parser.add_argument("--init-from", required=True, help="the model to begin with")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--negatives", type=int, default=0, help="negatives of a question")
    parser.add_argument("--questions", type=int, help="the number of questions that judge")
    arguments, options_of_train = parser.parse_known_args(given)
    # Negatives of BM25 replace the sampled ones.
    replaces = arguments.recipe == "rerank" and arguments.negatives
    options = ["--data.sampled-negatives", "0"] if replaces else []
    rows = []
    for seed in arguments.seeds:
        folder, init_from = arguments.folder / str(seed), arguments.init_from
        judge, bound = prepare(
            arguments.source,
            folder,
            seed=seed,
            negatives=arguments.negatives,
            judged=arguments.questions,
        )
        before = evaluate(init_from, judge) if arguments.recipe == "embed" else {}
        run, source = folder / arguments.recipe, f"jsonl:{folder / 'pairs.jsonl'}"
        start = time.perf_counter()
        command(
            "train", arguments.recipe, "--init-from", init_from, "--data.source", source,
            "--workdir", str(run), "--seed", str(seed), *options, *options_of_train,
        )  # fmt: skip
        minutes = (time.perf_counter() - start) / 60
        after = evaluate(run, judge)
        rows.append(
            {"seed": seed, "bm25": after["bm25_ndcg@10"], "bound": bound}
            | {f"before {name}": before[name] for name in ("ndcg@10", "recall@10") if before}
            | {name: after[name] for name in ("ndcg@10", "mrr@10", "recall@10")}
            | {"minutes": minutes}
        )
        print_row(rows[-1])
    if len(rows) > 1:
        print_row({"mean of": len(rows)} | {
            name: statistics.mean(row[name] for row in rows) for name in rows[0] if name != "seed"
        })  # fmt: skip
    return rows


def print_row(row: Mapping[str, float]) -> None:
    """Prints names and numbers."""
    print(", ".join(f"{name} {round(x, 4)}" for name, x in row.items()), flush=True)


if __name__ == "__main__":
    main()
