"""Denoising: a model restores original texts from corrupted texts (BART).

Lewis et al. 2020, "BART: denoising sequence-to-sequence pre-training", section 2.2: see
``features.denoising``. Documents are cut into texts that fill a sequence; shorter texts share a
sequence, with different segment ids. Every epoch has the same texts with different corruption.

A batch has the same arrays as in translation, with S = T; see ``translation.arrays_of_pairs``.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from ..common.errors import DataError
from ..common.fields import Fraction, Range
from ..common.files import default_cache_dir
from ..corpora.token_corpus import build_corpus
from ..dataset import ArraySpec, BatchSpec, DataSplit, counted
from ..features.denoising import Denoising
from ..features.span_corruption import SpanLength
from ..sources.documents import Documents, SourceLike
from ..sources.load_documents import load_whole
from ..tokenizers.base import Tokenizer
from .base import DocumentsData
from .span_corruption import SpanCorruptionExamples, tokenizer_with_sentinels
from .translation import ARRAYS, start_and_end

# A fixed seed, so that every run evaluates on the same examples and masks.
_EVALUATION_SEED = 0x5EED
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")


def mask_of(tokenizer: Tokenizer) -> int:
    """Returns the id of the token that masks a span: the mask token, or the first sentinel.

    Raises:
      DataError: The vocabulary has neither.
    """
    mask = tokenizer.special_ids.mask
    if mask is not None:
        return mask
    if not tokenizer.sentinels:
        raise DataError(
            f"this {tokenizer.kind} tokenizer has no mask token and no sentinel: train one "
            "(data.tokenizer.kind sentencepiece-unigram)"
        )
    return tokenizer.sentinels[0]


def sentence_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of the tokens that end with a full stop, "!" or "?"."""
    size = tokenizer.vocab_size
    # Look at spellings, because subword vocabularies join a full stop with other characters.
    return tuple(id for id in range(size) if tokenizer.token(id).endswith(_SENTENCE_ENDS))


class DenoisingExamples(SpanCorruptionExamples):
    """The examples of training epochs, or of evaluation; see ``SpanCorruptionExamples``."""

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """The mask, which replaces each span."""
        return (mask_of(self.tokenizer),)


@dataclass(frozen=True, kw_only=True)
class DenoisingData(DocumentsData):
    """Corrupted documents that a model restores completely (BART)."""

    kind: ClassVar[str] = "denoising"

    length: Annotated[int, Range(least=3)]
    """Tokens in a sequence on each side, S = T; a sequence may hold several texts."""
    mask_fraction: Fraction = 0.3
    """The fraction of masked tokens."""
    mean_span_length: SpanLength = 3.0
    """The mean number of consecutive tokens that a mask replaces (Poisson)."""
    permute_sentences: bool = True
    """Whether to shuffle the sentences of a text."""

    def make_tokenizer(self) -> Tokenizer:
        """See ``DataConfig``; a vocabulary without a mask token gets a sentinel instead."""
        return tokenizer_with_sentinels(self, 1)

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and ``translation.arrays_of_pairs``."""
        return {name: ArraySpec((self.length,), values) for name, values in ARRAYS.items()}

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns the texts that are not held out, with different corruption in every epoch."""
        return self._split(self.texts(), tokenizer, seed, changes=True)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns every validation text, always with the same corruption."""
        documents = self.validation_documents()
        return self._split(documents, tokenizer, _EVALUATION_SEED, changes=False)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns every text of a source, always with the same corruption."""
        return self._split(load_whole(source), tokenizer, _EVALUATION_SEED, changes=False)

    def _split(
        self, documents: Documents, tokenizer: Tokenizer, seed: int, *, changes: bool
    ) -> DataSplit:
        # Check the special tokens before tokenizing the documents.
        start_and_end(tokenizer)
        mask_of(tokenizer)
        ends = sentence_ends(tokenizer) if self.permute_sentences else ()
        noise = Denoising(self.mask_fraction, self.mean_span_length, ends)
        # The corpus is cached; the corruption is drawn when an example is made.
        corpus = build_corpus(documents, tokenizer, default_cache_dir() / "tokens")
        lengths = self.length, self.length
        examples = DenoisingExamples(corpus, tokenizer, noise, lengths, seed, changes)
        if not examples.num_texts:
            raise DataError("no document has two tokens: give a source with text")
        tokens = examples.num_tokens[1]
        padding = 1 - tokens / (self.length * examples.num_examples)
        summary = (
            f"{counted(corpus.num_documents, 'document')} in "
            f"{counted(examples.num_texts, 'text')}, {tokens:,} tokens in "
            f"{counted(examples.num_examples, 'sequence')} of {self.length} + {self.length}, "
            f"{padding:.1%} of the targets padding"
        )
        if corpus.num_unknown:
            unknown = f"{corpus.num_unknown:,} of {len(corpus.tokens):,} tokens"
            summary += f"; {unknown} are unknown to the tokenizer"
        notes = (documents.note,) if documents.note else ()
        return DataSplit(examples, corpus, corpus.fingerprint, summary, notes)
