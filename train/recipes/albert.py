"""Recipes of ALBERT: any published size, and a small size for two CPU cores."""

import dataclasses

from ...data.tasks.bert_pretraining import PretrainingData
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import Execution
from ...models.encoders.albert import AlbertConfig
from ..config import Recipe, TrainConfig
from . import encoders
from .encoders import quickstart_optimizer


def of_size(preset: str) -> TrainConfig:
    """Returns the settings that train a published size on the user's text."""
    config = encoders.of_size(preset)
    data = dataclasses.replace(config.data, pair_label="order", whole_word=True, ngrams=3)
    return dataclasses.replace(config, data=data)


RECIPES: dict[str, Recipe] = {
    "albert-quickstart": Recipe(
        summary="A small ALBERT on Python's documentation: masked spans and sentence order.",
        details=(
            "Run: flaxzoo train albert-quickstart\n"
            "Up to three consecutive words are masked together, and half of the pairs of segments "
            "are in reverse order (Lan et al. 2020, sections 3.1 and 4.1)."
        ),
        config=TrainConfig(
            model=AlbertConfig(
                # Training enlarges the vocabulary to the size of the tokenizer.
                vocab_size=1,
                max_length=256,
                num_layers=4,
                d_model=128,
                d_embedding=64,
                num_heads=4,
                classifier_dropout=0.0,
                # The initial standard deviation is about 1 / √D, where D is `d_model`.
                init_std=0.08,
            ),
            data=PretrainingData(
                source="builtin:python-docs",
                length=64,
                pair_label="order",
                whole_word=True,
                ngrams=3,
                tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=4096),
            ),
            optimizer=quickstart_optimizer(1e-3),
            execution=Execution(remat="dots"),
            steps=1000,
            batch_size=32,
            evaluate_every=250,
            checkpoint_every=250,
            sample_prompt="The [MASK] statement is used to exit a loop.",
        ),
    ),
    "albert": Recipe(
        summary="An ALBERT of any published size, pretrained on your own text.",
        details=(
            "Run: flaxzoo train albert --preset albert-base --data.source "
            "'text:books/*.txt#sentences'\n"
            "Masked spans of up to three words, and sentence order (Lan et al. 2020, sections 3.1 "
            "and 4.1). The vocabulary is trained on the text, and the size of the embedding "
            "follows from it."
        ),
        config=of_size("albert-base"),
        of_preset=of_size,
        preset="albert-base",
    ),
}
