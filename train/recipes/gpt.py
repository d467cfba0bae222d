"""Recipes of the GPT family."""

import dataclasses

from ...data.tasks.causal_lm import CausalLMData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution, Settings
from ...models.decoders.gpt.gpt import GPTConfig
from ...models.lectures.lecture_gpt import LectureGPTConfig
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig


def _of_size(preset: str) -> TrainConfig:
    """Returns the settings that train any published size on the user's text."""
    # Training enlarges the vocabulary to the size of the tokenizer.
    model = dataclasses.replace(registry.preset(preset), vocab_size=1)
    return TrainConfig(
        model=model,
        data=CausalLMData(
            source="builtin:python-docs",
            length=min(model.max_length, 512),
            tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=4096),
        ),
        optimizer=OptimizerConfig(
            # The smallest size has the width 768 and the rate 6e-4. Wider models need a smaller
            # rate.
            peak_learning_rate=round(6e-4 * 768 / model.d_model, 6),
            warmup_steps=500,
        ),
        execution=Execution(remat="dots"),
        steps=10_000,
        batch_size=32,
        evaluate_every=500,
        checkpoint_every=500,
    )


def _published(name: str, rate: float, rows: int) -> TrainConfig:
    """Returns the settings of GPT-3: 300 billion tokens (Brown et al. 2020, table 2.1, appendix B).

    For GPT-2, only the batch size is published (512 sequences, Radford et al. 2019, section 2.3).
    The other settings of GPT-2 are the settings of the GPT-3 model of the same size. There are
    three differences from the paper: the only data is C4, a part of Common Crawl; the batch size is
    constant; and the learning rate decays over the whole run instead of the first 260 billion
    tokens. The dropout rate is 0, because the text is seldom repeated.

    Args:
        name: the preset of the model.
        rate: the peak learning rate.
        rows: the number of sequences per batch.
    """
    model = dataclasses.replace(registry.preset(name), dropout_rate=0.0)
    length = model.max_length
    return TrainConfig(
        model=model,
        data=CausalLMData(
            source="tfds:c4/en#text",
            length=length,
            tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=model.vocab_size),
        ),
        optimizer=OptimizerConfig(
            # The warm-up lasts 375 million tokens, as in the paper.
            peak_learning_rate=rate,
            warmup_steps=375_000_000 // (rows * length),
        ),
        execution=Execution(dtype="bfloat16", remat="dots"),
        steps=300_000_000_000 // (rows * length),
        batch_size=rows,
        evaluate_every=1_000,
        checkpoint_every=1_000,
    )


