"""Notes what tests measure against torch, for the table of models/README.md.

Where the environment variable names a file, each comparison adds a line of JSON to it;
`python -m tests.parity_table` makes the table of them.
"""

import json
import os
from typing import Any

import numpy as np

FILE = "FLAXZOO_PARITY"


def note_answers(theirs: Any, direction: str, ours: Any, expected: Any) -> None:
    """Notes the largest difference of answers, in parts of the largest answer.

    Args:
      theirs: a torch model.
      direction: "import" where ours was read from it, "export" where it was read from ours.
      ours: an array.
      expected: what torch answers.
    """
    ours, expected = np.asarray(ours), np.asarray(expected)
    _note(theirs, direction, float(np.abs(ours - expected).max() / np.abs(expected).max()))


def note_tokens(theirs: Any) -> None:
    """Notes that a torch model and ours wrote the same tokens."""
    _note(theirs, "tokens", 0.0)


def _note(theirs: Any, what: str, difference: float) -> None:
    if FILE not in os.environ:
        return
    line = {"family": theirs.config.model_type, "model": type(theirs).__name__}
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps({**line, "what": what, "difference": difference}) + "\n")
