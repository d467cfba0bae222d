"""Muon (Jordan et al. 2024), which updates each matrix by its orthogonalized momentum.

Five Newton-Schulz iterations bring all singular values of the momentum near 1 (`optax.contrib`).
The factor 0.2 · √max(inputs, outputs) scales the update to a root mean square of about 0.2, like
AdamW's updates, so that AdamW's learning rates and weight decay can be used (Liu et al. 2025, "Muon
is scalable for LLM training", section 2.2).

Muon updates the matrices inside layers, separately for each layer and each expert. A linear map to
or from the heads is a single matrix `[D, N·H]`. Embeddings, output matrices and vectors get AdamW's
update.
"""

import math

import optax

from ...models.nn.typing import Array, PyTree
from .parameters import axes_of_matrix, is_stacked, map_named, matrix_axes, size_along

ADAMW_RMS = 0.2
"""The root mean square of AdamW's updates (Liu et al. 2025)."""


def is_orthogonalized(name: str, ndim: int) -> bool:
    """Returns whether a parameter is a matrix inside a layer, which Muon updates."""
    # Embeddings are tables of vectors, not linear maps.
    embeds = name.endswith("/embedding")
    return is_stacked(name) and not embeds and matrix_axes(name, ndim) is not None


def scale_by_muon(
    muon: optax.GradientTransformation, adam: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Updates matrices inside layers by `muon`, scaled like AdamW, and other parameters by `adam`.

    Args:
        muon: the result of `optax.contrib.scale_by_muon` with `dimension_numbers`.
        adam: the update rule for all other parameters.
    """

    def rules(params: PyTree) -> PyTree:
        return map_named(
            lambda name, x: "muon" if is_orthogonalized(name, x.ndim) else "adam", params
        )

    return optax.partition(
        {"muon": optax.chain(muon, scale_to_adamw()), "adam": adam},
        rules,  # pyright: ignore[reportArgumentType]
    )


def dimension_numbers(params: PyTree) -> PyTree:
    """Returns the axes of each parameter's matrix, in the form that optax needs."""
    from optax.contrib import MuonDimensionNumbers  # slow to import, and seldom needed

    def numbers(name: str, param: Array) -> MuonDimensionNumbers:
        axes = axes_of_matrix(name, param.ndim)
        return MuonDimensionNumbers(axes.inputs, axes.outputs)

    return map_named(numbers, params)


def scale_to_adamw() -> optax.GradientTransformation:
    """Scales orthogonal matrices to the root mean square of AdamW's updates."""

    def scale(name: str, update: Array) -> Array:
        axes = axes_of_matrix(name, update.ndim)
        # An orthogonal matrix has a root mean square of 1 / √max(inputs, outputs).
        longest = max(size_along(update, axes.inputs), size_along(update, axes.outputs))
        return update * (ADAMW_RMS * math.sqrt(longest))

    return optax.stateless(lambda updates, _: map_named(scale, updates))
