from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def assert_close() -> Any:
    """`assert_close(actual, expected)`: asserts that numbers differ by float32's rounding only."""

    def assert_close(actual: Any, expected: Any, atol: float = 1e-5) -> None:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)

    return assert_close
