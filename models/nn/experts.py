"""Mixtures of experts: feed-forward layers of which each token goes through a few.

- Shazeer et al. 2017, "Outrageously large neural networks": the k experts with the highest router
  probability, weighted by these probabilities.
- Fedus et al. 2022, "Switch transformers", section 2.2: the loss that balances the experts, the
  capacity of an expert, and jitter of the router's input.
- Zoph et al. 2022, "ST-MoE", section 3.2: the loss of the router's logits (z-loss).
- Jiang et al. 2024, "Mixtral of experts", section 2.1: probabilities that add up to 1 over the k.

Three executions compute the same: `blocked` sorts the tokens by expert and multiplies blocks of
them, in operations that every platform has; `ragged` leaves the groups to XLA
(`jax.lax.ragged_dot`: efficient on TPUs, dense elsewhere); `capacity` gives each expert a fixed
number of tokens of each sequence, and drops the others.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from ..config import Execution, TransformerConfig
from .layers import ACTIVATIONS, RowKeys, fold_in
from .typing import Array, Float, Int

BLOCK = 64
"""Tokens that are multiplied with an expert's matrices at a time. Fewer leave less of the last
block of each expert empty, more read the matrices less often."""


@struct.dataclass
class RouterStatistics:
    """Sums over the real tokens of each sequence, of one layer; `[L, …]` for a stack of layers."""

    assigned: Float[Array, "*L B E"]
    """How many times each expert was chosen; without gradient."""
    probability: Float[Array, "*L B E"]
    """The sum of each expert's router probability."""
    squared_log_normalizer: Float[Array, "*L B"]
    """The sum of logsumexp(router logits)²."""
    tokens: Float[Array, "*L B"]
    """The number of real tokens."""


def balance_loss(statistics: RouterStatistics) -> Float[Array, " B"]:
    """Returns the balance loss of each sequence, the mean over layers of E Σᵢ fᵢ Pᵢ.

    Fedus et al. 2022, equation 4, with fᵢ the number of times that expert i is chosen per token and
    Pᵢ its mean probability; it is k if both are uniform. Each sequence is balanced by itself, so
    that the mean over sequences does not depend on how they are spread over devices and
    micro-batches. A sequence without tokens has 0.

    Args:
      statistics: `[L, B, …]`, as `outputs.router` has them.
    """
    tokens = jnp.maximum(statistics.tokens, 1)[..., None]
    product = statistics.assigned / tokens * (statistics.probability / tokens)
    return statistics.assigned.shape[-1] * jnp.mean(jnp.sum(product, axis=-1), axis=0)


def batch_balance_loss(statistics: RouterStatistics) -> Float[Array, ""]:
    """Returns the balance loss over the tokens of all layers and sequences together.

    This is the form of transformers (`router_aux_loss_coef`). It depends on what else is in the
    batch: use it to compare, and `balance_loss` to train.
    """
    tokens = jnp.sum(statistics.tokens)
    assigned, probability = (
        jnp.sum(x, axis=tuple(range(x.ndim - 1))) / tokens
        for x in (statistics.assigned, statistics.probability)
    )
    return assigned.size * jnp.sum(assigned * probability)


def router_z_loss(statistics: RouterStatistics) -> Float[Array, " B"]:
    """Returns the z-loss of each sequence: the sum over its tokens, the mean over layers."""
    return jnp.mean(statistics.squared_log_normalizer, axis=0)


