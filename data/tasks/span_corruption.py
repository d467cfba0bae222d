"""Span corruption: sources with gaps, and targets that fill the gaps (T5).

Raffel et al. 2020, "Exploring the limits of transfer learning", section 3.1.4: see
``features.span_corruption``. Documents are cut into texts whose sources fill a sequence; shorter
texts share a sequence, with different segment ids. Every epoch has the same texts with new gaps.

The arrays of a batch are int32, as in translation: ``input_ids``, ``segment_ids``,
``position_ids`` [B, S], and ``decoder_input_ids``, ``decoder_segment_ids``,
``decoder_position_ids``, ``labels`` [B, T]; by default T follows from S and the dropped fraction.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import PositiveInt, require
from ..common.files import default_cache_dir
from ..corpora.token_corpus import TokenCorpus, build_corpus
from ..dataset import BatchSpec, DataSplit, PickledByFields
from ..features.span_corruption import Noise, NoiseDensity, SpanCorruption, SpanLength
from ..packing.packed_pairs import arrays_of_pairs, fill_note, pair_specs
from ..packing.packing import best_fit
from ..sources.documents import Documents
from ..tokenizers.base import Tokenizer
from ..tokenizers.load import load_tokenizer
from ..tokenizers.training import train_tokenizer
from .base import EVALUATION_SEED, DocumentsData, unknown_tokens
from .translation import start_and_end


@dataclass(frozen=True)
class SpanCorruptionExamples(PickledByFields):
    """The examples of training epochs, or of evaluation; see ``dataset.ExampleSource``.

    Attributes:
      corpus: The tokens.
      tokenizer: The tokenizer, with at least one sentinel for each span of a text.
      corruption: Makes a source and a target from a text.
      lengths: The lengths of a sequence, S and T.
      seed: The seed of the order of the texts and of the gaps, any integer.
      changes: Whether the gaps differ between epochs.
    """

    corpus: TokenCorpus
    tokenizer: Tokenizer
    corruption: Noise
    lengths: tuple[int, int]
    seed: int
    changes: bool

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, at least 1."""
        return len(self._plan[1]) - 1

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example: a pure function of the seed and its arguments.

        Args:
          epoch: From 0.
          index: In ``[0, num_examples)``.

        Returns:
          See ``packed_pairs.arrays_of_pairs``.
        """
        rng = np.random.default_rng([self.seed % 2**64, epoch if self.changes else 0, index])
        start, end = start_and_end(self.tokenizer)
        # Corrupt each text of the sequence in order, with one random generator.
        texts, sequence_starts = self._plan
        before, after = self.tokenizer.source_frame.single.marks
        found = [
            self.corruption.corrupt(self.text(text), self.marks, end, rng)
            for text in texts[sequence_starts[index] : sequence_starts[index + 1]].tolist()
        ]
        # Replace the end token of the source by the special tokens of the source frame.
        pairs = [([*before, *source[:-1], *after], target) for source, target in found]
        return arrays_of_pairs(pairs, self.lengths, start)

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """The tokens that mark dropped spans."""
        return self.tokenizer.sentinels

    def text(self, number: int) -> np.ndarray:
        """Returns the tokens of one of the texts before corruption."""
        firsts, sizes = self._texts
        return self.corpus.tokens[firsts[number] : firsts[number] + sizes[number]]

    @cached_property
    def num_tokens(self) -> tuple[int, int]:
        """The numbers of tokens in all sources and in all targets, including end tokens."""
        sources, targets = self._pair_sizes(self._texts[1][self._plan[0]])
        return int(sources.sum()), int(targets.sum())

    def _pair_sizes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, targets = self.corruption.pair_sizes(sizes)
        return sources + self._more_marks, targets

    @property
    def _more_marks(self) -> int:
        """The number of special tokens of a source besides the end token."""
        return self.tokenizer.source_frame.single.num_added - 1

    @property
    def fill(self) -> str:
        """Describes how the texts fill the sequences, which is independent of the gaps."""
        return fill_note(self.num_tokens, self.lengths, self.num_examples)

    @property
    def num_texts(self) -> int:
        """The number of texts in all examples."""
        return len(self._plan[0])

    @cached_property
    def _texts(self) -> tuple[np.ndarray, np.ndarray]:
        """The first token and the number of tokens of each text."""
        # The corpus stores each document with BOS and EOS, if the tokenizer has these tokens: skip
        # them.
        special = self.tokenizer.special_ids
        before, after = len(special.before), len(special.after)
        starts = self.corpus.document_starts
        sizes = np.diff(starts, append=len(self.corpus.tokens)) - before - after
        length, target_length = self.lengths
        longest = self.corruption.longest_text(length - self._more_marks, target_length)
        # Cut each document into texts of `longest` tokens; the last text may be shorter.
        number = -(-sizes // longest)  # texts of each document
        of_document = np.repeat(np.arange(len(sizes)), number)
        index = np.arange(len(of_document)) - np.repeat(np.cumsum(number) - number, number)
        firsts = starts[of_document] + before + index * longest
        lengths = np.minimum(sizes[of_document] - index * longest, longest)
        # A text needs a kept and a dropped token.
        kept = lengths >= 2
        return firsts[kept], lengths[kept]

    @cached_property
    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        """The texts of all sequences, and the start of each sequence."""
        source_sizes, target_sizes = self._pair_sizes(self._texts[1])
        return best_fit(source_sizes, target_sizes, self.lengths, self.seed)


def tokenizer_with_sentinels(data: DocumentsData, number: int) -> Tokenizer:
    """Loads or trains the tokenizer of a new run; adds sentinels if the tokenizer has none.

    Args:
      data: The config with the tokenizer and the texts.
      number: The number of sentinels. They are included in the requested size of the vocabulary. A
        single sentinel serves as a mask, and is not added to a vocabulary with a mask token.
    """
    config = data.tokenizer
    has_mask = number == 1 and config.kind in ("wordpiece", "words")
    if config.path is not None:
        tokenizer = load_tokenizer(config.path)
        has_mask = number == 1 and tokenizer.special_ids.mask is not None
    else:
        # Reserve room for the sentinels in the requested size.
        reserved = 0 if has_mask else number
        tokenizer = train_tokenizer(data.texts(), config, reserved=reserved)
    if has_mask or tokenizer.sentinels:
        return tokenizer
    # Imported late, because it imports the package tokenizers, which is slow to load.
    from ..tokenizers.sentinels import SentinelTokenizer

    return SentinelTokenizer(tokenizer, number)


@dataclass(frozen=True, kw_only=True)
class CorruptedData(DocumentsData):
    """Documents that are corrupted, so that a model learns to restore them."""

    examples_type: ClassVar[type[SpanCorruptionExamples]] = SpanCorruptionExamples

    @abstractmethod
    def noise(self, tokenizer: Tokenizer) -> Noise:
        """Returns the corruption.

        Raises:
          DataError: The vocabulary lacks a token that the corruption needs.
        """

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and ``packed_pairs.arrays_of_pairs``."""
        return pair_specs(self.lengths)

    def examples_of(
        self, documents: Documents, tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """See ``DocumentsData``; in training, the corruption differs between epochs."""
        # Check the special tokens before tokenizing the documents.
        start_and_end(tokenizer)
        noise = self.noise(tokenizer)
        # The corpus is cached; the corruption is drawn when an example is made.
        corpus = build_corpus(documents, tokenizer, default_cache_dir() / "tokens")
        drawn = (EVALUATION_SEED, False) if seed is None else (seed, True)
        examples = self.examples_type(corpus, tokenizer, noise, self.lengths, *drawn)
        require(
            examples.num_texts, "no document has two tokens: give a source with text", DataError
        )
        summary = (
            f"{counted(corpus.num_documents, 'document')} in "
            f"{counted(examples.num_texts, 'text')}, {examples.fill}{unknown_tokens(corpus)}"
        )
        return DataSplit(examples, corpus, corpus.fingerprint, summary)


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionData(CorruptedData):
    """Documents with gaps, where the model predicts the dropped spans (T5)."""

    kind: ClassVar[str] = "span_corruption"

    length: PositiveInt
    """Tokens in a sequence of sources, S; a sequence may contain several sources."""
    target_length: PositiveInt | None = None
    """Tokens in a sequence of targets, T. Defaults to the size of the target of a text whose source
    fills S.
    """
    noise_density: NoiseDensity = 0.15
    """The fraction of dropped tokens."""
    mean_span_length: SpanLength = 3.0
    """The mean number of consecutive dropped tokens."""
    num_sentinels: PositiveInt = 100
    """Sentinels to append to a vocabulary without sentinels. `tokenizer.vocab_size` includes the
    sentinels.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        corruption = self.corruption
        size = self.tokenizer.vocab_size
        require(
            self.tokenizer.path is not None or size is None or size > self.num_sentinels,
            f"data.tokenizer.vocab_size {size} leaves no room for tokens in addition to "
            f"data.num_sentinels "
            f"{self.num_sentinels}: give a larger vocabulary",
        )
        require(
            corruption.longest_text(self.length, self.target_length),
            f"no text of two tokens fits data.length {self.length} and data.target_length "
            f"{self.target_length or self.length}: give at least 3 on each side",
        )

    @property
    def corruption(self) -> SpanCorruption:
        """The amount of corruption."""
        return SpanCorruption(self.noise_density, self.mean_span_length)

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of a sequence, S and T."""
        if self.target_length is not None:
            return self.length, self.target_length
        longest = np.asarray([self.corruption.longest_text(self.length)])
        return self.length, int(self.corruption.pair_sizes(longest)[1][0])

    def make_tokenizer(self) -> Tokenizer:
        """See ``DataConfig``; adds sentinels to a vocabulary without sentinels."""
        return tokenizer_with_sentinels(self, self.num_sentinels)

    def noise(self, tokenizer: Tokenizer) -> SpanCorruption:
        """See ``CorruptedData``; each gap of the longest text needs a sentinel."""
        longest = self.corruption.longest_text(*self.lengths)
        (most,) = self.corruption.counts(np.asarray([longest]))[1].tolist()
        require(
            most <= len(tokenizer.sentinels),
            f"a text of {longest} tokens has {most} gaps, and the vocabulary "
            f"{counted(len(tokenizer.sentinels), 'sentinel')}: give a smaller data.length, or "
            f"train a vocabulary with data.num_sentinels {most}",
            DataError,
        )
        return self.corruption
