"""Paths of the leaves of a tree, as names."""

import jax


def path_name(path: jax.tree_util.KeyPath) -> str:
    """Returns a parameter's path as `layers/attention/query/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
