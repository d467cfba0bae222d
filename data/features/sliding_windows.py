"""Windows over a passage that is longer than an example.

As in google-research/bert ``run_squad.py`` (Devlin et al. 2018): a window starts every ``stride``
tokens; of the windows that contain a token, the one with the most context around the token is used
for its prediction.
"""

import numpy as np


def windows(total: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Covers a passage with windows.

    Args:
      total: The number of tokens of the passage.
      room: The number of tokens in a window, at least 1.
      stride: Tokens from the start of a window to the start of the next, at least 1. At most
        half a window is used, so that every span of at most half a window is whole in one.

    Returns:
      Half-open ranges that together contain every token, at least one.
    """
    step = max(1, min(stride, room // 2))
    found = [(0, min(total, room))]
    while found[-1][1] < total:
        start = found[-1][0] + step
        found.append((start, min(total, start + room)))
    return found


def most_context(ranges: np.ndarray) -> np.ndarray:
    """Returns the window in which each token has the most context.

    The context of a token in a window is the smaller number of tokens before or after it, plus one
    hundredth of the window's length, so that longer windows are preferred. The first of equal
    windows is chosen.

    Args:
      ranges: The windows of a passage, half-open, int [num_windows, 2].

    Returns:
      The index of a window for each token, int [num_tokens].
    """
    token = np.arange(ranges[:, 1].max())  # [num_tokens]
    start, end = ranges[:, :1], ranges[:, 1:]  # [num_windows, 1]
    context = np.minimum(token - start, end - 1 - token) + 0.01 * (end - start)
    # [num_windows, num_tokens]; -inf where the window does not contain the token
    return np.where((token >= start) & (token < end), context, -np.inf).argmax(0)
