"""FLOPs of the matmuls in a program before it is compiled.

Each matmul counts 2 · m · n · k, and in the body of a scan as often as the body runs. Attention is
counted as the model states it, for every pair of a query and a key, including those that a causal
or padding mask hides (as in appendix B of Chowdhery et al. 2022, "PaLM"); a kernel that skips
masked pairs computes less. All other operations of a transformer are a few parts in a thousand.
"""

import math

from jax.core import ShapedArray
from jax.extend import core


def matmul_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Returns the FLOPs of all matmuls; a `cond` counts its most expensive branch."""
    if isinstance(jaxpr, core.ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: core.JaxprEqn) -> int:
    params = equation.params
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left, result = equation.invars[0].aval, equation.outvars[0].aval
        assert isinstance(left, ShapedArray)
        assert isinstance(result, ShapedArray)
        depth = math.prod(left.shape[axis] for axis in contracted)  # k
        return 2 * depth * math.prod(result.shape)  # m · n, and batch axes
    if equation.primitive.name == "ragged_dot_general":  # each row by the matrix of one group
        left, result = equation.invars[0].aval, equation.outvars[0].aval
        assert isinstance(left, ShapedArray)
        assert isinstance(result, ShapedArray)
        return 2 * math.prod(left.shape) * result.shape[-1]
    inner = [matmul_flops(jaxpr) for jaxpr in core.jaxprs_in_params(params)]
    if equation.primitive.name == "cond":
        return max(inner)
    return sum(inner) * params.get("length", 1)  # `length` is a scan's
