"""The base class of post-training data: reads and splits records and sets the chat template."""

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
    """The texts of demonstrations, for training a tokenizer; see ``token_corpus.Texts``."""

    demonstrations: Sequence[Demonstration]

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for equal texts in the same order."""
        return digest(self)

    def __iter__(self) -> Iterator[str]:
        return (text for example in self.demonstrations for text in example.texts if text)


@dataclass
class Unusable:
    """Separates usable records from unusable records, and collects the reasons.

    Attributes:
      strict: Whether an unusable record raises an error.
      noun: The noun for one record, for error messages.
      messages: For each unusable record, its location and the reason why it cannot be used.
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
        """Applies `use` to each record, and returns the usable records with their results.

        Args:
          records: Pairs of a location and a record. The location is empty if the errors of `use`
            already contain it.
          use: The function that computes the result for a record.
          unusable: The class of the errors that `use` raises for a record that cannot be used.

        Raises:
          DataError: None of the records can be used, ``strict`` is true and a record cannot be
            used, or an error affects all records.
        """
        used: list[tuple[R, X]] = []
        for location, record in records:
            try:
                used.append((record, use(record)))
            # A template that does not end would reach its time limit for every record, so stop now.
            except EndlessTemplateError:
                raise
            except unusable as error:
                message = f"{location}: {error}" if location else str(error)
                if self.strict:
                    raise DataError(message) from None
                self.messages.append(message)
        # If no record is usable, raise an error with the first reason.
        if self.messages and not used:
            number = counted(len(self.messages), self.noun)
            raise DataError(f"none of {number} can be used; the first: {self.messages[0]}")
        return used


