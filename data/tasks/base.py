"""Defines the interface of a kind of data, and the settings that all kinds share.

Each kind of data is a subclass in a separate file (`causal_lm.CausalLMData`,
`bert_pretraining.PretrainingData` …). The fields of the subclass are command-line options, and its
methods make examples from a source.
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
# At run time the type is `str`, because the option parser can read only strings.
if TYPE_CHECKING:
    SourceField = SourceLike
else:
    SourceField = str

EVALUATION_SEED = 0x5EED
"""The seed of evaluations. It is fixed, so that every run is evaluated on the same examples."""
Target = Literal["single_label", "binary", "multi_label", "regression"]
"""The types of labels that texts can have."""
D = TypeVar("D", bound="DataConfig")
S = TypeVar("S", bound=Sized)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked, ABC):
    """The source of a run's examples, and how the examples are converted to arrays."""

    kind: ClassVar[str]
    """The name that config.json uses for this kind of data."""
    imported_length: ClassVar[int | None] = None
    """The maximum sequence length for an imported model. Defaults to the length in the recipe."""

    source: SourceField
    """builtin:python-docs, text:GLOB[#line|#block|#sentences], jsonl:GLOB#field,
    parquet:GLOB#field, arrow:GLOB#field, tfds:NAME/CONFIG#field or hf:NAME/CONFIG#field, or several
    of them, joined by " + ". A GLOB may be a URL, such as `gs://bucket/*.jsonl`. `0.7*SOURCE +
    0.3*SOURCE` mixes sources of documents or conversations. Next-token prediction also reads
    prepared:FOLDER, the output of `flaxzoo prepare`, and builtin:patterns, endless random tasks.
    Labeled examples can be read from tsv:GLOB, conll:GLOB, squad:GLOB, or any kind of source with
    fields. In Python, a list of examples is also accepted."""
    validation: SourceField | None = None
    """A source to validate on. By default, a part of `source` is held out for validation."""
    validation_fraction: Rate = 0.05
    """The fraction of `source` that is held out if `validation` is not given."""
    length: PositiveInt
    """The number of tokens in a sequence, T."""
    tokenizer: TokenizerConfig
    num_workers: NonNegativeInt = 0
    """The number of processes that prepare batches. If 0, a thread prepares them."""

    def __post_init__(self) -> None:
        # Convert lists of examples to `Examples`, which are strings. The class is frozen.
        object.__setattr__(self, "source", as_source(self.source))
        if self.validation is not None:
            object.__setattr__(self, "validation", as_source(self.validation))
        super().__post_init__()

    @property
    def lengths(self) -> tuple[int, int]:
        """The maximum lengths of the sequences that a model reads and writes."""
        return self.length, self.length

    @property
    def longest_side(self) -> int:
        """The length of the longest sequence that a model reads or writes."""
        return max(self.lengths)

    @property
    def held_out_fraction(self) -> float:
        """The fraction of the source to hold out, which is 0 if `validation` names other data."""
        return self.validation_fraction if self.validation is None else 0.0

    @property
    def source_name(self) -> str:
        """The name of the source, or the number and hash of examples in memory."""
        return as_source(self.source)

    @abstractmethod
    def texts(self) -> Texts:
        """Returns the training texts, which are used to train a vocabulary."""

    def make_tokenizer(self) -> Tokenizer:
        """Loads the tokenizer of a new run, or trains a tokenizer on the training texts."""
        # If the configuration names a tokenizer on disk, do not train a new tokenizer.
        if self.tokenizer.path is not None:
            return load_tokenizer(self.tokenizer.path)
        return train_tokenizer(self.texts(), self.tokenizer)

    def with_chat_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer, with the chat template of the data if the data have one."""
        return tokenizer

    def labels(self) -> tuple[str, ...]:
        """Returns the label names of the training examples, in the order of their ids."""
        return ()

    def assumed_labels(self) -> tuple[str, ...]:
        """Returns placeholders for label names, for a plan that is made before data are read."""
        return ()

    @property
    def label_target(self) -> Target | None:
        """The type of the texts' labels, or None if this kind of data does not label texts."""
        return None

    @property
    def classifies_single_texts(self) -> bool:
        """Whether a prediction consists of label probabilities for a single text."""
        return False

    def of_imported_model(self: D, target: Target, max_length: int) -> D:
        """Returns the data configuration for an imported model, whose training data are unknown.

        Args:
          target: The type of the model's labels, if it is a text classifier.
          max_length: The maximum number of tokens that the model reads.
        """
        del target
        return replace(self, length=min(self.imported_length or self.length, max_length))

    @abstractmethod
    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of a batch before any data are read.

        Args:
          num_labels: The number of labels, L, which depends on the data.
          num_choices: The number of choices per question, C, which depends on the data.

        Returns:
          For each array, its shape without the batch axis, its type and the range of its values.
        """

    @abstractmethod
    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the training examples, which are all examples that are not held out."""

    @abstractmethod
    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the examples to validate on."""

    @abstractmethod
    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all examples of a different source, for evaluation.

        If the source is a published data set, only the examples of its validation split are
        returned.
        """

    def input_split(
        self, path: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns unlabeled examples for prediction.

        Args:
          path: The name of a file, `-` for standard input, or a list of examples.
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
    """Returns the end of a summary, which states the number of unknown tokens unless it is 0."""
    if not corpus.num_unknown:
        return ""
    found = f"{corpus.num_unknown:,} of {len(corpus.tokens):,}"
    return f"; {found} tokens are unknown to the tokenizer"


@dataclass(frozen=True, kw_only=True)
class MixableData(DataConfig):
    """Data whose source may be a mixture, such as `0.7*SOURCE + 0.3*SOURCE`."""

    mix_by: MixtureUnit = "tokens"
    """The unit of a mixture's weights: tokens or documents."""

    @property
    def mixture(self) -> tuple[Term, ...]:
        """The weights and sources of a mixture; empty if the source is not a mixture."""
        return split_mixture(self.source_name)

    def mixed(self, contents: Sequence[S], encode: Callable[[S], DataSplit]) -> DataSplit:
        """Mixes the training examples of the sources in `mixture`.

        Args:
          contents: The training documents or records of each source, in the order of `mixture`.
          encode: A function that makes examples from the content of one source.

        Raises:
          DataError: A source has no training examples.
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
        """Makes examples from documents.

        Args:
          documents: The documents.
          tokenizer: The tokenizer of the model.
          seed: The seed of random choices, which differ between epochs. If None, the examples are
            for evaluation and are always the same.
        """

    def texts(self) -> Documents:
        """Returns the documents that are not held out."""
        return load_documents(self.source, "train", validation_fraction=self.held_out_fraction)

    def validation_documents(self) -> Documents:
        """Returns the documents of `validation`, or the held-out documents if it is not given."""
        if self.validation is not None:
            require_unmixed(as_source(self.validation), "a validation")
            return load_whole(self.validation)
        fraction = self.validation_fraction
        return load_documents(self.source, "validation", validation_fraction=fraction)

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns examples made from the documents that are not held out."""
        texts = self.texts()
        if not self.mixture:
            return self._noted(texts, tokenizer, seed)
        return self.mixed(texts.parts, lambda part: self._noted(part, tokenizer, seed))

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns examples made from the validation documents; they are always the same."""
        return self._noted(self.validation_documents(), tokenizer, None)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns examples made from all documents of a source; they are always the same."""
        return self._noted(load_whole(source), tokenizer, None)

    def _noted(self, documents: Documents, tokenizer: Tokenizer, seed: int | None) -> DataSplit:
        split = self.examples_of(documents, tokenizer, seed)
        notes = filter(None, (*split.notes, documents.note))
        return replace(split, notes=tuple(notes))
