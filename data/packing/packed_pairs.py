"""Packs pairs of a source and a target into the arrays of one example, for teacher forcing."""

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
"""The arrays of an example: int32 [S] for the sources, and int32 [T] for the targets."""

TokenPair = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]
"""The tokens of a source and the tokens of its target; each ends with an end token."""


def arrays_of_pairs(
    pairs: Iterable[TokenPair], lengths: tuple[int, int], start: int
) -> dict[str, np.ndarray]:
    """Makes one example from the pairs of a sequence.

    Args:
      pairs: The pairs. All sources together have at most S tokens, and all targets at most T.
      lengths: The length S of the source arrays and the length T of the target arrays.
      start: The id of the token that precedes each target in the decoder's input.

    Returns:
      The int32 [S] arrays ``input_ids``, ``segment_ids`` and ``position_ids``, and the int32 [T]
      arrays ``decoder_input_ids`` (the start token, then the labels shifted right),
      ``decoder_segment_ids``, ``decoder_position_ids`` and ``labels``. The source and the target of
      a pair have the same segment id, counted from 1. Positions start at 0 in each source and in
      each target. Padding is at the end, and is 0 in all arrays.
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
    """Describes the arrays that ``arrays_of_pairs`` makes for the lengths S and T."""
    of_sources = ("input_ids", "segment_ids", "position_ids")
    return {
        name: ArraySpec((lengths[name not in of_sources],), values)
        for name, values in ARRAYS.items()
    }


def fill_note(tokens: tuple[int, int], lengths: tuple[int, int], num_examples: int) -> str:
    """Describes how well pairs fill the sequences, in one line for a summary.

    Args:
      tokens: The total number of source tokens and the total number of target tokens.
      lengths: The maximum numbers of source tokens and of target tokens in a sequence, S and T.
      num_examples: The number of sequences.
    """
    padding = 1 - sum(tokens) / (sum(lengths) * num_examples)
    return (
        f"{tokens[0]:,} + {tokens[1]:,} tokens in {counted(num_examples, 'sequence')} of "
        f"{lengths[0]} + {lengths[1]}, {padding:.1%} of them padding"
    )
