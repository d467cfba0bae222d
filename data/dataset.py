"""What an objective brings: examples that can be made in any order."""

from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(frozen=True)
class DataSplit:
    """One split, ready to be batched.

    Attributes:
        rows: The examples as arrays; those of training may differ from epoch to epoch.
        content: What the rows are made of: a corpus, or the list of all examples, those
            included that are not trained on (the rows have what they keep).
        fingerprint: A stable hash of the texts or examples and the tokenizer; labelled data
            put their settings in, too. For other data the run's config.json has these.
        facts: What is in it, for the log: ``400 documents, 929,728 tokens``.
    """

    rows: Rows
    content: Any
    fingerprint: str
    facts: str
