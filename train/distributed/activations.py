"""Divides the computation of layers and attention kernels over the devices of a mesh.

The code of models does not depend on the mesh. Instead, `around` wraps the `apply` of a model, and
intercepts the calls of all modules of one class.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ...data.common.fields import require
from ...models.mesh_axes import BATCH_AXES, CONTEXT, MESH_AXES, MESH_AXIS_NAMES, automatic
from ...models.nn.dropout import HeadKeys
from ...models.nn.fused_attention import AttentionCall, FusedAttention
from ...models.nn.masks import Segments
from ...models.nn.stack import Layer
from ...models.nn.typing import Array, PyTree
from .ring_attention import PART_KERNELS, Ring, ring_refusal

Apply = Callable[..., Any]
Args = tuple[PyTree, ...]
Kwargs = dict[str, PyTree]
Around = Callable[[Apply, Args, Kwargs, Any], object]
"""A function of type `Around` is called as `function(call, args, kwargs, module)`, in place of
`call(*args, **kwargs)`."""


def around(apply_fn: Apply, modules: type[nn.Module], function: Around) -> Apply:
    """Wraps a model's `apply`, so that `function` replaces the calls of a class of modules.

    Within a `shard_map` over all axes, each device already runs the code by itself, so calls there
    are not replaced.
    """

    def interceptor(
        call: Apply, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
    ) -> object:
        module = context.module
        is_concerned = isinstance(module, modules) and context.method_name == "__call__"
        if not is_concerned or not automatic(MESH_AXIS_NAMES):
            return call(*args, **kwargs)
        return function(call, args, kwargs, module)

    def apply(*args: object, **kwargs: object) -> object:
        with nn.intercept_methods(interceptor):
            return apply_fn(*args, **kwargs)

    return apply


def current(mesh: Mesh) -> Mesh | AbstractMesh:
    """Returns `mesh`, or jax's current mesh if the traced code is within a `shard_map`."""
    inner = jax.sharding.get_abstract_mesh()
    return inner if inner.manual_axes else mesh


def constrain_activations(apply_fn: Apply, mesh: Mesh) -> Apply:
    """Wraps a model's `apply` to keep the residual stream between layers sharded by sequence.

    Without this sharding constraint, the compiler would shard activations like the parameters,
    whose width is sharded over `fsdp`. Each device would then compute attention for all sequences,
    and the devices would exchange sums of full activations in each layer. With the constraint, the
    compiler gathers a layer's parameters when the layer uses them.
    """

    def around_layer(layer: Apply, args: Args, kwargs: Kwargs, module: Layer) -> object:
        del module
        # Leave the sharding of tokens to the compiler (they may be sharded over `context`); do not
        # shard the width.
        spec = PartitionSpec(automatic(BATCH_AXES), PartitionSpec.UNCONSTRAINED)
        by_sequence = NamedSharding(current(mesh), spec)
        x, *rest = args  # x: [B, T, D]
        x, out = layer(jax.lax.with_sharding_constraint(x, by_sequence), *rest, **kwargs)
        return jax.lax.with_sharding_constraint(x, by_sequence), out

    return around(apply_fn, Layer, around_layer)


def shard_map_attention(apply_fn: Apply, mesh: Mesh) -> Apply:
    """Wraps a model's `apply` to run attention kernels on each device, on its shard of the arrays.

    The compiler cannot divide a kernel over devices, so it would gather the shards of sequences and
    heads. If tokens are sharded, the devices form a ring (`ring_attention`).
    """
    heads = MESH_AXES["heads"]
    axes_by_ndim = {4: (None, heads), 3: (heads,), 2: ()}
    """The mesh axes of the dimensions after the batch dimension, by number of dimensions: for
    arrays `[B, T, heads, head_dim]`, dropout keys `[B, heads, 2]`, and segment ids `[B, T]`. Other
    arrays are replicated.
    """

    def spec(x: jax.Array) -> PartitionSpec:
        if x.ndim not in axes_by_ndim:
            return PartitionSpec()
        return PartitionSpec(automatic(BATCH_AXES), *axes_by_ndim[x.ndim])

    def around_kernel(kernel: Apply, args: Args, kwargs: Kwargs, module: FusedAttention) -> object:
        del module
        on_each_device = jax.shard_map(
            lambda args, kwargs: kernel(*args, **kwargs),
            mesh=current(mesh),
            axis_names=set(automatic(mesh.axis_names)),
            in_specs=jax.tree.map(spec, (args, kwargs)),
            out_specs=spec(args[0]),
            check_vma=False,  # a kernel does not declare the axes over which its result varies
        )
        return on_each_device(args, kwargs)

    is_ring = mesh.shape[CONTEXT] > 1
    return around(apply_fn, FusedAttention, _around_ring(mesh) if is_ring else around_kernel)


def _around_ring(mesh: Mesh) -> Around:
    """Returns a function for `around` that runs an attention kernel on rings of devices."""
    size, heads = mesh.shape[CONTEXT], MESH_AXES["heads"]

    def around_kernel(kernel: Apply, args: Args, kwargs: Kwargs, module: FusedAttention) -> object:
        del kernel
        query, key, value = args
        # Dropout keys have a head axis but no token axis, so they are sharded differently from the
        # other arrays.
        head_keys: HeadKeys | None = kwargs.pop("keys", None)
        # Check here whether the kernel supports the call, because the sizes are known only during
        # tracing.
        call = AttentionCall(
            num_queries=query.shape[1],
            num_keys=key.shape[1],
            key_dim=key.shape[-1],
            head_dim=value.shape[-1],
            dtype=str(query.dtype),
            dropout_rate=0.0 if head_keys is None else module.dropout_rate,
        )
        reason = ring_refusal(module.kernel, call, size)
        require(
            reason is None,
            f"execution.attention {module.kernel} does not support this call ({reason}): choose "
            "xla, which gathers keys and values",
        )

        def on_ring(
            query: Array,
            key: Array,
            value: Array,
            segments: Segments | None,
            *,
            causal: bool,
            window: int | None,
            cap: float | None,
        ) -> Array:
            part_kernel = PART_KERNELS[module.kernel]
            ring = Ring(CONTEXT, size, part_kernel, causal, window, cap, call.dropout_rate)
            rows = automatic(BATCH_AXES)
            arrays = PartitionSpec(rows, CONTEXT, heads)  # [B, T, heads, head_dim]
            on_each_device = jax.shard_map(
                ring,
                mesh=current(mesh),
                axis_names=set(automatic(mesh.axis_names)),
                in_specs=(
                    (arrays, arrays, arrays),
                    PartitionSpec(rows, CONTEXT),
                    PartitionSpec(rows, heads),
                ),
                out_specs=arrays,
                check_vma=False,  # a kernel does not declare the axes over which its result varies
            )
            return on_each_device((query, key, value), segments, head_keys)

        return module.attend(on_ring, query, key, value, **kwargs)

    return around_kernel
