"""Recipes of reinforcement learning, and the recipe of the small model that they start from."""

import dataclasses
from collections.abc import Callable

from ...data.chat.policy import PolicyData
from ...data.chat.supervised import SupervisedData
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import TransformerConfig
from ...models.decoders.gpt.gpt import GPTConfig
from ..config import Recipe, TrainConfig
from ..objectives.grpo import GRPOConfig
from ..objectives.ppo import PPOConfig
from ..objectives.rloo import RLOOConfig
from ..optimizer_config import OptimizerConfig
from .post_training import of_any_size

_CHARACTERS = TokenizerConfig(kind="characters")
_MODEL = GPTConfig(
    # Training enlarges the vocabulary to the size of the tokenizer.
    vocab_size=1,
    max_length=32,
    num_layers=2,
    d_model=64,
    num_heads=4,
    dropout_rate=0.0,
    positions="rotary",
    # The initial standard deviation is about 1 / √D, where D is `d_model`.
    init_std=0.1,
)

# The other recipes start from this run. Its model gives the right sum about half of the time.
SUMS = TrainConfig(
    model=_MODEL,
    data=SupervisedData(source="builtin:sums", length=32, tokenizer=_CHARACTERS, learn="all"),
    optimizer=OptimizerConfig(peak_learning_rate=2e-3, warmup_steps=20),
    steps=600,
    batch_size=32,
    log_every=50,
    evaluate_every=200,
    checkpoint_every=200,
    sample_prompt="3+4=",
)

GRPO = TrainConfig(
    model=_MODEL,
    data=PolicyData(source="builtin:sums", length=16, tokenizer=_CHARACTERS),
    objective=GRPOConfig(rewards=("exact_match",), max_new_tokens=6, beta=0.05),
    optimizer=OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=0, weight_decay=0.0),
    init_from="runs/sums",
    steps=150,
    batch_size=16,
    evaluate_every=25,
    checkpoint_every=50,
    sample_prompt="3+4=",
)

# RLOO and PPO share the data and the initial model of GRPO.
RLOO = dataclasses.replace(
    GRPO,
    objective=RLOOConfig(rewards=("exact_match",), max_new_tokens=6, num_generations=4),
)

PPO = dataclasses.replace(
    GRPO,
    objective=PPOConfig(rewards=("exact_match",), max_new_tokens=6, num_generations=4),
    optimizer=dataclasses.replace(GRPO.optimizer, peak_learning_rate=5e-4),
    steps=100,
)

_BEGINS = (
    "The recipe starts from the run runs/sums (flaxzoo train sums), whose model is right about "
    "half of\n"
    "the time. --init-from names another model, of any size. --data.source names the prompts,\n"
    "JSON lines with prompt or messages, and with the fields that rewards read, such as answer.\n"
    "The validation loss is the negated mean reward."
)


def _of_any_size(config: TrainConfig) -> Callable[[TransformerConfig], TrainConfig]:
    """Returns a function that adapts a recipe to a given model.

    It also removes the recipe's initial run and its limit on new tokens.
    """
    # The recipe's limit of six tokens suffices for sums, but not for other prompts.
    objective = dataclasses.replace(config.objective, max_new_tokens=None)
    return of_any_size(dataclasses.replace(config, objective=objective))


RECIPES: dict[str, Recipe] = {
    "sums": Recipe(
        summary="A small GPT on sums, half of them wrong: half a minute, no download.",
        details=(
            "Run: flaxzoo train sums\n"
            "     flaxzoo train grpo\n"
            "The recipes grpo, rloo and ppo start from this run."
        ),
        config=SUMS,
    ),
    "grpo": Recipe(
        summary="Group relative policy optimization: answers are compared with each other.",
        details=f"Run: flaxzoo train grpo\n{_BEGINS}",
        config=GRPO,
        of_model=_of_any_size(GRPO),
    ),
    "rloo": Recipe(
        summary="REINFORCE with a leave-one-out baseline: whole answers are compared.",
        details=f"Run: flaxzoo train rloo\n{_BEGINS}",
        config=RLOO,
        of_model=_of_any_size(RLOO),
    ),
    "ppo": Recipe(
        summary="Proximal policy optimization: a learned value function predicts the reward.",
        details=f"Run: flaxzoo train ppo\n{_BEGINS}",
        config=PPO,
        of_model=_of_any_size(PPO),
    ),
}
