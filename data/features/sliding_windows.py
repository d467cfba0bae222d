"""Divides a passage that is longer than an example into overlapping windows.

As in google-research/bert ``run_squad.py`` (Devlin et al. 2018), a window starts every ``stride``
tokens. The prediction for a token comes from the window where the token has the most context.
"""

import numpy as np


def windows(total: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Covers a passage with windows.

    Args:
      total: The number of tokens in the passage.
      room: The number of tokens in a window, at least 1.
      stride: The number of tokens between the starts of consecutive windows, at least 1. The stride
        is limited to half a window, so that each span of at most half a window is completely
        contained in some window.

    Returns:
      At least one half-open range. Together, the ranges contain every token.
    """
    step = max(1, min(stride, room // 2))
    found = [(0, min(total, room))]
    while found[-1][1] < total:
        start = found[-1][0] + step
        found.append((start, min(total, start + room)))
    return found


def most_context(ranges: np.ndarray) -> np.ndarray:
    """Returns the window where each token has the most context.

    The context of a token in a window is the number of tokens before it or after it, whichever is
    smaller, plus one hundredth of the window's length, which favors longer windows. If several
    windows have equal context, the first of them is returned.

    Args:
      ranges: The half-open ranges of a passage's windows, int [num_windows, 2].

    Returns:
      The index of a window for each token, int [num_tokens].
    """
    token = np.arange(ranges[:, 1].max())  # [num_tokens]
    start, end = ranges[:, :1], ranges[:, 1:]  # [num_windows, 1]
    context = np.minimum(token - start, end - 1 - token) + 0.01 * (end - start)
    # If a window does not contain the token, the context is -inf, [num_windows, num_tokens].
    return np.where((token >= start) & (token < end), context, -np.inf).argmax(0)
