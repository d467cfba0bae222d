"""Recipes of encoder families, which pretrain any published size on the user's text."""

import dataclasses

from ...data.tasks.bert_pretraining import PretrainingData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ...models.heads.specs import HEADS
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig


def of_size(preset: str) -> TrainConfig:
    """Returns the settings that train any published size on the user's text."""
    model = registry.preset(preset)
    # Add a pretraining head to presets that are published without such a head.
    if not HEADS[model.head].predicts_masked:
        model = model.with_head("masked_lm", ())
    # Training enlarges the vocabulary to the size of the tokenizer.
    model = dataclasses.replace(model, vocab_size=1)
    return TrainConfig(
        model=model,
        data=PretrainingData(
            source="builtin:python-docs",
            length=min(model.max_length, 128),
            next_sentence=model.head == "pretraining",
            tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=4096),
        ),
        optimizer=OptimizerConfig(
            # BERT-base has the width 768 and the rate 1e-4. Wider models need a smaller rate.
            peak_learning_rate=round(1e-4 * 768 / model.d_model, 6),
            schedule="linear",
            final_fraction=0.0,
            warmup_steps=500,
            beta2=0.999,
            epsilon=1e-6,
            weight_decay=0.01,
        ),
        execution=Execution(remat="dots"),
        steps=10_000,
        batch_size=64,
        evaluate_every=500,
        checkpoint_every=500,
    )


def quickstart_optimizer(peak_learning_rate: float) -> OptimizerConfig:
    """Returns the optimizer that pretrains a small encoder in a few minutes."""
    return OptimizerConfig(
        peak_learning_rate=peak_learning_rate,
        schedule="linear",
        final_fraction=0.0,
        warmup_fraction=0.05,
        beta2=0.98,
        weight_decay=0.01,
    )


def recipe_of_family(family: str) -> Recipe:
    """Returns the recipe of an encoder family without a recipe file."""
    smallest = next(iter(registry.families()[family].presets))
    return Recipe(
        summary=f"Any published size of {family}, pretrained on your own text.",
        details=(
            f"Run: flaxzoo train {family} --preset {smallest} --data.source "
            "'text:books/*.txt#sentences'\n"
            "The model learns masked tokens. The vocabulary is trained on the text, and the size "
            "of the embedding "
            "follows\n"
            "from it. The learning rate is 1e-4 at a width of 768 and larger in proportion for "
            "narrower\n"
            "models."
        ),
        config=of_size(smallest),
        of_preset=of_size,
        preset=smallest,
    )