_QUICKSTART_MODEL: Settings = {
    # Training enlarges the vocabulary to the size of the tokenizer.
    "vocab_size": 1,
    "max_length": 128,
    "num_layers": 4,
    "d_model": 192,
    "num_heads": 4,
    "dropout_rate": 0.1,
}
QUICKSTART = TrainConfig(
    model=GPTConfig(**_QUICKSTART_MODEL),
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

# In most tasks, all letters of an answer have the same distance to the letters that they copy.
# Rotary positions and the convolution can express this distance. Without the convolution, learning
# takes far longer. A prompt with sixteen examples and a query has up to 204 characters.
IN_CONTEXT = TrainConfig(
    model=LectureGPTConfig(
        # Training enlarges the vocabulary to the size of the tokenizer.
        vocab_size=1,
        max_length=208,
        num_layers=2,
        d_model=64,
        num_heads=4,
        dropout_rate=0.0,
        activation="relu",
        positions="rotary",
        # The initial standard deviation is about 1 / √D, where D is `d_model`.
        init_std=0.1,
        head_convolution=3,
    ),
    data=CausalLMData(
        source="builtin:patterns#copy,reverse,count",
        length=208,
        tokenizer=TokenizerConfig(kind="characters"),
    ),
    optimizer=OptimizerConfig(
        peak_learning_rate=2e-3, warmup_steps=50, beta2=0.99, weight_decay=0.0
    ),
    steps=2500,
    batch_size=8,
    log_every=50,
    evaluate_every=500,
    checkpoint_every=500,
    sample_prompt="abc > cbahe\ndeg > gedhe\nhcb > bchhe\nfad >",
)

RECIPES: dict[str, Recipe] = {
    "quickstart": Recipe(
        summary=(
            "A small GPT on Python's documentation: no download, three minutes on two CPU cores."
        ),
        details=(
            "Run: flaxzoo train quickstart\n"
            "Expect a validation loss of 4.0 to 4.5 nats per token, 1.6 to 1.7 bits per byte. The "
            "text, and therefore the vocabulary, differs between Python versions."
        ),
        config=QUICKSTART,
    ),
    "primer-quickstart": Recipe(
        summary="The recipe quickstart with the changes that an architecture search found "
        "(Primer).",
        details=(
            "Run: flaxzoo train primer-quickstart\n"
            "The recipe has the two most important changes (So et al. 2021): squared ReLU, and a "
            "convolution over three tokens after the projections of attention. All other settings, "
            "including steps and sizes, are the same as in `quickstart`.\n"
            "Expect a validation loss about 0.3 nats per token below the loss of `quickstart`."
        ),
        config=dataclasses.replace(
            QUICKSTART,
            model=LectureGPTConfig(
                **_QUICKSTART_MODEL, activation="relu_squared", head_convolution=3
            ),
        ),
    ),
    "shakespeare-char": Recipe(
        summary=(
            "A character-level GPT on tiny shakespeare, with nanoGPT's size and budget for a CPU."
        ),
        details=(
            "Run: flaxzoo train shakespeare-char --data.source text:TRAIN --data.validation "
            "text:VALID\n"
            "Expect a validation loss of 1.70 nats per character; nanoGPT's README reports 1.88."
        ),
        config=TrainConfig(
            model=GPTConfig(
                # Training enlarges the vocabulary to the size of the tokenizer.
                vocab_size=1,
                max_length=64,
                num_layers=4,
                d_model=128,
                num_heads=4,
                dropout_rate=0.0,
            ),
            data=CausalLMData(
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
        ),
    ),
    "in-context": Recipe(
        summary=(
            "A small GPT that learns a task from its prompt: no download, minutes on two CPU cores."
        ),
        details=(
            "Run: flaxzoo train in-context\n"
            "     flaxzoo evaluate runs/in-context --shots 0 1 4 16 --data "
            "builtin:patterns#copy,reverse,count\n"
            "The model learns random tasks from examples alone, and is tested on tasks that it has "
            "never seen: accuracy increases with the number of examples in the prompt."
        ),
        config=IN_CONTEXT,
    ),
    "gpt": Recipe(
        summary="A GPT of any published size on your own text.",
        details=(
            "Run: flaxzoo train gpt --preset gpt2-large --data.source 'text:books/*.txt#block'\n"
            "The vocabulary is trained on the text, and the size of the embedding follows from it."
            " The learning rate is 6e-4 at a width of 768 and smaller in proportion for wider "
            "models, which is near the rates of Brown et al. 2020, table 2.1."
        ),
        config=_of_size("gpt2"),
        of_preset=_of_size,
        preset="gpt2",
    ),
    "gpt2": Recipe(
        summary="GPT-2 small (124 million parameters): 512 sequences of 1,024 tokens.",
        details="Run: flaxzoo train gpt2",
        config=_published("gpt2", 6e-4, 512),
    ),
    "gpt2-medium": Recipe(
        summary="GPT-2 medium (355 million parameters): 512 sequences of 1,024 tokens.",
        details="Run: flaxzoo train gpt2-medium --micro-batches 8",
        config=_published("gpt2-medium", 3e-4, 512),
    ),
    "gpt2-xl": Recipe(
        summary="GPT-2 XL (1.6 billion parameters): 512 sequences of 1,024 tokens.",
        details=(
            "Run: flaxzoo train gpt2-xl --mesh.fsdp 16 --micro-batches 32 --execution.remat full"
        ),
        config=_published("gpt2-xl", 2e-4, 512),
    ),
    "gpt3-13b": Recipe(
        summary="GPT-3 13B: 1,024 sequences of 2,048 tokens.",
        details=(
            "Run: flaxzoo train gpt3-13b --mesh.fsdp 64 --micro-batches 16 --execution.remat full"
        ),
        config=_published("gpt3-13b", 1e-4, 1024),
    ),
    "gpt3-175b": Recipe(
        summary="GPT-3 175B: 1,536 sequences of 2,048 tokens, or 3.1 million tokens.",
        details=(
            "Run: flaxzoo train gpt3-175b --mesh.fsdp 512 --micro-batches 3 --execution.remat full"
        ),
        config=_published("gpt3-175b", 0.6e-4, 1536),
    ),
}
