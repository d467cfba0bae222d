"""Causal language modeling: packed documents with the next token as label.

The arrays of a batch are ``input_ids``, ``labels``, ``segment_ids`` and ``position_ids``, int32
[B, T]; see ``packed_sequences.packed_arrays``.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from ..common.errors import DataError, counted
from ..common.files import default_cache_dir
from ..corpora.token_corpus import TokenCorpus, build_corpus
from ..dataset import BatchSpec, DataSplit, ExampleSource, PickledByFields
from ..packing.packed_sequences import (
    PackedTokens,
    gather_tokens,
    packed_arrays,
    packed_specs,
    require_bos_eos,
)
from ..packing.packing import (
    Packing,
    check_fills_a_sequence,
    concat_then_split,
    first_fit,
    split_once,
)
from ..prepared.read_shards import SPLITS, is_prepared, prepared_split, prepared_tokenizer
from ..sources.builtin.patterns import NUM_HELD_OUT, Episode, Patterns
from ..sources.documents import Documents, SourceLike, as_source
from ..tokenizers.base import Tokenizer
from .base import DocumentsData, unknown_tokens

EPISODES_PER_EPOCH = 1 << 16
"""The number of examples in an epoch of ``builtin:patterns``; every epoch has new examples."""
# Episodes that are drawn and tokenized to measure padding and to count tokens.
_SAMPLED_EPISODES = 1000


@dataclass(frozen=True)
class CausalLMExamples(PickledByFields):
    """The examples of training epochs; see ``dataset.ExampleSource``.

    With ``concat`` every epoch is split at a different offset; with ``first-fit`` all epochs have
    the same examples.

    Attributes:
      corpus: The tokens.
      length: The example's length T.
      packing: ``concat`` or ``first-fit``.
      seed: The seed of the offsets for ``concat``.
    """

    corpus: TokenCorpus
    length: int
    packing: Packing = "concat"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fills_a_sequence(self.corpus.num_targets, self.length)

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, at least 1."""
        if self.packing == "concat":
            return self.corpus.num_targets // self.length
        return len(self._plan[1]) - 1

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example: a pure function of its arguments.

        Args:
          epoch: From 0.
          index: In ``[0, num_examples)``.

        Returns:
          See ``packed_arrays``.
        """
        if self.packing == "concat":
            total = self.corpus.num_targets
            offset = _offset(self.seed, epoch, total)
            spans = concat_then_split(
                index, self.length, self.corpus.target_starts, total=total, offset=offset
            )
        else:
            planned, sequence_starts = self._plan
            spans = planned[sequence_starts[index] : sequence_starts[index + 1]].tolist()
        return packed_arrays(gather_tokens(self.corpus, spans), self.length)

    @cached_property
    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        return first_fit(self.corpus.target_counts, self.length)


@dataclass(frozen=True)
class CausalLMEvaluationExamples:
    """Each target token of a corpus exactly once, in order; the last example is padded.

    Attributes:
      corpus: The tokens.
      length: The length of a sequence, T.
    """

    corpus: TokenCorpus
    length: int

    @property
    def num_examples(self) -> int:
        """The number of examples that cover all target tokens."""
        return -(-self.corpus.num_targets // self.length)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Returns the same example in every epoch; see ``packed_arrays``."""
        spans = split_once(index, self.length, self.corpus.target_starts, self.corpus.num_targets)
        return packed_arrays(gather_tokens(self.corpus, spans), self.length)


@dataclass(frozen=True)
class PatternExamples:
    """Examples of small random tasks, newly drawn in each epoch.

    Attributes:
      patterns: The tasks.
      tokenizer: The tokenizer of the model.
      length: The example's length T.
      seed: The seed of the tasks, any integer.
    """

    patterns: Patterns
    tokenizer: Tokenizer
    length: int
    seed: int

    @property
    def num_examples(self) -> int:
        """The number of examples is a constant, because the source is endless."""
        return EPISODES_PER_EPOCH

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, a whole episode: a pure function of the seed and its arguments.

        Returns:
          See ``packed_arrays``.
        """
        # An example has at least one token, so `length` examples are enough to fill a sequence.
        episode = self.patterns.training_episode(self.seed, epoch, index, self.length)
        tokens = np.asarray(episode_tokens(self.tokenizer, episode, self.length))
        return packed_arrays(PackedTokens(tokens, np.asarray([len(tokens) - 1])), self.length)


def episode_tokens(tokenizer: Tokenizer, episode: Episode, length: int) -> list[int]:
    """Returns the tokens of as many examples of an episode as fit, with BOS and EOS.

    Args:
      tokenizer: A tokenizer with BOS and EOS.
      episode: The episode.
      length: The number of target tokens of a sequence; returns at most one token more.

    Raises:
      DataError: Not even two examples fit.
    """
    special, lines = tokenizer.special_ids, episode.lines
    sizes = list(map(len, tokenizer.encode_batch(lines)))
    # Estimate how many lines fit from the number of tokens of each line, with room for EOS as the
    # last target. Then remove lines until the joined lines fit.
    kept = int(np.searchsorted(np.cumsum(sizes), length, "left"))
    while kept > 1:
        # Subword vocabularies may tokenize joined lines differently than single lines.
        tokens = tokenizer.encode("".join(lines[:kept]), add_special_tokens=False)
        if len(tokens) < length:
            return [*special.before, *tokens, *special.after]
        kept -= 1
    raise DataError(
        f"two examples of the task {episode.task.name} have {sum(sizes[:2])} tokens and more than "
        f"fill a sequence: give data.length above {sum(sizes[:2])}"
    )


def _offset(seed: int, epoch: int, total: int) -> int:
    """Returns the pseudorandom start of an epoch's first sequence, equal on all processes."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % total


