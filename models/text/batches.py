"""Generates many texts in batches: by continuous batching, or by beam search."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from ...data.common.errors import counted
from ...data.common.fields import require
from ...data.common.progress import AdvanceFn
from ..decoding.generator import Generator, sampling_keys
from ..decoding.request import GenerationRequest
from ..hf.generate import search_all
from .bucketing import batches_by_length
from .completions import Positions
from .growing_text import GrowingText


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """The callbacks of `TextGenerator.complete`."""

    on_text: Callable[[str], None]
    on_batch: AdvanceFn

    def advance(self, rows: Sequence[GrowingText]) -> None:
        """Passes the number of finished texts and the number of their tokens to `on_batch`."""
        self.on_batch(len(rows), sum(row.num_chosen for row in rows))


def sample_texts(
    generator: Generator,
    texts: Sequence[Sequence[GrowingText]],
    request: GenerationRequest,
    batch_size: int,
    *,
    callbacks: Callbacks,
) -> str:
    """Samples texts; returns a message that states the fraction of padding.

    Args:
        generator: the model.
        texts: the texts that continue each prompt. The sampled tokens are appended to these texts.
        request: the settings.
        batch_size: the number of texts that are generated at a time.
        callbacks: called with each new piece of the first text, and when texts are finished.
    """
    seeds = [samples[0].prompt.seed or 0 for samples in texts]
    keys = jnp.concatenate([sampling_keys(s, request.num_return_sequences) for s in seeds])
    rows = [*itertools.chain(*texts)]
    # When a row becomes free, the batch starts the next text in it.
    num_rows = min(batch_size, len(rows))
    batch = generator.continuous_batch(
        [row.prompt_ids for row in rows],
        request,
        keys=keys,
        limits=[row.limit or 1 for row in rows],
        num_rows=num_rows,
    )
    for new in batch:
        row = rows[new.text]
        row.grow(new.tokens, new.log_probs)
        if row is rows[0]:
            callbacks.on_text(row.take_settled())
        if row.reason is not None:
            batch.stop(new.text)
            callbacks.advance([row])
    usage, number = batch.usage, sum(row.num_chosen for row in rows)
    read = Positions(usage.tokens_read, usage.positions_read)
    written = Positions(number, usage.positions_written)
    return (
        f"{counted(num_rows, 'row')} at a time, {read.padding:.1%} of the positions read and "
        f"{written.padding:.1%} of the tokens written were padding"
    )


def search_texts(
    generator: Generator,
    texts: Sequence[Sequence[GrowingText]],
    request: GenerationRequest,
    batch_size: int,
    *,
    callbacks: Callbacks,
) -> str:
    """Runs beam search for each prompt; returns a message that states the fraction of padding.

    See `sample_texts` for the arguments.
    """
    longest = generator.config.max_length
    for i, (first, *_) in enumerate(texts):
        number = len(first.prompt_ids)
        require(
            number <= longest, f"prompt {i} has {number} tokens: the model takes 1 to {longest}"
        )
    read, num_batches = Positions(), 0
    # A beam search has one length limit for all its prompts, so group the prompts by their limits.
    for limit in dict.fromkeys(samples[0].limit for samples in texts):
        limited = dataclasses.replace(request, max_new_tokens=limit)
        same = [samples for samples in texts if samples[0].limit == limit]
        all_ids = [samples[0].prompt_ids for samples in same]
        for chosen in batches_by_length(all_ids, batch_size):
            ids = [all_ids[i] for i in chosen]
            rows = [*itertools.chain(*(same[i] for i in chosen))]
            best = itertools.chain(*search_all(generator, ids, limited))
            for row, hypothesis in zip(rows, best, strict=True):
                row.grow_to(hypothesis)
            read.add(sum(map(len, ids)), len(ids) * max(map(len, ids)))
            num_batches += 1
            callbacks.advance(rows)
    return f"{num_batches:,} batches, {read.padding:.1%} of the positions read were padding"
