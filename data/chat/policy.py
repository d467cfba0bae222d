"""Prompts for reinforcement learning; the model samples the answers.

An example is a prompt. Its arrays are ``prompt_ids`` and ``prompt_mask``, int32 [P], padded on the
left, and ``epoch`` and ``index``, int32 []. The last two identify the record of the prompt, so that
a reward can read fields such as ``answer``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import require
from ..corpora.token_corpus import Texts
from ..dataset import ArraySpec, BatchSpec, DataSplit, Values
from ..filters.conditions import LeftOut
from ..sources.builtin.toys import Toy, ToyText
from ..sources.documents import Documents, SourceLike, as_source
from ..sources.hash_split import Split
from ..sources.source_names import require_unmixed
from ..tokenizers.base import Tokenizer
from .chat_data import ChatData
from .records import (
    Demonstration,
    Dialogue,
    PromptedText,
    UnusableRecordError,
    demonstration,
    form_of,
    preferences,
    task_of,
)
from .rows import Row

PROMPTS_PER_EPOCH = 1 << 16
"""The number of prompts in an epoch of an endless source; every epoch has new prompts."""
_SAMPLED_PROMPTS = 256


@dataclass(frozen=True)
class Prompt:
    """A prompt, its tokens, and the fields that rewards may read.

    Attributes:
      context: The input that the model continues: a ``PromptedText`` with an empty completion, or a
          conversation.
      text: The text that the model reads. The chat template renders a conversation as a text.
      ids: The tokens of the text.
      fields: The fields of the record, which rewards may read.
    """

    context: Demonstration
    text: str
    ids: tuple[int, ...]
    fields: Row = field(default_factory=dict)


@dataclass(frozen=True)
class PromptRecord:
    """A prompt before tokenization; see ``Prompt``."""

    context: Demonstration
    fields: Row

    def encode(self, tokenizer: Tokenizer) -> Prompt:
        """Returns the prompt and its tokens."""
        text, ids = self.context.prompt_tokens(tokenizer)
        return Prompt(self.context, text, tuple(ids), self.fields)


def prompt_record(row: Row, location: str) -> PromptRecord:
    """Reads the prompt of a record; the keys of the record determine where the prompt is.

    Args:
      row: The record. Its field ``prompt`` is a text or a list of messages. If there is no such
        field, the prompt is the ``text`` of the record, or a demonstration or preference without
        its answer.
      location: The location of the record, for error messages.

    Raises:
      DataError: The keys match none of these forms, or a value has the wrong type.
    """
    context = replace(_context(row, location), task=task_of(row), location=location)
    fields = {name: x for name, x in row.items() if name != "prompt"}
    if isinstance(context, Dialogue):
        # Rewards find the conversation in this field, even if the record has other keys.
        fields["messages"] = list(context.messages)
    problem = f"{location} has an empty prompt: leave the record out"
    require(context.opening.strip(), problem, error=UnusableRecordError)
    return PromptRecord(context, fields)


def _context(row: Row, location: str) -> Demonstration:
    """Returns the text or conversation that the model continues, based on the record's keys."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return PromptedText(prompt, "")
    if prompt is not None:
        # Read a list of messages as a conversation.
        return demonstration({"messages": prompt, "tools": row.get("tools")}, location)
    # Both answers of a preference follow the same prompt.
    if {"chosen", "rejected"} <= row.keys() and "text" not in row:
        chosen = next(preferences(row, location)).chosen
        if isinstance(chosen, Dialogue):
            return replace(chosen, messages=chosen.messages[: chosen.first], first=0)
        return replace(chosen, completion="")
    require(
        form_of(row),
        f"{location} has the fields {', '.join(map(str, row)) or 'none'}: a prompt is a field "
        "prompt or text, or the beginning of a demonstration or preference",
        error=UnusableRecordError,
    )
    return demonstration(row, location).without_answer()


def _of_toy(text: ToyText) -> PromptRecord:
    return PromptRecord(PromptedText(text.prompt, ""), text.fields)


class Prompts(Protocol):
    """The prompts of a run, indexed by epoch and position."""

    def __len__(self) -> int:
        """Returns the number of prompts in an epoch."""
        ...

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Returns a prompt, which depends only on the arguments."""
        ...


@dataclass(frozen=True)
class ListedPrompts:
    """A list of prompts that is the same in every epoch."""

    prompts: Sequence[Prompt]

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Returns a prompt; see ``Prompts``."""
        del epoch
        return self.prompts[index]