@dataclass(frozen=True, kw_only=True)
class CausalLMData(DocumentsData):
    """Documents for next-token prediction."""

    kind: ClassVar[str] = "causal_lm"

    packing: Packing = "concat"
    """concat: fill every sequence and split documents. first-fit: keep documents whole and pad the
    sequences.
    """

    def make_tokenizer(self) -> Tokenizer:
        """See ``DataConfig``; a prepared source provides its tokenizer."""
        if is_prepared(self.source_name) and self.tokenizer.path is None:
            return prepared_tokenizer(self.source_name)
        return super().make_tokenizer()

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``; int32 [T] each, see ``packed_arrays``."""
        return packed_specs(self.length)

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns packed examples; `concat` splits differently in every epoch unless prepared."""
        if is_prepared(self.source_name):
            # The settings of the folder must match, because its sequences cannot be packed again.
            requested = {"length": self.length, "packing": self.packing, **self._held_out()}
            splits = SPLITS if self.validation else SPLITS[:1]
            read = partial(prepared_split, splits=splits, tokenizer=tokenizer, requested=requested)
            if self.mixture:
                return self.mixed([term.source for term in self.mixture], read)
            return read(self.source_name)
        patterns = Patterns.parse(self.source_name)
        if patterns is not None:
            return self._endless(patterns, tokenizer, seed)
        return super().train_split(tokenizer, labels, seed)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns sequences that have every validation token once."""
        if self.validation is not None:
            return self.whole_source(self.validation, tokenizer, labels)
        if is_prepared(self.source_name):
            requested = {"length": self.length, **self._held_out()}
            return prepared_split(self.source_name, SPLITS[1:], tokenizer, requested)
        patterns = Patterns.parse(self.source_name)
        if patterns is not None:
            return self._held_out_episodes(patterns, tokenizer)
        return super().validation_split(tokenizer, labels)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns sequences that have every token of a source once."""
        name = as_source(source)
        if is_prepared(name):
            return prepared_split(name, SPLITS, tokenizer, {"length": self.length})
        patterns = Patterns.parse(name)
        if patterns is not None:
            return self._held_out_episodes(patterns, tokenizer)
        return super().whole_source(name, tokenizer, labels)

    def examples_of(
        self, documents: Documents, tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """See ``DocumentsData``; an evaluation has every token once."""
        corpus = _corpus(documents, tokenizer)
        if seed is None:
            return _split(CausalLMEvaluationExamples(corpus, self.length), corpus)
        examples = CausalLMExamples(corpus, self.length, self.packing, seed)
        # Plan the sequences of first-fit now instead of in the first batch.
        _ = examples.num_examples
        return _split(examples, corpus)

    def _endless(self, patterns: Patterns, tokenizer: Tokenizer, seed: int) -> DataSplit:
        require_bos_eos(tokenizer)
        sample = self._corpus_of(
            [
                patterns.training_episode(seed, 0, index, self.length)
                for index in range(_SAMPLED_EPISODES)
            ],
            tokenizer,
        )
        # Estimate the padding of an endless source from a sample of its episodes.
        padding = 1 - sample.num_targets / (_SAMPLED_EPISODES * self.length)
        summary = (
            f"endless tasks of the {counted(len(patterns.kinds), 'kind')} "
            f"{', '.join(patterns.kinds)}, one in each sequence of {self.length} tokens, "
            f"{padding:.1%} of them padding"
        )
        examples = PatternExamples(patterns, tokenizer, self.length, seed)
        return DataSplit(examples, sample, sample.fingerprint, summary)

    def _held_out_episodes(self, patterns: Patterns, tokenizer: Tokenizer) -> DataSplit:
        """Returns episodes of held-out tasks, each complete in one sequence."""
        require_bos_eos(tokenizer)
        corpus = self._corpus_of(
            [patterns.held_out_episode(index, self.length) for index in range(NUM_HELD_OUT)],
            tokenizer,
        )
        # first-fit never splits these episodes, because each fits a sequence.
        split = _split(CausalLMExamples(corpus, self.length, "first-fit"), corpus)
        return replace(split, notes=("the tasks of these documents are held out from training",))

    def _corpus_of(self, episodes: list[Episode], tokenizer: Tokenizer) -> TokenCorpus:
        # Decode the tokens that fit, so that the texts of the documents match the examples exactly.
        texts = [
            tokenizer.decode(episode_tokens(tokenizer, episode, self.length))
            for episode in episodes
        ]
        return _corpus(Documents.of(texts), tokenizer)

    def _held_out(self) -> dict[str, float]:
        """Returns the held-out fraction that a prepared source must have to validate on it."""
        return {} if self.validation else {"validation_fraction": self.validation_fraction}


def _corpus(documents: Documents, tokenizer: Tokenizer) -> TokenCorpus:
    require_bos_eos(tokenizer)
    return build_corpus(documents, tokenizer, default_cache_dir() / "tokens")


def _split(rows: ExampleSource, corpus: TokenCorpus) -> DataSplit:
    summary = (
        f"{counted(corpus.num_documents, 'document')}, {counted(corpus.num_bytes, 'byte')}, "
        f"{counted(corpus.num_targets, 'token')} to predict{unknown_tokens(corpus)}"
    )
    ratio = corpus.num_documents / corpus.num_targets
    return DataSplit(rows, corpus, corpus.fingerprint, summary, documents_per_token=ratio)
