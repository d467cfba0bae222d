"""Runs of tiny encoders, with a few sentences of data in every format."""

import json
import random
from typing import Any

from flaxzoo import data, models, train
from flaxzoo.data.tasks.bert_pretraining import PretrainingData
from flaxzoo.data.tasks.multiple_choice import MultipleChoiceData
from flaxzoo.data.tasks.question_answering import QuestionAnsweringData
from flaxzoo.data.tasks.sequence_classification import SequenceClassificationData
from flaxzoo.data.tasks.token_classification import TokenClassificationData

WORDS = "the cat sat on a mat and then it saw some dog run away from her big red house".split()
VOCABULARY = data.TokenizerConfig(kind="wordpiece", vocab_size=64)
SIZES: dict[str, Any] = {
    "vocab_size": 1,
    "max_length": 32,
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
}
OPTIMIZER = train.OptimizerConfig(peak_learning_rate=1e-2, beta2=0.999)


def sentence(draw, size):
    return " ".join(draw.choices(WORDS, k=size))


def write_documents(file):
    draw = random.Random(0)
    documents = ["\n".join(sentence(draw, 6) for _ in range(8)) for _ in range(20)]
    file.write_text("\n\n".join(documents) + "\n")


def write_labelled(folder):
    """Write a file of each format: texts labelled by whether they have a cat, words as animals."""
    draw = random.Random(1)
    texts = [f"{sentence(draw, 4)} {('cat', 'dog')[i % 2]}" for i in range(23)]
    lines = [f"{int('cat' in t.split())}\t{t}" for t in texts]
    (folder / "texts.tsv").write_text("\n".join(lines) + "\n")
    (folder / "several.tsv").write_text(
        "\n".join(f"{'cat,dog' if i % 3 else 'dog'}\t{t}" for i, t in enumerate(texts)) + "\n"
    )
    (folder / "scores.tsv").write_text("\n".join(f"{len(t) / 10}\t{t}" for t in texts) + "\n")
    tagged = [
        "\n".join(f"{w} {'B-ANIMAL' if w in ('cat', 'dog') else 'O'}" for w in t.split())
        for t in texts
    ]
    (folder / "words.conll").write_text("\n\n".join(tagged) + "\n")
    questions = [
        {
            "context": t,
            "qas": [
                {
                    "id": str(i),
                    "question": "what saw it",
                    "answers": [{"text": t.split()[-1], "answer_start": len(t) - 3}],
                }
            ],
        }
        for i, t in enumerate(texts)
    ]
    articles = [{"title": str(i), "paragraphs": [q]} for i, q in enumerate(questions)]
    (folder / "passages.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    choices = [
        {"context": t, "choices": ["the cat", "a dog", "red"], "label": i % 3}
        for i, t in enumerate(texts)
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(c) + "\n" for c in choices))


def pretraining(work_folder, **fields):
    settings = {"next_sentence": fields.pop("next_sentence", True)}
    return train.TrainConfig(
        model=models.BertConfig(**SIZES),
        data=PretrainingData(
            source=f"text:{work_folder}/documents.txt#sentences",
            validation_fraction=0.2,
            length=32,
            tokenizer=VOCABULARY,
            **settings,
        ),
        optimizer=OPTIMIZER,
        batch_size=8,
        **{"steps": 4, **fields},
    )


KINDS = {
    "one": (SequenceClassificationData, "tsv:texts.tsv", {}),
    "several": (SequenceClassificationData, "tsv:several.tsv", {"target": "multi_label"}),
    "score": (SequenceClassificationData, "tsv:scores.tsv", {"target": "regression"}),
    "tag": (TokenClassificationData, "conll:words.conll", {}),
    "span": (QuestionAnsweringData, "squad:passages.json", {"stride": 4, "max_question_length": 8}),
    "choice": (MultipleChoiceData, "jsonl:choices.jsonl", {}),
}


def fine_tuning(work_folder, kind, **fields):
    cls, source, settings = KINDS[kind]
    form, name = source.split(":")
    source = f"{form}:{work_folder}/{name}"
    return train.TrainConfig(
        model=models.BertConfig(**SIZES),
        data=cls(source=source, validation=source, length=32, tokenizer=VOCABULARY, **settings),
        optimizer=OPTIMIZER,
        batch_size=8,
        **{"epochs": 2.0, **fields},
    )
