"""Recipes of BERT: pretraining at published sizes and at a small size, and fine-tuning."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

from ...data.tasks.base import DataConfig
from ...data.tasks.bert_pretraining import PretrainingData
from ...data.tasks.multiple_choice import MultipleChoiceData
from ...data.tasks.question_answering import QuestionAnsweringData
from ...data.tasks.sequence_classification import SequenceClassificationData
from ...data.tasks.token_classification import TokenClassificationData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ...models.encoders.bert import BertConfig
from ...models.heads.specs import HEADS
from ...models.lectures.lecture_bert import LectureBertConfig
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig
from .encoders import of_size, quickstart_optimizer


def _small(dropout_rate: float) -> BertConfig:
    """Returns a small BERT that two CPU cores can train.

    The model has a quarter of the size of BERT-mini, and a smaller vocabulary.
    """
    return BertConfig(
        # Training enlarges the vocabulary to the size of the tokenizer.
        vocab_size=1,
        max_length=256,
        num_layers=4,
        d_model=128,
        num_heads=4,
        dropout_rate=dropout_rate,
        # The initial standard deviation is about 1 / √D, where D is `d_model`.
        init_std=0.08,
    )


_SMALL_VOCABULARY = TokenizerConfig(kind="wordpiece", vocab_size=8192)


def _published(name: str, length: int, *, lamb: bool = False) -> TrainConfig:
    """Returns the settings of one of the two phases of the original pretraining.

    The text is only Wikipedia, because BooksCorpus is not published. With AdamW, the settings
    follow Devlin et al. 2019, appendix A.2: 900,000 steps and then 100,000 steps of 256 sequences.
    With LAMB (You et al. 2020), the steps, batch sizes, learning rates and warm-up follow NVIDIA's
    DeepLearningExamples. However, the learning rate decays linearly instead of as the square root
    of a linear decay.

    Args:
        name: the preset of the model.
        length: the length of the sequences: 128 in the first phase, 512 in the second phase.
        lamb: whether to use LAMB instead of AdamW.
    """
    first = length == 128
    if lamb:
        steps, batch_size, rate, warmup = (
            (7_038, 65_536, 6e-3, 0.2843) if first else (1_563, 32_768, 4e-3, 0.128)
        )
    else:
        steps, batch_size, rate = (900_000 if first else 100_000), 256, 1e-4
        warmup = 10_000 / steps
    kind = f"{name}-lamb" if lamb else name
    return TrainConfig(
        model=registry.preset(name),
        data=PretrainingData(
            source="tfds:wikipedia/20230601.en#text",
            length=length,
            max_predictions=20 if first else 80,
            validation_fraction=0.005,
            tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=30_522),
        ),
        optimizer=OptimizerConfig(
            name="lamb" if lamb else "adamw",
            peak_learning_rate=rate,
            schedule="linear",
            final_fraction=0.0,
            warmup_fraction=warmup,
            beta2=0.999,
            epsilon=1e-6,
            weight_decay=0.01,
        ),
        execution=Execution(dtype="bfloat16", remat="dots"),
        init_from=None if first else f"runs/{kind}-128",
        steps=steps,
        batch_size=batch_size,
        evaluate_every=500 if lamb else 10_000,
        checkpoint_every=500 if lamb else 10_000,
    )


def _one_phase() -> TrainConfig:
    """Returns the settings of a single phase on random halves of texts.

    The sequences are as long as in the second phase, and there are as many steps as in both phases.
    """
    second = _published("bert-large", 512)
    steps = 1_000_000
    return dataclasses.replace(
        second,
        data=dataclasses.replace(second.data, segments="halves"),
        optimizer=dataclasses.replace(second.optimizer, warmup_fraction=10_000 / steps),
        init_from=None,
        steps=steps,
    )


def _fine_tuning(data: DataConfig) -> TrainConfig:
    """Returns the settings for fine-tuning of Devlin et al. 2019, appendix A.3.

    The learning rate is higher than in the paper. The model has the head of the task, because some
    model options, such as `pooling`, require this head.
    """
    head = data.kind
    # Placeholders, which the labels of the data source replace.
    labels = ("a", "b") if HEADS[head].needs_labels else ()
    return TrainConfig(
        model=_small(dropout_rate=0.1).with_head(head, labels),
        data=data,
        optimizer=OptimizerConfig(
            peak_learning_rate=3e-4,
            schedule="linear",
            final_fraction=0.0,
            warmup_fraction=0.1,
            beta2=0.999,
            weight_decay=0.01,
        ),
        execution=Execution(remat="dots"),
        epochs=3.0,
        batch_size=32,
        keep_last=1,
        keep_best=1,
    )


def _reviews(
    num_layers: int,
    positions: Literal["learned", "none"],
    pooling: Literal["mean", "max"],
    make_config: Callable[..., BertConfig] = BertConfig,
) -> TrainConfig:
    """Returns the settings of a word-level classifier for the built-in reviews.

    These reviews are generated from templates.
    """
    return TrainConfig(
        model=make_config(
            # Training enlarges the vocabulary to the size of the tokenizer.
            vocab_size=1,
            max_length=64,
            num_layers=num_layers,
            d_model=64,
            num_heads=4,
            num_token_types=0,
            dropout_rate=0.0,
            # The initial standard deviation is 1 / √D, where D is `d_model`.
            init_std=0.125,
            positions=positions,
            pooling=pooling,
            head="sequence_classification",
            # Placeholders, which the labels of the data source replace.
            labels=("a", "b"),
        ),
        data=SequenceClassificationData(
            source="builtin:reviews", length=16, tokenizer=TokenizerConfig(kind="words")
        ),
        optimizer=OptimizerConfig(
            peak_learning_rate=2e-3, final_fraction=0.0, warmup_fraction=0.1, beta2=0.98
        ),
        epochs=20.0,
        batch_size=64,
        evaluate_every=180,
        checkpoint_every=180,
        keep_last=1,
    )


RECIPES: dict[str, Recipe] = {
    "bert-quickstart": Recipe(
        summary="A small BERT on Python's documentation: masked tokens and next sentence.",
        details=(
            "Run: flaxzoo train bert-quickstart\n"
            "Or: flaxzoo train bert-quickstart --data.source 'text:brown.txt#sentences + "
            "text:novel/*.txt'"
        ),
        config=TrainConfig(
            model=_small(dropout_rate=0.0),
            data=PretrainingData(
                source="builtin:python-docs",
                length=64,
                # Python's documentation contains enough text for a vocabulary of 5,300 to 5,500
                # tokens, depending on the version of Python.
                tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=4096),
            ),
            optimizer=quickstart_optimizer(1e-3),
            execution=Execution(remat="dots"),
            steps=1500,
            batch_size=64,
            evaluate_every=500,
            checkpoint_every=500,
            sample_prompt="The [MASK] statement is used to exit a loop.",
        ),
    ),
    "bert": Recipe(
        summary="A BERT of any published size, pretrained on your own text.",
        details=(
            "Run: flaxzoo train bert --preset bert-small --data.source "
            "'text:books/*.txt#sentences'\n"
            "The vocabulary is trained on the text, and the size of the embedding follows from it."
            " The learning rate is 1e-4 at a width of 768 (Devlin et al. 2019, appendix A.2) and "
            "larger in proportion for narrower models."
        ),
        config=of_size("bert-base"),
        of_preset=of_size,
        preset="bert-base",
    ),
    "bert-base-128": Recipe(
        summary="BERT-base as published, phase 1: 900,000 steps of 256 sequences of 128 tokens.",
        details="Run: flaxzoo train bert-base-128",
        config=_published("bert-base", 128),
    ),
    "bert-base-512": Recipe(
        summary="BERT-base as published, phase 2: 100,000 steps of 256 sequences of 512 tokens.",
        details="Run: flaxzoo train bert-base-512 --init-from runs/bert-base-128",
        config=_published("bert-base", 512),
    ),
    "bert-large-128": Recipe(
        summary="BERT-large as published, phase 1: 900,000 steps of 256 sequences of 128 tokens.",
        details="Run: flaxzoo train bert-large-128",
        config=_published("bert-large", 128),
    ),
    "bert-large-512": Recipe(
        summary="BERT-large as published, phase 2: 100,000 steps of 256 sequences of 512 tokens.",
        details="Run: flaxzoo train bert-large-512 --init-from runs/bert-large-128",
        config=_published("bert-large", 512),
    ),
    "bert-large-one-phase": Recipe(
        summary="BERT-large in one phase: 1,000,000 steps of 256 random halves of 512 tokens.",
        details=(
            "Run: flaxzoo train bert-large-one-phase\n"
            "With books: --data.source 'tfds:wikipedia/20230601.en#text + text:books/*.txt'\n"
            "Pretraining as lectures describe it: 512 tokens from a random position, or two halves "
            "from two parts of the text. 256 · 512 · 1,000,000 tokens are 39.7 times the 3.3 "
            "billion words of Wikipedia and BooksCorpus; Devlin et al. 2019 state 40 epochs, and "
            "some lectures state 50 epochs."
        ),
        config=_one_phase(),
    ),
    "bert-large-lamb-128": Recipe(
        summary="BERT-large with LAMB, phase 1: 7,038 steps of 65,536 sequences of 128 tokens.",
        details="Run: flaxzoo train bert-large-lamb-128 --micro-batches 32",
        config=_published("bert-large", 128, lamb=True),
    ),
    "bert-large-lamb-512": Recipe(
        summary="BERT-large with LAMB, phase 2: 1,563 steps of 32,768 sequences of 512 tokens.",
        details=(
            "Run: flaxzoo train bert-large-lamb-512 --init-from runs/bert-large-lamb-128 "
            "--micro-batches 64"
        ),
        config=_published("bert-large", 512, lamb=True),
    ),
    "reviews-bag": Recipe(
        summary="Classify reviews by a bag of words: embeddings and global max-pooling.",
        details=(
            "Run: flaxzoo train reviews-bag\n"
            "The model has neither attention nor positions, so the order of the words changes "
            "nothing. In a part of the built-in reviews, the label depends only on the order of "
            "the words (accuracy_order)."
        ),
        config=_reviews(0, "none", "max"),
    ),
    "reviews-mean": Recipe(
        summary="Classify reviews by a bag of words that cannot learn negation: the mean.",
        details=(
            "Run: flaxzoo train reviews-mean\n"
            "The scores of the words add up. The single score of 'not' cannot reverse both "
            "'terrible' and 'great' (accuracy_negated)."
        ),
        config=_reviews(0, "none", "mean"),
    ),
    "reviews-simple": Recipe(
        summary="Classify reviews by simple self-attention, without parameters or positions.",
        details=(
            "Run: flaxzoo train reviews-simple\n"
            "Attention relates 'not' to 'terrible', but the order of the words changes nothing."
        ),
        config=_reviews(
            1, "none", "mean", functools.partial(LectureBertConfig, attention="simple")
        ),
    ),
    "reviews": Recipe(
        summary="Classify reviews by transformer blocks with positions, and the mean over words.",
        details=(
            "Run: flaxzoo train reviews\n"
            "Without the order of the words: flaxzoo train reviews --model.positions none"
        ),
        config=_reviews(2, "learned", "mean"),
    ),
    "bert-classify": Recipe(
        summary="Fine-tune to classify texts: sentiment, acceptability, topic, entailment.",
        details=(
            "Run: flaxzoo train bert-classify --init-from runs/bert-quickstart --data.source "
            "tsv:train.tsv"
        ),
        config=_fine_tuning(
            SequenceClassificationData(
                source="tsv:train.tsv", length=64, tokenizer=_SMALL_VOCABULARY
            )
        ),
    ),
    "bert-tag": Recipe(
        summary="Fine-tune to tag words: names of people, places, organizations.",
        details=(
            "Run: flaxzoo train bert-tag --init-from runs/bert-quickstart --data.source "
            "conll:eng.train"
        ),
        config=_fine_tuning(
            TokenClassificationData(
                source="conll:eng.train", length=64, tokenizer=_SMALL_VOCABULARY
            )
        ),
    ),
    "bert-span": Recipe(
        summary="Fine-tune to answer questions with a span of a passage.",
        details=(
            "Run: flaxzoo train bert-span --init-from runs/bert-quickstart --data.source "
            "squad:train.json"
        ),
        config=_fine_tuning(
            QuestionAnsweringData(
                source="squad:train.json", length=256, tokenizer=_SMALL_VOCABULARY
            )
        ),
    ),
    "bert-choice": Recipe(
        summary="Fine-tune to choose the best of several endings of a text.",
        details=(
            "Run: flaxzoo train bert-choice --init-from runs/bert-quickstart --data.source "
            "jsonl:train.jsonl"
        ),
        config=_fine_tuning(
            MultipleChoiceData(source="jsonl:train.jsonl", length=128, tokenizer=_SMALL_VOCABULARY)
        ),
    ),
}
