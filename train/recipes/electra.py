"""Recipes of ELECTRA: replaced-token detection at a small size, and at published sizes."""

import dataclasses

from ...data.tasks.bert_pretraining import PretrainingData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ...models.encoders.electra import ElectraConfig
from ..config import Recipe, TrainConfig
from ..objectives.replaced_token_detection import ReplacedTokenConfig
from . import encoders
from .encoders import quickstart_optimizer

SETTINGS = {
    "electra-small": (1 / 4, 0.15, 5e-4),
    "electra-base": (1 / 3, 0.15, 2e-4),
    "electra-large": (1 / 4, 0.25, 2e-4),
}
"""The relative size of the generator, the masking rate and the learning rate of each preset (Clark
et al. 2020, table 6)."""


def of_size(preset: str) -> TrainConfig:
    """Returns the settings that train a published size on the user's text."""
    config = encoders.of_size(preset)
    generator, masking, rate = SETTINGS[preset]
    return dataclasses.replace(
        config,
        # Training enlarges the vocabulary to the size of the tokenizer.
        model=dataclasses.replace(registry.preset(preset), vocab_size=1),
        data=dataclasses.replace(config.data, masking_rate=masking),
        objective=ReplacedTokenConfig(generator_size=generator),
        optimizer=dataclasses.replace(config.optimizer, peak_learning_rate=rate),
    )


RECIPES: dict[str, Recipe] = {
    "electra-quickstart": Recipe(
        summary="A small ELECTRA on Python's documentation: it finds the tokens of a generator.",
        details=(
            "Run: flaxzoo train electra-quickstart\n"
            "The generator has a quarter of the discriminator's width. flaxzoo export writes the "
            "discriminator."
        ),
        config=TrainConfig(
            model=ElectraConfig(
                # Training enlarges the vocabulary to the size of the tokenizer.
                vocab_size=1,
                max_length=256,
                num_layers=4,
                d_model=128,
                num_heads=4,
                dropout_rate=0.0,
                # The initial standard deviation is about 1 / √D, where D is `d_model`.
                init_std=0.08,
            ),
            data=PretrainingData(
                source="builtin:python-docs",
                length=64,
                next_sentence=False,
                tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=4096),
            ),
            objective=ReplacedTokenConfig(),
            optimizer=quickstart_optimizer(1e-3),
            execution=Execution(remat="dots"),
            steps=500,
            batch_size=64,
            evaluate_every=250,
            checkpoint_every=250,
        ),
    ),
    "electra": Recipe(
        summary="An ELECTRA of any published size, pretrained on your own text.",
        details=(
            "Run: flaxzoo train electra --preset electra-small --data.source "
            "'text:books/*.txt#sentences'\n"
            "Replaced-token detection (Clark et al. 2020), with the generator's size, the masking "
            "rate and the learning rate of table 6. The vocabulary is trained on the text, and "
            "the size of the embedding follows from it."
        ),
        config=of_size("electra-small"),
        of_preset=of_size,
        preset="electra-small",
    ),
}
