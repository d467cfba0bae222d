"""Recipes of the Llamas."""

import dataclasses

from ...data.tasks.causal_lm import CausalLMData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ...models.decoders.llama import LlamaConfig
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig


def _of_size(preset: str) -> TrainConfig:
    """Returns the settings of any published size, on the user's own text."""
    model = dataclasses.replace(registry.preset(preset), vocab_size=1)  # grows to the tokenizer's
    return TrainConfig(
        model=model,
        data=CausalLMData(
            source="builtin:python-docs",
            length=512,
            tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=4096),
        ),
        optimizer=OptimizerConfig(
            peak_learning_rate=round(3e-4 * 4096 / model.d_model, 6), warmup_steps=500
        ),
        execution=Execution(dtype="bfloat16", remat="dots"),
        steps=10_000,
        batch_size=32,
        evaluate_every=500,
        checkpoint_every=500,
    )


RECIPES: dict[str, Recipe] = {
    "llama-quickstart": Recipe(
        summary="A small Llama on the English prose that every Python ships.",
        details=(
            "Run: flaxzoo train llama-quickstart\n"
            "Expect a validation loss of 3.9 nats per token, 1.5 bits per byte. The text, and\n"
            "therefore the vocabulary, differs between Python versions.\n"
            "The sizes are those of `quickstart`, with two key/value heads for the four query "
            "heads."
        ),
        config=TrainConfig(
            model=LlamaConfig(
                vocab_size=1,  # grows to the tokenizer's
                max_length=128,
                num_layers=4,
                d_model=192,
                num_heads=4,
                num_kv_heads=2,
                d_ff=512,
                tie_output=True,
            ),
            data=CausalLMData(
                source="builtin:python-docs",
                length=128,
                tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=2048),
            ),
            optimizer=OptimizerConfig(peak_learning_rate=3e-3, warmup_steps=50),
            execution=Execution(remat="dots"),
            steps=600,
            batch_size=16,
            evaluate_every=150,
            checkpoint_every=150,
            sample_prompt="The for statement is used to",
        ),
    ),
    "llama": Recipe(
        summary="A Llama of any published size on your own text.",
        details=(
            "Run: flaxzoo train llama --preset llama2-7b --data.source 'text:books/*.txt#block'\n"
            "The vocabulary is trained on the text, and the size of the embedding follows "
            "from it. The\n"
            "learning rate is 3e-4 at a width of 4,096 (Touvron et al. 2023, table 2) and "
            "smaller in\n"
            "proportion for wider models."
        ),
        config=_of_size("llama-7b"),
        of_preset=_of_size,
        preset="llama-7b",
    ),
}
