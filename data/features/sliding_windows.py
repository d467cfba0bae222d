"""Windows over a passage that is longer than an example.

As in google-research/bert ``run_squad.py`` (Devlin et al. 2018), a window starts every ``stride``
tokens. The prediction for a token comes from the window that has the most context around it.
"""

import numpy as np


def windows(total: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Covers a passage with windows.

    Args:
      total: The number of tokens of the passage.
      room: The number of tokens in a window, at least 1.
      stride: Tokens between the starts of consecutive windows, at least 1. The stride is capped at
        half a window, so that every span of at most half a window is complete in some window.

    Returns:
      At least one half-open range; together the ranges contain every token.
    """
    step = max(1, min(stride, room // 2))
    found = [(0, min(total, room))]
    while found[-1][1] < total:
        start = found[-1][0] + step
        found.append((start, min(total, start + room)))
    return found


def most_context(ranges: np.ndarray) -> np.ndarray:
    """Returns the window with the most context for each token.

    The context of a token is the number of tokens before it or after it, whichever is smaller. One
    hundredth of the window's length is added, to prefer longer windows. If contexts are equal, the
    first window is returned.

    Args:
      ranges: The windows of a passage, half-open, int [num_windows, 2].

    Returns:
      The index of a window for each token, int [num_tokens].
    """
    token = np.arange(ranges[:, 1].max())  # [num_tokens]
    start, end = ranges[:, :1], ranges[:, 1:]  # [num_windows, 1]
    context = np.minimum(token - start, end - 1 - token) + 0.01 * (end - start)
    # The context is -inf in a window that does not contain the token, [num_windows, num_tokens].
    return np.where((token >= start) & (token < end), context, -np.inf).argmax(0)
