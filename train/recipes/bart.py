"""Recipes of BART and mBART: denoising at a small size and at published sizes."""

import dataclasses

from ...data.tasks.denoising import DenoisingData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ...models.encoder_decoders.bart import BartConfig
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig


def _of_size(preset: str) -> TrainConfig:
    """Returns the settings that train any published size on the user's text."""
    # Training enlarges the vocabulary to the size of the tokenizer.
    model = dataclasses.replace(registry.preset(preset), vocab_size=1)
    return TrainConfig(
        model=model,
        data=DenoisingData(
            source="builtin:python-docs",
            length=min(model.max_length, 512),
            tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=4096),
        ),
        optimizer=OptimizerConfig(peak_learning_rate=3e-4, warmup_steps=500),
        execution=Execution(dtype="bfloat16", remat="dots"),
        steps=10_000,
        batch_size=32,
        evaluate_every=500,
        checkpoint_every=500,
    )


RECIPES: dict[str, Recipe] = {
    "bart-denoising": Recipe(
        summary="A small BART restores the English prose in Python's documentation.",
        details=(
            "Run: flaxzoo train bart-denoising\n"
            "Expect a validation loss of about 3.54 nats per token. The text, and therefore the "
            "vocabulary, differs between Python versions.\n"
            "30 % of the tokens are masked in spans (Poisson, 3 on average), and the sentences are"
            " shuffled, as in Lewis et al. 2020, section 2.2. The mask is <extra_id_0>:\n"
            "echo 'The for <extra_id_0> is used to' | flaxzoo translate runs/bart-denoising "
            "--input -"
        ),
        config=TrainConfig(
            model=BartConfig(
                # Training enlarges the vocabulary to the size of the tokenizer.
                vocab_size=1,
                max_length=128,
                num_layers=3,
                d_model=192,
                num_heads=4,
                d_ff=512,
                dropout_rate=0.0,
            ),
            data=DenoisingData(
                source="builtin:python-docs",
                length=128,
                tokenizer=TokenizerConfig(kind="sentencepiece-unigram", vocab_size=2048),
            ),
            optimizer=OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=50),
            execution=Execution(remat="dots"),
            steps=800,
            batch_size=16,
            evaluate_every=200,
            checkpoint_every=200,
            sample_prompt="The for <extra_id_0> is used to iterate over the elements of a list",
        ),
    ),
    "bart": Recipe(
        summary="A BART or mBART of any published size restores your own text.",
        details=(
            "Run: flaxzoo train bart --preset bart-base --data.source 'text:books/*.txt#block'\n"
            "The vocabulary is trained on the text, and determines the size of the embedding.\n"
            "flaxzoo train text-to-text --preset bart-base trains a BART on pairs of texts."
        ),
        config=_of_size("bart-base"),
        of_preset=_of_size,
        preset="bart-base",
    ),
}
