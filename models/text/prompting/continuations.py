"""Computes the log-probabilities of many continuations. Common prefixes are computed only once.

Several requests are packed into one row of tokens, and each token attends only to earlier tokens of
its request (`prefix_tree.py`). Only the positions before the tokens of a continuation are projected
to the vocabulary.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ....data.common.errors import UserError
from ....data.common.fields import require
from ....data.common.progress import AdvanceFn, LogFn, ignore
from ....data.tasks.translation import encode_source
from ...decoding.cached_context import rotates_by_length
from ...decoding.padding import pad_rows, power_of_two, round_up
from ...finite import check_outputs
from ...heads.specs import CAUSAL_HEADS
from ...mesh_axes import BATCH_AXES, num_shards
from ...nn.cache import Cache, init_cache
from ...nn.masks import AnyArray
from ...nn.typing import Array, Bool, Int, Params
from ...token_log_probs import token_log_probs
from ..text_model import TextModel
from .prefix_tree import Item, Layout, Plan, PrefixGroup, Request, pack, plan

CAPACITY = {"cpu": 512}
DEFAULT_CAPACITY = 1024
"""Maximum number of tokens in a row that continues a prefix. Attention scores are computed for all
pairs of these tokens, including masked pairs. With 512 tokens, this takes a tenth of the total
computation of GPT-2.
"""
TOKENS_AT_ONCE = {"cpu": 2048}
DEFAULT_TOKENS_AT_ONCE = 16384
"""Maximum number of tokens in all rows of a call."""


@dataclasses.dataclass(frozen=True)
class ContinuationScore:
    """The probability of a continuation, given its context."""

    log_probabilities: tuple[float, ...]
    """The log-probability of each token given the context and all tokens before it, in nats."""
    is_greedy: bool
    """Whether each token is the most probable token, so that greedy decoding would generate this
    continuation."""

    @property
    def log_probability(self) -> float:
        """The log-probability of the whole continuation, in nats."""
        return float(np.sum(self.log_probabilities))


class _Rows(NamedTuple):
    """The tokens of a batch and the labels that are scored."""

    inputs: dict[str, AnyArray]
    """The model's arguments except for the attention mask, int32[B, T] or int32[B, S] each."""
    last: AnyArray
    """The index of the last descendant of each token, int32[B, T]; see `Layout`."""
    at: AnyArray
    """The index of the token before each label, int32[B, M]."""
    labels: AnyArray
    """The tokens that are scored, int32[B, M]."""


class _ScoredBatch(NamedTuple):
    """The layout of each row of a batch, and the scores [B, M] of the labels."""

    layouts: list[Layout]
    log_probs: Array
    is_top1: Array


