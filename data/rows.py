"""What an objective brings: examples that can be made in any order."""

from typing import Protocol

import numpy as np


class Rows(Protocol):
    """Examples that can be made in any order; must pickle, for worker processes."""

    @property
    def rows_per_epoch(self) -> int:
        """The number of examples of an epoch, at least 1 and below 2^32."""
        ...

    def row(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, the same arrays and shapes each time; all 0 is padding."""
        ...
