"""Prepares data for translation: packs sentence pairs into examples for teacher forcing.

As in Vaswani et al. 2017, sections 3.1 and 5.1, the decoder reads a start token and then the
target, and at each position predicts the next token of the target or the end token. Source and
target share a vocabulary. The paper puts pairs of similar length into a batch. In flaxzoo, an
example contains several pairs with different segment ids, so that all steps have the same shapes
and almost no padding.

The arrays of a batch are int32: ``input_ids``, ``segment_ids``, ``position_ids`` [B, S], and
``decoder_input_ids``, ``decoder_segment_ids``, ``decoder_position_ids``, ``labels`` [B, T]; see
``packed_pairs.arrays_of_pairs``. Other tasks whose output is a text use ``TextToTextData``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import PositiveInt, Rate, require
from ..common.files import default_cache_dir
from ..common.hashing import digest
from ..corpora.pair_corpus import PairCorpus, build_pair_corpus, pair_at
from ..corpora.token_corpus import corpus_key
from ..dataset import BatchSpec, DataSplit, too_long
from ..packing.packed_pairs import TokenPair, arrays_of_pairs, fill_note, pair_specs
from ..packing.packing import best_fit
from ..sources.builtin.spelled_numbers import HELD_OUT, LIMIT, NumberWords, draw_numbers, spell
from ..sources.documents import SourceLike
from ..sources.parallel_corpus import ParallelText, open_parallel
from ..tokenizers.base import Tokenizer
from .base import EVALUATION_SEED, DataConfig, SourceField, unknown_tokens

VOCABULARY_PAIRS = 1_000_000
"""The maximum number of pairs that train a vocabulary. These pairs are evenly spaced."""
NUMBER_EXAMPLES_PER_EPOCH = 1 << 16
"""The number of examples in an epoch of spelled-out numbers; every epoch has new examples."""

# A pair that does not fit is still translated and scored in evaluation, but has no loss.
_OF_THE_LOSS = "left out of the loss"
# A sequence is considered full after this many numbers did not fit into it.
_MISSES = 3
# The number of sequences that are made to measure the fraction of padding for an endless source.
_NUM_MEASURED = 32


def start_and_end(tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns the ids of the tokens that start and end a translation.

    Raises:
      DataError: The vocabulary lacks one of these tokens.
    """
    special = tokenizer.target.special_ids
    if special.bos is None or special.eos is None:
        raise DataError(
            f"this {tokenizer.kind} tokenizer has no tokens that start and end a text: "
            "train one (data.tokenizer.kind sentencepiece-bpe)"
        )
    return special.bos, special.eos


