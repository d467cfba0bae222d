"""Pairs of a source and a target, packed into the arrays of one example for teacher forcing."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..common.errors import counted
from ..dataset import ArraySpec, BatchSpec, Values, zeros

ARRAYS = {
    "input_ids": Values.SOURCE_TOKEN,
    "segment_ids": Values.SEGMENT,
    "position_ids": Values.TEXT_POSITION,
    "decoder_input_ids": Values.TARGET_TOKEN,
    "decoder_segment_ids": Values.SEGMENT,
    "decoder_position_ids": Values.TEXT_POSITION,
    "labels": Values.TARGET_TOKEN,
}
"""The arrays of an example, int32 [S] for the source and int32 [T] for the target."""

TokenPair = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]
"""The tokens of a source and of its target, each with an end token."""


def arrays_of_pairs(
    pairs: Iterable[TokenPair], lengths: tuple[int, int], start: int
) -> dict[str, np.ndarray]:
    """Makes one example.

    Args:
      pairs: The pairs. All sources together fit in S tokens, and all targets in T tokens.
      lengths: The lengths of the source and of the target arrays, S and T.
      start: The id that begins each target in the decoder.

    Returns:
      Int32 [S] ``input_ids``, ``segment_ids``, ``position_ids``; int32 [T]
      ``decoder_input_ids`` (the labels shifted right, after the start token),
      ``decoder_segment_ids``, ``decoder_position_ids`` and ``labels``. The source and the target of
      a pair have the same segment id, counted from 1; positions start at 0 in each pair. Padding is
      at the end, and is 0 in all arrays.
    """
    arrays = zeros(pair_specs(lengths))
    # Fill the source and the target arrays from the left, pair by pair.
    positions = np.arange(max(lengths))
    first = first_of_target = 0
    for segment, (source, target) in enumerate(pairs, start=1):
        end = first + len(source)
        arrays["input_ids"][first:end] = source
        arrays["segment_ids"][first:end] = segment
        arrays["position_ids"][first:end] = positions[: len(source)]
        first, end = end, first_of_target + len(target)
        # Teacher forcing: the decoder reads the target shifted right by one token.
        arrays["decoder_input_ids"][first_of_target] = start
        arrays["decoder_input_ids"][first_of_target + 1 : end] = target[:-1]
        arrays["decoder_segment_ids"][first_of_target:end] = segment
        arrays["decoder_position_ids"][first_of_target:end] = positions[: len(target)]
        arrays["labels"][first_of_target:end] = target
        first_of_target = end
    return arrays


def pair_specs(lengths: tuple[int, int]) -> BatchSpec:
    """Describes the arrays that ``arrays_of_pairs`` makes, with the lengths S and T."""
    of_sources = ("input_ids", "segment_ids", "position_ids")
    return {
        name: ArraySpec((lengths[name not in of_sources],), values)
        for name, values in ARRAYS.items()
    }


def fill_note(tokens: tuple[int, int], lengths: tuple[int, int], num_examples: int) -> str:
    """Describes how pairs fill sequences, for a summary.

    Args:
      tokens: The numbers of tokens in all sources and in all targets.
      lengths: The lengths of a sequence, S and T.
      num_examples: The number of sequences.
    """
    padding = 1 - sum(tokens) / (sum(lengths) * num_examples)
    return (
        f"{tokens[0]:,} + {tokens[1]:,} tokens in {counted(num_examples, 'sequence')} of "
        f"{lengths[0]} + {lengths[1]}, {padding:.1%} of them padding"
    )
