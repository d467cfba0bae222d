"""The interface of a kind of data, and the settings that all kinds share.

Each kind of data is a subclass in a file of its own (`causal_lm.CausalLMData`,
`bert_pretraining.PretrainingData` …). Its fields are options of the command line; its methods
lead from a source to examples.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..common.errors import DataError
from ..common.fields import Checked, NonNegativeInt, PositiveInt, Rate
from ..corpora.token_corpus import Texts
from ..dataset import BatchSpec, DataSplit
from ..sources.documents import Documents, SourceLike, as_source
from ..sources.load_documents import load_documents, load_whole
from ..tokenizers.base import Tokenizer
from ..tokenizers.load import load_tokenizer
from ..tokenizers.training import TokenizerConfig, train_tokenizer

# A configuration takes examples in place of a source's name, and keeps a string in either case.
# Readers of options look up the type, for which a string is all there is to read.
if TYPE_CHECKING:
    SourceField = SourceLike
else:
    SourceField = str


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked, ABC):
    """The source of the examples of a run, and the way in which they become arrays."""

    kind: ClassVar[str]
    """The kind of data, as a run's config.json names it."""

    source: SourceField
    """builtin:python-docs, text:GLOB[#line|#block|#sentences], jsonl:GLOB#field or
    tfds:NAME/CONFIG#field, or several of them, joined by " + ". For next-token prediction also
    prepared:FOLDER, the output of `flaxzoo prepare`, and builtin:patterns, endless random tasks.
    For labeled examples tsv:GLOB, conll:GLOB, squad:GLOB, jsonl:GLOB or tfds:NAME/CONFIG. In
    Python also the examples themselves."""
    validation: SourceField | None = None
    """A source to validate on. By default a part of `source` is held out."""
    validation_fraction: Rate = 0.05
    """The fraction that is held out when `validation` is not given."""
    length: PositiveInt
    """Tokens in a sequence, T."""
    tokenizer: TokenizerConfig
    num_workers: NonNegativeInt = 0
    """Processes that prepare batches; 0 prepares them in a thread."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", as_source(self.source))
        if self.validation is not None:
            object.__setattr__(self, "validation", as_source(self.validation))
        super().__post_init__()

    @property
    def lengths(self) -> tuple[int, int]:
        """The tokens of a sequence that a model reads, and of one that it writes."""
        return self.length, self.length

    @property
    def longest_side(self) -> int:
        """The tokens of the longest sequence that a model has to read or write."""
        return self.length

    @property
    def source_name(self) -> str:
        """The name of the source; for examples in memory their number and hash."""
        return as_source(self.source)

    @abstractmethod
    def texts(self) -> Texts:
        """Returns the training texts, to train a vocabulary on."""

    def make_tokenizer(self) -> Tokenizer:
        """Loads the tokenizer of a new run, or trains one on the training texts."""
        if self.tokenizer.path is not None:
            return load_tokenizer(self.tokenizer.path)
        return train_tokenizer(self.texts(), self.tokenizer)

    def with_chat_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer with the chat template that the data are written with, if any."""
        return tokenizer

    def labels(self) -> tuple[str, ...]:
        """Returns the names of the labels in the training examples, in the order of their ids."""
        return ()

    def assumed_labels(self) -> tuple[str, ...]:
        """Returns stand-ins for `labels`, for a plan that is made before any data are read."""
        return ()

    @abstractmethod
    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of a batch before any data are read.

        Args:
          num_labels: Different labels, L; the settings do not say how many the data have.
          num_choices: Choices of a question, C; likewise.

        Returns:
          Each array's shape without the batch axis, its type and the range of its values.
        """

    @abstractmethod
    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the examples to train on: those of the source that are not held out."""

    @abstractmethod
    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the examples to validate on."""

    @abstractmethod
    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all examples of another source, to evaluate on.

        For a published data set these are the examples of its validation split.
        """

    def input_split(
        self, path: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns the unlabeled examples of a file, to predict (`-` is standard input).

        Args:
          path: The file, or a list of examples.
          tokenizer: The model's.
          labels: The names of the model's labels.

        Raises:
          DataError: This kind of data has no labels to predict.
        """
        raise DataError(
            f"{self.kind} data has no labels to predict: give the run of a fine-tuned model "
            "(for text, see the commands generate and fill-mask)"
        )


@dataclass(frozen=True, kw_only=True)
class DocumentsData(DataConfig):
    """Data whose examples are made from plain documents."""

    def texts(self) -> Documents:
        """Returns the documents that are not held out."""
        fraction = self.validation_fraction if self.validation is None else 0.0
        return load_documents(self.source, "train", validation_fraction=fraction)

    def validation_documents(self) -> Documents:
        """Returns the documents of `validation`, or those that are held out."""
        if self.validation is not None:
            return load_whole(self.validation)
        fraction = self.validation_fraction
        return load_documents(self.source, "validation", validation_fraction=fraction)
