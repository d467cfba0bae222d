"""Computes the mean reward of a trained policy."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from ...data.batching import evaluation_batches
from ...data.chat.encoding import turn_ends
from ...data.chat.policy import PolicyData, PolicyExamples
from ...data.chat.records import Dialogue
from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.dataset import DataSplit
from ...data.tokenizers.base import Tokenizer
from ...models.decoding.rollout import Answers, sample_answers
from ...models.decoding.unstack_layers import unstack_layers
from ...models.model import Model
from ...models.nn.dropout import row_keys
from ...models.nn.typing import Array, Int, Key, Params
from ..config import TrainConfig
from ..losses.eval_step import rows_at_once
from ..objectives.online import OnlineConfig
from ..rewards.functions import rewards_of, weighted
from .reward_model import RewardModel

_EVALUATION = 0x5EED
"""This value is folded into the key of evaluations, so that evaluations and training steps use
different random numbers."""


def evaluation_key(seed: int) -> Key[Array, ""]:
    """Returns the key for sampling in evaluations. The key of each row is derived from it."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _EVALUATION)


def ends_of_answers(tokenizer: Tokenizer, examples: PolicyExamples) -> tuple[int, ...]:
    """Returns the ids of the end-of-text token and, in dialogues, of the tokens that end a turn.

    Raises:
        RunError: the tokenizer has no end-of-text token.
    """
    end = tokenizer.special_ids.eos
    if end is None:
        raise RunError(
            f"the {tokenizer.kind} tokenizer has no token that ends a completion: give a language "
            "model as --init-from"
        )
    if not isinstance(examples.prompts.prompt(0, 0).context, Dialogue):
        return (end,)
    return tuple(dict.fromkeys((end, *turn_ends(tokenizer, tokenizer.chat_template).ids)))


def score_policy(
    model: Model, params: Params, split: DataSplit, *, config: TrainConfig, tokenizer: Tokenizer
) -> dict[str, float | int]:
    """Samples and rewards a completion for each prompt, as the evaluations of a run do.

    Args:
        model: the policy.
        params: the parameters of the policy.
        split: the prompts.
        config: the configuration of the policy's run.
        tokenizer: the tokenizer of the policy.

    Returns:
        `loss` (the negated mean reward), `reward`, the mean of each single reward, and metrics of
        the completion lengths, named as in TRL.

    Raises:
        RunError: the rewards of the run are Python functions, which the run folder does not
          contain.
    """
    objective = cast(OnlineConfig, config.objective)
    examples = cast(PolicyExamples, split.examples)
    require(
        objective.rewards,
        "the run was rewarded by Python functions: train with --objective.rewards, or call the "
        "functions on its completions",
        error=RunError,
    )
    # Open the reward models first, so that a missing model raises an error before the sampling.
    rewards = rewards_of(objective, open_model=RewardModel.of_run)
    num_prompts = examples.num_examples
    texts, lengths, ended = _completions(
        model, params, examples, config=config, tokenizer=tokenizer
    )
    prompts = [examples.prompts.prompt(0, index) for index in range(num_prompts)]
    values = rewards(prompts, texts)  # [num_prompts, F]
    total = weighted(values, rewards.weights) - objective.missing_end_penalty * ~np.asarray(ended)
    # If no function rewards a completion, its reward is NaN, and the means exclude this completion.
    reward = float(np.nanmean(total))
    return {
        "loss": -reward,
        "reward": reward,
        **{
            f"rewards/{name}/mean": float(np.nanmean(values[:, column]))
            for column, name in enumerate(rewards.functions)
        },
        "completions/mean_length": float(np.mean(lengths)),
        "completions/clipped_ratio": 1 - float(np.mean(ended)),
        "prompts": num_prompts,
    }


def _completions(
    model: Model,
    params: Params,
    examples: PolicyExamples,
    *,
    config: TrainConfig,
    tokenizer: Tokenizer,
) -> tuple[list[str], list[int], list[bool]]:
    """Samples a completion for each prompt.

    Returns:
        Three lists: the texts of the completions, their lengths in tokens, and whether each has an
        end token.
    """
    objective, data = cast(OnlineConfig, config.objective), cast(PolicyData, config.data)
    ends, num_prompts = ends_of_answers(tokenizer, examples), examples.num_examples
    part = config.batch_size // config.micro_batches
    size = rows_at_once(data.length, part, num_prompts)
    # Unstack the layers, because this makes decoding faster.
    model, params = unstack_layers(model, params)

    @jax.jit
    def sampled(
        params: Params, ids: Int[Array, "B P"], mask: Int[Array, "B P"], first: Int[Array, ""]
    ) -> Answers:
        return sample_answers(
            model,
            params,
            ids,
            mask,
            keys=row_keys(evaluation_key(config.seed), ids.shape[0], first),
            max_new_tokens=objective.answer_length(data),
            end_ids=ends,
            temperature=objective.temperature,
        )

    # Give all batches the same shape, so that a single program is compiled.
    texts: list[str] = []
    lengths: list[int] = []
    ended: list[bool] = []
    for start, batch in zip(
        range(0, num_prompts, size), evaluation_batches(examples, batch_size=size), strict=True
    ):
        ids, mask = (jnp.asarray(batch[name]) for name in ("prompt_ids", "prompt_mask"))
        answers = jax.device_get(sampled(params, ids, mask, jnp.int32(start)))
        for tokens, real in zip(answers.tokens, answers.mask, strict=True):
            answer = tokens[real != 0].tolist()
            texts.append(tokenizer.decode([token for token in answer if token not in ends]))
            lengths.append(len(answer))
            ended.append(any(end in answer for end in ends))
    # Drop the filler rows of the last batch.
    return texts[:num_prompts], lengths[:num_prompts], ended[:num_prompts]
