"""Reinforcement learning: prompts, and how answers to them are sampled and rewarded.

An example is a prompt. Its arrays are ``prompt_ids`` and ``prompt_mask`` int32 [P], padded on the
left, and ``epoch`` and ``index`` int32 [], by which the fields of its record are found again: an
``answer``, for example, that a reward compares with.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from ..common.errors import DataError, UserError, check_choices
from ..corpora.token_corpus import Texts
from ..dataset import ArraySpec, BatchSpec, DataSplit, Values, counted, too_long
from ..filters.conditions import LeftOut
from ..sources.builtin.toys import Toy
from ..sources.documents import Documents, SourceLike, Split, as_source
from ..tokenizers.base import Tokenizer
from .chat_data import ChatData, Unusable
from .encoding import encode_chat
from .records import (
    Demonstration,
    Dialogue,
    PromptedText,
    UnusableRecordError,
    demonstration,
    preferences,
)
from .rows import Row

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
    """Tokens of an answer at most, its end token included; None: half of data.length. What
    is left of data.length is the longest prompt."""
    temperature: float | None = None
    """Divisor of the logits in sampling and in the loss; by default 1, for ppo 0.7."""
    rewards: tuple[str, ...] = ()
    """Rewards of an answer, one or several: exact_match, arithmetic, format:REGEX, length:N,
    contains:WORD, or the folder of a reward model's run."""
    reward_weights: tuple[float, ...] = ()
    """The factor of each reward in their sum; by default 1."""
    beta: float | None = None
    """Weight of the divergence from the model at the start; None: 0 for grpo, else 0.05. Above 0
    the checkpoints hold that model, too."""
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
    """A prompt, and what a reward may know of it.

    Attributes:
      begun: A text, whose completion is empty, or a conversation that the assistant continues.
      text: The text that the model reads: that of ``begun``, by the chat template.
      ids: Its tokens.
      fields: The fields of its record, which rewards may read.
    """

    begun: Demonstration
    text: str
    ids: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptRecord:
    """A prompt as its record has it; see ``Prompt``."""

    begun: Demonstration
    fields: Mapping[str, Any]

    def encode(self, tokenizer: Tokenizer) -> Prompt:
        """Returns the prompt with its tokens."""
        if isinstance(self.begun, Dialogue):
            encoded = encode_chat(
                tokenizer,
                self.begun.messages,
                tools=self.begun.tools,
                add_generation_prompt=True,
            )
            return Prompt(self.begun, encoded.text, tuple(encoded.ids), self.fields)
        text = self.begun.prompt
        ids = tokenizer.encode(text, add_special_tokens=False)
        return Prompt(self.begun, text, (*tokenizer.frame.before, *ids), self.fields)


def prompt_record(row: Row, location: str) -> PromptRecord:
    """Reads a prompt by the keys of a record.

    Args:
      row: The record. Its ``prompt`` is a text or a list of messages; without one it is a
        demonstration or a preference, whose answer is left out, or a ``text``.
      location: Its location, for messages.

    Raises:
      DataError: The keys are those of no form, or a value has another type.
    """
    task = row.get("task")
    task = None if task is None else str(task)
    prompt, fields = row.get("prompt"), {name: x for name, x in row.items() if name != "prompt"}
    if isinstance(prompt, str):
        begun: Demonstration = PromptedText(prompt, "", task)
    elif "text" in row and prompt is None:
        begun = replace(demonstration(row, location), task=task)
        assert isinstance(begun, PromptedText)
        begun = PromptedText(begun.completion, "", task)
    elif prompt is not None:
        whole = demonstration({"messages": prompt, "tools": row.get("tools")}, location)
        begun = replace(whole, task=task)
    elif {"chosen", "rejected"} <= row.keys():
        begun = next(preferences(row, location)).chosen
        if isinstance(begun, Dialogue):
            begun = replace(begun, messages=begun.messages[: begun.first], first=0, task=task)
        else:
            begun = PromptedText(begun.prompt, "", task)
    else:
        try:
            begun = _without_answer(demonstration(row, location))
        except DataError as error:
            if not {"completion", "messages", "conversations", "instruction"}.isdisjoint(row):
                raise
            raise DataError(
                f"{location} has the fields {', '.join(map(str, row)) or 'none'}: a prompt is a "
                "field prompt or text, or the beginning of a demonstration or preference"
            ) from error
    if isinstance(begun, Dialogue):
        fields = {**fields, "messages": list(begun.messages)}
    if not begun.opening.strip():
        raise UnusableRecordError(f"{location} has an empty prompt: leave the record out")
    return PromptRecord(replace(begun, location=location), fields)