class ContinuationScorer(TextModel):
    """Scores continuations of contexts with a generative model and its tokenizer.

    The model is compiled once for each batch shape.

    Example::

        scorer = models.ContinuationScorer.of_run("runs/quickstart")
        [yes, no] = scorer([("Is the sky blue?", " yes"), ("Is the sky blue?", " no")])
        print(yes.log_probability - no.log_probability, yes.is_greedy)

    Args:
        model: a causal language model or an encoder-decoder.
        params: its parameters. If the parameters are sharded over a mesh, the rows of each batch
            are sharded as well.
        tokenizer: its tokenizer.

    Raises:
        UserError: the model cannot generate text.
    """

    heads = (*CAUSAL_HEADS, "seq2seq_lm")
    refusal = "cannot score texts"
    remedy = "give a run of a causal language model or of a translation model"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the encoder reads the contexts and the decoder reads the continuations."""
        return self._model.config.head == "seq2seq_lm"

    def __call__(
        self, pairs: Sequence[tuple[str, str]], *, log: LogFn = print
    ) -> list[ContinuationScore]:
        """Returns the probability of each continuation, given its context.

        Args:
            pairs: contexts and continuations. Whitespace at the end of a context is moved to the
                beginning of the continuation.
            log: called with a line if contexts are truncated.

        Raises:
            UserError: as in `score`.
        """
        return self.score([self.encode_pair(*pair) for pair in pairs], log=log)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context and of a continuation.

        For a causal language model, both are encoded as one text, which is then divided at a token
        boundary. For an encoder-decoder, the context has an end token, and the continuation has
        none.

        Raises:
            UserError: the context is empty, and the vocabulary has no token that begins or ends a
              text.
        """
        # Tokenizers encode whitespace as a part of the token after it, so move whitespace from the
        # end of the context to the continuation.
        before = context.rstrip()
        continuation = context[len(before) :] + continuation
        tokenizer = self._tokenizer
        if self.is_encoder_decoder:
            ids = tokenizer.target.encode(continuation, add_special_tokens=False)
            return encode_source(tokenizer, before), ids
        if not before:
            ids, first = self.encode_text(continuation), self.first_id
            return ([first], ids) if ids[:1] != [first] else (ids[:1], ids[1:])
        ids = self.encode_text(before)
        whole = self.encode_text(before + continuation)
        return [*self.added_before(ids), *ids], whole[len(ids) :]

    def encode_text(self, text: str) -> list[int]:
        """Returns the tokens of a text without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def added_before(self, ids: list[int]) -> list[int]:
        """Returns the special tokens that begin a text; none if `ids` already begin with them."""
        before = list(self._tokenizer.frame.before)
        return [] if ids[: len(before)] == before else before

    @property
    def first_id(self) -> int:
        """The token that represents an empty context.

        It is the token that begins a text or, if there is none, the token that ends a text.

        Raises:
            UserError: the vocabulary has neither of these tokens.
        """
        special = self._tokenizer.special_ids
        # A source never contains the token that begins an encoder-decoder's target.
        first = special.eos if special.bos is None or self.is_encoder_decoder else special.bos
        if first is None:
            raise UserError(
                f"a context is empty, and this {self._tokenizer.kind} tokenizer has no "
                f"token that begins a text: give a context"
            )
        return first

    def score(
        self,
        requests: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        on_batch: AdvanceFn = ignore,
        log: LogFn = print,
    ) -> list[ContinuationScore]:
        """Returns the probability of each continuation, given its context.

        Args:
            requests: the token ids of each context and continuation, at least one each. A context
              and its continuation together may have one token more than the model's maximum length.
              If they are longer, the first tokens of the context are dropped.
            on_batch: called after each batch with the numbers of finished requests and tokens.
            log: called with a line if contexts are truncated.

        Raises:
            UserError: a context or continuation is empty, a continuation is longer than the
              model's maximum length, an id is not in the vocabulary, the model is not causal, or a
              log-probability is NaN.
        """
        # Check all requests before the first batch is computed.
        for number, request in enumerate(requests, start=1):
            self._check(f"request {number}", *request)
        longest = self._model.config.max_length
        over = sum(
            # The model does not read the last token of a continuation.
            len(context) + (0 if self.is_encoder_decoder else len(ids) - 1) > longest
            for context, ids in requests
        )
        if over:
            log(
                f"{over:,} of {len(requests):,} contexts are longer than the {longest:,} "
                "tokens that the model reads: their first tokens are left out"
            )
        # Copy the scores of each batch to the requests that its labels belong to.
        log_probs = [np.zeros(len(ids), np.float32) for _, ids in requests]
        greedy = [np.zeros(len(ids), bool) for _, ids in requests]
        for layouts, *arrays in self._batches(requests):
            done, tokens = 0, 0
            # The labels of one request are not always adjacent in a row.
            for layout, row, top in zip(layouts, *map(np.asarray, arrays), strict=False):
                tokens += len(layout.ids)
                for k, (_, _, request, index) in enumerate(layout.scored):
                    log_probs[request][index], greedy[request][index] = row[k], top[k]
                    done += index == 0
            on_batch(done, tokens)
        check_outputs({f"continuation {i}": scores for i, scores in enumerate(log_probs, start=1)})
        return [
            ContinuationScore(tuple(scores.tolist()), bool(top.all()))
            for scores, top in zip(log_probs, greedy, strict=True)
        ]

    def _check(self, name: str, context: Sequence[int], continuation: Sequence[int]) -> None:
        """Raises UserError if a request cannot be scored."""
        config = self._model.config
        sizes = {"context": config.input_vocab_size, "continuation": config.vocab_size}
        for (part, size), ids in zip(sizes.items(), (context, continuation), strict=True):
            require(len(ids), f"{name} has no tokens in its {part}: give at least 1")
            least, most = min(ids), max(ids)
            require(
                0 <= least <= most < size,
                f"{name} has the token ids {least} … {most} in its {part}, which are not within "
                f"the vocabulary of {size}: use the model's own tokenizer",
            )
        require(
            len(continuation) <= config.max_length,
            f"{name} has a continuation of {len(continuation):,} tokens, but the model reads "
            f"{config.max_length:,}: shorten it",
        )

    @property
    def _sharding(self) -> NamedSharding | None:
        """The sharding of the rows if the parameters are sharded over a mesh, otherwise None."""
        sharding = getattr(jax.tree.leaves(self._params)[0], "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return None
        has_batch_axes = set(BATCH_AXES) <= set(sharding.mesh.axis_names)
        return NamedSharding(sharding.mesh, PartitionSpec(BATCH_AXES)) if has_batch_axes else None

    @property
    def _num_shards(self) -> int:
        return 1 if self._sharding is None else num_shards(self._sharding.mesh, BATCH_AXES)

    def _plans(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]], share: bool
    ) -> list[tuple[tuple[int, ...], Plan]]:
        """Returns pairs of an encoder input and the plan for its requests.

        For a causal model, there is a single pair, whose encoder input is empty. The plans of an
        encoder-decoder have no `PrefixGroup`, because nearly all tokens of its targets are scored.
        """
        config, both = self._model.config, self.is_encoder_decoder
        require(
            getattr(config, "causal", True),
            "the model attends to later tokens (causal is false), so it cannot score continuations",
        )
        by_source: dict[tuple[int, ...], list[Request]] = {}
        for number, (context, ids) in enumerate(requests):
            if both:
                source, inputs = tuple(context[-config.max_length :]), (*self._target_start, *ids)
            else:
                source, inputs = (), (*context, *ids)[-config.max_length - 1 :]
            by_source.setdefault(source, []).append(Request(inputs[:-1], tuple(ids), number))
        # A head convolution reads neighboring tokens of a row, so these tokens must belong to the
        # same request.
        share = share and not config.recent_shapes
        return [
            (source, plan(targets, _capacity(), share=share))
            for source, targets in by_source.items()
        ]

    def _batches(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> Iterator[_ScoredBatch]:
        """Yields the scores of all requests."""
        # In some models (LongRoPE), the longest request of a row determines the rotary frequencies
        # of the whole row, so give each request a separate row.
        config = self._model.config
        longest = max((len(context) + len(ids) - 1 for context, ids in requests), default=0)
        separate_rows = rotates_by_length(config, min(longest, config.max_length))
        # First score the requests that continue a separately computed prefix, and then all other
        # requests.
        plans = self._plans(requests, share=not separate_rows)
        for _, division in plans:
            for group in division.groups:
                yield from self._continued(group)
        waiting = [(source, item) for source, division in plans for item in division.items]
        waiting.sort(key=lambda pair: (-len(pair[0]), -pair[1].size))
        budget = TOKENS_AT_ONCE.get(jax.default_backend(), DEFAULT_TOKENS_AT_ONCE)
        while waiting:
            # The first item is the largest, so it determines the length of the rows. The token
            # budget then determines the number of rows.
            source, item = waiting[0]
            longest_input = config.longest_input or len(source) + bucket(len(source))
            length = min(bucket(len(source)), longest_input) if source else 0
            width = bucket(max(item.size, length))
            most = round_up(max(budget // (length + width), 1), self._num_shards)
            sizes = [(len(source), item.size) for source, item in waiting]
            # Fill the rows of one batch, and leave the remaining items for the next batch. With a
            # capacity of 0, each row contains one item.
            bins = pack(sizes, (0, 0) if separate_rows else (length, width), most)
            rows = [[waiting[i] for i in chosen] for chosen in bins]
            packed = {*itertools.chain(*bins)}
            waiting = [pair for i, pair in enumerate(waiting) if i not in packed]
            layouts = [_laid_out([item for _, item in row]) for row in rows]
            width = bucket(max(len(layout.ids) for layout in layouts))
            number = round_up(min(power_of_two(len(rows)), most), self._num_shards)
            inputs = _rows(layouts, number, width)
            if length:
                inputs = _with_sources(inputs, rows, length)
            yield _ScoredBatch(
                layouts, *self._score_rows(self._params, jax.device_put(inputs, self._sharding))
            )

    def _continued(self, group: PrefixGroup) -> Iterator[_ScoredBatch]:
        """Computes a prefix, and yields the scores of its continuations."""
        base, items, capacity = len(group.prefix), group.items, _capacity()
        total = sum(item.size for item in items)
        # Divide the tokens evenly over the rows, so that the last row is not mostly padding.
        even = -(-total // -(-total // capacity))
        length = max(bucket(even), *(item.size for item in items))
        bins = pack([(item.size,) for item in items], (min(bucket(length), capacity),))
        layouts = [_laid_out([items[i] for i in chosen], base) for chosen in bins]
        length = bucket(max(len(layout.ids) for layout in layouts))
        # Read the prefix into a cache once. Every row then continues this cache.
        slots = bucket(base)
        ids, _ = pad_rows([group.prefix], length=slots)
        prefix = self._read_prefix(self._params, ids, base, slots + length)
        # Pad all rows to the same number of tokens and the same number of labels, so that one
        # compiled program scores them all.
        scored = max(len(layout.scored) for layout in layouts)
        for start in range(0, len(layouts), self._num_shards):
            chosen = layouts[start : start + self._num_shards]
            rows = _rows(chosen, self._num_shards, length, scored)
            rows = jax.device_put(rows, self._sharding)
            yield _ScoredBatch(chosen, *self._score_rows(self._params, rows, prefix))

    @functools.cached_property
    def _score_rows(self):
        mask_name = "decoder_attention_mask" if self.is_encoder_decoder else "attention_mask"

        @jax.jit
        def compute(
            params: Params, rows: _Rows, prefix: Cache | None = None
        ) -> tuple[Array, Array]:
            """Returns each label's log-probability and whether it is the highest, `[B, M]` each."""
            given = {**rows.inputs, mask_name: tree_mask(rows.last)}
            if prefix is not None:
                given |= _after_prefix(prefix, given[mask_name])
            projection = self._model.apply({"params": params}, **given).projection
            # Project only the positions before labels: [B, M, D].
            hidden = jnp.take_along_axis(projection.hidden, jnp.asarray(rows.at)[..., None], axis=1)
            chosen = dataclasses.replace(projection, hidden=hidden)
            result = token_log_probs(chosen, jnp.asarray(rows.labels))
            return result.log_prob, result.is_top1

        return compute

    @functools.cached_property
    def _read_prefix(self):
        @functools.partial(jax.jit, static_argnums=3)
        def compute(params: Params, ids: Array, length: Array, num_slots: int) -> Cache:
            # No layer may discard old tokens (as layers with a sliding window do), because the
            # padding will be removed and a tree of tokens appended.
            cache = init_cache(
                self._model.config, self._model.execution, 1, num_slots, spare=num_slots
            )
            real = (jnp.arange(num_slots) < length).astype(jnp.int32)[None]
            positions = jnp.arange(ids.shape[1])[None]
            outputs = self._model.apply(
                {"params": params}, ids, real, position_ids=positions, cache=cache
            )
            # Continuations overwrite the slots of the padding.
            return dataclasses.replace(outputs.cache, index=jnp.asarray(length, jnp.int32))

        return compute


