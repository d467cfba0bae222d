"""Orders the batches of several data sets. Each batch comes from a single data set."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from .distinct import shuffled

Mixing: TypeAlias = Literal["proportional", "round_robin"]


def _proportional(orders: Sequence[np.ndarray], seed: int, epoch: int) -> np.ndarray:
    whole = np.concatenate(orders)
    # The orders within data sets use turns 0, 1, …. Use a different turn here, so that the order of
    # the batches is independent of them.
    return whole[shuffled(len(whole), seed, epoch, -1 % 2**32)]


def _round_robin(orders: Sequence[np.ndarray], seed: int, epoch: int) -> np.ndarray:
    del seed, epoch
    num_batches = min(map(len, orders))
    # To alternate between the data sets, convert [sets, N, B] to [N, sets, B] to [N · sets, B].
    return np.concatenate(np.stack([order[:num_batches] for order in orders], axis=1))


MIXED: Mapping[Mixing, Callable[[Sequence[np.ndarray], int, int], np.ndarray]] = {
    "proportional": _proportional,
    "round_robin": _round_robin,
}
"""Functions that order the batches of several data sets.

A function takes the batches of each data set, int [N_i, B], the seed and the epoch, and returns all
batches of the epoch, int [N, B]. With "proportional", every batch of each data set occurs once, in
a random order. With "round_robin", the batches alternate between the data sets until the smallest
data set is used up. ProportionalBatchSampler and RoundRobinBatchSampler of sentence-transformers
use the same orders.
"""
