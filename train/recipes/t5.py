"""Recipes of T5: span corruption, and arbitrary pairs of texts."""

import dataclasses

from ...data.common.fields import require
from ...data.tasks.span_corruption import SpanCorruptionData
from ...data.tasks.translation import TextToTextData
from ...data.tokenizers.training import TokenizerConfig
from ...models import registry
from ...models.config import Execution, TransformerConfig
from ...models.encoder_decoders.t5 import T5Config
from ..config import Recipe, TrainConfig
from ..optimizer_config import OptimizerConfig

# A small T5 1.1, which can be trained on two CPU cores in minutes.
_SMALL = T5Config(
    # Training enlarges the vocabulary to the size of the tokenizer.
    vocab_size=1,
    max_length=128,
    num_layers=3,
    d_model=192,
    num_heads=4,
    d_head=48,
    d_ff=512,
    activation="gelu_tanh",
    gated=True,
    tie_output=False,
    scale_output=False,
    dropout_rate=0.0,
)

_TEXT_TO_TEXT = TrainConfig(
    model=_SMALL,
    data=TextToTextData(
        source="builtin:numbers-en-fr",
        length=128,
        tokenizer=TokenizerConfig(kind="sentencepiece-bpe", vocab_size=400),
    ),
    optimizer=OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=50),
    execution=Execution(remat="dots"),
    steps=1000,
    batch_size=16,
    evaluate_every=250,
    checkpoint_every=250,
)


def _text_to_text(model: TransformerConfig) -> TrainConfig:
    """Returns the settings of `text-to-text` for a published encoder-decoder of any family."""
    require(
        "seq2seq_lm" in model.heads,
        f"{registry.family_name(model)} has no head seq2seq_lm: choose an encoder-decoder, such "
        "as t5-small or bart-base",
    )
    return dataclasses.replace(
        _TEXT_TO_TEXT,
        # Training enlarges the vocabulary to the size of the tokenizer.
        model=dataclasses.replace(model, vocab_size=1),
        data=dataclasses.replace(_TEXT_TO_TEXT.data, length=min(model.max_length, 512)),
        optimizer=OptimizerConfig(peak_learning_rate=3e-4, warmup_steps=500),
        execution=Execution(dtype="bfloat16", remat="dots"),
        steps=10_000,
    )


def _of_size(preset: str) -> TrainConfig:
    """Returns the settings that train any published size on the user's text."""
    # Training enlarges the vocabulary to the size of the tokenizer.
    model = dataclasses.replace(registry.preset(preset), vocab_size=1)
    return TrainConfig(
        model=model,
        data=SpanCorruptionData(
            source="builtin:python-docs",
            length=min(model.max_length, 512),
            tokenizer=TokenizerConfig(kind="sentencepiece-unigram", vocab_size=4096),
        ),
        optimizer=OptimizerConfig(
            peak_learning_rate=1e-3, schedule="inverse_sqrt", warmup_steps=1000
        ),
        execution=Execution(dtype="bfloat16", remat="dots"),
        steps=10_000,
        batch_size=128,
        evaluate_every=500,
        checkpoint_every=500,
    )


RECIPES: dict[str, Recipe] = {
    "t5-quickstart": Recipe(
        summary="A small T5 1.1 fills gaps in the English prose in Python's documentation.",
        details=(
            "Run: flaxzoo train t5-quickstart\n"
            "Expect a validation loss of about 3.71 nats per token of the targets. The text, and "
            "therefore the vocabulary, differs between Python versions.\n"
            "A run that starts from runs/t5-quickstart keeps its vocabulary. For other languages, "
            "train on text in these languages (--data.source), with --data.noise-density 0.5 if "
            "the run is short.\n"
            "Gaps in a text are marked by <extra_id_0>, <extra_id_1>, …:\n"
            "echo 'The for <extra_id_0> is used to' | flaxzoo translate runs/t5-quickstart --input"
            " -"
        ),
        config=TrainConfig(
            model=_SMALL,
            data=SpanCorruptionData(
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
            sample_prompt="The for <extra_id_0> is used to iterate over the <extra_id_1> of a list",
        ),
    ),
    "text-to-text": Recipe(
        summary="An encoder-decoder learns any pairs of texts: summaries, corrections, answers.",
        details=(
            "Run: flaxzoo train text-to-text --init-from runs/t5-quickstart --data.source "
            "'jsonl:pairs.jsonl#question,answer'\n"
            "The source has pairs of texts (jsonl:, tsv:, pairs:, tfds:; see the data "
            "guide). Defaults to numbers that are spelled out in English and French. "
            "Lower --data.target-length if targets are shorter than their sources. flaxzoo "
            "evaluate prints exact matches, ROUGE, BLEU and chrF.\n"
            "--preset takes the published sizes of T5, mT5, BART, mBART and the Transformer."
        ),
        config=_TEXT_TO_TEXT,
        of_model=_text_to_text,
    ),
    "t5": Recipe(
        summary="A T5 of any published size on your own text.",
        details=(
            "Run: flaxzoo train t5 --preset t5-v1.1-small --data.source 'text:books/*.txt#block'\n"
            "The vocabulary is trained on the text and gets 100 sentinels. The size of the "
            "embedding follows from it. 15 % of the tokens are dropped in spans of 3 on average, "
            "and sequences have 512 tokens, as in Raffel et al. 2020, sections 3.1.2 and 3.1.4."
        ),
        config=_of_size("t5-v1.1-small"),
        of_preset=_of_size,
        preset="t5-v1.1-small",
    ),
}
