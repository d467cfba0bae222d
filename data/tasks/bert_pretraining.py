"""Pretrains an encoder to predict masked tokens and, optionally, the next-sentence label.

The arrays of a batch are int32: ``input_ids``, ``attention_mask``, ``token_type_ids`` [B, T];
``masked_positions``, ``masked_labels``, ``masked_weights`` [B, M]; and, with the next-sentence
objective, ``next_sentence_label`` [B], which is 0 if the second segment continues the first. Packed
rows also have ``segment_ids`` [B, T], the index, from 1, of the text that each token belongs to.
"""

import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import Fraction, PositiveInt, Range, require, require_type
from ..common.files import default_cache_dir
from ..common.hashing import digest
from ..corpora.sentence_corpus import build_sentence_corpus
from ..dataset import ArraySpec, BatchSpec, DataSplit, Values, zeros
from ..features.bert_inputs import token_specs
from ..features.masking import Masking, prediction_specs, usual_predictions
from ..features.nsp_inputs import SentencePairExamples, read_pairs
from ..features.packed_texts import PackedTexts
from ..features.segment_pairs import Segments
from ..features.token_windows import Windows
from ..sources.documents import Documents, SourceLike
from ..tokenizers.base import Tokenizer
from .base import EVALUATION_SEED, DocumentsData, unknown_tokens
from .labelled_examples import encoded_texts


@dataclass(frozen=True)
class PretrainingExamples:
    """The examples of each pretraining epoch; see ``dataset.ExampleSource``.

    Attributes:
      segments: Selects the tokens of an example.
      masking: Selects the tokens to predict.
      pad: The id of ``[PAD]``.
      seed: The seed of all random choices in an example.
    """

    segments: Segments | Windows | PackedTexts
    masking: Masking
    pad: int
    seed: int

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, at least 1."""
        return self.segments.num_examples

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, which depends only on the seed and the arguments.

        Args:
          epoch: The number of the epoch, from 0.
          index: The index of the example, in ``[0, num_examples)``.

        Returns:
          ``input_ids``, ``attention_mask``, ``token_type_ids``, int32 [T];
          ``masked_positions``, ``masked_labels``, ``masked_weights``, int32 [M]; and, with the
          next-sentence objective, ``next_sentence_label``, int32 [].
        """
        # All random choices of the example come from this generator, in a fixed order.
        rng = np.random.default_rng([self.seed % 2**64, epoch, index])
        example = self.segments.example(epoch, index, rng)
        # Mask in place before padding, so that the number of predictions depends on real tokens.
        predictions = self.masking.mask_row(example.input_ids, rng)
        length, size = self.segments.length, len(example.input_ids)
        row = zeros(token_specs(length))
        row["input_ids"][:size] = example.input_ids
        row["input_ids"][size:] = self.pad
        row["attention_mask"][:size] = 1
        row["token_type_ids"][:size] = example.token_type_ids
        row |= predictions
        if example.segment_ids is not None:
            row["segment_ids"] = np.zeros(length, np.int32)
            row["segment_ids"][:size] = example.segment_ids
        if example.label is not None:
            row["next_sentence_label"] = np.asarray(example.label, np.int32)
        return row


