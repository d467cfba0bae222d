"""Expert parallelism: each device computes its experts for the tokens of all devices.

The experts and the sequences of a batch are sharded over the mesh axis `expert`. If experts have no
capacity, each device of this axis all-gathers the tokens, computes its own experts for all tokens,
and reduce-scatters the weighted sums. With n devices, (n - 1) / n of the tokens are sent twice,
regardless of the router's choices. If experts have a capacity, each device sends to every other
device only the tokens for that device's experts (all-to-all; Lepikhin et al. 2020, "GShard",
section 3.2).
"""

import jax
from jax.sharding import Mesh, PartitionSpec

from ...models.config import TransformerConfig
from ...models.mesh_axes import BATCH_AXES, CONTEXT, automatic
from ...models.nn.experts import Choice, ExpertMixture, Kernels, combine
from ...models.nn.typing import Array
from .activations import Apply, Args, Kwargs, around, constrain_activations, current

EXPERT, WIDTH, HIDDEN = "expert", "fsdp", "tensor"


def over_mesh(apply_fn: Apply, mesh: Mesh, model: TransformerConfig) -> Apply:
    """Wraps a model's `apply` to run over a mesh, with sequences and experts sharded over it."""
    apply_fn = constrain_activations(apply_fn, mesh)
    return shard_map_experts(apply_fn, mesh) if model.num_experts and mesh.size > 1 else apply_fn


def shard_map_experts(apply_fn: Apply, mesh: Mesh) -> Apply:
    """Wraps a model's `apply` so that each device computes only its own experts of a mixture.

    Without this wrapper, the compiler would gather all tokens, because it cannot sort tokens by
    expert across devices.
    """

    def around_mixture(call: Apply, args: Args, kwargs: Kwargs, mixture: ExpertMixture) -> object:
        del call, kwargs
        x, choice, kernels = args
        # A capacity applies to all tokens of a sequence together, so the sequence must be whole.
        # Without a capacity, tokens are independent.
        whole = mixture.config.expert_capacity is not None or x.shape[1] % mesh.shape[CONTEXT]
        rows = PartitionSpec(automatic(BATCH_AXES), None if whole else CONTEXT)
        # The specs of the kernels [E, D, F], which map from the model width D to the hidden width
        # F, and of the kernel [E, F, D], which maps back.
        of_kernels = (
            (PartitionSpec(EXPERT, WIDTH, HIDDEN),) * len(kernels.inputs),
            PartitionSpec(EXPERT, HIDDEN, WIDTH),
        )
        alone = ExpertMixture(mixture.config, mixture.execution, parent=None)
        on_each_device = jax.shard_map(
            lambda x, choice, kernels: _on_one(alone, x, Choice(*choice), Kernels(*kernels)),
            mesh=current(mesh),
            axis_names=set(automatic(mesh.axis_names)),
            in_specs=(rows, (rows, rows, rows), of_kernels),
            out_specs=rows,
            check_vma=False,  # this check would reject the initial zeros of a loop
        )
        return on_each_device(x, tuple(choice), tuple(kernels))

    return around(apply_fn, ExpertMixture, around_mixture)


def _on_one(mixture: ExpertMixture, x: Array, choice: Choice, kernels: Kernels) -> Array:
    """Returns the weighted sums of expert outputs (from all devices) for this device's tokens."""
    kernels = Kernels(
        # Gather the kernels along the model width, which is sharded over `fsdp`.
        tuple(jax.lax.all_gather(k, WIDTH, axis=1, tiled=True) for k in kernels.inputs),
        jax.lax.all_gather(kernels.down, WIDTH, axis=2, tiled=True),
    )
    if mixture.config.expert_capacity is None:
        x, choice = jax.tree.map(lambda x: jax.lax.all_gather(x, EXPERT, tiled=True), (x, choice))
        # Number the experts so that the device's first expert is 0. The indices of other devices'
        # experts are then out of range, and these experts add 0.
        first = jax.lax.axis_index(EXPERT) * kernels.down.shape[0]
        choice = choice._replace(experts=choice.experts - first)
        y = jax.lax.psum_scatter(mixture.dropless(x, choice, kernels), EXPERT, tiled=True)
    else:
        # Send each expert the tokens in its slots, and send its outputs back.
        rows, slot = mixture.dispatch(x, choice)
        rows = jax.lax.all_to_all(rows, EXPERT, 1, 0, tiled=True)  # [n · B, E / n, C, D]
        outputs = mixture.by_capacity(rows, kernels)
        # [n · B, E / n, C, D] back to [B, E, C, D].
        outputs = jax.lax.all_to_all(outputs, EXPERT, 0, 1, tiled=True)
        y = combine(outputs, slot, choice.weight)
    # Each device along `tensor` has a slice of the hidden units; sum the outputs of the slices.
    return jax.lax.psum(y, HIDDEN)
