"""Reinforcement learning: prompts, and how answers to them are sampled and rewarded.

An example is a prompt. Its arrays are ``prompt_ids`` and ``prompt_mask`` int32 [P], padded on the
left, and ``epoch`` and ``index`` int32 [], by which the fields of its record are found again: an
``answer``, for example, that a reward compares with.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from ..corpora.token_corpus import Texts
from ..dataset import ArraySpec, BatchSpec, DataSplit, Values, counted
from ..errors import DataError, UserError, check_choices
from ..io.hashing import digest
from ..sources.builtin.toys import Toy
from ..sources.documents import Documents, SourceLike, as_source
from ..tokenizers.base import Tokenizer
from .base import DataConfig

PROMPTS_PER_EPOCH = 1 << 16
"""Prompts in an epoch of an endless source; every epoch has new ones."""
_SAMPLED_PROMPTS = 256

Algorithm = Literal["grpo", "rloo", "ppo"]
"""How a policy learns from rewards."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are sampled and rewarded, and what is learned from the rewards.

    A setting that is None has the default of TRL for the algorithm.
    """

    algorithm: Algorithm = "grpo"
    """grpo: rewards are compared within the answers to a prompt, token by token. rloo: likewise,
    each answer with the others, as a whole. ppo: a learned value predicts the reward."""
    num_generations: int | None = None
    """Answers to each prompt, G; by default 8 for grpo, 2 for rloo and 1 for ppo. A step samples
    and learns from batch_size · G answers."""
    max_new_tokens: int | None = None
    """Tokens of an answer at most, its end token included; by default half of data.length. What
    is left of data.length is the longest prompt."""
    temperature: float | None = None
    """Divisor of the logits in sampling and in the loss; by default 1, for ppo 0.7."""
    rewards: tuple[str, ...] = ()
    """Rewards of an answer, one or several: exact_match, arithmetic, format:REGEX, length:N,
    contains:WORD, or the folder of a reward model's run."""
    reward_weights: tuple[float, ...] = ()
    """The factor of each reward in their sum; by default 1."""
    beta: float | None = None
    """Weight of the divergence from the model at the start; by default 0 for grpo, else 0.05.
    Above 0 the checkpoints hold that model, too."""
    num_iterations: int | None = None
    """Passes over the answers of a step; by default 1, for ppo 4."""
    num_mini_batches: int = 1
    """Updates in each of these passes."""
    epsilon: float = 0.2
    """Largest relative change of a probability that is rewarded."""
    epsilon_high: float | None = None
    """Largest relative increase, if not `epsilon`; for grpo."""
    loss: Literal["dapo", "grpo", "bnpo", "dr_grpo"] = "dapo"
    """How grpo averages over tokens."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """The standard deviation by which grpo divides rewards."""
    importance: Literal["token", "sequence"] = "token"
    """Ratios of probabilities of tokens or of whole answers, for grpo."""
    mask_truncated: bool = False
    """Whether answers without an end are left out of the loss."""
    missing_end_penalty: float = 0.0
    """Penalty of an answer without an end, subtracted from its reward."""
    value_coefficient: float = 0.1
    """Weight of the value's squared error, for ppo."""
    epsilon_value: float = 0.2
    """Largest change of a value that is learned, for ppo."""
    gamma: float = 1.0
    """Discount of later rewards, for ppo."""
    gae_lambda: float = 0.95
    """Weight of later values against earlier ones in advantages, for ppo."""
    whiten_rewards: bool = False
    """Whether rewards of tokens are scaled to variance 1, for ppo."""

    def __post_init__(self) -> None:
        check_choices(self)
        self._check_numbers()
        for name in ("rewards", "reward_weights"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def _check_numbers(self) -> None:
        """Checks the ranges of all numbers, and that they belong to the algorithm."""
        grouped = self.algorithm != "ppo"
        least = {
            "num_generations": 2 if grouped else 1,
            "max_new_tokens": 1,
            "num_iterations": 1,
            "num_mini_batches": 1,
        }
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                why = f" for {self.algorithm}, which compares answers" if smallest == 2 else ""
                raise UserError(f"data.rollout.{name} {value} must be at least {smallest}{why}")
        for name in (
            *("beta", "epsilon", "epsilon_high", "missing_end_penalty", "value_coefficient"),
            "epsilon_value",
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"data.rollout.{name} {value} must be at least 0")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"data.rollout.{name} {getattr(self, name)} must be from 0 to 1")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise UserError(f"data.rollout.temperature {self.temperature} must be above 0")
        owners = {
            "grpo": ("epsilon_high", "loss", "scale_rewards", "importance"),
            "ppo": (
                *("value_coefficient", "epsilon_value", "gamma", "gae_lambda", "whiten_rewards"),
            ),
        }
        defaults = type(self).__dataclass_fields__
        for owner, names in owners.items():
            for name in names:
                value = getattr(self, name)
                if owner != self.algorithm and value != defaults[name].default:
                    raise UserError(
                        f"data.rollout.{name} {value} belongs to {owner}, and data.rollout."
                        f"algorithm is {self.algorithm}: leave it out"
                    )

    @property
    def updates_several(self) -> bool:
        """Whether a step has several updates, so that the policy leaves the one that sampled."""
        return self.filled().num_iterations * self.num_mini_batches > 1

    def filled(self) -> "FilledRollout":
        """Returns the settings that depend on the algorithm, with its defaults."""
        given = {name: getattr(self, name) for name in _USUAL[self.algorithm]}
        chosen = {name: value for name, value in given.items() if value is not None}
        return FilledRollout(**{**_USUAL[self.algorithm], **chosen})


