"""Recipes of the original Transformer: spelled-out numbers, Multi30k, WMT 2014."""

import dataclasses

from ...data.tasks.translation import TranslationData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution
from ...models.encoder_decoders.transformer import EncoderDecoderConfig
from ..config import Recipe, TrainConfig
from ..objectives.seq2seq import Seq2SeqConfig
from ..optimizer_config import OptimizerConfig


def _published_schedule(d_model: int, warmup_steps: int = 4000) -> OptimizerConfig:
    """Returns Adam with the learning rate schedule of Vaswani et al. 2017, section 5.3.

    The learning rate is d^-0.5 · min(step^-0.5, step · warmup^-1.5).
    """
    return _adam((d_model * warmup_steps) ** -0.5, warmup_steps)


def _adam(peak_learning_rate: float, warmup_steps: int) -> OptimizerConfig:
    return OptimizerConfig(
        peak_learning_rate=peak_learning_rate,
        schedule="inverse_sqrt",
        warmup_steps=warmup_steps,
        beta1=0.9,
        beta2=0.98,
        epsilon=1e-9,
        weight_decay=0.0,
        max_gradient_norm=None,
    )


def _to_zero(peak_learning_rate: float, warmup_steps: int) -> OptimizerConfig:
    """Returns Adam with a linear decay to zero, which works better in short runs."""
    optimizer = _adam(peak_learning_rate, warmup_steps)
    return dataclasses.replace(optimizer, schedule="linear", final_fraction=0.0)


def _of_size(preset: str) -> TrainConfig:
    """Returns the settings that train any published size on the user's pairs of sentences."""
    # Training enlarges the vocabulary to the size of the tokenizer.
    model = dataclasses.replace(registry.preset(preset), vocab_size=1)
    return TrainConfig(
        model=model,
        data=TranslationData(
            source="builtin:numbers-en-fr",
            length=min(model.max_length, 64),
            tokenizer=TokenizerConfig(kind="sentencepiece-bpe", vocab_size=400),
        ),
        optimizer=_published_schedule(model.d_model),
        execution=Execution(remat="dots"),
        objective=Seq2SeqConfig(label_smoothing=0.1),
        steps=10_000,
        batch_size=64,
        evaluate_every=500,
        checkpoint_every=500,
    )


def _wmt14(size: str, target: str, steps: int, dropout_rate: float | None = None) -> TrainConfig:
    """Returns the settings of a published run on WMT 2014.

    A batch has 104 rows of 256 tokens, which is about 25,000 tokens per language, as in the paper.
    """
    vocab_size = 37_000 if target == "de" else 32_000
    model = dataclasses.replace(registry.preset(f"transformer-{size}"), vocab_size=vocab_size)
    if dropout_rate is not None:
        model = dataclasses.replace(model, dropout_rate=dropout_rate)
    corpus = "de-en" if target == "de" else "fr-en"
    return TrainConfig(
        model=model,
        data=TranslationData(
            source=f"tfds:wmt14_translate/{corpus}#en,{target}",
            length=256,
            tokenizer=TokenizerConfig(kind="sentencepiece-bpe", vocab_size=vocab_size),
        ),
        optimizer=_published_schedule(model.d_model),
        execution=Execution(dtype="bfloat16", remat="dots"),
        objective=Seq2SeqConfig(label_smoothing=0.1),
        steps=steps,
        batch_size=104,
        evaluate_every=5_000,
        checkpoint_every=1_000,
        # The paper averages the last 20 checkpoints of the big model and the last 5 of the base
        # model.
        keep_last=20 if size == "big" else 5,
    )


