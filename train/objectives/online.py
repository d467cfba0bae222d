"""The base of objectives that learn from answers that the model samples: GRPO, RLOO, PPO."""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping

from ...data.chat.policy import PolicyData
from ...data.common.errors import UserError
from ...data.common.fields import NonNegative, Positive, PositiveInt
from ...data.dataset import ArraySpec, BatchSpec, DataSplit, Values
from ...models.nn.typing import Array, Bool, Float, Int
from ..losses.eval_step import Evaluation
from ..losses.objective import Objective
from ..objective_config import ObjectiveConfig, OpenReference, Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineConfig(ObjectiveConfig[PolicyData]):
    """How answers are sampled and rewarded, and what all such objectives do with the rewards."""

    data_kinds = (PolicyData,)
    progress_metrics = ("reward", "kl", "completions/mean_length")
    next_command = "chat {run}"

    rewards: tuple[str, ...] = ()
    """Rewards of an answer, one or several: exact_match, arithmetic, format:REGEX, length:N,
    contains:WORD, or the folder of a reward model's run."""
    reward_weights: tuple[float, ...] = ()
    """The factor of each reward in their sum; by default 1."""
    missing_end_penalty: NonNegative = 0.0
    """Penalty of an answer without an end, subtracted from its reward."""
    mask_truncated: bool = False
    """Whether answers without an end are left out of the loss."""
    num_generations: PositiveInt
    """Answers to each prompt, G. A step samples and learns from batch_size · G answers."""
    max_new_tokens: PositiveInt | None = None
    """Tokens of an answer at most, its end token included; None: half of data.length. What
    is left of data.length is the longest prompt."""
    temperature: Positive = 1.0
    """Divisor of the logits in sampling and in the loss."""
    num_iterations: PositiveInt = 1
    """Passes over the answers of a step."""
    num_mini_batches: PositiveInt = 1
    """Updates in each of these passes."""
    beta: NonNegative
    """Weight of the divergence from the model at the start. Above 0 the checkpoints hold that
    model, too."""
    epsilon: NonNegative = 0.2
    """Largest relative change of a probability that is rewarded."""

    @property
    def updates_several(self) -> bool:
        """Whether a step has several updates, so that the policy leaves the one that sampled."""
        return self.num_iterations * self.num_mini_batches > 1

    @property
    def needs_log_probs(self) -> bool:
        """Whether a step needs the log-probabilities of answers under the policy that sampled."""
        return self.updates_several or self.beta > 0

    def answer_length(self, data: PolicyData) -> int:
        """Returns the longest answer in tokens, N."""
        given = self.max_new_tokens
        return max(data.length // 2, 1) if given is None else given

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
        """Returns what is learned from the rewards, as arrays of a batch of the loss.

        Args:
            rewards: the reward of each answer; NaN for none.
            loss_mask: 1 where a label belongs to the answer.
            scored: `log_probs`, `reference_log_probs` and `values`, as far as they are needed.
        """

    def rollout_metrics(
        self,
        rewards: Float[Array, " R"],
        loss_mask: Int[Array, "R T"],
        scored: Mapping[str, Float[Array, "R T"]],
        *,
        ended: Bool[Array, " R"],
    ) -> dict[str, Array]:
        """Returns further metrics of a rollout.

        Args:
            rewards: as in `targets`.
            loss_mask: likewise.
            scored: likewise.
            ended: whether an answer has an end.
        """
        del rewards, loss_mask, scored, ended
        return {}

    def build(self, data: PolicyData) -> Objective:
        """Returns the loss; the state keeps the initial parameters if β is above 0."""
        return dataclasses.replace(self.loss(data), keeps_initial=self.beta > 0)

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: PolicyData) -> Scores:
        """Returns the mean rewards and the number of prompts."""
        del split, data
        return {**evaluation.means, "prompts": int(evaluation.counts["reward"])}

    def heads(self, data: PolicyData) -> tuple[str, ...]:
        """Returns the head of a language model."""
        del data
        return ("causal_lm",)

    def check(self, data: PolicyData) -> None:
        """Checks that an answer leaves tokens for a prompt."""
        if self.answer_length(data) >= data.length:
            raise UserError(
                f"objective.max_new_tokens {self.answer_length(data)} leaves no token for a "
                f"prompt in data.length {data.length}: lower the first or raise the second"
            )

    def loss_note(self, data: PolicyData) -> str | None:
        """Returns a line on the validation loss."""
        del data
        return "the validation loss is the mean reward of held-out prompts, negated"

    def batch_spec(self, data: PolicyData, num_labels: int, num_choices: int) -> BatchSpec:
        """Returns the arrays of a sampled answer."""
        del num_labels, num_choices
        row = (data.length,)
        tokens, mask = ArraySpec(row, Values.TARGET_TOKEN), ArraySpec(row, Values.MASK)
        arrays = {"input_ids": tokens, "labels": tokens, "attention_mask": mask, "loss_mask": mask}
        return arrays | {"advantages": ArraySpec((), Values.LABEL, "float32")}

    def prepare(self, data: PolicyData, open_reference: OpenReference) -> PolicyData:
        """Returns the data whose prompts leave room for the longest answer."""
        del open_reference
        return data.with_answer_length(self.answer_length(data))


def per_token_spec(length: int) -> ArraySpec:
    """Returns the description of a number at each token of a row."""
    return ArraySpec((length,), Values.LABEL, "float32")


def near_zero_note(settings: OnlineConfig) -> str:
    """Returns the note on a loss without a value: near 0 before the first update of a step."""
    note = "the validation loss is the mean reward of held-out prompts, negated"
    if settings.updates_several:
        return note
    return f"{note}; the loss of a step is near 0 whatever the rewards, its gradient is not"
