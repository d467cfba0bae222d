"""The interface of a kind of data, and the settings that all kinds share.

Each kind of data is a subclass in a separate file (`causal_lm.CausalLMData`,
`bert_pretraining.PretrainingData` …). Its fields are command-line options; its methods make
examples from a source.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from ..common.errors import DataError
from ..common.fields import Checked, NonNegativeInt, PositiveInt, Rate, require
from ..common.hashing import digest
from ..corpora.token_corpus import CorpusFolder, Texts
from ..dataset import BatchSpec, DataSplit
from ..mixture import MixtureUnit, mix
from ..sources.documents import Documents, SourceLike, as_source
from ..sources.load_documents import load_documents, load_whole
from ..sources.source_names import Term, require_unmixed, split_mixture
from ..tokenizers.base import Tokenizer
from ..tokenizers.load import load_tokenizer
from ..tokenizers.training import TokenizerConfig, train_tokenizer

# A configuration accepts examples in place of a source name, and stores a string in both cases.
# At run time the type is `str`, because the parser of options reads only strings.
if TYPE_CHECKING:
    SourceField = SourceLike
else:
    SourceField = str

EVALUATION_SEED = 0x5EED
"""The fixed seed of evaluations, so that every run is evaluated on the same examples."""
Target = Literal["single_label", "binary", "multi_label", "regression"]
"""The type of the labels of texts."""
D = TypeVar("D", bound="DataConfig")
S = TypeVar("S", bound=Sized)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked, ABC):
    """The source of a run's examples, and how they become arrays."""

    kind: ClassVar[str]
    """The name of the kind of data in config.json."""
    imported_length: ClassVar[int | None] = None
    """The maximum length of a sequence for an imported model. Defaults to the length of the
    recipe."""

    source: SourceField
    """builtin:python-docs, text:GLOB[#line|#block|#sentences], jsonl:GLOB#field,
    parquet:GLOB#field, arrow:GLOB#field, tfds:NAME/CONFIG#field or hf:NAME/CONFIG#field, or several
    of them, joined by " + ". A GLOB may be a URL, such as `gs://bucket/*.jsonl`. `0.7*SOURCE +
    0.3*SOURCE` mixes sources of documents or conversations. Next-token prediction also reads
    prepared:FOLDER, the output of `flaxzoo prepare`, and builtin:patterns, endless random tasks.
    Labeled examples are in tsv:GLOB, conll:GLOB, squad:GLOB, or the kinds with fields. In Python, a
    list of examples is also accepted."""
    validation: SourceField | None = None
    """A source to validate on. By default, part of `source` is held out."""
    validation_fraction: Rate = 0.05
    """The held-out fraction if `validation` is not given."""
    length: PositiveInt
    """Tokens in a sequence, T."""
    tokenizer: TokenizerConfig
    num_workers: NonNegativeInt = 0
    """Processes that prepare batches; 0 prepares them in a thread."""

    def __post_init__(self) -> None:
        # The class is frozen. Convert lists of examples to `Examples`, which are strings.
        object.__setattr__(self, "source", as_source(self.source))
        if self.validation is not None:
            object.__setattr__(self, "validation", as_source(self.validation))
        super().__post_init__()

    @property
    def lengths(self) -> tuple[int, int]:
        """The maximum numbers of tokens that a model reads and writes per sequence."""
        return self.length, self.length

    @property
    def longest_side(self) -> int:
        """The length of the longest sequence that a model reads or writes."""
        return max(self.lengths)

    @property
    def held_out_fraction(self) -> float:
        """The fraction of the source to hold out: 0 if `validation` names other data."""
        return self.validation_fraction if self.validation is None else 0.0

    @property
    def source_name(self) -> str:
        """The name of the source; for examples in memory, their number and hash."""
        return as_source(self.source)

    @abstractmethod
    def texts(self) -> Texts:
        """Returns the training texts, for training a vocabulary."""

    def make_tokenizer(self) -> Tokenizer:
        """Loads the tokenizer of a new run, or trains a tokenizer on the training texts."""
        # A tokenizer on disk takes precedence over training a new tokenizer.
        if self.tokenizer.path is not None:
            return load_tokenizer(self.tokenizer.path)
        return train_tokenizer(self.texts(), self.tokenizer)

    def with_chat_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer with the chat template of the data, if the data have a template."""
        return tokenizer

    def labels(self) -> tuple[str, ...]:
        """Returns the label names of the training examples, in the order of their ids."""
        return ()

    def assumed_labels(self) -> tuple[str, ...]:
        """Returns placeholder names of labels, for a plan that is made before any data are read."""
        return ()

    @property
    def label_target(self) -> Target | None:
        """The type of the labels of texts, or None for data of another kind."""
        return None

    @property
    def classifies_single_texts(self) -> bool:
        """Whether a prediction gives the probabilities of the labels of a single text."""
        return False

    def of_imported_model(self: D, target: Target, max_length: int) -> D:
        """Returns the configuration of the data of an imported model, whose source is unknown.

        Args:
          target: The type of its labels, for a classifier of texts.
          max_length: The number of tokens that the model reads.
        """
        del target
        return replace(self, length=min(self.imported_length or self.length, max_length))

    @abstractmethod
    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of a batch before any data are read.

        Args:
          num_labels: The number of labels, L, which only the data determine.
          num_choices: The number of choices of a question, C, which only the data determine.

        Returns:
          The shape of each array without the batch axis, its type and the range of its values.
        """

    @abstractmethod
    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the training examples: all examples of the source that are not held out."""

    @abstractmethod
    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the examples to validate on."""

    @abstractmethod
    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all examples of another source, for evaluation.

        For a published data set, these are the examples of its validation split.
        """

    def input_split(
        self, path: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns the unlabeled examples of a file for prediction (`-` is standard input).

        Args:
          path: The file, or a list of examples.
          tokenizer: The tokenizer of the model.
          labels: The names of the model's labels.

        Raises:
          DataError: This kind of data has no labels to predict.
        """
        raise DataError(
            f"{self.kind} data has no labels to predict: give the run of a fine-tuned model "
            "(for text, see the commands generate and fill-mask)"
        )