def encode_source(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the encoder input for a text: its tokens with the tokens of `source_frame`.

    Raises:
      DataError: The vocabulary has no end token.
    """
    return tokenizer.source_frame.join(tokenizer.encode(text, add_special_tokens=False)).ids


@dataclass(frozen=True)
class TranslationExamples:
    """Examples that contain each fitting pair exactly once, and are the same in every epoch.

    Attributes:
      corpus: The tokens of the pairs.
      lengths: The lengths of a sequence of sources and of a sequence of targets, S and T.
      start: The id of the token that precedes each target in the decoder's input.
      pairs: The indices of the pairs, grouped by sequence, int64 [num_fitting].
      sequence_starts: The index in ``pairs`` where each sequence starts, then the end, int64
        [num_sequences + 1].
    """

    corpus: PairCorpus
    lengths: tuple[int, int]
    start: int
    pairs: np.ndarray
    sequence_starts: np.ndarray

    @classmethod
    def plan(
        cls, corpus: PairCorpus, lengths: tuple[int, int], start: int, seed: int
    ) -> "TranslationExamples":
        """Packs the pairs; see ``packing.best_fit``.

        Raises:
          DataError: No pair fits into a sequence.
        """
        # Plan only once, because all epochs have the same sequences in different orders.
        sources, targets = corpus.sizes
        pairs, sequence_starts = best_fit(sources, targets, lengths, seed)
        shortest = int(np.maximum(sources, targets).min())
        require(
            len(pairs),
            f"no pair fits a sequence of data.length {lengths[0]} and data.target_length "
            f"{lengths[1]}, the shortest pair has {shortest} tokens on a side: give longer "
            "sequences",
            DataError,
        )
        return cls(corpus, lengths, start, pairs, sequence_starts)

    @property
    def num_examples(self) -> int:
        """The number of sequences, at least 1."""
        return len(self.sequence_starts) - 1

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, which is the same in every epoch.

        Returns:
          See ``arrays_of_pairs``.
        """
        chosen = self.pairs[self.sequence_starts[index] : self.sequence_starts[index + 1]]
        pairs = map(self.corpus.pair, chosen.tolist())
        return arrays_of_pairs(pairs, self.lengths, self.start)

    @cached_property
    def num_tokens(self) -> tuple[int, int]:
        """The total numbers of source tokens and of target tokens, including end tokens."""
        source, target = (sizes[self.pairs].sum() for sizes in self.corpus.sizes)
        return int(source), int(target)

    @property
    def padding_fraction(self) -> float:
        """The fraction of all tokens, in sources and targets together, that are padding."""
        return 1 - sum(self.num_tokens) / (sum(self.lengths) * self.num_examples)


@dataclass(frozen=True)
class NumberExamples:
    """Examples of spelled-out numbers, which are different in each epoch.

    Attributes:
      languages: The source language and the target language, as num2words names them.
      tokenizer: The tokenizer for sources; its ``target`` is the tokenizer for targets.
      lengths: The lengths of a sequence of sources and of a sequence of targets, S and T.
      seed: The seed that determines the numbers, any integer.
    """

    languages: tuple[str, str]
    tokenizer: Tokenizer
    lengths: tuple[int, int]
    seed: int

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, a constant because the source is endless."""
        return NUMBER_EXAMPLES_PER_EPOCH

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, which depends only on the seed and the arguments.

        Returns:
          See ``arrays_of_pairs``.
        """
        rng = np.random.default_rng([self.seed % 2**64, epoch, index])
        start, _ = start_and_end(self.tokenizer)
        pairs = self._fill(draw_numbers(rng))
        return arrays_of_pairs(pairs, self.lengths, start)

    @cached_property
    def padding_fraction(self) -> float:
        """The fraction of padding in a sample of sequences, in sources and targets together."""
        measured = [self.example(0, index) for index in range(_NUM_MEASURED)]
        names = "segment_ids", "decoder_segment_ids"
        sides = [arrays[name] for arrays in measured for name in names]
        return float(np.mean(np.concatenate(sides) == 0))

    def _fill(self, numbers: Iterator[int]) -> Iterator[TokenPair]:
        # Fill the sequence with random numbers until a few of them do not fit.
        source_room, target_room = self.lengths
        misses = 0
        while misses < _MISSES:
            number = next(numbers)
            source = self.side(number, 0)
            # Do not spell out the target if the source does not fit.
            target = self.side(number, 1) if len(source) <= source_room else []
            if 0 < len(target) <= target_room:
                source_room -= len(source)
                target_room -= len(target)
                yield source, target
            else:
                misses += 1

    def side(self, number: int, which: int) -> list[int]:
        """Returns the tokens of a spelled-out number, including the end token."""
        tokenizer = (self.tokenizer, self.tokenizer.target)[which]
        return encode_source(tokenizer, spell(number, self.languages[which]))


@dataclass(frozen=True)
class VocabularyTexts:
    """The texts of pairs; each target follows its source. See ``token_corpus.Texts``.

    Attributes:
      text: The sentence pairs.
    """

    text: ParallelText

    @property
    def fingerprint(self) -> str:
        """A hash of all texts in their order."""
        return digest(self)

    def __iter__(self) -> Iterator[str]:
        number = len(self.text)
        kept = min(number, VOCABULARY_PAIRS)
        for i, pair in enumerate(self.text):
            # Keep `kept` of the `number` pairs, evenly spaced.
            if i * kept // number != (i - 1) * kept // number:
                yield from filter(str.strip, (pair.source, pair.target))


@dataclass(frozen=True, kw_only=True)
class TranslationData(DataConfig):
    """Sentences and their translations."""

    kind: ClassVar[str] = "translation"

    source: SourceField
    """pairs:SRC,TGT, tsv:GLOB#1,2, jsonl:GLOB#en,de, parquet:GLOB#en,de, tfds:NAME/CONFIG#en,de,
    hf:NAME#en,de, several sources joined by " + ", or builtin:numbers-en-fr. To translate in the
    other direction, swap the two names."""
    validation_fraction: Rate = 0.01
    """The fraction of `source` that is held out if `validation` is not given and no validation
    split is published."""
    length: PositiveInt
    """The number of tokens in a sequence of sources, S. A sequence contains several pairs."""
    target_length: PositiveInt | None = None
    """The number of tokens in a sequence of targets, T. Defaults to `length`."""

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of a sequence of sources and of a sequence of targets, S and T."""
        return self.length, self.target_length or self.length

    def texts(self) -> VocabularyTexts:
        """Returns the sources and targets of the training pairs, to train a shared vocabulary."""
        return VocabularyTexts(self._open("train"))

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and ``arrays_of_pairs``."""
        return pair_specs(self.lengths)

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns examples made from the pairs that are not held out.

        The examples are the same in every epoch, except that spelled-out numbers are always new.
        """
        numbers = NumberWords.parse(self.source_name)
        if numbers is None:
            return self._split(self._open("train"), tokenizer, seed, "left out")
        return self._endless(numbers, tokenizer, seed)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns the validation pairs.

        They are from the validation source, or else from the published split, or else held out.
        """
        if self.validation is not None:
            return self.whole_source(self.validation, tokenizer, labels)
        return self._split(self._open("validation"), tokenizer, EVALUATION_SEED, _OF_THE_LOSS)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns all pairs of a source, or the validation split of a published source.

        The split's content includes every pair as it was read. The examples leave out pairs with an
        empty source or target, and pairs that are longer than a sequence.
        """
        text = open_parallel(source, "whole", like=self.source_name)
        return self._split(text, tokenizer, EVALUATION_SEED, _OF_THE_LOSS)

    def input_split(
        self, path: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Raises an error, because ``predict`` predicts labels and not translations.

        Raises:
          DataError: Always. The message names the command that translates.
        """
        raise DataError(f"{self.kind} data has no labels to predict: use the command translate")

    def _open(self, split: Literal["train", "validation"]) -> ParallelText:
        return open_parallel(self.source, split, validation_fraction=self.held_out_fraction)

    def _split(
        self, text: ParallelText, tokenizer: Tokenizer, seed: int, left_out: str
    ) -> DataSplit:
        start, _ = start_and_end(tokenizer)
        corpus = build_pair_corpus(text, tokenizer, default_cache_dir() / "pairs")
        examples = TranslationExamples.plan(corpus, self.lengths, start, seed)
        summary = _summary(examples, text, left_out)
        return DataSplit(examples, text, corpus.fingerprint, summary, text.notes())

    def _endless(self, numbers: NumberWords, tokenizer: Tokenizer, seed: int) -> DataSplit:
        start_and_end(tokenizer)
        sample = numbers.vocabulary
        examples = NumberExamples(numbers.languages, tokenizer, self.lengths, seed)
        # Check that the numbers of the sample fit, because training would silently skip numbers
        # that do not fit.
        for which, length in enumerate(self.lengths):
            longest = max(len(examples.side(number, which)) for number in sample.numbers)
            require(
                longest <= length,
                f"a number takes up to {longest} tokens on a side, more than data."
                f"{('length', 'target_length')[which]} {length}: give longer sequences or a "
                "larger vocabulary",
                DataError,
            )
        # The examples are computed from a random number generator, so the sample and the tokenizer
        # identify them.
        fingerprint = corpus_key("numbers", sample.fingerprint, tokenizer.fingerprint)
        summary = (
            f"numbers below {LIMIT:,}, except those from {HELD_OUT.start:,} to {HELD_OUT[-1]:,}, "
            f"endless; sequences of {self.lengths[0]} + {self.lengths[1]} tokens, "
            f"{examples.padding_fraction:.1%} of them padding"
        )
        return DataSplit(examples, ParallelText((sample,)), fingerprint, summary)


@dataclass(frozen=True, kw_only=True)
class TextToTextData(TranslationData):
    """Pairs of an input text and an output text, such as a summary or a correction (T5, BART)."""

    kind: ClassVar[str] = "text_to_text"


def _summary(examples: TranslationExamples, text: ParallelText, left_out: str) -> str:
    """Describes the sequences, and states how many pairs are left out and why."""
    corpus = examples.corpus
    fill = fill_note(examples.num_tokens, examples.lengths, examples.num_examples)
    summary = [f"{counted(len(examples.pairs), 'pair')}, {fill}"]
    sources, targets = corpus.sizes
    number = corpus.num_read
    if corpus.first_empty is not None:
        location = pair_at(text, corpus.first_empty).location
        empty = f"{corpus.num_empty:,} of {counted(number, 'pair')}"
        summary.append(f"{empty} {left_out}: an empty side (first: {location})")
    # Best-fit left out these pairs, because the source or the target is longer than a sequence.
    over_long = np.flatnonzero((sources > examples.lengths[0]) | (targets > examples.lengths[1]))
    if len(over_long):
        # The corpus contains no empty pairs; `numbers` maps its indices to indices in the text.
        location = pair_at(text, int(corpus.numbers[over_long[0]])).location
        limit = f"data.length {examples.lengths[0]}"
        if examples.lengths[0] != examples.lengths[1]:
            limit += f" or data.target_length {examples.lengths[1]}"
        (note,) = too_long(len(over_long), number, "pair", limit, consequence=left_out)
        summary.append(f"{note} (first: {location})")
    return "; ".join(summary) + unknown_tokens(corpus)