@dataclass(frozen=True)
class ToyPrompts:
    """The training prompts of a toy source; every epoch has new prompts."""

    toy: Toy
    tokenizer: Tokenizer
    seed: int

    def __len__(self) -> int:
        return PROMPTS_PER_EPOCH

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Returns a prompt; see ``Prompts``."""
        text = self.toy.training_text(self.seed, epoch, index)
        return _of_toy(text).encode(self.tokenizer)


@dataclass(frozen=True)
class PolicyExamples:
    """The prompts of a split as arrays; see ``dataset.ExampleSource``.

    Attributes:
      prompts: The prompts.
      length: The padded length of prompts, P.
    """

    prompts: Prompts
    length: int

    @property
    def num_examples(self) -> int:
        """The number of prompts in an epoch."""
        return len(self.prompts)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, which depends only on the arguments.

        Args:
          epoch: The epoch, counted from 0.
          index: The index of the example, in ``[0, num_examples)``.

        Returns:
          ``prompt_ids`` and ``prompt_mask``, int32 [P], padded on the left; ``epoch`` and
          ``index``, int32 [].
        """
        prompt = self.prompts.prompt(epoch, index)
        first = self.length - len(prompt.ids)
        require(
            first >= 0,
            f"the prompt {prompt.text[:60]!r} has {len(prompt.ids)} tokens, more than the "
            f"{self.length} that data.length leaves with objective.max_new_tokens: raise "
            "data.length",
            error=DataError,
        )
        ids, mask = np.zeros(self.length, np.int32), np.zeros(self.length, np.int32)
        # Pad on the left, so that all answers begin at the same position.
        ids[first:], mask[first:] = prompt.ids, 1
        return {
            "prompt_ids": ids,
            "prompt_mask": mask,
            "epoch": np.asarray(epoch, np.int32),
            "index": np.asarray(index, np.int32),
        }


@dataclass(frozen=True, kw_only=True)
class PolicyData(ChatData[PromptRecord]):
    """Prompts for reinforcement learning: the model is rewarded for its sampled answers.

    An example is a prompt. `length` is the total number of tokens in a prompt and its answer.
    """

    kind: ClassVar[str] = "policy"

    _answer_length: ClassVar[int | None] = None  # set by with_answer_length

    def with_answer_length(self, tokens: int) -> "PolicyData":
        """Returns the same data with prompts that leave room for answers of a given length.

        Args:
          tokens: The maximum number of tokens in an answer. If this method is not called, it is
            half of `length`. ``dataclasses.replace`` copies only the settings, so it drops this
            number.
        """
        # This value is not a field, because the fields are the user's settings.
        bound = replace(self)
        object.__setattr__(bound, "_answer_length", tokens)
        return bound

    @property
    def prompt_length(self) -> int:
        """The maximum number of tokens in a prompt, P."""
        longest_answer = max(self.length // 2, 1)
        return self.length - (self._answer_length or longest_answer)

    def records_of(self, row: Row, location: str) -> Iterator[PromptRecord]:
        """Yields the prompt of a record."""
        yield prompt_record(row, location)

    def demonstrations_of(self, record: PromptRecord) -> tuple[Demonstration, ...]:
        """Returns the prompt."""
        return (record.context,)

    def texts(self) -> Texts:
        """Returns the training prompts, or the documents of a toy source."""
        toy = Toy.parse(self.source_name)
        return super().texts() if toy is None else Documents.of(toy.documents())

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """Returns the specifications of a prompt's arrays; see ``DataConfig``."""
        return {
            "prompt_ids": ArraySpec((self.prompt_length,), Values.TARGET_TOKEN),
            "prompt_mask": ArraySpec((self.prompt_length,), Values.MASK),
            "epoch": ArraySpec((), Values.INDEX),
            "index": ArraySpec((), Values.INDEX),
        }

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the training prompts; a toy source provides endless prompts."""
        toy = Toy.parse(self.source_name)
        if toy is None:
            require_unmixed(self.source_name, "a policy")
            return super().train_split(tokenizer, labels, seed)
        prompts = ToyPrompts(toy, tokenizer, seed)
        # Compute the fingerprint and the summary from a sample of the endless prompts.
        texts = [toy.training_text(seed, 0, index) for index in range(_SAMPLED_PROMPTS)]
        split = self.encode(list(map(_of_toy, texts)), tokenizer, seed)
        summary = f"endless prompts of {toy.name}, such as {texts[0].prompt!r}"
        examples = PolicyExamples(prompts, self.prompt_length)
        return DataSplit(examples, None, split.fingerprint, summary)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the prompts for validation."""
        if self.validation is None and Toy.parse(self.source_name) is not None:
            return self.whole_source(self.source, tokenizer, labels)
        return super().validation_split(tokenizer, labels)

    def read(
        self, source: SourceLike, split: Split = "train", left_out: LeftOut | None = None
    ) -> list[PromptRecord]:
        """Reads all prompts of a source, or the validation prompts of a toy source."""
        toy = Toy.parse(as_source(source))
        if toy is None:
            return super().read(source, split, left_out)
        return list(map(_of_toy, toy.validation_texts()))

    def encode(
        self, records: Sequence[PromptRecord], tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """Returns the prompts that are short enough, with a note on the prompts left out."""
        del seed
        longest = self.prompt_length
        kept, notes = self.fitting(
            records,
            lambda record: record.encode(tokenizer),
            lambda prompt: len(prompt.ids),
            noun="prompt",
            most=longest,
            setting=f"the {longest} tokens of data.length {self.length} before an answer of "
            f"objective.max_new_tokens {self.length - longest}",
        )
        examples = PolicyExamples(ListedPrompts([prompt for _, prompt in kept]), longest)
        fingerprint = self.fingerprint(records, tokenizer, longest)
        return DataSplit(examples, list(records), fingerprint, counted(len(kept), "prompt"), notes)
