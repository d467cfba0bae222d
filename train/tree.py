"""Trees of parameters by the names of their leaves."""

from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
    """A parameter's place in the tree as `layers/attention/query/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