class Experts(nn.Module):
    """A router and E feed-forward layers, gated as in a Llama, of which each token uses k.

    Attributes:
      config: sizes; `num_experts` E, `experts_per_token` k, `expert_dim` F, and
        `normalize_experts`, `expert_capacity`, `router_jitter`.
      execution: precision, and how the experts are computed.
      output_init_std: standard deviation of the initial maps back to the residual stream.
    """

    config: TransformerConfig
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        real: Float[Array, "B T"] | None = None,
        rng: RowKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], RouterStatistics]:
        """Returns the weighted sum of k experts' outputs for each token.

        Args:
          x: input of the sublayer.
          real: 1 for tokens that count in the statistics, and take an expert's capacity; None: all.
          rng: keys of jitter; None: no jitter.
        """
        c, e = self.config, self.execution
        number, width = c.num_experts, c.expert_dim
        real = jnp.ones(x.shape[:2]) if real is None else real.astype(jnp.float32)
        init = nn.initializers.normal(c.init_std or 0.02)
        out_init = nn.initializers.normal(self.output_init_std or 0.02)
        router = self.param("router", init, (c.d_model, number), e.param_dtype)
        gate, up = (
            self.param(name, init, (number, c.d_model, width), e.param_dtype).astype(e.dtype)
            for name in ("gate", "up")
        )
        down = self.param("down", out_init, (number, width, c.d_model), e.param_dtype)
        down = down.astype(e.dtype)

        # The router decides in float32 (Fedus et al. 2022, section 2.4).
        seen = _jittered(x.astype(jnp.float32), c.router_jitter, rng)
        logits = jnp.einsum("BTD,DE->BTE", seen, router.astype(jnp.float32))
        probability = jax.nn.softmax(logits, axis=-1)
        weight, chosen = jax.lax.top_k(probability, c.experts_per_token)  # [B, T, k]
        if c.normalize_experts:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)

        activation = ACTIVATIONS[c.activation]
        kernels = gate, up, down
        if c.expert_capacity is not None:
            capacity = math.ceil(x.shape[1] * c.experts_per_token / number * c.expert_capacity)
            outputs = _by_capacity(
                x.astype(e.dtype),
                chosen,
                real,
                kernels=kernels,
                activation=activation,
                capacity=capacity,
            )
        else:
            rows = x.astype(e.dtype).reshape(-1, c.d_model)
            compute = {"blocked": _by_blocks, "ragged": _ragged}.get(e.experts, _by_platform)
            outputs = compute(rows, chosen.reshape(-1, chosen.shape[-1]), kernels, activation)
            outputs = outputs.reshape(*chosen.shape, c.d_model)
        y = jnp.einsum("BTKD,BTK->BTD", outputs, weight.astype(e.dtype))

        one_hot = jax.nn.one_hot(chosen, number).sum(axis=2) * real[..., None]  # [B, T, E]
        squared = jnp.square(jax.nn.logsumexp(logits, axis=-1)) * real
        return y, RouterStatistics(
            assigned=jax.lax.stop_gradient(one_hot.sum(axis=1)),
            probability=jnp.sum(probability * real[..., None], axis=1),
            squared_log_normalizer=squared.sum(axis=1),
            tokens=real.sum(axis=1),
        )


def _jittered(x: Float[Array, "B T D"], width: float, rng: RowKeys | None) -> Array:
    """Multiplies by random numbers from 1 - width to 1 + width."""
    if width == 0 or rng is None:
        return x
    draw = functools.partial(
        jax.random.uniform, shape=x.shape[1:], minval=1 - width, maxval=1 + width
    )
    return x * jax.vmap(draw)(fold_in(rng, _JITTER))


_JITTER = 0x6A
Kernels = tuple[Float[Array, "E D F"], Float[Array, "E D F"], Float[Array, "E F D"]]
"""The maps of all experts: gate, up, down."""


Activation = Callable[[Array], Array]


def _by_platform(rows: Array, chosen: Array, kernels: Kernels, activation: Activation) -> Array:
    return jax.lax.platform_dependent(
        rows,
        chosen,
        kernels,
        tpu=functools.partial(_ragged, activation=activation),
        default=functools.partial(_by_blocks, activation=activation),
    )


def _ragged(
    rows: Float[Array, "M D"],
    chosen: Int[Array, "M K"],
    kernels: Kernels,
    activation: Activation,
) -> Float[Array, "A D"]:
    """Returns the output of each of the M · K assignments, the groups of rows left to XLA."""
    gate, up, down = kernels
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts, stable=True)  # the assignments by expert
    sizes = jnp.bincount(experts, length=gate.shape[0]).astype(jnp.int32)
    x = rows[order // chosen.shape[1]]
    hidden = activation(jax.lax.ragged_dot(x, gate, sizes)) * jax.lax.ragged_dot(x, up, sizes)
    return jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]


