"""Prepares data for span corruption: sources with gaps, and targets that fill the gaps (T5).

``features.span_corruption`` implements the corruption of Raffel et al. 2020, "Exploring the limits
of transfer learning", section 3.1.4. Documents are cut into texts whose sources fill a sequence;
shorter texts share a sequence, with different segment ids. Every epoch has the same texts, but with
different gaps.

The arrays of a batch are int32, as in translation: ``input_ids``, ``segment_ids``,
``position_ids`` [B, S], and ``decoder_input_ids``, ``decoder_segment_ids``,
``decoder_position_ids``, ``labels`` [B, T]. By default, T is computed from S and the fraction of
dropped tokens.
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
    """The examples of training epochs or of an evaluation; see ``dataset.ExampleSource``.

    Attributes:
      corpus: The tokens of the documents.
      tokenizer: The tokenizer. It has at least as many sentinels as a text has gaps.
      corruption: Makes a source and a target from a text.
      lengths: The length S of a sequence of sources and the length T of a sequence of targets.
      seed: The seed that determines the order of the texts and the gaps, any integer.
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
        """Makes one example, which depends only on the attributes and the arguments.

        Args:
          epoch: The number of the epoch, from 0.
          index: The index of the example, in ``[0, num_examples)``.

        Returns:
          See ``packed_pairs.arrays_of_pairs``.
        """
        rng = np.random.default_rng([self.seed % 2**64, epoch if self.changes else 0, index])
        start, end = start_and_end(self.tokenizer)
        # Corrupt the texts of the sequence in order, with the same random number generator.
        texts, sequence_starts = self._plan
        before, after = self.tokenizer.source_frame.single.marks
        found = [
            self.corruption.corrupt(self.text(text), self.marks, end, rng)
            for text in texts[sequence_starts[index] : sequence_starts[index + 1]].tolist()
        ]
        # Replace the end token of the source with the special tokens of the source frame.
        pairs = [([*before, *source[:-1], *after], target) for source, target in found]
        return arrays_of_pairs(pairs, self.lengths, start)

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """The ids of the tokens that mark dropped spans."""
        return self.tokenizer.sentinels

    def text(self, number: int) -> np.ndarray:
        """Returns the tokens of one text before its corruption."""
        firsts, sizes = self._texts
        return self.corpus.tokens[firsts[number] : firsts[number] + sizes[number]]

    @cached_property
    def num_tokens(self) -> tuple[int, int]:
        """The total numbers of source tokens and of target tokens, including end tokens."""
        sources, targets = self._pair_sizes(self._texts[1][self._plan[0]])
        return int(sources.sum()), int(targets.sum())

    def _pair_sizes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, targets = self.corruption.pair_sizes(sizes)
        return sources + self._more_marks, targets

    @property
    def _more_marks(self) -> int:
        """The number of special tokens that a source has in addition to the end token."""
        return self.tokenizer.source_frame.single.num_added - 1

    @property
    def fill(self) -> str:
        """Describes how well the texts fill the sequences, which does not depend on the gaps."""
        return fill_note(self.num_tokens, self.lengths, self.num_examples)

    @property
    def num_texts(self) -> int:
        """The number of texts in all examples."""
        return len(self._plan[0])

    @cached_property
    def _texts(self) -> tuple[np.ndarray, np.ndarray]:
        """The index of the first token of each text, and its number of tokens."""
        # Skip BOS and EOS, which the corpus stores with each document if the tokenizer has them.
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
        # A text must have at least one token to keep and one token to drop.
        kept = lengths >= 2
        return firsts[kept], lengths[kept]

    @cached_property
    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        """The indices of the texts of all sequences, and the start of each sequence in them."""
        source_sizes, target_sizes = self._pair_sizes(self._texts[1])
        return best_fit(source_sizes, target_sizes, self.lengths, self.seed)


def tokenizer_with_sentinels(data: DocumentsData, number: int) -> Tokenizer:
    """Loads or trains the tokenizer of a new run, and adds sentinels if the tokenizer has none.

    Args:
      data: The configuration of the tokenizer and the texts.
      number: The number of sentinels. They count toward the requested size of the vocabulary. A
        single sentinel is used as a mask, so it is not added if the vocabulary has a mask token.
    """
    config = data.tokenizer
    has_mask = number == 1 and config.kind in ("wordpiece", "words")
    if config.path is not None:
        tokenizer = load_tokenizer(config.path)
        has_mask = number == 1 and tokenizer.special_ids.mask is not None
    else:
        # Leave room for the sentinels in the requested size.
        reserved = 0 if has_mask else number
        tokenizer = train_tokenizer(data.texts(), config, reserved=reserved)
    if has_mask or tokenizer.sentinels:
        return tokenizer
    # Import the class only here: its module imports the package `tokenizers`, which loads slowly.
    from ..tokenizers.sentinels import SentinelTokenizer

    return SentinelTokenizer(tokenizer, number)


@dataclass(frozen=True, kw_only=True)
class CorruptedData(DocumentsData):
    """Documents that are corrupted, so that a model learns to restore them."""

    examples_type: ClassVar[type[SpanCorruptionExamples]] = SpanCorruptionExamples

    @abstractmethod
    def noise(self, tokenizer: Tokenizer) -> Noise:
        """Returns the corruption to apply.

        Raises:
          DataError: The vocabulary lacks a token that the corruption needs.
        """

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and ``packed_pairs.arrays_of_pairs``."""
        return pair_specs(self.lengths)

    def examples_of(
        self, documents: Documents, tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """See ``DocumentsData``; for training, the corruption differs between epochs."""
        # Check the special tokens before tokenizing the documents.
        start_and_end(tokenizer)
        noise = self.noise(tokenizer)
        # The corpus is cached; the random corruption is drawn when an example is made.
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
    """Documents with gaps; the model predicts the dropped spans (T5)."""

    kind: ClassVar[str] = "span_corruption"

    length: PositiveInt
    """The number of tokens in a sequence of sources, S. A sequence may contain several sources."""
    target_length: PositiveInt | None = None
    """The number of tokens in a sequence of targets, T. By default, it is the length of the target
    that belongs to a source of S tokens.
    """
    noise_density: NoiseDensity = 0.15
    """The fraction of tokens that are dropped."""
    mean_span_length: SpanLength = 3.0
    """The mean number of consecutive tokens that are dropped."""
    num_sentinels: PositiveInt = 100
    """The number of sentinels to append to a vocabulary that has none. `tokenizer.vocab_size`
    includes the sentinels.
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
        """The corruption that the fields describe."""
        return SpanCorruption(self.noise_density, self.mean_span_length)

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of a sequence of sources and of a sequence of targets, S and T."""
        if self.target_length is not None:
            return self.length, self.target_length
        longest = np.asarray([self.corruption.longest_text(self.length)])
        return self.length, int(self.corruption.pair_sizes(longest)[1][0])

    def make_tokenizer(self) -> Tokenizer:
        """See ``DataConfig``; adds sentinels to a vocabulary that has none."""
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
