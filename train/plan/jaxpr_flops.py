"""Counts the FLOPs of the matmuls in a program before compilation.

A matmul has 2 · m · n · k FLOPs, and a matmul in the body of a scan is counted in each iteration.
In attention, every pair of query and key is counted, including pairs that a causal or padding mask
hides (as in appendix B of Chowdhery et al. 2022, "PaLM"). A kernel that skips masked pairs computes
fewer FLOPs. All operations of a transformer that are not matmuls would add only a few thousandths
to the FLOPs.
"""

import math
from typing import Any, cast

from jax.core import ShapedArray
from jax.extend import core


def matmul_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Returns the FLOPs of all matmuls. For a `cond`, only the most expensive branch is counted."""
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(equation: core.JaxprEqn) -> int:
    params = equation.params
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left, result = _shape(equation.invars[0]), _shape(equation.outvars[0])
        # `depth` is k of the matmul. The result has m · n elements for each index of the batch
        # axes.
        depth = math.prod(left[axis] for axis in contracted)
        return 2 * depth * math.prod(result)
    # A ragged matmul multiplies each row by the matrix of its group, as in a mixture of experts.
    if equation.primitive.name == "ragged_dot_general":
        left, result = _shape(equation.invars[0]), _shape(equation.outvars[0])
        # [M, K] times a matrix [K, N] for each row: 2 · M · K · N.
        return 2 * math.prod(left) * result[-1]
    inner = list(map(matmul_flops, core.jaxprs_in_params(params)))
    if equation.primitive.name == "cond":
        return max(inner)
    # Only a scan has a `length`.
    return sum(inner) * params.get("length", 1)


def _shape(variable: Any) -> tuple[int, ...]:
    return cast(ShapedArray, variable.aval).shape
