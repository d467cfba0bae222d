"""The base class of post-training data: records, their split, and the chat template."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from ..chat_templates.bounds import EndlessTemplateError
from ..chat_templates.chat_template import ChatTemplate, find_template, read_template
from ..common.errors import DataError, counted
from ..common.fields import require, require_one_of, require_value
from ..common.hashing import digest
from ..corpora.token_corpus import Texts
from ..dataset import DataSplit, too_long
from ..filters.conditions import LeftOut, left_out_notes
from ..sources.documents import SourceLike, as_source
from ..sources.hash_split import HashSplit, Split, text_digest
from ..sources.source_names import require_unmixed
from ..tasks.base import MixableData, SourceField
from ..tokenizers.base import Tokenizer
from .records import Demonstration, UnusableRecordError
from .rows import Row, read_rows

R = TypeVar("R")
X = TypeVar("X")


@dataclass(frozen=True)
class ChatTexts:
    """The texts of demonstrations, to train a vocabulary on; see ``token_corpus.Texts``."""

    demonstrations: Sequence[Demonstration]

    @property
    def fingerprint(self) -> str:
        """The hash is equal for equal texts in the same order."""
        return digest(self)

    def __iter__(self) -> Iterator[str]:
        return (text for example in self.demonstrations for text in example.texts if text)


@dataclass
class Unusable:
    """Leaves out the records that cannot be used.

    Attributes:
      strict: Whether an unusable record is an error.
      noun: The singular name of a record, for messages.
      messages: Why each unusable record cannot be used, with its location.
    """

    strict: bool
    noun: str
    messages: list[str] = field(default_factory=list)

    def used(
        self,
        records: Iterable[tuple[str, R]],
        use: Callable[[R], X],
        unusable: type[DataError] = DataError,
    ) -> list[tuple[R, X]]:
        """Returns the usable records, each with the result of `use`.

        Args:
          records: The records, each with its location if the errors do not name it.
          use: The function that computes the result for a record.
          unusable: The class of the errors that `use` raises for a record that cannot be used.

        Raises:
          DataError: There are records but none can be used, ``strict`` is set and one cannot be
            used, or an error affects every record.
        """
        used: list[tuple[R, X]] = []
        for location, record in records:
            try:
                used.append((record, use(record)))
            # An endless template would use up its time for every record, so stop at once.
            except EndlessTemplateError:
                raise
            except unusable as error:
                message = f"{location}: {error}" if location else str(error)
                if self.strict:
                    raise DataError(message) from None
                self.messages.append(message)
        # If every record is unusable, the first reason is the error.
        if self.messages and not used:
            number = counted(len(self.messages), self.noun)
            raise DataError(f"none of {number} can be used; the first: {self.messages[0]}")
        return used


@dataclass(frozen=True, kw_only=True)
class ChatData(MixableData, Generic[R]):
    """Data whose records are recognized by their keys; see the data guide."""

    source: SourceField
    """Records, recognized by their keys: jsonl:GLOB, parquet:GLOB, arrow:GLOB, tfds:NAME/CONFIG or
    hf:NAME/CONFIG, or several such sources, joined by " + ". Answers to learn are in the fields
    messages, prompt and completion, or instruction and output. Preferences are in chosen and
    rejected. Prompts for sampled answers are in prompt or messages, with the fields that the
    rewards read. builtin:sums and builtin:calculations need no download. In Python, a list of
    examples is also accepted."""
    template: str | None = None
    """A folder or a file with the chat template. Defaults to the tokenizer's template, or to lines
    of `user: …` and `bot: …` if the tokenizer has none.
    """
    hold_out: tuple[str, ...] = ()
    """Names of tasks that are only for validation; the field `task` of a record names its task."""
    strict: bool = False
    """Whether a record that cannot be used, such as one with an empty answer, is an error. By
    default such records are left out and counted."""

    def with_chat_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer with the chat template of the data, which is stored with the run.

        Raises:
          DataError: `template` names no chat template.
        """
        # The template of the data takes precedence over the tokenizer's.
        template = tokenizer.chat_template
        if self.template is not None:
            path = Path(self.template).expanduser()
            named = require_value(
                ChatTemplate(read_template(path)) if path.is_file() else find_template(path),
                "data.template must be a folder with chat_template.jinja, or such a file, got "
                f"{self.template!r}",
                DataError,
            )
            # A template file has no tokens, so keep the tokenizer's.
            template = dataclasses.replace(named, tokens={**template.tokens, **named.tokens})
        if tokenizer.own_chat_template is None and tokenizer.batch_settings is not None:
            # The template writes the names of special tokens, which must become these tokens.
            settings = dataclasses.replace(tokenizer.batch_settings, split_special_tokens=False)
            tokenizer.batch_settings = settings
        tokenizer.own_chat_template = template
        return tokenizer

    @abstractmethod
    def records_of(self, row: Row, location: str) -> Iterator[R]:
        """Yields the records that a row of the source contains."""

    @abstractmethod
    def demonstrations_of(self, record: R) -> tuple[Demonstration, ...]:
        """Returns the texts of a record; a hash of the first text chooses the record's split."""

    @abstractmethod
    def encode(self, records: Sequence[R], tokenizer: Tokenizer, seed: int | None) -> DataSplit:
        """Makes examples from records. If `seed` is None, the examples are for an evaluation."""

    def read(
        self, source: SourceLike, split: Split = "train", left_out: LeftOut | None = None
    ) -> list[R]:
        """Reads all records of a source.

        Args:
          source: The source.
          split: The split, for sources that have splits.
          left_out: Counts the records that do not satisfy the conditions of the source.

        Raises:
          DataError: The source cannot be read, no record can be used, or `strict` is set and one
            cannot be used.
        """
        unusable = Unusable(self.strict, "record")
        rows = (("", located) for located in read_rows(source, split, left_out))
        # Other errors, such as an unknown role, concern all records and end the reading.
        used = unusable.used(
            rows, lambda one: list(self.records_of(one[1], one[0])), UnusableRecordError
        )
        if left_out is not None and (wrong := unusable.messages):
            left_out[f"the check of contents; the first: {wrong[0]}"] += len(wrong)
        return [record for _, records in used for record in records]

    def fitting(
        self,
        records: Sequence[R],
        encode: Callable[[R], X],
        size: Callable[[X], int],
        *,
        noun: str,
        most: int,
        setting: str,
    ) -> tuple[list[tuple[R, X]], tuple[str, ...]]:
        """Encodes records, and leaves out records that cannot be used or are too long.

        Args:
          records: The records.
          encode: Encodes a record.
          size: Returns the number of tokens of an encoded record.
          noun: The singular name of a record.
          most: The maximum size.
          setting: The setting that determines the maximum, with its value, for messages.

        Returns:
          The remaining records (at least one) with their encoded forms, and log lines about the
          omitted records.

        Raises:
          DataError: No record is left, or `strict` is set and one cannot be used.
        """
        unusable = Unusable(self.strict, noun)
        # Errors of tokenization do not name the record, so add its location.
        located = ((self.demonstrations_of(record)[0].location, record) for record in records)
        encoded = unusable.used(located, encode)
        # A truncated text would teach an answer without its end, so leave it out.
        kept = [(record, one) for record, one in encoded if size(one) <= most]
        shortest = min((size(one) for _, one in encoded), default=0)
        require(
            kept,
            f"none of {counted(len(records), noun)} has at most {most} tokens, limited by "
            f"{setting}; the shortest has {shortest}: give a larger data.length",
            error=DataError,
        )
        notes = too_long(len(encoded) - len(kept), len(records), noun, setting)
        number, of = len(unusable.messages), counted(len(records), noun)
        if number:
            notes += (f"{number:,} of {of} left out; the first: {unusable.messages[0]}",)
        return kept, notes

    def texts(self) -> Texts:
        """Returns the texts of the records that are not held out."""
        records = self._part("train", LeftOut())
        return ChatTexts([one for record in records for one in self.demonstrations_of(record)])

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the examples of the records that are not held out."""
        left_out = LeftOut()
        if not self.mixture:
            return _noted(self.encode(self._part("train", left_out), tokenizer, seed), left_out)
        parts = self._parts("train", left_out)
        split = self.mixed(parts, lambda records: self.encode(records, tokenizer, seed))
        return _noted(split, left_out)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the examples of the source `validation`; without one, the held-out examples."""
        left_out = LeftOut()
        return _noted(self.encode(self._part("validation", left_out), tokenizer, None), left_out)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all examples of another source."""
        left_out = LeftOut()
        records = self.read(source, "validation", left_out)
        return _noted(self.encode(records, tokenizer, None), left_out)

    def _part(self, split: Split, left_out: LeftOut) -> list[R]:
        """Returns the records of a split; records with equal openings share a split."""
        if split == "validation" and self.validation is not None:
            require_unmixed(as_source(self.validation), "a validation")
            return self.read(self.validation, "validation", left_out)
        return list(chain.from_iterable(self._parts(split, left_out)))

    def _parts(self, split: Split, left_out: LeftOut) -> list[list[R]]:
        """Returns the records of each source of a mixture, or of the only source."""
        names = [term.source for term in self.mixture] or [self.source]
        parts = [self.read(name, "train", left_out) for name in names]
        # The sources are divided together, so that no prompt is in both splits.
        kept = set(map(id, self._divided(list(chain.from_iterable(parts)), split)))
        return [list(filter(lambda record: id(record) in kept, part)) for part in parts]

    def _divided(self, records: list[R], split: Split) -> list[R]:
        # Held-out tasks replace a random split.
        if self.hold_out:
            return self._of_tasks(records, split)
        fraction = self.held_out_fraction
        if fraction == 0 and split == "train":
            return records
        require(
            fraction > 0,
            f"{self.source_name!r} has no validation split: set validation_fraction above 0, or "
            "name data.validation",
            error=DataError,
        )
        # Split by the opening, so that no prompt is in both splits.
        digests = [text_digest(self.demonstrations_of(record)[0].opening) for record in records]
        division = HashSplit.of(digests, fraction, self.source_name)
        of_each = zip(records, digests, strict=True)
        return [record for record, digest in of_each if division.split(digest) == split]

    def _of_tasks(self, records: Sequence[R], split: Split) -> list[R]:
        """Returns the records of the tasks that are held out, or all other records."""
        tasks = [self.demonstrations_of(record)[0].task for record in records]
        known = sorted({*filter(None, tasks)})
        for name in self.hold_out:
            require_one_of(f"data.hold_out of {self.source_name}", name, known, error=DataError)
        # Training sees all other tasks, and records that name no task.
        held_out = split == "validation"
        of_each = zip(records, tasks, strict=True)
        kept = [record for record, task in of_each if (task in self.hold_out) == held_out]
        require(
            kept,
            f"data.hold_out {', '.join(self.hold_out)} leaves no task of {self.source_name} to "
            "train on: hold out fewer tasks",
            error=DataError,
        )
        return kept

    def fingerprint(self, records: Sequence[R], tokenizer: Tokenizer, *settings: object) -> str:
        """Returns a hash of everything that determines the examples."""
        # The tokenizer's fingerprint does not cover its chat template.
        template = tokenizer.chat_template
        decisive = [repr((self.length, *settings)), tokenizer.fingerprint]
        decisive += [
            template.source,
            template.with_tools or "",
            repr(sorted(template.tokens.items())),
        ]
        return digest(decisive, map(repr, records))


def _noted(split: DataSplit, left_out: LeftOut) -> DataSplit:
    """Returns a split with a note of the records that the conditions of its source leave out."""
    notes = (*split.notes, *left_out_notes(left_out, "record"))
    return dataclasses.replace(split, notes=notes)
