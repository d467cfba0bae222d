"""Prepares data for causal language modeling: packed documents with the next tokens as labels.

The arrays of a batch are ``input_ids``, ``labels``, ``segment_ids`` and ``position_ids``, each
int32 [B, T]; see ``packed_sequences.packed_arrays``.
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
# The number of episodes that are tokenized to measure the padding and to count tokens.
_SAMPLED_EPISODES = 1000


@dataclass(frozen=True)
class CausalLMExamples(PickledByFields):
    """The examples of each training epoch; see ``dataset.ExampleSource``.

    With ``concat``, the splitting starts at a different offset in every epoch. With ``first-fit``,
    all epochs have the same examples.

    Attributes:
      corpus: The tokens of the documents.
      length: The length T of an example.
      packing: ``concat`` or ``first-fit``.
      seed: The seed that determines the offsets for ``concat``.
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
        """Makes one example, which depends only on the attributes and the arguments.

        Args:
          epoch: The number of the epoch, from 0.
          index: The index of the example, in ``[0, num_examples)``.

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
    """Examples that contain each target token of a corpus once, in order; the last is padded.

    Attributes:
      corpus: The tokens of the documents.
      length: The length of a sequence, T.
    """

    corpus: TokenCorpus
    length: int

    @property
    def num_examples(self) -> int:
        """The number of examples that together contain all target tokens."""
        return -(-self.corpus.num_targets // self.length)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Returns the same example in every epoch; see ``packed_arrays``."""
        spans = split_once(index, self.length, self.corpus.target_starts, self.corpus.num_targets)
        return packed_arrays(gather_tokens(self.corpus, spans), self.length)


@dataclass(frozen=True)
class PatternExamples:
    """Examples of small random tasks, which are different in each epoch.

    Attributes:
      patterns: The source of the tasks.
      tokenizer: The tokenizer of the model.
      length: The length T of an example.
      seed: The seed that determines the tasks, any integer.
    """

    patterns: Patterns
    tokenizer: Tokenizer
    length: int
    seed: int

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, a constant because the source is endless."""
        return EPISODES_PER_EPOCH

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example from an episode; it depends only on the seed and the arguments.

        Returns:
          See ``packed_arrays``.
        """
        # Each example of an episode has at least one token, so `length` of them fill a sequence.
        episode = self.patterns.training_episode(self.seed, epoch, index, self.length)
        tokens = np.asarray(episode_tokens(self.tokenizer, episode, self.length))
        return packed_arrays(PackedTokens(tokens, np.asarray([len(tokens) - 1])), self.length)


def episode_tokens(tokenizer: Tokenizer, episode: Episode, length: int) -> list[int]:
    """Returns the tokens of an episode, truncated after the last example that fits.

    Args:
      tokenizer: A tokenizer with BOS and EOS.
      episode: The episode.
      length: The number of target tokens in a sequence. The result, including BOS and EOS, has at
        most one token more.

    Raises:
      DataError: Fewer than two examples fit.
    """
    special, lines = tokenizer.special_ids, episode.lines
    sizes = list(map(len, tokenizer.encode_batch(lines)))
    # From the number of tokens in each line, estimate how many lines fit together with EOS, the
    # last target. Then remove lines until the joined lines fit.
    kept = int(np.searchsorted(np.cumsum(sizes), length, "left"))
    while kept > 1:
        # A subword vocabulary may tokenize joined lines differently from single lines.
        tokens = tokenizer.encode("".join(lines[:kept]), add_special_tokens=False)
        if len(tokens) < length:
            return [*special.before, *tokens, *special.after]
        kept -= 1
    raise DataError(
        f"two examples of the task {episode.task.name} have {sum(sizes[:2])} tokens and more than "
        f"fill a sequence: give data.length above {sum(sizes[:2])}"
    )


def _offset(seed: int, epoch: int, total: int) -> int:
    """Returns the pseudorandom start of an epoch's first sequence; all processes get the same."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % total


@dataclass(frozen=True, kw_only=True)
class CausalLMData(DocumentsData):
    """Documents for next-token prediction."""

    kind: ClassVar[str] = "causal_lm"

    packing: Packing = "concat"
    """concat: fill every sequence, which splits documents. first-fit: keep documents whole where
    possible, and pad the sequences.
    """

    def make_tokenizer(self) -> Tokenizer:
        """See ``DataConfig``; for a prepared source, loads the tokenizer of its folder."""
        if is_prepared(self.source_name) and self.tokenizer.path is None:
            return prepared_tokenizer(self.source_name)
        return super().make_tokenizer()

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``; each array is int32 [T], see ``packed_arrays``."""
        return packed_specs(self.length)

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns packed examples. With `concat`, epochs differ unless the source is prepared."""
        if is_prepared(self.source_name):
            # The settings of the folder must be the same, because its sequences are already packed.
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
        """Returns sequences that contain every validation token exactly once."""
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
        """Returns sequences that contain every token of a source exactly once."""
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
        """See ``DocumentsData``; for evaluation, the examples contain every token exactly once."""
        corpus = _corpus(documents, tokenizer)
        if seed is None:
            return _split(CausalLMEvaluationExamples(corpus, self.length), corpus)
        examples = CausalLMExamples(corpus, self.length, self.packing, seed)
        # Accessing the property plans the sequences of first-fit now, and not with the first batch.
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
        """Returns episodes of held-out tasks. No episode is split between sequences."""
        require_bos_eos(tokenizer)
        corpus = self._corpus_of(
            [patterns.held_out_episode(index, self.length) for index in range(NUM_HELD_OUT)],
            tokenizer,
        )
        # first-fit never splits these episodes, because each fits into a sequence.
        split = _split(CausalLMExamples(corpus, self.length, "first-fit"), corpus)
        return replace(split, notes=("the tasks of these documents are held out from training",))

    def _corpus_of(self, episodes: list[Episode], tokenizer: Tokenizer) -> TokenCorpus:
        # Decode the tokens that fit, so that each document has exactly the text of its example.
        texts = [
            tokenizer.decode(episode_tokens(tokenizer, episode, self.length))
            for episode in episodes
        ]
        return _corpus(Documents.of(texts), tokenizer)

    def _held_out(self) -> dict[str, float]:
        """Returns the held-out fraction that a prepared source must have for validation."""
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
