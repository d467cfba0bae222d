"""GradCache: the gradient of a loss that compares the examples of a batch, in micro-batches.

A loss that compares the examples of a batch is not a sum over micro-batches. Let g be the gradient
of the loss with respect to the outputs of the model, and J the Jacobian of the outputs of a
micro-batch. Then the gradient with respect to the parameters is the sum of J^T g over micro-batches
(Gao et al. 2021, "Scaling deep contrastive learning batch size under memory limited setup").
GradCache runs the model twice: first without a gradient, for the outputs of the whole batch, and
again after g is known. GradCache needs the memory of one micro-batch and of the outputs of the
whole batch. The second run computes a sum over examples. Without FSDP, each device therefore
accumulates its gradients over all micro-batches, and devices exchange gradients only once per step.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ...data.common.fields import require
from ...models.nn.typing import Array, Params
from ..distributed.fsdp import GradientFn
from ..losses.micro_batches import accumulate, in_parts, micro_batches
from ..losses.objective import Batch, Outputs, Terms

Rows = tuple[Batch, Array]
"""The arrays of a batch or of a micro-batch, and the dropout key of each example."""
RunFn = Callable[[Params, Params | None, Rows], Outputs]
"""`run(params, frozen, rows)` computes the outputs of examples, arrays `[B, …]`."""
OUTPUTS = "outputs_of_batch"
"""The `jax.named_scope` around a loss that compares the outputs of the whole batch, which devices
exchange for it."""


def cached_gradient(
    run: RunFn,
    loss: Callable[[Outputs], tuple[Array, Terms]],
    models: tuple[Params, Params | None],
    rows: Rows,
    *,
    number: int,
    exchange: Callable[[GradientFn], GradientFn] | None = None,
) -> tuple[Params, Terms]:
    """Returns the gradient of `loss(run(params, frozen, rows))`, and the means that `loss` reports.

    Args:
        run: computes the outputs. Each row of an output must depend on a single example only.
        loss: computes the loss, and means to report, from the outputs of the batch.
        models: the trained and the frozen parameters.
        rows: the batch.
        number: the number of micro-batches.
        exchange: wraps the function that sums gradients over rows, so that it also sums over
            devices. If None, the compiler sums over devices.

    Raises:
        UserError: An output is not an array of floats with a row for each example.
    """
    _check_rows(run, models, rows, number=number)
    # The first run, without a gradient: the outputs of the whole batch.
    outputs = in_parts(lambda part: run(*models, part), rows, number)
    # g, the gradient of the loss with respect to these outputs.
    with jax.named_scope(OUTPUTS):
        wanted, means = jax.grad(loss, has_aux=True)(outputs)

    def sums_of_rows(
        params: Params, frozen: Params | None, scales: tuple[()], given: tuple[Rows, Outputs]
    ) -> tuple[Params, Terms]:
        del scales

        def of_part(part: tuple[Rows, Outputs]) -> tuple[Params, Terms]:
            own, wanted = part
            # The second run has the same keys as the first, so that dropout is the same.
            _, transpose = jax.vjp(lambda params: run(params, frozen, own), params)
            (gradients,) = transpose(wanted)
            # An exchange may have gathered parameters in the dtype of the computation.
            return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, models[0]), {}

        return accumulate(of_part, micro_batches(given, number))

    summed = sums_of_rows if exchange is None else exchange(sums_of_rows)
    gradients, _ = summed(*models, (), (rows, wanted))
    return gradients, means


def _check_rows(
    run: RunFn, models: tuple[Params, Params | None], rows: Rows, *, number: int
) -> None:
    """Checks that the outputs of twice as many examples have twice as many rows."""

    def shapes(parts: int) -> list[tuple[jax.tree_util.KeyPath, jax.ShapeDtypeStruct]]:
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((parts * x.shape[0] // number, *x.shape[1:]), x.dtype),
            rows,
        )
        return jax.tree.leaves_with_path(jax.eval_shape(run, *models, given))

    size = rows[1].shape[0] // number
    for (path, one), (_, two) in zip(shapes(1), shapes(2), strict=True):
        expected = (2 * size, *one.shape[1:])
        require(
            one.shape[:1] == (size,)
            and two.shape == expected
            and jnp.issubdtype(one.dtype, jnp.floating),
            f"the objective compares the examples of a batch with each other, and with "
            f"micro_batches {number} each of its outputs must be floats with a row for each "
            f"example, got output{jax.tree_util.keystr(path)} {one.dtype} {list(one.shape)} of "
            f"{size} examples: return such arrays from forward, or choose micro_batches 1",
        )
