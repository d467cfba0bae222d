import itertools

import numpy as np
from flaxzoo.data.features.sliding_windows import most_context, windows
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 80), st.integers(1, 20), st.integers(1, 30))
def test_windows_cover_every_token(total, room, stride):
    found = windows(total, room, stride)
    covered = [token for start, end in found for token in range(start, end)]
    assert set(covered) == set(range(total))
    assert all(0 < end - start <= room for start, end in found) or total == 0
    starts = [start for start, _ in found]
    step = max(1, min(room // 2, stride))
    assert all(b - a == step for a, b in itertools.pairwise(starts))
    for size in range(1, room // 2 + 2):  # whatever is not longer is whole in a window
        whole = {first for start, end in found for first in range(start, end - size + 1)}
        assert total < size or whole == set(range(total - size + 1))
    assert [end for _, end in found].count(total) == 1


@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 20))
def test_most_context_is_the_original_rule(total, room, stride):
    ranges = windows(total, room, stride)

    def original(token):  # google-research/bert run_squad.py, _check_is_max_context
        best, best_window = None, None
        for number, (start, end) in enumerate(ranges):
            if start <= token < end:
                score = min(token - start, end - 1 - token) + 0.01 * (end - start)
                if best is None or score > best:
                    best, best_window = score, number
        return best_window

    assert most_context(np.array(ranges)).tolist() == [original(token) for token in range(total)]
