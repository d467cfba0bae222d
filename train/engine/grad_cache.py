"""GradCache: computes, in micro-batches, the gradient of a loss that compares a batch's examples.

A loss that compares the examples of a batch is not a sum over micro-batches. Let g be the gradient
of the loss with respect to the outputs of the model, and J the Jacobian of the outputs of a
micro-batch. Then the gradient with respect to the parameters is the sum of J^T g over micro-batches
(Gao et al. 2021, "Scaling deep contrastive learning batch size under memory limited setup").
GradCache runs the model twice: first without a gradient, to get the outputs of the whole batch, and
again after g is known. It needs memory for one micro-batch and for the outputs of the whole batch.
The second run computes a sum over examples. Without FSDP, each device therefore accumulates its
gradients over all micro-batches, and devices exchange gradients only once per step.
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
"""The arrays of a batch or a micro-batch, and the dropout key of each example."""
RunFn = Callable[[Params, Params | None, Rows], Outputs]
"""`run(params, frozen, rows)` computes the outputs of examples, arrays `[B, …]`."""
OUTPUTS = "outputs_of_batch"
"""The `jax.named_scope` of a loss that compares the examples of a batch. Within this scope, devices
exchange the outputs of the model."""


def cached_gradient(
    run: RunFn,
    loss: Callable[[Outputs], tuple[Array, Terms]],
    models: tuple[Params, Params | None],
    rows: Rows,
    *,
    num_micro_batches: int,
    exchange: Callable[[GradientFn], GradientFn] | None = None,
) -> tuple[Params, Terms]:
    """Returns the gradient of `loss(run(params, frozen, rows))`, and the means that `loss` reports.

    Args:
        run: computes the outputs. Each row of an output must depend on a single example only.
        loss: computes the loss and the means to report from the outputs of the batch.
        models: the trained and the frozen parameters.
        rows: the batch.
        num_micro_batches: the number of micro-batches.
        exchange: wraps the function that sums gradients over rows, so that it also sums over
            devices. If None, the compiler sums over devices.

    Raises:
        UserError: An output is not an array of floats with a row for each example.
    """
    _check_rows(run, models, rows, num_micro_batches=num_micro_batches)
    # First run: compute the outputs of the whole batch, without a gradient.
    outputs = in_parts(lambda part: run(*models, part), rows, num_micro_batches)
    # Compute g, the gradient of the loss with respect to these outputs.
    with jax.named_scope(OUTPUTS):
        output_gradients, means = jax.grad(loss, has_aux=True)(outputs)

    def sums_of_rows(
        params: Params,
        frozen: Params | None,
        scales: tuple[()],
        batch: tuple[Rows, Outputs],
    ) -> tuple[Params, Terms]:
        del scales

        def of_part(part: tuple[Rows, Outputs]) -> tuple[Params, Terms]:
            examples, gradients_of_part = part
            # The second run uses the same keys as the first, so that dropout is the same.
            _, transpose = jax.vjp(lambda params: run(params, frozen, examples), params)
            (gradients,) = transpose(gradients_of_part)
            # The exchange may have gathered parameters in the compute dtype.
            return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, models[0]), {}

        return accumulate(of_part, micro_batches(batch, num_micro_batches))

    summed = sums_of_rows if exchange is None else exchange(sums_of_rows)
    gradients, _ = summed(*models, (), (rows, output_gradients))
    return gradients, means


def _check_rows(
    run: RunFn, models: tuple[Params, Params | None], rows: Rows, *, num_micro_batches: int
) -> None:
    """Checks that doubling the number of examples doubles the number of rows of each output."""

    def shapes(factor: int) -> list[tuple[jax.tree_util.KeyPath, jax.ShapeDtypeStruct]]:
        examples = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (factor * x.shape[0] // num_micro_batches, *x.shape[1:]), x.dtype
            ),
            rows,
        )
        return jax.tree.leaves_with_path(jax.eval_shape(run, *models, examples))

    size = rows[1].shape[0] // num_micro_batches
    for (path, one), (_, two) in zip(shapes(1), shapes(2), strict=True):
        expected = (2 * size, *one.shape[1:])
        require(
            one.shape[:1] == (size,)
            and two.shape == expected
            and jnp.issubdtype(one.dtype, jnp.floating),
            f"the objective compares the examples of a batch with each other, and with "
            f"micro_batches {num_micro_batches} each of its outputs must be floats with a row for "
            f"each example, got output{jax.tree_util.keystr(path)} {one.dtype} {list(one.shape)} "
            f"of {size} examples: return such arrays from forward, or choose micro_batches 1",
        )
