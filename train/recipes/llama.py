"""Recipes of the Llama family."""

from ...data.tasks.causal_lm import CausalLMData
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import Execution
from ...models.decoders.llama import LlamaConfig
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig
from .decoders import of_size

RECIPES: dict[str, Recipe] = {
    "llama-quickstart": Recipe(
        summary="A small Llama on the English prose in Python's documentation.",
        details=(
            "Run: flaxzoo train llama-quickstart\n"
            "Expect a validation loss of 3.9 nats per token, 1.5 bits per byte. The text, and "
            "therefore the vocabulary, differs between Python versions.\n"
            "The model has the sizes of `quickstart`, with two key/value heads for the four query "
            "heads."
        ),
        config=TrainConfig(
            model=LlamaConfig(
                # Training enlarges the vocabulary to the size of the tokenizer.
                vocab_size=1,
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
            "The vocabulary is trained on the text, and the size of the embedding follows from it."
            " The learning rate is 3e-4 at a width of 4,096 (Touvron et al. 2023, table 2) and "
            "smaller in proportion for wider models."
        ),
        config=of_size("llama-7b"),
        of_preset=of_size,
        preset="llama-7b",
    ),
}
