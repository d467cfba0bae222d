"""Recipes of ALBERT: any published size, and a small size for two CPU cores."""

from ...data.tasks.bert_pretraining import PretrainingData
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import Execution
from ...models.encoders.albert import AlbertConfig
from ..config import Recipe, TrainConfig
from .encoders import quickstart_optimizer, recipe_of_family

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
    "albert": recipe_of_family("albert"),
}
