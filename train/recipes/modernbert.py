"""Recipes of ModernBERT: any published size, and a small size for two CPU cores."""

from ...data.tasks.bert_pretraining import PretrainingData
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import Execution
from ...models.encoders.modernbert import ModernBertConfig
from ..config import Recipe, TrainConfig
from .encoders import quickstart_optimizer, recipe_of_family

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
    "modernbert": recipe_of_family("modernbert"),
}
