"""Recipes of the Llamas."""

import dataclasses
from collections.abc import Callable

from ...data.tasks.causal_lm import CausalLMData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ...models.llama import LlamaConfig
from ..config import TrainConfig
from ..optimizer_config import OptimizerConfig


def llama_quickstart() -> TrainConfig:
    """A small Llama on the English prose that every Python ships.

    Run: flaxzoo train llama-quickstart
    Expect a validation loss of 3.9 nats per token, 1.5 bits per byte. The text, and
    therefore the vocabulary, differs between Python versions.
    The sizes are those of `quickstart`, with two key/value heads for the four query heads.
    """
    return TrainConfig(
        model=LlamaConfig(
            vocab_size=2048,
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
    )


def llama(preset: str = "llama-7b") -> TrainConfig:
    """A Llama of any published size on your own text.

    Run: flaxzoo train llama --preset llama2-7b --data.source 'text:books/*.txt#block'
    The vocabulary is trained on the text, and the size of the embedding follows from it. The
    learning rate is 3e-4 at a width of 4,096 (Touvron et al. 2023, table 2) and smaller in
    proportion for wider models.
    """
    model = dataclasses.replace(registry.preset(preset), vocab_size=1)
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


RECIPES: dict[str, Callable[..., TrainConfig]] = {
    "llama-quickstart": llama_quickstart,
    "llama": llama,
}
