"""The base class of data with columns for anchors, positives, negatives and scores."""

from dataclasses import dataclass, replace
from typing import ClassVar

from ..common.errors import DataError
from ..common.fields import NonNegativeInt, require
from ..sources.hash_split import Split
from ..sources.labelled_names import LabelledSource, Record, forms_of_rows
from ..sources.parallel_corpus import open_parallel
from ..sources.published.records import OpenedRecords
from ..sources.retrieval.collection import read_retrieval
from ..sources.tables import ColumnRoles
from ..tasks.base import SourceField
from ..tasks.labelled import RecordData
from ..tasks.labelled_examples import ExampleSet
from .columns import (
    COLUMNS,
    NEGATIVES,
    EmbeddingExample,
    examples_of,
    examples_of_collection,
    find_fields,
    limited,
)
from .paragraphs import paragraph_records


@dataclass(frozen=True, kw_only=True)
class ColumnsData(RecordData[EmbeddingExample]):
    """Anchors with positives, negatives and scores, which are columns of records."""

    # If the source does not list fields, the names of the columns determine their roles.
    forms: ClassVar[dict[str, str]] = {
        **forms_of_rows(""),
        **dict.fromkeys(("csv", "tsv", "memory", "beir", "squad"), ""),
        "builtin": "anchor,positive",
    }
    noun: ClassVar[str] = "examples"
    columns: ClassVar[ColumnRoles] = COLUMNS

    source: SourceField
    """jsonl:GLOB, csv:GLOB, tsv:GLOB, parquet:GLOB, tfds:NAME or hf:NAME, with the columns anchor
    and positive, followed by negative, negative_1 … or negatives (a list), or score; or with the
    columns text and label. #question,paragraph selects other columns, in this order.
    builtin:python-docs contains the first sentence and the rest of each paragraph;
    builtin:numbers-en-fr contains numbers in two languages; beir:FOLDER#train and squad:GLOB
    contain queries and their documents. To train an embedding model, several named data sets are
    also accepted: sets:A=SOURCE | B=SOURCE. In Python, a list of examples is also accepted.
    """
    num_negatives: NonNegativeInt | None = None
    """Maximum number of negatives in an example. Defaults to the largest number in the data. """

    def builtin_records(self, source: LabelledSource, split: Split) -> list[Record]:
        """See ``RecordData``."""
        if not source.location.startswith("numbers-"):
            return paragraph_records(source, split)
        pairs = open_parallel(source.name, split)
        return [Record(pair.location, (pair.source, pair.target)) for pair in pairs]

    def read(self, records: OpenedRecords, split: Split) -> ExampleSet[EmbeddingExample]:
        """See ``RecordData``."""
        source = records.source
        # A retrieval collection has relevance judgments instead of columns.
        if source.kind in ("beir", "squad"):
            collection = read_retrieval(source.name)
            examples = examples_of_collection(collection, source.name)
            return ExampleSet(tuple(examples), lines=(collection.summary, *collection.notes))
        # Either the user lists the columns after a #, or their names determine their roles.
        names = known = source.fields
        if not names:
            known = records.field_names
            names = find_fields(known, source.name)
        problem = f"{source.name!r} names one column: name the column of the positive as well"
        require(len(names) > 1, problem, DataError)
        # Negatives may be missing in a record.
        fields = tuple(name + "?" * self._is_optional(name, source) for name in names)
        records = replace(records, source=replace(source, fields=fields, named=True))
        read_records, lines = self._records(records, split)
        examples = examples_of(read_records, names)
        if self.num_negatives is not None:
            # The documents are one positive and the negatives.
            examples = [limited(example, 1 + self.num_negatives) for example in examples]
        # Log the columns that are not read, so that the user notices unknown names.
        unread = [name for name in known if name not in names]
        columns = f"columns: {', '.join(names)}"
        columns += " (scores)" * any(example.scores for example in examples)
        columns += f"; not read: {', '.join(unread)}" if unread else ""
        return ExampleSet(tuple(examples), lines=(columns, *lines))

    def train_examples(self) -> tuple[EmbeddingExample, ...]:
        """Reads the training examples, and returns them."""
        return tuple(self._part("train").examples)

    def require_scores(
        self, low: float, high: float, learner: str, *, remedy: str = "scale them"
    ) -> None:
        """Checks that all scores of the training examples are within a range.

        Args:
          low: The lowest allowed score.
          high: The highest allowed score.
          learner: The loss or model that uses the scores, for messages.
          remedy: The remedy that the message gives.

        Raises:
          DataError: A score is outside the range.
        """
        for example in self.train_examples():
            for x in example.scores:
                require(
                    low <= x <= high,
                    f"{example.location} has the score {x:g}, and {learner} needs scores from "
                    f"{low:g} to {high:g}: {remedy}",
                    error=DataError,
                )

    def require_one_negative(self, learner: str) -> None:
        """Checks that each training example with a single score has exactly one negative.

        The score is then the margin between the positive and this negative.

        Args:
          learner: The loss that uses the margins, for messages.

        Raises:
          DataError: The number of negatives in such an example is not one.
        """
        for example in self.train_examples():
            require(
                example.form != "pairs" or len(example.documents) == 2,
                f"{example.location} has {len(example.documents) - 1} negatives and a single score "
                f"as its margin, and {learner} needs one margin for one negative: give a list of "
                "scores, one for each document",
                error=DataError,
            )

    def _is_optional(self, name: str, source: LabelledSource) -> bool:
        # A JSON object may lack a field, but a row of a table has all columns.
        of_objects = source.kind in ("jsonl", "memory") and not source.fields
        return of_objects and NEGATIVES.fullmatch(name.casefold()) is not None
