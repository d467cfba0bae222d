"""Random-access data sets of examples, and descriptions of their arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from .common.errors import counted


def too_long(
    number: int, of: int, noun: str, limit: str, *, consequence: str = "left out"
) -> tuple[str, ...]:
    """Returns a log line with the number of items that are too long, or nothing if there are none.

    The data guide explains which types of data leave out such examples, and which truncate them.

    Args:
      number: The number of items that are too long.
      of: The number of all items.
      noun: The noun for one item, such as ``pair``.
      limit: The setting that these items exceed, with its value, such as ``data.length 128``.
      consequence: What happens to these items.
    """
    if not number:
        return ()
    return (f"{number:,} of {counted(of, noun)} {consequence}: longer than {limit}",)


def stacked(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stacks the arrays with the same name from several examples along a new first axis."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class Values(Enum):
    """The meaning of the values of an array, which implies their range; no value is negative."""

    SOURCE_TOKEN = "source_token"
    """Ids of input tokens, less than the size of the (source) vocabulary."""
    TARGET_TOKEN = "target_token"
    """Ids of tokens that a decoder reads or predicts, less than the vocabulary size."""
    TOKEN_TYPE = "token_type"
    """0 for the first text of an example, 1 for the second."""
    MASK = "mask"
    """1 for real items, 0 for padding."""
    SEGMENT = "segment"
    """The number of the text that a token belongs to, counted from 1; 0 for padding."""
    TEXT_POSITION = "text_position"
    """The position of a token within its segment, from 0."""
    INDEX = "index"
    """The position of a token within the example, less than the length of the example."""
    LABEL = "label"
    """Class ids below `ArraySpec.num_classes`, or scores (any float) if `num_classes` is 0."""


@dataclass(frozen=True)
class ArraySpec:
    """The description of one array of an example, which is known before any data are read.

    Attributes:
      shape: The shape without the batch axis.
      values: The meaning of the numbers, which implies their range.
      dtype: The numpy name of the data type.
      num_classes: The number of classes, if the values are class ids; 0 for other values.
    """

    shape: tuple[int, ...]
    values: Values
    dtype: str = "int32"
    num_classes: int = 0


def zeros(specs: "BatchSpec") -> dict[str, np.ndarray]:
    """Returns int32 arrays of zeros with the shapes of an example."""
    return {name: np.zeros(spec.shape, np.int32) for name, spec in specs.items()}


BatchSpec = dict[str, ArraySpec]
"""The descriptions of the arrays of one example, by name."""


class PickledByFields:
    """A dataclass that pickles only its fields.

    Cached properties are not pickled. Instead, each worker process opens the files and maps the
    arrays itself.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __getstate__(self) -> dict[str, object]:
        # Unpickling sets `__dict__` to this dict without calling `__init__`, so the class may be
        # frozen.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


# Runtime checks test only whether the members exist, so any class can be a source.
@runtime_checkable
class ExampleSource(Protocol):
    """A random-access data set of examples.

    Every example is a pure function of its epoch and index. The object must be
    picklable, because worker processes also make examples.
    """

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, at least 1 and less than 2^32."""
        ...

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Returns example `index` of `epoch` as arrays of fixed shapes; padding is all zeros."""
        ...


@runtime_checkable
class OrderedExamples(ExampleSource, Protocol):
    """Examples whose source decides which examples share a batch."""

    def batches(self, batch_size: int, seed: int, epoch: int) -> np.ndarray | None:
        """Returns the example indices of each batch of an epoch, or None if any order is allowed.

        Args:
          batch_size: The size of a batch, B.
          seed: The seed of the order, any integer.
          epoch: The epoch.

        Returns:
          The indices, int64 [N, B]. N is the same in every epoch.

        Raises:
          DataError: No batch can be formed.
        """
        ...


@dataclass(frozen=True)
class DataSplit:
    """One split of a data set, ready for batching.

    Attributes:
      examples: The examples as arrays. Training examples may differ between epochs.
      content: The source of the examples: a corpus, or the list of all labelled examples,
        including examples that are left out of training.
      fingerprint: A stable hash of the texts or examples and of the tokenizer. For labelled data,
        the hash also covers the settings; for other data, config.json contains the settings.
      summary: A line for the log, such as ``400 documents, 929,728 tokens``.
      notes: Further lines for the log, such as the count of each label, or that a header was
        recognized or a label occurs only once.
      documents_per_token: The number of documents per token, if a document may span several
        examples; otherwise None.
    """

    examples: ExampleSource
    content: Any
    fingerprint: str
    summary: str
    notes: tuple[str, ...] = ()
    documents_per_token: float | None = None
