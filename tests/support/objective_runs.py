"""Configurations of a tiny run for every objective."""

import random

from flaxzoo import models, train
from flaxzoo.data import (
    CausalLMData,
    Examples,
    PolicyData,
    TokenizerConfig,
    TranslationData,
)

from .encoders import OPTIMIZER, fine_tuning, pretraining, write_documents, write_labelled
from .run_folders import write_text

WORDS = {"one": "un", "two": "deux", "three": "trois", "four": "quatre", "five": "cinq"}


def write_sources(work_folder):
    """Write the files that all of `RUNS` read."""
    write_text(work_folder / "text.txt")
    write_documents(work_folder / "documents.txt")
    write_labelled(work_folder)
    draw = random.Random(0)
    pairs = [draw.choices(list(WORDS.items()), k=draw.randint(1, 4)) for _ in range(80)]
    for side, suffix in enumerate(("en", "fr")):
        text = "".join(" ".join(words[side] for words in pair) + "\n" for pair in pairs)
        (work_folder / f"pairs.{suffix}").write_text(text)


def causal(work_folder, **fields):
    return train.TrainConfig(
        model=models.GPTConfig(
            vocab_size=1, max_length=16, num_layers=2, d_model=16, num_heads=2, dropout_rate=0.2
        ),
        data=CausalLMData(
            source=f"text:{work_folder}/text.txt#block",
            validation_fraction=0.1,
            length=16,
            tokenizer=TokenizerConfig(kind="characters"),
        ),
        optimizer=OPTIMIZER,
        batch_size=8,
        **fields,
    )


def translation(work_folder, **fields):
    pairs = f"pairs:{work_folder}/pairs.en,{work_folder}/pairs.fr"
    return train.TrainConfig(
        model=models.EncoderDecoderConfig(
            vocab_size=1, max_length=16, num_layers=1, d_model=16, num_heads=2, d_ff=32,
            dropout_rate=0.2,
        ),
        data=TranslationData(
            source=pairs,
            validation=pairs,
            length=16,
            tokenizer=TokenizerConfig(kind="sentencepiece-unigram", vocab_size=290),
        ),
        optimizer=OPTIMIZER,
        objective=train.Seq2SeqConfig(label_smoothing=0.1),
        batch_size=8,
        **fields,
    )  # fmt: skip


def policy(algorithm):
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (1, 4, 9) for b in (2, 7, 8)]
    settings = {"rewards": ("exact_match", "length:2"), "max_new_tokens": 4, "beta": 0.1}
    kind = {"grpo": train.GRPOConfig, "rloo": train.RLOOConfig, "ppo": train.PPOConfig}[algorithm]
    objective = kind(num_iterations=2, **settings)

    def run(work_folder, **fields):
        return train.TrainConfig(
            model=models.GPTConfig(
                vocab_size=1, max_length=12, num_layers=2, d_model=16, num_heads=2, dropout_rate=0.2
            ),
            data=PolicyData(
                source="builtin:sums",
                validation=Examples.of(prompts),
                length=9,
                tokenizer=TokenizerConfig(kind="characters"),
            ),
            objective=objective,
            optimizer=OPTIMIZER,
            batch_size=8,
            **fields,
        )

    return run


def tuning(kind):
    return lambda work_folder, **fields: fine_tuning(work_folder, kind, epochs=0.0, **fields)


RUNS = {
    "causal": causal,
    "pretraining": pretraining,
    "masked": lambda work_folder, **fields: pretraining(work_folder, next_sentence=False, **fields),
    "classification": tuning("one"),
    "tagging": tuning("tag"),
    "spans": tuning("span"),
    "choices": tuning("choice"),
    "translation": translation,
    **{algorithm: policy(algorithm) for algorithm in ("grpo", "rloo", "ppo")},
}
"""Functions that make a run's configuration from the folder of the sources and some fields."""