def _by_blocks(
    rows: Float[Array, "M D"],
    chosen: Int[Array, "M K"],
    kernels: Kernels,
    activation: Activation,
) -> Float[Array, "A D"]:
    """Returns the output of each of the M · K assignments, computed in blocks of one expert.

    The rows of each expert are padded to whole blocks. There are at most A / BLOCK + E of these,
    so that shapes are static, and no assignment is dropped.
    """
    number, per_token = kernels[0].shape[0], chosen.shape[1]
    experts = chosen.reshape(-1)
    assignments = experts.size
    order = jnp.argsort(experts, stable=True)
    counts = jnp.bincount(experts, length=number)
    blocks = -(-counts // BLOCK)
    ends = jnp.cumsum(blocks)
    # The place of each assignment among the padded rows.
    rank = jnp.arange(assignments) - (jnp.cumsum(counts) - counts)[experts[order]]
    place = (ends - blocks)[experts[order]] * BLOCK + rank
    place = jnp.zeros_like(place).at[order].set(place, unique_indices=True)

    most = (assignments + number * (BLOCK - 1)) // BLOCK
    expert_of = jnp.minimum(jnp.searchsorted(ends, jnp.arange(most), side="right"), number - 1)
    padded = jnp.zeros((most * BLOCK, rows.shape[1]), rows.dtype)
    padded = padded.at[place].set(jnp.repeat(rows, per_token, axis=0), unique_indices=True)
    outputs = _blocks(activation, padded.reshape(most, BLOCK, -1), kernels, expert_of, ends[-1])
    return outputs.reshape(most * BLOCK, -1)[place]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocks(
    activation: Activation,
    x: Float[Array, "n b D"],
    kernels: Kernels,
    expert_of: Int[Array, " n"],
    used: Int[Array, ""],
) -> Float[Array, "n b D"]:
    """Returns the output of the first `used` blocks, each by the expert of its own; then zeros."""
    return _blocks_forward(activation, x, kernels, expert_of, used)[0]


def _blocks_forward(
    activation: Activation, x: Array, kernels: Kernels, expert_of: Array, used: Array
) -> tuple[Array, tuple[Array, Kernels, Array, Array, Array, Array]]:
    gate, up, down = kernels
    wide = jnp.zeros((*x.shape[:2], gate.shape[-1]), x.dtype)

    def one(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y, gates, ups = carry
        expert, block = expert_of[i], x[i]
        g, u = block @ gate[expert], block @ up[expert]
        out = (activation(g) * u) @ down[expert]
        return y.at[i].set(out), gates.at[i].set(g), ups.at[i].set(u)

    y, gates, ups = jax.lax.fori_loop(0, used, one, (jnp.zeros_like(x), wide, wide))
    return y, (x, kernels, expert_of, used, gates, ups)


def _blocks_backward(
    activation: Activation,
    residuals: tuple[Array, Kernels, Array, Array, Array, Array],
    dy: Array,
) -> tuple[Array, Kernels, None, None]:
    x, (gate, up, down), expert_of, used, gates, ups = residuals

    def one(i: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
        dx, d_gate, d_up, d_down = carry
        expert = expert_of[i]
        active, pullback = jax.vjp(activation, gates[i])
        d_hidden = dy[i] @ down[expert].T
        (dg,) = pullback(d_hidden * ups[i])
        du = d_hidden * active
        return (
            dx.at[i].set(dg @ gate[expert].T + du @ up[expert].T),
            d_gate.at[expert].add(x[i].T @ dg),
            d_up.at[expert].add(x[i].T @ du),
            d_down.at[expert].add((active * ups[i]).T @ dy[i]),
        )

    zeros = jax.tree.map(jnp.zeros_like, (x, gate, up, down))
    dx, *d_kernels = jax.lax.fori_loop(0, used, one, zeros)
    return dx, (d_kernels[0], d_kernels[1], d_kernels[2]), None, None


_blocks.defvjp(_blocks_forward, _blocks_backward)


def _by_capacity(
    x: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    real: Float[Array, "B T"],
    *,
    kernels: Kernels,
    activation: Activation,
    capacity: int,
) -> Float[Array, "B T K D"]:
    """Returns the output of each assignment; 0 for those beyond an expert's capacity.

    Every sequence has its own capacity, so that the result does not depend on the batch. A token's
    first choice comes before any token's second (Lepikhin et al. 2020, "GShard").
    """
    gate, up, down = kernels
    batch, length, per_token = chosen.shape
    one_hot = jax.nn.one_hot(chosen, gate.shape[0], dtype=jnp.int32)
    one_hot *= real[..., None, None].astype(jnp.int32)  # padding takes no capacity
    by_choice = jnp.swapaxes(one_hot, 1, 2).reshape(batch, per_token * length, -1)
    rank = jnp.cumsum(by_choice, axis=1) - by_choice  # of an assignment among its expert's
    rank = jnp.sum(rank * by_choice, axis=-1).reshape(batch, per_token, length)
    rank = jnp.swapaxes(rank, 1, 2)  # [B, T, K]
    kept = (rank < capacity) & (real[..., None] != 0)
    slot = jnp.where(kept, chosen * capacity + rank, gate.shape[0] * capacity)

    def of_sequence(x: Array, slot: Array) -> Array:
        flat = slot.reshape(-1)
        rows = jnp.zeros((gate.shape[0] * capacity, x.shape[-1]), x.dtype)
        rows = rows.at[flat].set(jnp.repeat(x, per_token, axis=0), mode="drop")
        rows = rows.reshape(gate.shape[0], capacity, -1)  # [E, C, D]
        hidden = activation(jnp.einsum("ECD,EDF->ECF", rows, gate))
        hidden *= jnp.einsum("ECD,EDF->ECF", rows, up)
        outputs = jnp.einsum("ECF,EFD->ECD", hidden, down).reshape(-1, x.shape[-1])
        return outputs.at[flat].get(mode="fill", fill_value=0).reshape(*slot.shape, -1)

    return jax.vmap(of_sequence)(x, slot)
