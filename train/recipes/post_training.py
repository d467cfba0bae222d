"""Recipes of post-training. Most of these recipes start from the run of another recipe."""

import dataclasses
from collections.abc import Callable

from ...data.chat.preference_pairs import DPOData, RewardData
from ...data.chat.supervised import SupervisedData
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import Execution, TransformerConfig
from ...models.decoders.gpt.gpt import GPTConfig
from ...models.lectures.lecture_gpt import LectureGPTConfig
from ..config import Recipe, TrainConfig
from ..objectives.reward import RewardConfig
from ..optimizer_config import OptimizerConfig

# The initial model (`init_from`) determines the actual sizes and the vocabulary.
_MODEL = GPTConfig(
    vocab_size=1,
    max_length=128,
    num_layers=4,
    d_model=192,
    num_heads=4,
    dropout_rate=0.0,
)
_TOKENIZER = TokenizerConfig(kind="byte-bpe", vocab_size=2048)

SFT = TrainConfig(
    model=_MODEL,
    data=SupervisedData(source="jsonl:alpaca.train.jsonl.gz", length=128, tokenizer=_TOKENIZER),
    optimizer=OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=50, weight_decay=0.0),
    execution=Execution(remat="dots"),
    init_from="runs/quickstart",
    steps=600,
    batch_size=16,
    evaluate_every=200,
    checkpoint_every=200,
)

REWARD = TrainConfig(
    model=_MODEL,
    data=RewardData(source="jsonl:hh.train.jsonl.gz", length=128, tokenizer=_TOKENIZER),
    objective=RewardConfig(centering=0.01),
    optimizer=OptimizerConfig(peak_learning_rate=3e-4, warmup_steps=20, weight_decay=0.0),
    execution=Execution(remat="dots"),
    init_from="runs/sft",
    epochs=2.0,
    batch_size=16,
)

DPO = TrainConfig(
    model=_MODEL,
    data=DPOData(source="jsonl:hh.train.jsonl.gz", length=128, tokenizer=_TOKENIZER),
    optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=20, weight_decay=0.0),
    execution=Execution(remat="dots"),
    init_from="runs/sft",
    epochs=2.0,
    batch_size=16,
)


def of_any_size(config: TrainConfig) -> Callable[[TransformerConfig], TrainConfig]:
    """Returns a function that adapts a recipe to a given model and removes its initial run."""

    def of_size(model: TransformerConfig) -> TrainConfig:
        model = dataclasses.replace(model, dropout_rate=0.0)
        length = min(model.max_length, 1024)
        return dataclasses.replace(
            config,
            model=model,
            data=dataclasses.replace(config.data, length=length),
            execution=Execution(dtype="bfloat16", remat="dots"),
            init_from=None,
        )

    return of_size


# This run starts from random parameters, and the model learns to call a tool.
CALCULATIONS = TrainConfig(
    model=LectureGPTConfig(
        vocab_size=1,
        max_length=192,
        num_layers=2,
        d_model=64,
        num_heads=4,
        dropout_rate=0.0,
        positions="rotary",
        head_convolution=3,
    ),
    data=SupervisedData(
        source="builtin:calculations",
        length=144,
        tokenizer=TokenizerConfig(kind="characters"),
        packing="none",
    ),
    optimizer=OptimizerConfig(peak_learning_rate=3e-3, warmup_steps=50, beta2=0.99),
    steps=1200,
    batch_size=16,
    evaluate_every=400,
    checkpoint_every=400,
)


RECIPES: dict[str, Recipe] = {
    "sft": Recipe(
        summary="Supervised fine-tuning of a GPT: it learns the answers to instructions.",
        details=(
            "Run: flaxzoo train sft --data.source jsonl:alpaca.train.jsonl.gz\n"
            "The recipe starts from the run runs/quickstart, which flaxzoo train quickstart makes; "
            "--init-from names another model, of any size. flaxzoo chat runs/sft talks to the "
            "result. The keys of a record determine its format: messages, prompt and completion, "
            "instruction and output …"
        ),
        config=SFT,
        of_model=of_any_size(SFT),
    ),
    "calculations": Recipe(
        summary="A small GPT that calls a tool for arithmetic: no download, minutes on two cores.",
        details=(
            "Run: flaxzoo train calculations\n"
            "Talk to the model with flaxzoo chat runs/calculations --tools arithmetic. Asked for a "
            "product, the model writes a call, reads the result, and repeats the result. Without "
            "the tool, the model's answers are wrong."
        ),
        config=CALCULATIONS,
    ),
    "reward": Recipe(
        summary="A reward model that learns from preferences which of two answers is better.",
        details=(
            "Run: flaxzoo train reward --data.source jsonl:hh.train.jsonl.gz\n"
            "The recipe starts from the run runs/sft and replaces the head of the language model "
            "with a "
            "head of a single number."
        ),
        config=REWARD,
        of_model=of_any_size(REWARD),
    ),
    "dpo": Recipe(
        summary="Direct preference optimization: a language model learns from preferences.",
        details=(
            "Run: flaxzoo train dpo --data.source jsonl:hh.train.jsonl.gz\n"
            "The recipe starts from the run runs/sft, which is also the reference model of the "
            "loss."
        ),
        config=DPO,
        of_model=of_any_size(DPO),
    ),
}