def _after_prefix(prefix: Cache, mask: Bool[Array, "B T T"]) -> dict[str, Any]:
    """Repeats a prefix's cache for all rows that continue it; returns the cache and the mask."""
    number, width = mask.shape[:2]

    def repeated(x: Array, axis: int) -> Array:
        return jnp.broadcast_to(x, (*x.shape[:axis], number, *x.shape[axis + 1 :]))

    # Repeat the single row of the prefix along the batch axis, the fourth from the end.
    cache = dataclasses.replace(
        prefix,
        layers=jax.tree.map(lambda x: repeated(x, x.ndim - 4), prefix.layers),
        positions=None if prefix.positions is None else repeated(prefix.positions, 0),
    )
    # Slot `prefix.index` + j will contain token j of the row.
    hidden = jnp.zeros((number, width, cache.length), bool)
    of_row = jax.lax.dynamic_update_slice(hidden, mask, (0, 0, prefix.index))
    visible = of_row | (jnp.arange(cache.length) < prefix.index)
    return {"cache": cache, "attention_mask": visible}


def _capacity() -> int:
    return CAPACITY.get(jax.default_backend(), DEFAULT_CAPACITY)


def tree_mask(last: Int[AnyArray, "B T"]) -> Bool[Array, "B T T"]:
    """Returns the mask that lets each token attend to itself and its ancestors; see `Layout`."""
    index = jnp.arange(last.shape[1])
    return (index[:, None] >= index) & (index[:, None] <= last[:, None, :])