@dataclass(frozen=True, kw_only=True)
class ChatData(MixableData, Generic[R]):
    """Data whose keys determine the form of each record; see the data guide."""

    source: SourceField
    """The source of the records: jsonl:GLOB, parquet:GLOB, arrow:GLOB, tfds:NAME/CONFIG or
    hf:NAME/CONFIG, or several such sources joined by " + ". The keys of a record determine its
    form. Answers to learn are in the fields messages, prompt and completion, or instruction and
    output. Preferences are in the fields chosen and rejected. Prompts for sampled answers are in
    the field prompt or messages, next to the fields that the rewards read. builtin:sums and
    builtin:calculations need no download. In Python, a list of examples is also accepted.
    """
    template: str | None = None
    """A folder or a file with the chat template. Defaults to the tokenizer's template, or to lines
    of `user: …` and `bot: …` if the tokenizer has none.
    """
    hold_out: tuple[str, ...] = ()
    """Names of tasks used only for validation; the field `task` of a record names its task."""
    strict: bool = False
    """Whether a record that cannot be used, such as a record with an empty answer, raises an error.
    By default, such records are left out and counted.
    """

    def with_chat_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """Sets the tokenizer's chat template from the data, and returns the tokenizer.

        The template is stored with the run.

        Raises:
          DataError: `template` names no chat template.
        """
        # The template of the data takes precedence over the tokenizer's template.
        template = tokenizer.chat_template
        if self.template is not None:
            path = Path(self.template).expanduser()
            named = require_value(
                ChatTemplate(read_template(path)) if path.is_file() else find_template(path),
                "data.template must be a folder with chat_template.jinja, or such a file, got "
                f"{self.template!r}",
                DataError,
            )
            # A template file defines no tokens, so keep the tokens of the tokenizer's template.
            template = dataclasses.replace(named, tokens={**template.tokens, **named.tokens})
        if tokenizer.own_chat_template is None and tokenizer.batch_settings is not None:
            # The template writes the names of special tokens, which must be encoded as these
            # tokens.
            settings = dataclasses.replace(tokenizer.batch_settings, split_special_tokens=False)
            tokenizer.batch_settings = settings
        tokenizer.own_chat_template = template
        return tokenizer

    @abstractmethod
    def records_of(self, row: Row, location: str) -> Iterator[R]:
        """Yields the records in a row of the source."""

    @abstractmethod
    def demonstrations_of(self, record: R) -> tuple[Demonstration, ...]:
        """Returns the demonstrations in a record; a hash of the first one determines the split."""

    @abstractmethod
    def encode(self, records: Sequence[R], tokenizer: Tokenizer, seed: int | None) -> DataSplit:
        """Makes examples from records. A `seed` of None means that they are for evaluation."""

    def read(
        self, source: SourceLike, split: Split = "train", left_out: LeftOut | None = None
    ) -> list[R]:
        """Reads all records of a source.

        Args:
          source: The source.
          split: The split, for sources that have splits.
          left_out: Counter of the records that do not satisfy the source's conditions.

        Raises:
          DataError: The source cannot be read, no record can be used, or `strict` is true and a
            record cannot be used.
        """
        unusable = Unusable(self.strict, "record")
        rows = (("", located) for located in read_rows(source, split, left_out))
        # Other errors, such as an unknown role, affect all records and stop the reading.
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
        """Encodes records, and leaves out those that are unusable or too long.

        Args:
          records: The records.
          encode: A function that encodes a record.
          size: A function that returns the number of tokens of an encoded record.
          noun: The noun for one record, for messages.
          most: The maximum number of tokens.
          setting: The setting that determines the maximum, with its value, for messages.

        Returns:
          The remaining records (at least one), each with its encoded form, and log lines about the
          records that were left out.

        Raises:
          DataError: No record is left, or `strict` is true and a record cannot be used.
        """
        unusable = Unusable(self.strict, noun)
        # Tokenization errors do not mention the record, so add its location.
        located = ((self.demonstrations_of(record)[0].location, record) for record in records)
        encoded = unusable.used(located, encode)
        # A truncated text would teach an incomplete answer, so leave out the record.
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
        """Returns the texts of all records that are not held out."""
        records = self._part("train", LeftOut())
        return ChatTexts([one for record in records for one in self.demonstrations_of(record)])

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the examples from all records that are not held out."""
        left_out = LeftOut()
        if not self.mixture:
            return _noted(self.encode(self._part("train", left_out), tokenizer, seed), left_out)
        parts = self._parts("train", left_out)
        split = self.mixed(parts, lambda records: self.encode(records, tokenizer, seed))
        return _noted(split, left_out)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the examples of `validation`, or the held-out examples if it is not set."""
        left_out = LeftOut()
        return _noted(self.encode(self._part("validation", left_out), tokenizer, None), left_out)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all examples of a given source."""
        left_out = LeftOut()
        records = self.read(source, "validation", left_out)
        return _noted(self.encode(records, tokenizer, None), left_out)

    def _part(self, split: Split, left_out: LeftOut) -> list[R]:
        """Returns the records of a split; records with equal openings are in the same split."""
        if split == "validation" and self.validation is not None:
            require_unmixed(as_source(self.validation), "a validation")
            return self.read(self.validation, "validation", left_out)
        return list(chain.from_iterable(self._parts(split, left_out)))

    def _parts(self, split: Split, left_out: LeftOut) -> list[list[R]]:
        """Returns the records of a split, as one list for each source of a mixture."""
        names = [term.source for term in self.mixture] or [self.source]
        parts = [self.read(name, "train", left_out) for name in names]
        # Divide all sources together, so that no prompt is in both splits.
        kept = set(map(id, self._divided(list(chain.from_iterable(parts)), split)))
        return [list(filter(lambda record: id(record) in kept, part)) for part in parts]

    def _divided(self, records: list[R], split: Split) -> list[R]:
        # If tasks are held out, do not split the records at random.
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
        """Returns the records of the held-out tasks for validation, and all others for training."""
        tasks = [self.demonstrations_of(record)[0].task for record in records]
        known = sorted({*filter(None, tasks)})
        for name in self.hold_out:
            require_one_of(f"data.hold_out of {self.source_name}", name, known, error=DataError)
        # Training uses all other tasks and the records that do not name a task.
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
        """Returns a hash of all inputs that determine the examples."""
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
    """Adds notes to a split about the records that the conditions of its source leave out."""
    notes = (*split.notes, *left_out_notes(left_out, "record"))
    return dataclasses.replace(split, notes=notes)
