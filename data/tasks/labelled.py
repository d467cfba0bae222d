"""Defines the base classes of data that are made from records with fields.

``RecordData`` reads any records and divides them into splits; ``LabelledData`` adds labels and
predictions. A subclass (``SequenceClassificationData`` …) declares which sources and fields it
reads, and defines how a record is converted to an example, and how examples are converted to
arrays.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Generic

from ..common.errors import DataError, counted
from ..common.fields import Range, require
from ..common.hashing import digest
from ..common.json_lines import single_fields
from ..dataset import DataSplit
from ..filters.conditions import LeftOut, left_out_notes
from ..sources.builtin.reviews import review_records
from ..sources.documents import SourceLike, as_source
from ..sources.hash_split import Split
from ..sources.in_memory import Examples
from ..sources.labelled_names import (
    PUBLISHED,
    LabelledSource,
    Record,
    parse_labelled,
    with_known_fields,
)
from ..sources.labelled_records import read_fields
from ..sources.published.local import BuiltinRecords, LocalRecords
from ..sources.published.opening import open_published
from ..sources.published.records import OpenedRecords
from ..sources.tables import LABELED_TEXTS, ColumnRoles
from ..tokenizers.base import Tokenizer
from .base import DataConfig
from .labelled_examples import E, EncodedExamples, ExampleSet, ExampleTexts, divide

# These settings are not part of the fingerprint, because they affect only the examples and the
# tokenizer, which are part of the fingerprint.
_FOUND_AGAIN = (
    *("source", "validation", "validation_fraction", "tokenizer", "num_workers"),
    "label_names",
)
_LABELS_SHOWN = 20
# If there are fewer examples than this, rare labels are normal and cause no warning.
_FEW_EXAMPLES = 8
LabelledLength = Annotated[int, Range(least=8)]
"""A sequence length that leaves room for two texts and their special tokens."""


@dataclass(frozen=True, kw_only=True)
class RecordData(DataConfig, Generic[E]):
    """The base class of all data whose examples are made from records with fields."""

    forms: ClassVar[dict[str, str]]
    """The kinds of source that can be read, each with its default fields."""
    published_fields: ClassVar[dict[str, str]] = {}
    """The fields of well-known published data sets, by the name of the data set."""
    noun: ClassVar[str] = "examples"
    columns: ClassVar[ColumnRoles] = LABELED_TEXTS
    """The roles of the columns in a table, and the names that identify a header."""

    @abstractmethod
    def read(self, records: OpenedRecords, split: Split) -> ExampleSet[E]:
        """Reads examples from a source with fields.

        Args:
          records: The opened source.
          split: The split to read, if the source is published or built in. All other sources are
            read completely.

        Raises:
          DataError: The source cannot be read, has too few or too many fields, or an example is not
            valid.
        """

    def builtin_records(self, source: LabelledSource, split: Split) -> list[Record]:
        """Returns the records of a split of a built-in source."""
        return review_records(source, split)

    def labels_in(self, example: E) -> tuple[str, ...]:
        """Returns the labels of an example that are counted for the log."""
        return ()

    def _records(
        self, records: OpenedRecords, split: Split
    ) -> tuple[list[Record], tuple[str, ...]]:
        """Returns the records of a source, and lines for the log."""
        # The conditions of the source may leave out records; the log states how many.
        notes, left_out = records.notes, LeftOut()
        read = list(records.read(split, left_out))
        return read, (*notes, *left_out_notes(left_out, "record"))

    @abstractmethod
    def encode(
        self,
        examples: Sequence[E],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> EncodedExamples:
        """Makes arrays from examples. Either all examples have labels, or none has.

        Args:
          examples: The examples.
          tokenizer: The tokenizer.
          labels: The names of the labels.
          training: Whether the arrays are for training. If False, they are for evaluation.
        """

    def decisive_settings(self) -> dict[str, object]:
        """Returns the settings that affect the arrays and are part of the fingerprint."""
        names = [field.name for field in fields(self) if field.name not in _FOUND_AGAIN]
        return {name: getattr(self, name) for name in names}

    def texts(self) -> ExampleTexts:
        """Returns the texts of the training examples."""
        return ExampleTexts(self._part("train").examples)

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the examples that are not held out. They are the same in every epoch."""
        return self._split(self._part("train"), tokenizer, labels, training=True)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the validation examples.

        They are from the validation source, or else from the published split, or else held out.
        """
        return self._split(self._part("validation"), tokenizer, labels)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all examples of a source, or the validation split of a published data set."""
        return self._split(self._read(self.open(source), "validation"), tokenizer, labels)

    def _own_source(self) -> LabelledSource:
        return parse_labelled(self.source_name, self.forms)

    def _part(self, split: Split) -> ExampleSet[E]:
        # A source that the configuration names for validation takes precedence.
        if split == "validation" and self.validation is not None:
            return self._read(self.open(self.validation), "validation")
        # If the source itself has a validation split, it is not divided.
        records = self.open(self.source)
        if records.validation is not None:
            return self._read(records, split)
        # Any other source is one set of examples, which is divided by hash.
        whole = self._read(records, "train")
        fraction = self.held_out_fraction
        if fraction == 0 and split == "train":
            return whole
        problem = f"{self.source_name!r} has no validation split: set validation_fraction above 0"
        require(fraction > 0, problem, DataError)
        return divide(whole, fraction, self.source_name)[split]

    def open(self, name: SourceLike, columns: ColumnRoles | None = None) -> OpenedRecords:
        """Opens a source of the kinds in ``forms``.

        Args:
          name: The name of the source, or a list of examples.
          columns: The roles of the columns, if the source is a table. Defaults to ``self.columns``.

        Raises:
          DataError: The kind is unknown, or a published data set cannot be opened.
        """
        source = parse_labelled(as_source(name), self.forms, self._own_source())
        if source.kind in PUBLISHED:
            return open_published(source, self.published_fields)
        if source.kind == "builtin":
            return BuiltinRecords(source, self.builtin_records)
        return LocalRecords(source, columns or self.columns)

    def _read(self, records: OpenedRecords, split: Split) -> ExampleSet[E]:
        source = records.source
        loaded = self._loaded.get((source, split))
        if loaded is None:
            loaded = self.read(records, split)
            require(
                loaded.examples,
                f"no {self.noun} in {source.name!r} (it is empty, or has only blank lines or "
                "column names): give a source that has some",
                error=DataError,
            )
            self._loaded[source, split] = loaded
        return loaded

    @cached_property
    def _loaded(self) -> dict[tuple[LabelledSource, Split], ExampleSet[E]]:
        """A cache of the examples, because labels, texts and splits need the same examples."""
        return {}

    def _split(
        self,
        loaded: ExampleSet[E],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> DataSplit:
        rows = self.encode(loaded.examples, tokenizer, labels, training=training)
        # The fingerprint depends on everything that affects the arrays: settings, labels, tokenizer
        # and examples.
        decisive = (self.kind, self.decisive_settings(), labels, training)
        fingerprint = digest([repr(decisive), tokenizer.fingerprint], map(repr, loaded.examples))
        # The `notes` are added to the summary. Each of the `lines` is a separate line in the log.
        number = counted(len(loaded.examples), self.noun.removesuffix("s"))
        summary = ", ".join([number, *rows.notes, *loaded.notes])
        notes = (*loaded.lines, *_label_note(self._counts(loaded.examples), labels))
        return DataSplit(rows, list(loaded.examples), fingerprint, summary, notes)

    def _counts(self, examples: Iterable[E]) -> Counter[str]:
        """Counts how often each label occurs in the examples."""
        return Counter(name for example in examples for name in self.labels_in(example))


@dataclass(frozen=True, kw_only=True)
class LabelledData(RecordData[E]):
    """The base class of all labeled data."""

    field_names: ClassVar[str]
    """The fields of a record as they are written in a source name, with optional fields in square
    brackets."""
    label_field: ClassVar[int] = 0
    """The index of the label field among the fields."""
    imported_length: ClassVar[int | None] = 512  # the length of BERT

    def __post_init__(self) -> None:
        super().__post_init__()
        # Add the field names to the name of examples in memory, so that config.json records them.
        for name in ("source", "validation"):
            if isinstance(given := getattr(self, name), Examples):
                fields = parse_labelled(given, self.forms, self._own_source()).fields
                object.__setattr__(self, name, given.with_fields(fields))

    def read(self, records: OpenedRecords, split: Split) -> ExampleSet[E]:
        """See ``RecordData``."""
        source = records.source
        # Count the required and the optional fields in a syntax such as "label,text[,text_b]".
        most = self.field_names.count(",") + 1
        fewest, number = most - self.field_names.count("["), len(source.fields)
        problem = f"{source.name!r} names {number} fields: name them as #{self.field_names}"
        require(fewest <= number <= most, problem, DataError)
        # Labels of published data sets are class ids with declared names; local labels are names.
        label = source.fields[self.label_field]
        rows, lines = self._records(records, split)
        rows, names = self.named(rows, records.class_names(label))
        loaded = self.labelled(rows, names, split)
        return replace(loaded, lines=(*lines, *loaded.lines))

    def named(
        self, records: list[Record], names: tuple[str, ...] | None
    ) -> tuple[list[Record], tuple[str, ...] | None]:
        """Returns the records and, if their labels are numbers, the names of the labels.

        Args:
          records: The records.
          names: The label names that a published data set declares.
        """
        return records, names

    @abstractmethod
    def labelled(
        self, records: Sequence[Record], names: tuple[str, ...] | None, split: Split
    ) -> ExampleSet[E]:
        """Makes examples from records that have all fields.

        Args:
          records: The records.
          names: The names of the labels, if labels are numbers as in published data sets.
          split: The split of the records.
        """

    @abstractmethod
    def unlabelled(self, records: Iterable[Record]) -> list[E]:
        """Makes unlabeled examples from records that lack the label field."""

    @abstractmethod
    def examples_to_predict(self, path: str, unread: set[str]) -> list[E]:
        """Reads examples without labels from a file or from standard input.

        Args:
          path: The name of the file, or ``-`` for standard input.
          unread: Collects the names of fields that are present but not read.
        """

    def examples_of_source(self, name: str, unread: set[str]) -> list[E]:
        """Reads the examples of a labeled source for prediction, without the labels.

        Takes the same arguments as ``examples_to_predict``.

        Raises:
          DataError: The source does not name the fields that the model reads, with or without the
            label.
        """
        records = self.open(name, self.columns.without(self.label_field))
        given, trained = records.source.fields, self.fields
        # Drop the label, unless the named fields already omit it.
        if len(given) + 1 != len(trained):
            source = replace(records.source, fields=self.without_label(given))
            records = replace(records, source=source)
            # A model trained on CoNLL files has at most one field, the tag column. In this case the
            # source may name a different number of fields.
            require(
                len(trained) <= 1 or len(given) == len(trained),
                f"{name!r} names {len(given)} fields ({', '.join(given)}) but this model "
                f"was trained on {len(trained)} ({', '.join(trained)}): name as many, or omit the "
                "label",
                error=DataError,
            )
        # If the source has splits, predict its validation split.
        return self.unlabelled(records.read("validation"))

    def without_label(self, fields: tuple[str, ...]) -> tuple[str, ...]:
        """Returns all fields except the label."""
        return fields[: self.label_field] + fields[self.label_field + 1 :]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields that are read from the source, or the numbers of columns."""
        return with_known_fields(self._own_source(), self.published_fields).fields

    def fields_to_predict(self, usual: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the fields to read from JSON lines without labels.

        Args:
          usual: The fields to read if the fields of the source are column numbers.
        """
        fields = self.without_label(self.fields)
        numbers = all(part.isdecimal() for field in fields for part in field.split("+"))
        return usual if numbers else fields

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the examples that are not held out. They are the same in every epoch."""
        split = super().train_split(tokenizer, labels, seed)
        return replace(split, notes=(*split.notes, *self._rare_labels()))

    def input_split(
        self, path: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns unlabeled examples for prediction.

        Args:
          path: The name of a file (see ``examples_to_predict``), ``-`` for standard input, a
            labeled source (``tsv:GLOB#LABEL,TEXT``), whose labels are not read, or a list of
            examples.
          tokenizer: The tokenizer of the model.
          labels: The names of the model's labels.

        Raises:
          DataError: The file is missing, empty or malformed.
        """
        name = as_source(path)
        kind, colon, _ = name.partition(":")
        unread: set[str] = set()
        if isinstance(name, Examples):
            examples = self.examples_in_memory(name, unread)
        # An existing file takes precedence over a source with the same name.
        elif colon and kind in self.forms and not Path(name).exists():
            examples = self.examples_of_source(name, unread)
        else:
            examples = self.examples_to_predict(name, unread)
        require(examples, f"nothing to predict in {name}: it is empty", error=DataError)
        notes = (f"fields that are not read: {', '.join(sorted(unread))}",) if unread else ()
        return self._split(ExampleSet(tuple(examples), notes=notes), tokenizer, labels)

    def examples_in_memory(self, name: Examples, unread: set[str]) -> list[E]:
        """Reads dicts of fields or texts; takes the same arguments as ``examples_to_predict``."""
        source = parse_labelled(name, self.forms, self._own_source())
        source = replace(source, fields=self.without_label(source.fields))
        read = single_fields(source.fields)
        unread |= {key for row in name.rows if isinstance(row, dict) for key in row.keys() - read}
        return self.unlabelled(read_fields(source, self.columns))

    def _whole(self) -> ExampleSet[E]:
        """Reads the training examples and, if the source is local, also the held-out examples."""
        return self._read(self.open(self.source), "train")

    def _rare_labels(self) -> tuple[str, ...]:
        """Returns a warning if a label occurs only once, even including held-out examples."""
        examples = self._whole().examples
        unique = sorted(name for name, count in self._counts(examples).items() if count == 1)
        if not unique or len(examples) < _FEW_EXAMPLES:
            return ()
        where = next(e.location for e in examples if unique[0] in self.labels_in(e))
        return (
            f"warning: {counted(len(unique), 'label')} in only one example, {unique[0]!r} at "
            f"{where}: check that this is neither misspelled nor a column name",
        )


def _label_note(counts: Counter[str], labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a log line with label counts: known labels in id order, then others by name."""
    order = [*filter(counts.__contains__, labels), *sorted(counts.keys() - {*labels})]
    shown = ", ".join(f"{name} ({counts[name]:,})" for name in order[:_LABELS_SHOWN])
    hidden = len(order) - _LABELS_SHOWN
    more = f" and {hidden:,} more" if hidden > 0 else ""
    return (f"labels: {shown}{more}",) if order else ()
