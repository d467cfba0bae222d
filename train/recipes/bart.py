"""Recipes of BART and mBART: published sizes."""

import dataclasses

from ...data.tasks.translation import TranslationData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig


def _of_size(preset: str) -> TrainConfig:
    """Returns the settings of any published size, on the user's own pairs of texts."""
    model = dataclasses.replace(registry.preset(preset), vocab_size=1)  # grows to the tokenizer's
    return TrainConfig(
        model=model,
        data=TranslationData(
            source="builtin:numbers-en-fr",
            length=64,
            tokenizer=TokenizerConfig(kind="sentencepiece-bpe", vocab_size=400),
        ),
        optimizer=OptimizerConfig(peak_learning_rate=3e-4, warmup_steps=500),
        execution=Execution(dtype="bfloat16", remat="dots"),
        label_smoothing=0.1,
        steps=10_000,
        batch_size=64,
        evaluate_every=500,
        checkpoint_every=500,
    )


RECIPES: dict[str, Recipe] = {
    "bart": Recipe(
        summary="A BART or mBART of any published size on your own pairs of texts.",
        details=(
            "Run: flaxzoo train bart --preset bart-base --data.source pairs:train.en,train.de\n"
            "The vocabulary is trained on the pairs, and the size of the embedding follows from it."
        ),
        config=_of_size("bart-base"),
        of_preset=_of_size,
        preset="bart-base",
    ),
}
