"""Record the differences to torch that tests measure, for the table of docs/support.md.

If the environment variable FLAXZOO_PARITY names a file, each comparison appends a line of JSON to
it; `python -m tests.parity.parity_table` makes the table from them.
"""

import json
import os
from typing import Any

import jax
import numpy as np

FILE = "FLAXZOO_PARITY"


def note_answers(theirs: Any, direction: str, ours: Any, expected: Any) -> None:
    """Record the largest difference of outputs, relative to the largest output.

    Args:
      theirs: The torch model.
      direction: "import" if flaxzoo's model was read from it, "export" if it has flaxzoo's,
        "vectors" if the outputs are vectors of texts.
      ours: The output of flaxzoo's model.
      expected: The output of the torch model.
    """
    ours, expected = np.asarray(ours), np.asarray(expected)
    _note(theirs, direction, float(np.abs(ours - expected).max() / np.abs(expected).max()))


def difference_of_trees(ours: Any, expected: Any) -> float:
    """Return the largest difference of two trees of arrays, relative to the largest value."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
    # Python's max ignores a NaN that is not the first value.
    apart = np.max([np.abs(np.asarray(x) - y).max() for x, y in pairs])
    return float(apart / np.max([np.abs(x).max() for x in jax.tree.leaves(expected)]))


def note_gradients(theirs: Any, what: str, ours: Any, expected: Any) -> None:
    """Record the largest difference of gradients, relative to the largest gradient.

    Args:
      theirs: The torch model.
      what: "gradients" on one device, "devices" if eight devices computed flaxzoo's gradients.
      ours: The gradients of flaxzoo's model.
      expected: The gradients of the torch model, as a flaxzoo tree.
    """
    _note(theirs, what, difference_of_trees(ours, expected))


def note_tokens(theirs: Any) -> None:
    """Record that a torch model and flaxzoo's generated the same tokens."""
    _note(theirs, "tokens", 0.0)


def _note(theirs: Any, what: str, difference: float) -> None:
    if FILE not in os.environ:
        return
    line = {"family": theirs.config.model_type, "model": type(theirs).__name__}
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps({**line, "what": what, "difference": difference}) + "\n")