def unknown_tokens(corpus: CorpusFolder) -> str:
    """Returns the last words of a summary, which count unknown tokens; empty if there are none."""
    if not corpus.num_unknown:
        return ""
    found = f"{corpus.num_unknown:,} of {len(corpus.tokens):,}"
    return f"; {found} tokens are unknown to the tokenizer"


@dataclass(frozen=True, kw_only=True)
class MixableData(DataConfig):
    """Data whose source may be a mixture, as `0.7*SOURCE + 0.3*SOURCE`."""

    mix_by: MixtureUnit = "tokens"
    """The unit of the weights of a mixture: tokens or documents."""

    @property
    def mixture(self) -> tuple[Term, ...]:
        """The weights and sources of a mixture; empty for any other source."""
        return split_mixture(self.source_name)

    def mixed(self, contents: Sequence[S], encode: Callable[[S], DataSplit]) -> DataSplit:
        """Mixes the training examples of the sources of `mixture`.

        Args:
          contents: The training documents or records of each source, in this order.
          encode: Makes the examples of a source.

        Raises:
          DataError: A source has nothing to train on.
        """
        parts: dict[str, tuple[float, DataSplit]] = {}
        for term, content in zip(self.mixture, contents, strict=True):
            problem = f"nothing of {term.source!r} is left to train on: give more, or leave it out"
            require(len(content), problem, DataError)
            parts[term.source] = term.weight, encode(content)
        decisive = [f"{weight!r} {split.fingerprint}" for weight, split in parts.values()]
        return mix(parts, self.mix_by, digest([self.mix_by, *decisive]))


@dataclass(frozen=True, kw_only=True)
class DocumentsData(MixableData):
    """Data whose examples are made from plain documents."""

    @abstractmethod
    def examples_of(
        self, documents: Documents, tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """Makes the examples of documents.

        Args:
          documents: The documents.
          tokenizer: The tokenizer of the model.
          seed: The seed of random choices, which differ between epochs. If None, the examples are
            for an evaluation and always the same.
        """

    def texts(self) -> Documents:
        """Returns the documents that are not held out."""
        return load_documents(self.source, "train", validation_fraction=self.held_out_fraction)

    def validation_documents(self) -> Documents:
        """Returns the documents of the source `validation`; without one, the held-out documents."""
        if self.validation is not None:
            require_unmixed(as_source(self.validation), "a validation")
            return load_whole(self.validation)
        fraction = self.validation_fraction
        return load_documents(self.source, "validation", validation_fraction=fraction)

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the examples of the documents that are not held out."""
        texts = self.texts()
        if not self.mixture:
            return self._noted(texts, tokenizer, seed)
        return self.mixed(texts.parts, lambda part: self._noted(part, tokenizer, seed))

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the examples of the validation documents, which are the same each time."""
        return self._noted(self.validation_documents(), tokenizer, None)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns the examples of all documents of another source, always the same examples."""
        return self._noted(load_whole(source), tokenizer, None)

    def _noted(self, documents: Documents, tokenizer: Tokenizer, seed: int | None) -> DataSplit:
        split = self.examples_of(documents, tokenizer, seed)
        notes = filter(None, (*split.notes, documents.note))
        return replace(split, notes=tuple(notes))