RECIPES: dict[str, Recipe] = {
    "numbers-en-fr": Recipe(
        summary=(
            "A tiny Transformer that spells English numbers in French; no download, three minutes."
        ),
        details=(
            "Run: flaxzoo train numbers-en-fr\n"
            "Expect all of the thousand validation numbers to be correct (flaxzoo evaluate).\n"
            "For another language of num2words: --data.source builtin:numbers-en-de"
        ),
        config=TrainConfig(
            model=EncoderDecoderConfig(
                # Training enlarges the vocabulary to the size of the tokenizer.
                vocab_size=1,
                max_length=128,
                num_layers=2,
                d_model=128,
                num_heads=4,
                d_ff=256,
                dropout_rate=0.0,
            ),
            data=TranslationData(
                source="builtin:numbers-en-fr",
                length=64,
                tokenizer=TokenizerConfig(kind="sentencepiece-bpe", vocab_size=400),
            ),
            optimizer=_to_zero(3e-3, 200),
            execution=Execution(remat="dots"),
            objective=Seq2SeqConfig(label_smoothing=0.1),
            steps=1000,
            batch_size=32,
            evaluate_every=250,
            checkpoint_every=250,
            sample_prompt="ninety-seven",
        ),
    ),
    "multi30k-en-de": Recipe(
        summary="The tiny Transformer of Multi30k: descriptions of pictures, English to German.",
        details=(
            'The model has the sizes of Wu et al. 2021, "Good for misconceived reasons", section '
            "4.2, but the run is shorter.\n"
            "Run: flaxzoo train multi30k-en-de --data.source pairs:train.en.gz,train.de.gz \\\n"
            "--data.validation pairs:val.en.gz,val.de.gz\n"
            "Expect 36.8 BLEU on the validation pairs with the mean of 5 checkpoints and a beam of "
            "4.\n"
            "For the other direction, swap the names."
        ),
        config=TrainConfig(
            model=EncoderDecoderConfig(
                # Training enlarges the vocabulary to the size of the tokenizer.
                vocab_size=1,
                max_length=256,
                num_layers=4,
                d_model=128,
                num_heads=4,
                d_ff=256,
                dropout_rate=0.2,
            ),
            data=TranslationData(
                source="pairs:train.en.gz,train.de.gz",
                length=64,
                tokenizer=TokenizerConfig(kind="sentencepiece-bpe", vocab_size=8000),
            ),
            optimizer=_to_zero(3e-3, 400),
            execution=Execution(remat="dots"),
            objective=Seq2SeqConfig(label_smoothing=0.1),
            steps=2400,
            batch_size=64,
            evaluate_every=300,
            checkpoint_every=100,
            keep_last=5,
            sample_prompt="A man in a blue shirt is standing on a ladder.",
        ),
    ),
    "transformer": Recipe(
        summary="A Transformer of any published size on your own pairs of sentences.",
        details=(
            "Run: flaxzoo train transformer --preset transformer-big --data.source "
            "pairs:train.en,train.de\n"
            "The vocabulary is trained on the pairs, and the size of the embedding follows from "
            "it. The learning rate follows Vaswani et al. 2017, section 5.3."
        ),
        config=_of_size("transformer-base"),
        of_preset=_of_size,
        preset="transformer-base",
    ),
    "wmt14-en-de-base": Recipe(
        summary="The base Transformer on WMT 2014 English to German as published: 100,000 steps.",
        details=(
            "Run: flaxzoo train wmt14-en-de-base, then flaxzoo average runs/wmt14-en-de-base "
            "--last 5"
        ),
        config=_wmt14("base", "de", 100_000),
    ),
    "wmt14-en-de-big": Recipe(
        summary="The big Transformer on WMT 2014 English to German as published: 300,000 steps.",
        details=(
            "Run: flaxzoo train wmt14-en-de-big, then flaxzoo average runs/wmt14-en-de-big --last "
            "20"
        ),
        config=_wmt14("big", "de", 300_000),
    ),
    "wmt14-en-fr-base": Recipe(
        summary="The base Transformer on WMT 2014 English to French as published: 100,000 steps.",
        details=(
            "Run: flaxzoo train wmt14-en-fr-base, then flaxzoo average runs/wmt14-en-fr-base "
            "--last 5"
        ),
        config=_wmt14("base", "fr", 100_000),
    ),
    "wmt14-en-fr-big": Recipe(
        summary="The big Transformer on WMT 2014 English to French as published: 300,000 steps.",
        details=(
            "The dropout rate is 0.1; the big model for German has the rate 0.3 (section 6.1).\n"
            "Run: flaxzoo train wmt14-en-fr-big, then flaxzoo average runs/wmt14-en-fr-big --last "
            "20"
        ),
        config=_wmt14("big", "fr", 300_000, dropout_rate=0.1),
    ),
}
