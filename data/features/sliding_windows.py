"""Windows over a passage that is longer than a row.

Devlin et al. 2018 as in google-research/bert ``run_squad.py``: a window starts every
``stride`` tokens; of the windows that hold a token, the one with the most context around it
speaks for it.
"""

import numpy as np


def windows(total: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Covers a passage.

    Args:
        total: Its tokens.
        room: Tokens in a window, at least 1.
        stride: Tokens from the start of a window to that of the next, at least 1; never
            more than half of a window, so that windows overlap and whatever is not longer
            than half of one is whole in one.

    Returns:
        Half-open ranges of tokens that hold each one, at least one range.
    """
    step = max(1, min(stride, room // 2))
    found = [(0, min(total, room))]
    while found[-1][1] < total:
        start = found[-1][0] + step
        found.append((start, min(total, start + room)))
    return found


def most_context(ranges: np.ndarray) -> np.ndarray:
    """Says which window speaks for each token.

    A token's context in a window is the fewer of the tokens before and after it, and one
    hundredth of the window's length, by which a longer window wins; of equals the first.

    Args:
        ranges: The windows of a passage, int [n, 2], half-open.

    Returns:
        The number of a window for each token, int [total].
    """
    token = np.arange(ranges[:, 1].max())
    start, end = ranges[:, :1], ranges[:, 1:]
    context = np.minimum(token - start, end - 1 - token) + 0.01 * (end - start)
    return np.where((token >= start) & (token < end), context, -np.inf).argmax(0)
