"""Recipes of ModernBERT: any published size, and a small size for two CPU cores."""

import dataclasses

from ...data.tasks.bert_pretraining import PretrainingData
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import Execution
from ...models.encoders.modernbert import ModernBertConfig
from ..config import Recipe, TrainConfig
from . import encoders
from .encoders import quickstart_optimizer


def of_size(preset: str) -> TrainConfig:
    """Returns the settings that train a published size on the user's text."""
    config = encoders.of_size(preset)
    data = dataclasses.replace(config.data, segments="packed", masking_rate=0.3)
    return dataclasses.replace(config, data=data)


RECIPES: dict[str, Recipe] = {
    "modernbert-quickstart": Recipe(
        summary="A small ModernBERT on Python's documentation: packed rows, 30 % masked tokens.",
        details=(
            "Run: flaxzoo train modernbert-quickstart\n"
            "Rows contain several documents without padding. Documents do not attend to each other "
            "(Warner et al. 2024, section 2.1.3)."
        ),
        config=TrainConfig(
            model=ModernBertConfig(
                # Training enlarges the vocabulary to the size of the tokenizer.
                vocab_size=1,
                max_length=256,
                num_layers=4,
                d_model=128,
                num_heads=4,
                d_ff=192,
                window=17,
                # The initial standard deviation is about 1 / √D, where D is `d_model`.
                init_std=0.08,
            ),
            data=PretrainingData(
                source="builtin:python-docs",
                length=128,
                next_sentence=False,
                segments="packed",
                masking_rate=0.3,
                tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=4096),
            ),
            optimizer=quickstart_optimizer(2e-3),
            execution=Execution(remat="dots"),
            steps=500,
            batch_size=32,
            evaluate_every=250,
            checkpoint_every=250,
            sample_prompt="The [MASK] statement is used to exit a loop.",
        ),
    ),
    "modernbert": Recipe(
        summary="A ModernBERT of any published size, pretrained on your own text.",
        details=(
            "Run: flaxzoo train modernbert --preset modernbert-base --data.source "
            "'text:books/*.txt#sentences'\n"
            "Rows contain several documents without padding, and 30 % of the tokens are masked "
            "(Warner et al. 2024, section 2). The authors train at lengths 1,024 and 8,192. "
            "The vocabulary is trained on the text, and the size of the embedding follows from it."
        ),
        config=of_size("modernbert-base"),
        of_preset=of_size,
        preset="modernbert-base",
    ),
}