def bucket(number: int) -> int:
    """Rounds up to one of 16, 20, 24, 28, 32, 40, 48, 56, 64 …, so that few programs are compiled.

    If the result is above 16, at most a fifth of it is padding.
    """
    step = max(4, power_of_two(number) // 8)
    return max(16, round_up(number, step))


def _laid_out(items: Sequence[Item], base: int = 0) -> Layout:
    """Returns a layout of the items, in order."""
    layout = Layout()
    for item in items:
        layout.append(item.requests, base)
    return layout


def _rows(layouts: Sequence[Layout], num_rows: int, length: int, scored: int = 1) -> _Rows:
    """Returns the arrays of a batch, for a causal language model.

    Args:
        layouts: the contents of each row, at most `num_rows`.
        num_rows: the number of rows, B.
        length: the number of tokens of each row, T.
        scored: a lower bound for the number of labels of each row, M.
    """
    most = bucket(max(scored, *(len(layout.scored) for layout in layouts)))

    def padded(rows: list[list[int]], length: int = length, fill: int = 0) -> np.ndarray:
        return pad_rows(rows, num_rows=num_rows, length=length, fill=fill)[0]

    return _Rows(
        {
            "input_ids": padded([layout.ids for layout in layouts]),
            "position_ids": padded([layout.positions for layout in layouts]),
        },
        # No token attends to padding.
        last=padded([layout.last for layout in layouts], fill=-1),
        at=padded([[label.at for label in layout.scored] for layout in layouts], most),
        labels=padded([[label.label for label in layout.scored] for layout in layouts], most),
    )


def _numbers(sizes: Sequence[int]) -> list[int]:
    """Returns the number of the part that each token belongs to, counted from 1."""
    return np.repeat(np.arange(len(sizes)) + 1, sizes).tolist()


def _with_sources(
    rows: _Rows, pairs: Sequence[Sequence[tuple[Sequence[int], Item]]], length: int
) -> _Rows:
    """Adds the sources to the arrays of a batch, for an encoder-decoder.

    Args:
        rows: the arrays of the targets, from `_rows`.
        pairs: the items of each row, each with its source.
        length: the padded number of tokens of all sources in a row, S.
    """
    (num_rows, width), inputs = rows.last.shape, rows.inputs
    joined = [[id for source, _ in row for id in source] for row in pairs]
    numbers = [_numbers([len(source) for source, _ in row]) for row in pairs]
    targets = [_numbers([item.size for _, item in row]) for row in pairs]
    given = {
        "input_ids": pad_rows(joined, num_rows=num_rows, length=length)[0],
        "segment_ids": pad_rows(numbers, num_rows=num_rows, length=length)[0],
        "decoder_input_ids": inputs["input_ids"],
        "decoder_position_ids": inputs["position_ids"],
        "decoder_segment_ids": pad_rows(targets, num_rows=num_rows, length=width)[0],
    }
    return rows._replace(inputs=given)