def _without_answer(whole: Demonstration) -> Demonstration:
    """Returns a conversation up to its last answer."""
    if isinstance(whole, PromptedText):
        return replace(whole, completion="")
    messages = list(whole.messages)
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()
    return replace(whole, messages=tuple(messages), first=0)


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
    tokenizer: Tokenizer
    seed: int

    def __len__(self) -> int:
        return PROMPTS_PER_EPOCH

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Returns a prompt; see ``Prompts``."""
        text = self.toy.training_text(self.seed, epoch, index)
        return PromptRecord(PromptedText(text.prompt, ""), text.fields).encode(self.tokenizer)


@dataclass(frozen=True)
class PolicyExamples:
    """The prompts of a split as arrays; see ``dataset.ExampleSource``.

    Attributes:
      prompts: The prompts.
      length: The length P to which prompts are padded.
    """

    prompts: Prompts
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
        if len(prompt.ids) > self.length:
            raise DataError(
                f"the prompt {prompt.text[:60]!r} has {len(prompt.ids)} tokens, more than the "
                f"{self.length} that data.length leaves beside data.rollout.max_new_tokens: raise "
                "data.length"
            )
        ids, mask = np.zeros(self.length, np.int32), np.zeros(self.length, np.int32)
        ids[self.length - len(prompt.ids) :] = prompt.ids
        mask[self.length - len(prompt.ids) :] = 1
        return {
            "prompt_ids": ids,
            "prompt_mask": mask,
            "epoch": np.asarray(epoch, np.int32),
            "index": np.asarray(index, np.int32),
        }


@dataclass(frozen=True, kw_only=True)
class PolicyData(ChatData[PromptRecord]):
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

    def records_of(self, row: Row, location: str) -> Iterator[PromptRecord]:
        """Yields the prompt of a record."""
        yield prompt_record(row, location)

    def demonstrations_of(self, record: PromptRecord) -> tuple[Demonstration, ...]:
        """Returns the prompt."""
        return (record.begun,)

    def texts(self) -> Texts:
        """Returns the training prompts; of a toy its documents."""
        toy = Toy.parse(self.source_name)
        return super().texts() if toy is None else Documents.of(toy.documents())

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``: the arrays of a prompt."""
        return {
            "prompt_ids": ArraySpec((self.prompt_length,), Values.TARGET_TOKEN),
            "prompt_mask": ArraySpec((self.prompt_length,), Values.MASK),
            "epoch": ArraySpec((), Values.INDEX),
            "index": ArraySpec((), Values.INDEX),
        }

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the prompts to learn from; those of a toy are endless."""
        toy = Toy.parse(self.source_name)
        if toy is None:
            return super().train_split(tokenizer, labels, seed)
        prompts = ToyPrompts(toy, tokenizer, seed)
        texts = [toy.training_text(seed, 0, index) for index in range(_SAMPLED_PROMPTS)]
        records = [PromptRecord(PromptedText(text.prompt, ""), text.fields) for text in texts]
        split = self.encode(records, tokenizer, seed)
        summary = f"endless prompts of {toy.name}, such as {texts[0].prompt!r}"
        examples = PolicyExamples(prompts, self.prompt_length)
        return DataSplit(examples, None, split.fingerprint, summary)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the prompts to validate on."""
        if self.validation is None and Toy.parse(self.source_name) is not None:
            return self.whole_source(self.source, tokenizer, labels)
        return super().validation_split(tokenizer, labels)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all prompts of a source; of a toy those to validate on."""
        if Toy.parse(as_source(source)) is None:
            return super().whole_source(source, tokenizer, labels)
        return self.encode(self.read(source, "validation"), tokenizer, None)

    def read(
        self, source: SourceLike, split: Split = "train", left_out: LeftOut | None = None
    ) -> list[PromptRecord]:
        """Reads all prompts of a source; of a toy those to validate on."""
        toy = Toy.parse(as_source(source))
        if toy is None:
            return super().read(source, split, left_out)
        texts = toy.validation_texts()
        return [PromptRecord(PromptedText(text.prompt, ""), text.fields) for text in texts]

    def encode(
        self, records: Sequence[PromptRecord], tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """Returns the prompts that are short enough, with a note of the others."""
        del seed
        prompts: list[Prompt] = []
        unusable = Unusable(self.strict)
        for record in records:
            try:
                prompts.append(record.encode(tokenizer))
            except DataError as error:
                unusable.add(error, record.begun.location)
        unusable.check(len(prompts), "prompt")
        kept = [prompt for prompt in prompts if len(prompt.ids) <= self.prompt_length]
        if not kept:
            shortest = min(len(prompt.ids) for prompt in prompts)
            raise DataError(
                f"no prompt has at most {self.prompt_length} tokens, which data.length "
                f"{self.length} leaves beside data.rollout.max_new_tokens "
                f"{self.answer_length}; the shortest has {shortest}: raise data.length"
            )
        limit = f"the {self.prompt_length} tokens of data.length {self.length} before an answer"
        notes = too_long(len(prompts) - len(kept), len(records), "prompt", limit)
        notes += unusable.note(len(records), "prompt")
        examples = PolicyExamples(ListedPrompts(kept), self.prompt_length)
        fingerprint = self.fingerprint(records, tokenizer, self.prompt_length)
        return DataSplit(examples, list(records), fingerprint, counted(len(kept), "prompt"), notes)
