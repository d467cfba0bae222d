"""Chooses how the devices of a mesh exchange gradients and gather parameters (`fsdp`)."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ...data.common.fields import require
from ...models.config import Execution
from ...models.nn.typing import Array, PyTree
from ..mesh import Gather
from ..optim.parameters import map_named
from ..state import TrainState, in_units
from .fsdp import GradientFn, Way, compute_dtype, exchanged
from .sharding import divided_axes

ONCE = ("data", "fsdp")
"""The mesh axes where gradients can be summed once per step."""
LARGEST_PART = 0.9
"""By default, "step" is tried only if the state, the full parameters and the gradients take at most
this fraction of a device's memory. The rest of the memory is left for activations."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A way for the devices of a mesh to exchange gradients."""

    wrap: Callable[[GradientFn], GradientFn] | None = None
    """Wraps the function that sums gradients over the rows of a batch, so that it also sums over
    devices. None on a single device."""
    description: str = ""
    """Describes the exchange, to show to the user; empty if no gradients are exchanged."""


def choose_exchanges(
    gather: Gather,
    mesh: Mesh,
    *,
    state: TrainState,
    state_bytes: int,
    shardings: TrainState,
    whole_batch: bool,
    by_rows: bool,
    micro_batches: int,
    execution: Execution,
    device_memory: int | None,
    has_adapter: bool = False,
) -> tuple[Exchange, ...]:
    """Returns the ways to exchange gradients over a mesh, in the order to try them.

    Args:
        gather: when parameters are gathered, as in `TrainConfig`.
        mesh: the mesh; its devices need not be present.
        state: arrays or their shapes.
        state_bytes: the number of bytes of the state on each device.
        shardings: the shardings of the state.
        whole_batch: whether the loss of an example depends on the other examples of the batch, or
          the compiler must place the parameters of auxiliary models.
        by_rows: whether the exchanged gradients are sums over the rows of each device. This can be
          true even if `whole_batch` is true, as in `cached_gradient`.
        micro_batches: the number of micro-batches.
        execution: the settings that determine how to run the model.
        device_memory: the memory of a device in bytes. If None, "auto" gathers layer by layer.
        has_adapter: whether the run trains adapters.

    Raises:
        UserError: "step" does not support the mesh or the objective.
    """
    # Adapters are added to the kernels before the kernels are cast, so gather kernels uncast.
    dtype = None if has_adapter else execution.dtype
    full = full_bytes(state, dtype, micro_batches)
    fits = state_bytes + full <= LARGEST_PART * (device_memory or 0)
    # If this module gathered layers in a run without remat, the full parameters of all layers would
    # stay in memory for the backward pass. Let the compiler gather them instead.
    layers_can = execution.remat != "none" and not has_adapter and mesh.shape["fsdp"] > 1

    def exchange(gather: Gather) -> Exchange:
        per_layer = gather == "layer" and layers_can
        axes = manual_axes(mesh, micro_batches, shards=gather == "step" or per_layer)
        way = Way(gather, axes if by_rows else (), per_layer, dtype, micro_batches)
        wrap = functools.partial(exchanged, way=way, mesh=mesh, shardings=shardings)
        return Exchange(wrap, describe(way, mesh, full))

    # The other candidates are tried only if the first one does not fit into memory.
    gathers = gather_candidates(gather, mesh, whole_batch=whole_batch, fits=fits)
    first, *others = map(exchange, gathers)
    why = "gathered once a step they do not fit"
    return first, *(Exchange(x.wrap, f"{x.description} ({why})") for x in others)