@dataclass(frozen=True, kw_only=True)
class FilledRollout:
    """The settings of ``RolloutConfig`` that depend on the algorithm, none of them None."""

    num_generations: int
    temperature: float
    beta: float
    num_iterations: int


# As TRL has them.
_USUAL: dict[Algorithm, dict[str, Any]] = {
    "grpo": {"num_generations": 8, "temperature": 1.0, "beta": 0.0, "num_iterations": 1},
    "rloo": {"num_generations": 2, "temperature": 1.0, "beta": 0.05, "num_iterations": 1},
    "ppo": {"num_generations": 1, "temperature": 0.7, "beta": 0.05, "num_iterations": 4},
}


@dataclass(frozen=True)
class Prompt:
    """A prompt as its record has it.

    Attributes:
      text: The text that the model continues.
      fields: All other fields of the record, which rewards may read.
    """

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class Prompts(Protocol):
    """Prompts by epoch and index."""

    def __len__(self) -> int:
        """Returns the number of prompts in an epoch."""
        ...

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Returns a prompt, a pure function of the arguments."""
        ...


@dataclass(frozen=True)
class ListedPrompts:
    """The same prompts in every epoch."""

    prompts: Sequence[Prompt]

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Returns a prompt; see ``Prompts``."""
        del epoch
        return self.prompts[index]


