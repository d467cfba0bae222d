"""Record the differences to torch that tests measure, for the table of docs/support.md.

If the environment variable FLAXZOO_PARITY names a file, each comparison appends a line of JSON to
it; `python -m tests.parity.parity_table` makes the table from them.
"""

import json
import os
from typing import Any

import numpy as np

FILE = "FLAXZOO_PARITY"


def note_answers(theirs: Any, direction: str, ours: Any, expected: Any) -> None:
    """Record the largest difference of outputs, relative to the largest output.

    Args:
      theirs: The torch model.
      direction: "import" if flaxzoo's model was read from it, "export" if it has flaxzoo's.
      ours: The output of flaxzoo's model.
      expected: The output of the torch model.
    """
    ours, expected = np.asarray(ours), np.asarray(expected)
    _note(theirs, direction, float(np.abs(ours - expected).max() / np.abs(expected).max()))


def note_tokens(theirs: Any) -> None:
    """Record that a torch model and flaxzoo's generated the same tokens."""
    _note(theirs, "tokens", 0.0)


def _note(theirs: Any, what: str, difference: float) -> None:
    if FILE not in os.environ:
        return
    line = {"family": theirs.config.model_type, "model": type(theirs).__name__}
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps({**line, "what": what, "difference": difference}) + "\n")