def full_bytes(state: TrainState, dtype: DTypeLike | None, micro_batches: int) -> int:
    """Returns the bytes, in addition to the state, that a device needs to gather once per step.

    These are the bytes of the full parameters, their gradients and, with several micro-batches, the
    sums of the gradients.

    Args:
        state: arrays or their shapes.
        dtype: see `Way`.
        micro_batches: the number of micro-batches.
    """

    def size(tree: PyTree, dtype: DTypeLike | None) -> int:
        def of_array(name: str, x: Array) -> int:
            return x.size * jnp.dtype(compute_dtype(name, x.dtype, dtype)).itemsize

        return sum(jax.tree.leaves(map_named(of_array, tree)))

    # The sums over several micro-batches have the dtype of the parameters.
    sums = size(state.params, None) * (micro_batches > 1)
    return 2 * size(state.params, dtype) + sums + size(state.frozen, dtype)


def gather_candidates(
    gather: Gather, mesh: Mesh, *, whole_batch: bool, fits: bool
) -> tuple[Gather, ...]:
    """Returns the candidates for `gather` in order: "step", "layer", or "step" and then "layer".

    Args:
        gather: as in `TrainConfig`.
        mesh: the mesh.
        whole_batch: as in `choose_exchanges`.
        fits: whether state, full parameters and gradients leave some memory for activations. Only
            the compiled step shows whether the activations fit.

    Raises:
        UserError: "step" does not support the mesh or the objective.
    """
    # "step" is possible only if each device can hold the full parameters, and the loss is a sum
    # over examples.
    others = divided_axes(mesh).keys() - set(ONCE)
    problems = [f"mesh.{axis} is {mesh.shape[axis]}" for axis in others]
    if whole_batch:
        problems.append("the objective needs the whole batch or runs auxiliary models")
    if gather == "step":
        require(
            not problems,
            "gather step lets each device compute the gradients of its own sequences from full "
            f"parameters, but {' and '.join(sorted(problems))}: choose gather layer",
        )
    if gather != "auto":
        return (gather,)
    # Gathering once per step sends fewer bytes, but gathering per layer needs less memory.
    return ("step", "layer") if mesh.shape["fsdp"] > 1 and fits and not problems else ("layer",)


def manual_axes(mesh: Mesh, micro_batches: int, *, shards: bool) -> tuple[str, ...]:
    """Returns the mesh axes over which `fsdp.exchanged`, not the compiler, exchanges gradients.

    The result is empty if a layer is divided over `expert`, `context` or `tensor`, because XLA's
    partitioner (jaxlib 0.10) crashes on programs that are partly manual and partly divided over
    several axes.

    Args:
        mesh: the mesh.
        micro_batches: the number of micro-batches.
        shards: whether the result may contain the axis `fsdp`.
    """
    sizes = divided_axes(mesh)
    axes = tuple(sizes) if shards else tuple(sizes.keys() & {"data"})
    # With one micro-batch, a manual exchange over only some axes sends no fewer bytes than the
    # compiler's exchange.
    is_useful = len(axes) == len(sizes) or micro_batches > 1
    return axes if is_useful and sizes.keys() <= set(ONCE) else ()


def describe(way: Way, mesh: Mesh, full: int) -> str:
    """Returns a clause that describes the exchange of gradients.

    Args:
        way: the way to exchange gradients.
        mesh: the mesh, which has several devices.
        full: from `full_bytes`.
    """
    if mesh.size == mesh.shape["tensor"]:
        return ""  # each device has all tokens, and computes the gradients of its own shard
    once_per_step = way.micro_batches == 1
    often = "once a step" if once_per_step else "in each micro-batch"
    # With data parallelism alone, no parameters are gathered.
    if mesh.shape["fsdp"] == 1:
        return f"gradients exchanged {'once a step' if way.axes else often}"
    if way.gather == "step":
        return (
            "gradients exchanged once a step; parameters gathered once a step, which takes "
            f"{in_units(full)} in addition to the state (less with --gather layer)"
        )
    by = "" if way.per_layer and way.axes else " by the compiler"
    among = " among the devices of fsdp" if way.axes and not once_per_step else ""
    return f"parameters gathered layer by layer{by}; gradients exchanged {often}{among}"