@dataclass(frozen=True)
class ToyPrompts:
    """The training prompts of a toy, new in every epoch."""

    toy: Toy
    seed: int

    def __len__(self) -> int:
        return PROMPTS_PER_EPOCH

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Returns a prompt; see ``Prompts``."""
        text = self.toy.training_text(self.seed, epoch, index)
        return Prompt(text.prompt, text.fields)


@dataclass(frozen=True)
class PolicyExamples:
    """The prompts of a split as arrays; see ``dataset.ExampleSource``.

    Attributes:
      prompts: The prompts.
      tokenizer: The tokenizer of the model.
      length: The length P to which prompts are padded.
    """

    prompts: Prompts
    tokenizer: Tokenizer
    length: int

    @property
    def num_examples(self) -> int:
        """The number of prompts in an epoch."""
        return len(self.prompts)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example: a pure function of its arguments.

        Args:
          epoch: From 0.
          index: In ``[0, num_examples)``.

        Returns:
          ``prompt_ids`` and ``prompt_mask`` int32 [P], padded on the left; ``epoch`` and ``index``.
        """
        prompt = self.prompts.prompt(epoch, index)
        tokens = prompt_tokens(self.tokenizer, prompt)
        if len(tokens) > self.length:
            raise DataError(
                f"the prompt {prompt.text[:60]!r} has {len(tokens)} tokens, more than the "
                f"{self.length} that data.length leaves beside data.rollout.max_new_tokens: raise "
                "data.length"
            )
        ids, mask = np.zeros(self.length, np.int32), np.zeros(self.length, np.int32)
        ids[self.length - len(tokens) :] = tokens
        mask[self.length - len(tokens) :] = 1
        return {
            "prompt_ids": ids,
            "prompt_mask": mask,
            "epoch": np.asarray(epoch, np.int32),
            "index": np.asarray(index, np.int32),
        }


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Returns the tokens of a prompt, after the token that begins a document if there is one."""
    bos = tokenizer.special_ids.bos
    tokens = tokenizer.encode(prompt.text, add_special_tokens=False)
    return tokens if bos is None else [bos, *tokens]


@dataclass(frozen=True, kw_only=True)
class PolicyData(DataConfig):
    """Prompts whose answers a model samples and is rewarded for: reinforcement learning.

    An example is a prompt: a step takes `batch_size` prompts and learns from
    `batch_size` · `rollout.num_generations` answers. `length` is that of prompt and answer.
    """

    kind: ClassVar[str] = "policy"

    rollout: RolloutConfig = RolloutConfig()
    """How answers are sampled and rewarded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_length < 1:
            raise UserError(
                f"data.rollout.max_new_tokens {self.answer_length} leaves no token for a "
                f"prompt in data.length {self.length}: lower the first or raise the second"
            )

    @property
    def answer_length(self) -> int:
        """The longest answer in tokens, N."""
        given = self.rollout.max_new_tokens
        return max(self.length // 2, 1) if given is None else given

    @property
    def prompt_length(self) -> int:
        """The longest prompt in tokens, P."""
        return self.length - self.answer_length

    def texts(self) -> Texts:
        """Returns the training prompts and, of a toy, its answers."""
        toy = Toy.parse(self.source_name)
        if toy is not None:
            return Documents.of(toy.documents())
        return Documents.of([prompt.text for prompt in self._listed(self.source_name)])

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``: the arrays of a prompt."""
        return {
            "prompt_ids": ArraySpec((self.prompt_length,), Values.TARGET_TOKEN),
            "prompt_mask": ArraySpec((self.prompt_length,), Values.MASK),
            "epoch": ArraySpec((), Values.INDEX),
            "index": ArraySpec((), Values.INDEX),
        }

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the prompts to learn from."""
        toy = Toy.parse(self.source_name)
        if toy is None:
            return self._split(self._listed(self.source_name), tokenizer)
        prompts = ToyPrompts(toy, seed)
        sample = [prompts.prompt(0, index) for index in range(_SAMPLED_PROMPTS)]
        split = self._split(sample, tokenizer)
        examples = PolicyExamples(prompts, tokenizer, self.prompt_length)
        summary = f"endless prompts of {toy.name}, such as {sample[0].text!r}"
        return DataSplit(examples, None, split.fingerprint, summary)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the prompts to validate on."""
        if self.validation is not None:
            return self.whole_source(self.validation, tokenizer, labels)
        return self.whole_source(self.source, tokenizer, labels)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all prompts of a source; of a toy those that are held out."""
        name = as_source(source)
        toy = Toy.parse(name)
        if toy is None:
            return self._split(self._listed(name), tokenizer)
        listed = [Prompt(text.prompt, text.fields) for text in toy.validation_texts()]
        return self._split(listed, tokenizer)

    def _listed(self, name: str) -> list[Prompt]:
        raise DataError(f"{name!r} has no prompts: give builtin:sums or builtin:words")

    def _split(self, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> DataSplit:
        """Returns the prompts that are short enough, with a note of the others."""
        every = [len(prompt_tokens(tokenizer, prompt)) for prompt in prompts]
        kept = [
            prompt
            for prompt, number in zip(prompts, every, strict=True)
            if number <= self.prompt_length
        ]
        if not kept:
            raise DataError(
                f"no prompt has at most {self.prompt_length} tokens, which data.length "
                f"{self.length} leaves beside data.rollout.max_new_tokens "
                f"{self.answer_length}; the shortest has {min(every)}: raise data.length"
            )
        left_out = len(prompts) - len(kept)
        notes = ()
        if left_out:
            notes = (
                f"left out: {counted(left_out, 'prompt')} longer than {self.prompt_length} tokens",
            )
        examples = PolicyExamples(ListedPrompts(kept), tokenizer, self.prompt_length)
        fingerprint = digest(_lines(kept, tokenizer.fingerprint, self.prompt_length))
        return DataSplit(examples, None, fingerprint, counted(len(kept), "prompt"), notes)


def _lines(prompts: Sequence[Prompt], tokenizer: str, length: int) -> Iterator[str]:
    yield f"{tokenizer} {length}"
    for prompt in prompts:
        yield repr((prompt.text, sorted(prompt.fields.items())))