@dataclass(frozen=True, kw_only=True)
class PretrainingData(DocumentsData):
    """Documents that are divided into segments or pairs of segments, with masked tokens."""

    kind: ClassVar[str] = "pretraining"

    next_sentence: bool = True
    """Whether to train on segment pairs with the next-sentence objective (BERT) or without the
    objective (RoBERTa)."""
    pair_label: Literal["next", "order"] = "next"
    """The label to predict. next: whether the second segment continues the first (BERT).
    order: which of two consecutive segments comes first (ALBERT)."""
    segments: Literal["sentences", "halves", "packed"] = "sentences"
    """sentences: segments are whole sentences, as in the original code. halves: a sequence is a
    window from a random position that is divided in the middle, or two halves from different parts
    of the text; without next_sentence, it is a single window. packed: rows without padding contain
    several documents, each with its special tokens (ModernBERT); requires next_sentence False."""
    masking_rate: Annotated[float, Range(above=0, below=1)] = 0.15
    """The fraction of tokens that are predicted."""
    whole_word: bool = False
    """Whether to mask all tokens of a word together."""
    ngrams: PositiveInt = 1
    """The maximum number of consecutive words (or tokens, if whole_word is False) that are masked
    together. The probability of n words is proportional to 1 / n (ALBERT: up to 3).
    """
    max_predictions: PositiveInt | None = None
    """The maximum number of predictions per sequence. Defaults to masking_rate * length, rounded
    up."""
    short_fraction: Fraction = 0.1
    """The fraction of examples that are deliberately shorter than a sequence, if segments are whole
    sentences."""
    language: str = "en"
    """The language of the text, which determines how it is split into sentences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = f"data.max_predictions {self.max_predictions} exceeds data.length {self.length}"
        require((self.max_predictions or 0) <= self.length, problem)
        problem = "data.segments packed has no pairs: set data.next_sentence False"
        require(self.segments != "packed" or not self.next_sentence, problem)
        require(
            self.pair_label == "next" or (self.next_sentence and self.segments == "sentences"),
            f"data.pair_label {self.pair_label} needs pairs of sentences: set data.next_sentence "
            "True and data.segments sentences",
        )

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and ``PretrainingExamples.example``."""
        # `Masking.of` computes the same number, but needs a tokenizer.
        predictions = self.max_predictions or usual_predictions(self.masking_rate, self.length)
        spec = token_specs(self.length) | prediction_specs(predictions)
        if self.segments == "packed":
            spec["segment_ids"] = ArraySpec((self.length,), Values.SEGMENT)
        if self.next_sentence:
            spec["next_sentence_label"] = ArraySpec((), Values.LABEL, num_classes=2)
        return spec

    def input_split(
        self, path: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Reads two tab-separated texts per line, to predict whether text 2 continues text 1.

        Raises:
          DataError: The run was not trained with the next-sentence objective, or a line does not
            contain two texts.
        """
        if not self.next_sentence:
            return super().input_split(path, tokenizer, labels)
        problem = "pairs of segments must be in a file: give its name"
        located = read_pairs(require_type(path, str, problem, DataError))
        pairs = tuple(located.values())
        tokens, cut = encoded_texts(
            pairs, tuple(located), tokenizer, length=self.length, noun="pair"
        )
        masking = Masking.of(tokenizer, self.length, max_predictions=self.max_predictions)
        rows = SentencePairExamples(tokens, pairs, masking.max_predictions)
        summary = ", ".join([counted(len(pairs), "pair"), *cut])
        return DataSplit(rows, pairs, digest(map("\t".join, pairs)), summary)

    def examples_of(
        self, documents: Documents, tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """See ``DocumentsData``; for training, offsets, pairs and masks differ between epochs."""
        pad = _checked(tokenizer)
        jitter, seed = seed is not None, EVALUATION_SEED if seed is None else seed
        corpus = build_sentence_corpus(
            documents, tokenizer, default_cache_dir() / "sentences", self.language
        )
        # Segments are whole sentences as in the original code, windows of a fixed length, or packed
        # texts.
        segments: Segments | Windows | PackedTexts
        if self.segments == "packed":
            segments = PackedTexts(corpus, self.length, tokenizer.frame)
        elif self.segments == "halves":
            segments = Windows(
                corpus, self.length, tokenizer.frame, next_sentence=self.next_sentence
            )
        else:
            segments = Segments(
                corpus,
                self.length,
                tokenizer.frame,
                seed=seed,
                next_sentence=self.next_sentence,
                short_fraction=self.short_fraction,
                jitter=jitter,
                swap=self.pair_label == "order",
            )
        # The segments determine the tokens of an example, and the masking which of them to predict.
        masking = Masking.of(
            tokenizer,
            self.length,
            rate=self.masking_rate,
            max_predictions=self.max_predictions,
            whole_word=self.whole_word,
            ngrams=self.ngrams,
        )
        rows = PretrainingExamples(segments, masking, pad, seed)
        number = counted(rows.num_examples, "example")
        summary = f"{corpus.summary}, {number} an epoch{unknown_tokens(corpus)}"
        return DataSplit(rows, corpus, corpus.fingerprint, summary)


def _checked(tokenizer: Tokenizer) -> int:
    """Returns the id of the padding token, after checking that all special tokens exist."""
    # Padding, masking, and the start and the end of texts each need a special token.
    ids = tokenizer.special_ids.present
    missing = list(itertools.filterfalse(ids.__contains__, ("cls", "sep", "mask", "pad")))
    require(
        not missing,
        f"this {tokenizer.kind} tokenizer has no {', '.join(missing)} token, which pretraining "
        "needs: train a wordpiece vocabulary (data.tokenizer.kind wordpiece), or name a BERT",
        error=DataError,
    )
    return ids["pad"]
