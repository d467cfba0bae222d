"""Recipes of decoder families, which train any published size on the user's text."""

import dataclasses

from ...data.common.fields import require
from ...data.tasks.causal_lm import CausalLMData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig


def of_size(preset: str) -> TrainConfig:
    """Returns the settings that train any published size on the user's text."""
    model = registry.preset(preset)
    require(
        model.causal,
        f"preset {preset!r} attends to later tokens and cannot learn to predict them: "
        f"flaxzoo train embed --preset {preset}",
    )
    # Training enlarges the vocabulary to the size of the tokenizer.
    model = dataclasses.replace(model, vocab_size=1)
    return TrainConfig(
        model=model,
        data=CausalLMData(
            source="builtin:python-docs",
            length=min(model.max_length, 512),
            tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=4096),
        ),
        optimizer=OptimizerConfig(
            # LLaMA-7B has the width 4,096 and the rate 3e-4. Wider models need a smaller rate.
            peak_learning_rate=round(3e-4 * 4096 / model.d_model, 6),
            warmup_steps=500,
        ),
        execution=Execution(dtype="bfloat16", remat="dots"),
        steps=10_000,
        batch_size=32,
        evaluate_every=500,
        checkpoint_every=500,
    )


def recipe_of_family(family: str) -> Recipe:
    """Returns the recipe of a decoder family without a recipe file."""
    smallest = next(iter(registry.families()[family].presets))
    return Recipe(
        summary=f"Any published size of {family}, on your own text.",
        details=(
            f"Run: flaxzoo train {family} --preset {smallest} --data.source "
            "'text:books/*.txt#block'\n"
            "The vocabulary is trained on the text, and the size of the embedding follows "
            "from it. The\n"
            "learning rate is 3e-4 at a width of 4,096 and smaller in proportion for wider models."
        ),
        config=of_size(smallest),
        of_preset=of_size,
        preset=smallest,
    )
