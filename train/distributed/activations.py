"""The division of layers and attention kernels over the devices of a mesh.

Models are independent of the mesh. `around` wraps the `apply` of a model to intercept the calls of
a class of modules.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ...data.common.errors import UserError
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
"""`function(call, args, kwargs, module)` replaces `call(*args, **kwargs)`."""


def around(apply_fn: Apply, modules: type[nn.Module], function: Around) -> Apply:
    """Wraps a model's `apply` to run a function around each call of the modules of a class.

    Code within a `shard_map` over all axes already runs per device, so `around` does not change
    such code.
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
    """Returns the mesh for the code being traced; within a `shard_map`, jax's current mesh."""
    inner = jax.sharding.get_abstract_mesh()
    return inner if inner.manual_axes else mesh


def constrain_activations(apply_fn: Apply, mesh: Mesh) -> Apply:
    """Wraps a model's `apply` to keep the residual stream sharded by sequence around each layer.

    Without this sharding constraint, the compiler follows the parameters, whose width is sharded
    over `fsdp`: each device would compute attention for all sequences, and each layer would
    exchange sums of full activations. With the constraint, the compiler gathers a layer's
    parameters when they are used.
    """

    def around_layer(layer: Apply, args: Args, kwargs: Kwargs, module: Layer) -> object:
        del module
        # Tokens may be sharded over `context`; the width is not sharded.
        spec = PartitionSpec(automatic(BATCH_AXES), PartitionSpec.UNCONSTRAINED)
        by_sequence = NamedSharding(current(mesh), spec)
        x, *rest = args  # x: [B, T, D]
        x, out = layer(jax.lax.with_sharding_constraint(x, by_sequence), *rest, **kwargs)
        return jax.lax.with_sharding_constraint(x, by_sequence), out

    return around(apply_fn, Layer, around_layer)


def shard_map_attention(apply_fn: Apply, mesh: Mesh) -> Apply:
    """Wraps a model's `apply` to run attention kernels per device, on its part of the arrays.

    The compiler cannot divide a kernel and would gather sharded sequences and heads. If tokens are
    sharded, the devices form a ring.
    """
    heads = MESH_AXES["heads"]
    axes_by_ndim = {4: (None, heads), 3: (heads,), 2: ()}
    """The mesh axes of the dimensions after the batch: of `[B, T, heads, head_dim]`, of dropout
    keys `[B, heads, 2]`, and of segments `[B, T]`. Other arrays are replicated.
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
    """Returns the function that runs an attention kernel on rings of devices."""
    size, heads = mesh.shape[CONTEXT], MESH_AXES["heads"]

    def around_kernel(kernel: Apply, args: Args, kwargs: Kwargs, module: FusedAttention) -> object:
        del kernel
        query, key, value = args
        # Dropout keys have heads but no tokens, so they are sharded separately from the other
        # arrays.
        head_keys: HeadKeys | None = kwargs.pop("keys", None)
        # The sizes of a call are known only while the call is traced, so check the kernel here.
        call = AttentionCall(
            num_queries=query.shape[1],
            num_keys=key.shape[1],
            key_dim=key.shape[-1],
            head_dim=value.shape[-1],
            dtype=str(query.dtype),
            dropout_rate=0.0 if head_keys is None else module.dropout_rate,
        )
        if reason := ring_refusal(module.kernel, call, size):
            raise UserError(
                f"execution.attention {module.kernel} does not support this call ({reason}): "
                "choose xla, which gathers keys and values"
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
