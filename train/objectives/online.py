"""The base class of objectives that learn from sampled answers: GRPO, RLOO and PPO."""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from ...data.chat.policy import PolicyData
from ...data.common.fields import NonNegative, Positive, PositiveInt, require
from ...data.dataset import ArraySpec, BatchSpec, DataSplit, Values
from ...models.nn.typing import Array, Bool, Float, Int
from ..losses.eval_step import Evaluation
from ..losses.objective import Objective
from ..objective_config import ObjectiveConfig, OpenReference, Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineConfig(ObjectiveConfig[PolicyData]):
    """The settings for sampling and rewards that all online objectives share."""

    data_kinds = (PolicyData,)
    head_names = ("causal_lm",)
    progress_metrics = ("reward", "kl", "completions/mean_length")
    compares_with_start = True
    next_command = "chat {run}"
    learns_values: ClassVar[bool] = False
    """Whether the loss includes a value function."""

    rewards: tuple[str, ...] = ()
    """One or several rewards: exact_match, arithmetic, format:REGEX, length:N, contains:WORD, or
    the run folder of a reward model."""
    reward_weights: tuple[float, ...] = ()
    """The weight of each entry of rewards in the total reward. Each weight defaults to 1."""
    missing_end_penalty: NonNegative = 0.0
    """Penalty subtracted from the reward of an answer without an end token."""
    mask_truncated: bool = False
    """Whether the loss ignores answers without an end token."""
    num_generations: PositiveInt
    """Number of answers per prompt, G. Each step learns from batch_size · G sampled answers."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens of an answer, including its end token. If None, it is half of
    data.length. The rest of data.length is for the prompt."""
    temperature: Positive = 1.0
    """Divisor of the logits in sampling and in the loss."""
    num_iterations: PositiveInt = 1
    """Number of passes over the answers that a step samples."""
    num_mini_batches: PositiveInt = 1
    """Number of updates in each pass over the answers."""
    beta: NonNegative
    """Weight of the KL divergence from the initial model. If above 0, checkpoints also contain the
    initial model."""
    epsilon: NonNegative = 0.2
    """Largest relative change of a probability before the loss is clipped."""

    @property
    def updates_several(self) -> bool:
        """Whether a step has several updates, so that policy and sampling policy can differ."""
        return self.num_iterations * self.num_mini_batches > 1

    @property
    def needs_log_probs(self) -> bool:
        """Whether a step needs the log-probabilities of answers under the sampling policy."""
        return self.updates_several or self.beta > 0

    def answer_length(self, data: PolicyData) -> int:
        """Returns the maximum length of an answer in tokens, N."""
        longest = self.max_new_tokens
        return max(data.length // 2, 1) if longest is None else longest

    @abstractmethod
    def loss(self, data: PolicyData) -> Objective:
        """Returns the loss of a batch of sampled answers."""

    @abstractmethod
    def targets(
        self,
        rewards: Float[Array, " R"],
        loss_mask: Int[Array, "R T"],
        scored: Mapping[str, Float[Array, "R T"]],
    ) -> dict[str, Array]:
        """Computes the arrays that the loss needs, such as the advantages, from the rewards.

        Args:
            rewards: the reward of each answer; NaN for an answer without a reward.
            loss_mask: 1 where a label belongs to the answer.
            scored: the arrays `log_probs`, `reference_log_probs` and `values` for the sampled
              tokens; only the arrays that the objective needs.
        """

    def rollout_metrics(
        self,
        rewards: Float[Array, " R"],
        loss_mask: Int[Array, "R T"],
        scored: Mapping[str, Float[Array, "R T"]],
        *,
        ended: Bool[Array, " R"],
    ) -> dict[str, Array]:
        """Returns the metrics of a rollout that only this objective reports.

        Args:
            rewards: as in `targets`.
            loss_mask: as in `targets`.
            scored: as in `targets`.
            ended: whether each answer has an end token.
        """
        del rewards, loss_mask, scored, ended
        return {}

    def build(self, data: PolicyData) -> Objective:
        """Returns the objective. If β is above 0, the state keeps the initial parameters."""
        # The loss compares the model with the initial model, so the state keeps the initial
        # parameters.
        return dataclasses.replace(self.loss(data), keeps_initial=self.beta > 0)

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: PolicyData) -> Scores:
        """Returns the mean rewards, other metrics of the answers, and the number of prompts."""
        del split, data
        return {**evaluation.means, "prompts": int(evaluation.counts["reward"])}

    def check(self, data: PolicyData) -> None:
        """Checks that a row has room for a prompt in addition to the longest answer."""
        require(
            self.answer_length(data) < data.length,
            f"objective.max_new_tokens {self.answer_length(data)} leaves no token for a prompt in "
            f"data.length {data.length}: lower objective.max_new_tokens or raise data.length",
        )

    def loss_note(self, data: PolicyData) -> str | None:
        """Returns a line that explains the validation loss, and why a training loss may be near 0.

        If the objective has no value function, the loss is near 0 in the first update of a step,
        but not in later updates of the step.
        """
        del data
        note = "the validation loss is the negated mean reward of held-out prompts"
        if self.learns_values or self.updates_several:
            return note
        return f"{note}; the loss of a step is near 0 for any rewards, but its gradient is not"

    def batch_spec(self, data: PolicyData, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of a sampled answer."""
        del num_labels, num_choices
        # Each row has a prompt and its answer.
        row = (data.length,)
        tokens, mask = ArraySpec(row, Values.TARGET_TOKEN), ArraySpec(row, Values.MASK)
        arrays = {"input_ids": tokens, "labels": tokens, "attention_mask": mask, "loss_mask": mask}
        return arrays | {"advantages": ArraySpec((), Values.LABEL, "float32")}

    def prepare(self, data: PolicyData, open_reference: OpenReference) -> PolicyData:
        """Returns the data, with prompts limited to the length that the longest answer leaves."""
        del open_reference
        return data.with_answer_length(self.answer_length(data))


def per_token_spec(length: int) -> ArraySpec:
    """Describes an array that has one number for each token of a row."""
    return ArraySpec((length,), Values.LABEL, "float32")
