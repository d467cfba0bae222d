"""Recipes of the GPTs."""

from ..data.causal import CausalData
from ..data.tokenizer_training import TokenizerConfig
from ..models.config import Execution
from ..models.gpt import GPTConfig
from .config import TrainConfig
from .optimizer_config import OptimizerConfig


def quickstart() -> TrainConfig:
    """A small GPT on the English prose that every Python ships; three minutes on two cores.

    Run: flaxzoo train quickstart
    Expect a validation loss of 4.0 to 4.5 nats per token, 1.6 to 1.7 bits per byte; the
    text, and with it the vocabulary, differs between Python versions.
    """
    return TrainConfig(
        model=GPTConfig(
            vocab_size=2048,
            max_length=128,
            num_layers=4,
            d_model=192,
            num_heads=4,
            dropout_rate=0.1,
        ),
        data=CausalData(
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


def shakespeare_char() -> TrainConfig:
    """A character-level GPT on tiny shakespeare, of nanoGPT's size and budget for a CPU.

    Run: flaxzoo train shakespeare-char --data.source text:TRAIN --data.validation text:VALID
    Expect a validation loss of 1.70 nats per character; nanoGPT's README reports 1.88.
    """
    return TrainConfig(
        model=GPTConfig(
            vocab_size=1,  # grows to the tokenizer's
            max_length=64,
            num_layers=4,
            d_model=128,
            num_heads=4,
            dropout_rate=0.0,
        ),
        data=CausalData(
            source="text:tinyshakespeare.train.txt",
            validation="text:tinyshakespeare.valid.txt",
            validation_fraction=0.0,
            length=64,
            tokenizer=TokenizerConfig(kind="characters"),
        ),
        optimizer=OptimizerConfig(peak_learning_rate=4e-3, warmup_steps=100, beta2=0.99),
        execution=Execution(remat="dots"),
        steps=2000,
        batch_size=12,
        evaluate_every=500,
        checkpoint_every=500,
        sample_prompt="ROMEO:",
    )
