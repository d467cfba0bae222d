"""Floating-point operations of the matrix products in a program, before it is compiled.

2 · m · n · k of each product, of a scan's body as often as it runs.  Attention is
counted as the model states it, for every pair of a query and a key, those that a
causal or padding mask hides included (as in appendix B of Chowdhery et al. 2022,
"PaLM"); a kernel that skips hidden pairs does less.  Everything else in a
transformer is a few parts in a thousand.
"""

import math
from typing import Any

from jax.extend import core


def matrix_flops(jaxpr: Any) -> int:
    """Operations of all matrix products in a (closed) jaxpr; of branches the dearest."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(equation: Any) -> int:
    params = equation.params
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        depth = math.prod(left[axis] for axis in contracted)
        return 2 * depth * math.prod(equation.outvars[0].aval.shape)
    inner = [matrix_flops(jaxpr) for jaxpr in core.jaxprs_in_params(params)]
    if equation.primitive.name == "cond":
        return max(inner)
    return sum(inner) * params.get("length", 1)
