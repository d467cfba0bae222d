from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def close() -> Any:
    """`close(actual, expected)`: asserts that numbers differ by float32's rounding only."""

    def close(actual: Any, expected: Any, atol: float = 1e-5) -> None:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)

    return close
