"""Mixtures of experts: each token passes through a few of many feed-forward layers.

- Shazeer et al. 2017, "Outrageously large neural networks": each token uses the k experts with the
  highest router probability, weighted by these probabilities.
- Fedus et al. 2022, "Switch transformers", section 2.2: a loss that balances the experts, a
  capacity for each expert, and jitter of the router's input.
- Zoph et al. 2022, "ST-MoE", section 3.2: a loss that keeps the router's logits small (z-loss).
- Jiang et al. 2024, "Mixtral of experts", section 2.1: probabilities are normalized over the k
  experts.

The experts can be computed in three ways. `blocked` sorts the tokens by expert and multiplies
blocks of tokens by the expert's matrices. This method works on every platform. `ragged` computes
the same result with `jax.lax.ragged_dot`. This function is efficient on TPUs; on other platforms it
multiplies every token by every expert's matrices. `capacity` assigns each expert a limited number
of tokens of each sequence, and drops the other tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..config import Execution, TransformerConfig
from .cache import Cache
from .dropout import RowKeys, fold_in
from .layers import ACTIVATIONS, FeedForward, GatedFeedForward
from .masks import AnyArray
from .typing import Array, Bool, Float, Int

BLOCKS = 256, 64, 16
"""Block sizes in tokens; each size is a multiple of the next. An expert's tokens fill as many large
blocks as possible; the remaining tokens fill smaller blocks. With large blocks, the expert's
matrices are read less often; with small blocks, the last block contains less padding.
"""
_JITTER = 0x6A

Config = TypeVar("Config", bound=TransformerConfig)
Carry = TypeVar("Carry")


@struct.dataclass
class RouterStatistics:
    """Sums over the real tokens of each sequence, for one router or for all L routers."""

    assigned: Float[Array, "*L B E"]
    """How many times each expert was chosen; this count has no gradient."""
    probability: Float[Array, "*L B E"]
    """The sum of each expert's router probability."""
    squared_log_normalizer: Float[Array, "*L B"]
    """The sum of logsumexp(router logits)²."""
    tokens: Float[Array, "*L B"]
    """The number of real tokens."""


def stack_statistics(
    router: RouterStatistics | tuple[RouterStatistics, ...] | None,
) -> RouterStatistics | None:
    """Returns the statistics of stacked or separate layers as arrays with a leading axis L."""
    if not isinstance(router, tuple):
        return router
    return jax.tree.map(lambda *each: jnp.stack(each), *router)


def real_tokens(
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None,
    segment_ids: Int[AnyArray, "B T"] | None,
    cache: Cache | None,
) -> Float[Array, "B T"] | None:
    """Returns a mask of the tokens of a call: 1 for real tokens, 0 for padding.

    Returns None if all tokens are real, or if the mask does not have an entry for each token.
    """
    if segment_ids is not None:
        return (jnp.asarray(segment_ids) != 0).astype(jnp.float32)
    # A mask per query or over cache slots does not show which tokens of this call are real.
    if attention_mask is None or attention_mask.ndim == 3 or cache is not None:
        return None
    return (jnp.asarray(attention_mask) != 0).astype(jnp.float32)


def config_of_call(config: Config, cache: Cache | None) -> Config:
    """Returns the configuration for a call; if there is a cache, experts have no maximum capacity.

    A call with a cache reads only some tokens of a sequence, or tokens of several beams. If the
    capacity were limited, the dropped tokens would depend on how a sequence is divided into calls.
    """
    if cache is None or config.expert_capacity is None:
        return config
    return dataclasses.replace(config, expert_capacity=None)


def balance_loss(statistics: RouterStatistics) -> Float[Array, " B"]:
    """Returns the balance loss of each sequence, the mean over layers of E Σᵢ fᵢ Pᵢ.

    Fedus et al. 2022, equation 4, where fᵢ is the average number of times that a token chooses
    expert i, and Pᵢ is the expert's mean probability. The loss is k if fᵢ and Pᵢ are uniform, and 0
    for a sequence without tokens. Sequences are balanced separately, so that the mean over the
    sequences does not depend on devices and micro-batches.

    Args:
      statistics: `[L, B, …]`, from `outputs.router`.
    """
    tokens = jnp.maximum(statistics.tokens, 1)[..., None]
    product = statistics.assigned / tokens * (statistics.probability / tokens)
    return statistics.assigned.shape[-1] * _layer_mean(jnp.sum(product, axis=-1), statistics)


def batch_balance_loss(statistics: RouterStatistics) -> Float[Array, ""]:
    """Returns the balance loss computed over the tokens of all layers and all sequences together.

    transformers computes the same loss (`router_aux_loss_coef`). The loss depends on the other
    sequences of the batch, so use this function for comparison and `balance_loss` for training.
    """
    tokens = jnp.maximum(jnp.sum(statistics.tokens), 1)
    assigned, probability = (
        jnp.sum(x, axis=tuple(range(x.ndim - 1))) / tokens
        for x in (statistics.assigned, statistics.probability)
    )
    return assigned.size * jnp.sum(assigned * probability)


def router_z_loss(statistics: RouterStatistics) -> Float[Array, " B"]:
    """Returns the z-loss of each sequence, the mean logsumexp(logits)² over tokens and layers."""
    tokens = jnp.maximum(statistics.tokens, 1)
    return _layer_mean(statistics.squared_log_normalizer / tokens, statistics)


def _layer_mean(x: Float[Array, "L B"], statistics: RouterStatistics) -> Float[Array, " B"]:
    """Returns the mean over the layers with experts. In a layer without experts, x is 0."""
    return jnp.sum(x, axis=0) / jnp.maximum(jnp.sum(statistics.tokens > 0, axis=0), 1)


class Kernels(NamedTuple):
    """The kernels of the linear maps of E experts."""

    inputs: tuple[Float[Array, "E D F"], ...]
    """The kernels of the maps before the activation: the gate and the up projection, or only the up
    projection."""
    down: Float[Array, "E F D"]


class Choice(NamedTuple):
    """The K experts that the router chose for each token, with their weights."""

    experts: Int[Array, "*tokens K"]
    weight: Float[Array, "*tokens K"]
    real: Float[Array, "*tokens"]
    """1 for real tokens, 0 for padding tokens."""


Activation = Callable[[Array], Array]
"""The elementwise non-linearity."""


class Experts(nn.Module):
    """E feed-forward layers (experts) with a router that chooses k of them for each token.

    Shared experts, if any, process all tokens.

    Attributes:
      config: the sizes `num_experts` (E), `experts_per_token` (k), `expert_dim` (F) and
        `num_shared_experts`, and the options `gated_experts`, `normalize_experts`,
        `expert_capacity` and `router_jitter`.
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
          real: 1 for the tokens that count in the statistics and toward the experts' capacity. If
            None, all tokens are real.
          rng: random keys for the jitter and for the dropout in shared experts. If None, neither
            jitter nor dropout is applied.
        """
        c, e = self.config, self.execution
        num_experts, width = c.num_experts, c.expert_dim
        real = jnp.ones(x.shape[:2]) if real is None else real.astype(jnp.float32)
        init = nn.initializers.normal(c.init_std or 0.02)
        out_init = nn.initializers.normal(self.output_init_std or 0.02)
        router = self.param("router", init, (c.d_model, num_experts), e.param_dtype)
        inputs = tuple(
            self.param(name, init, (num_experts, c.d_model, width), e.param_dtype)
            for name in (("gate", "up") if c.gated_experts else ("up",))
        )
        down = self.param("down", out_init, (num_experts, width, c.d_model), e.param_dtype)

        # The router computes in float32 (Fedus et al. 2022, section 2.4).
        seen = _jittered(x.astype(jnp.float32), c.router_jitter, rng)
        logits = jnp.einsum("BTD,DE->BTE", seen, router.astype(jnp.float32))
        probability = jax.nn.softmax(logits, axis=-1)
        weight, chosen = jax.lax.top_k(probability, c.experts_per_token)  # [B, T, k]
        if c.normalize_experts:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)

        x, weight, inputs, down = jax.tree.map(
            lambda x: x.astype(e.dtype), (x, weight, inputs, down)
        )
        # `ExpertMixture` is a module, so that distributed training can intercept it to shard the
        # experts.
        mixture = ExpertMixture(c, e, name="mixture")
        y = mixture(x, Choice(chosen, weight, real), Kernels(inputs, down))
        for i in range(c.num_shared_experts):
            shared = GatedFeedForward if c.gated_experts else FeedForward
            y += shared(c, e, self.output_init_std, name=f"shared_{i}")(x, fold_in(rng, i))

        # The losses need statistics over the real tokens.
        one_hot = jax.nn.one_hot(chosen, num_experts).sum(axis=2) * real[..., None]  # [B, T, E]
        squared = jnp.square(jax.nn.logsumexp(logits, axis=-1)) * real
        return y, RouterStatistics(
            assigned=jax.lax.stop_gradient(one_hot.sum(axis=1)),
            probability=jnp.sum(probability * real[..., None], axis=1),
            squared_log_normalizer=squared.sum(axis=1),
            tokens=real.sum(axis=1),
        )


class ExpertMixture(nn.Module):
    """Computes the outputs of the chosen experts. This module has no parameters.

    Distributed training finds this module by its class and shards the experts over devices.

    Attributes:
      config: the options `num_experts`, `experts_per_token`, `expert_capacity` and `activation`.
      execution: how the experts are computed.
    """

    config: TransformerConfig
    execution: Execution

    def __call__(
        self, x: Float[Array, "B T D"], choice: Choice, kernels: Kernels
    ) -> Float[Array, "B T D"]:
        """Returns Σₖ weightₖ · expertₖ(x) for each token."""
        if self.config.expert_capacity is None:
            return self.dropless(x, choice, kernels)
        rows, slot = self.dispatch(x, choice)
        return combine(self.by_capacity(rows, kernels), slot, choice.weight)

    @property
    def activation(self) -> Activation:
        """The non-linearity of the experts."""
        return ACTIVATIONS[self.config.activation]

    def dropless(
        self, x: Float[Array, "B T D"], choice: Choice, kernels: Kernels
    ) -> Float[Array, "B T D"]:
        """Returns the weighted sums over the chosen experts that `kernels` contains."""
        compute = {"blocked": _by_blocks, "ragged": _ragged}.get(
            self.execution.experts, _by_platform
        )
        per_token = choice.experts.shape[-1]
        # Experts process each token separately, so merge the sequences: [B, T, K] to [M, K] with M
        # = B · T.
        flat = Choice(
            choice.experts.reshape(-1, per_token),
            choice.weight.reshape(-1, per_token),
            choice.real.reshape(-1),
        )
        rows = x.reshape(-1, x.shape[-1])
        return compute(rows, flat, kernels, activation=self.activation).reshape(x.shape)

    def dispatch(
        self, x: Float[Array, "B T D"], choice: Choice
    ) -> tuple[Float[Array, "B E C D"], Int[Array, "B T K"]]:
        """Returns the tokens in each expert's C slots, and the slot of each choice.

        The capacity is computed separately for each sequence from its real tokens, so that the
        result does not depend on the batch or on padding. The first choices of all tokens take
        precedence over second choices (Lepikhin et al. 2020, "GShard"). A choice beyond the
        capacity gets the slot E · C.
        """
        num_experts, (_, length, per_token) = self.config.num_experts, choice.experts.shape
        real = choice.real != 0
        assert self.config.expert_capacity is not None
        # Compute the capacity of an expert for every possible number of real tokens.
        sizes = np.arange(length + 1)
        capacities = np.ceil(sizes * per_token / num_experts * self.config.expert_capacity)
        capacities = np.minimum(capacities, sizes).astype(np.int32)  # one choice per token
        capacity = int(capacities[-1])
        # The expert of each choice as a one-hot vector, [B, T, K, E].
        one_hot = jax.nn.one_hot(choice.experts, num_experts, dtype=jnp.int32)
        one_hot *= real[..., None, None]  # padding uses no capacity
        # Order the choices of a sequence by rank, then by token, and count them per expert.
        # [B, T, K, E] to [B, K · T, E]: all first choices, then all second choices.
        by_choice = jnp.swapaxes(one_hot, 1, 2).reshape(x.shape[0], per_token * length, num_experts)
        # the index of the choice among all choices of the same expert
        rank = jnp.cumsum(by_choice, axis=1) - by_choice
        rank = jnp.sum(rank * by_choice, axis=-1).reshape(x.shape[0], per_token, length)
        rank = jnp.swapaxes(rank, 1, 2)  # [B, T, K]
        # Look up the capacity of each sequence. Choices beyond the capacity are dropped.
        of_sequence = jnp.asarray(capacities)[jnp.sum(real, axis=1)]  # [B]
        kept = (rank < of_sequence[:, None, None]) & real[..., None]
        slot = jnp.where(kept, choice.experts * capacity + rank, num_experts * capacity)

        def fill(x: Array, slot: Array) -> Array:
            rows = jnp.zeros((num_experts * capacity, x.shape[-1]), x.dtype)
            # Map [T, D] to [E · C, D]; choices whose slot is out of range are dropped.
            return rows.at[slot.reshape(-1)].set(jnp.repeat(x, per_token, axis=0), mode="drop")

        return jax.vmap(fill)(x, slot).reshape(x.shape[0], num_experts, capacity, -1), slot

    def by_capacity(
        self, rows: Float[Array, "B E C D"], kernels: Kernels
    ) -> Float[Array, "B E C D"]:
        """Returns each expert's output for the tokens in the expert's rows."""
        # Each expert maps its C rows from [B, E, C, D] to [B, E, C, F] and back.
        before = tuple(jnp.einsum("BECD,EDF->BECF", rows, kernel) for kernel in kernels.inputs)
        return jnp.einsum("BECF,EFD->BECD", _hidden(self.activation, before), kernels.down)


def combine(
    outputs: Float[Array, "B E C D"], slot: Int[Array, "B T K"], weight: Float[Array, "B T K"]
) -> Float[Array, "B T D"]:
    """Returns the weighted sum of the experts' outputs for each token. A dropped choice adds 0."""

    def of_sequence(outputs: Array, slot: Array) -> Array:
        rows = outputs.reshape(-1, outputs.shape[-1])
        # [E · C, D] to [T, K, D].
        return rows.at[slot].get(mode="fill", fill_value=0)

    return jnp.einsum("BTKD,BTK->BTD", jax.vmap(of_sequence)(outputs, slot), weight)


def _jittered(x: Float[Array, "B T D"], width: float, rng: RowKeys | None) -> Array:
    """Multiplies each element by a random number from 1 - width to 1 + width."""
    if width == 0 or rng is None:
        return x
    draw = functools.partial(
        jax.random.uniform, shape=x.shape[1:], minval=1 - width, maxval=1 + width
    )
    return x * jax.vmap(lambda key: draw(key))(fold_in(rng, _JITTER))


def _hidden(activation: Activation, before: tuple[Array, ...]) -> Array:
    """Returns the input of the down projection: activation(gate) · up, or activation(up)."""
    first, *gated = before
    return activation(first) * gated[0] if gated else activation(first)


def _by_platform(x: Array, choice: Choice, kernels: Kernels, *, activation: Activation) -> Array:
    return jax.lax.platform_dependent(
        x,
        choice,
        kernels,
        tpu=functools.partial(_ragged, activation=activation),
        default=functools.partial(_by_blocks, activation=activation),
    )


def _ragged(
    x: Float[Array, "M D"], choice: Choice, kernels: Kernels, *, activation: Activation
) -> Float[Array, "M D"]:
    """Returns the weighted sums of the experts' outputs, computed with `ragged_dot`."""
    num_experts, per_token = kernels.down.shape[0], choice.experts.shape[1]
    experts = _known(choice.experts, num_experts).reshape(-1)
    order = jnp.argsort(experts, stable=True)  # indices of the choices, sorted by expert
    sizes = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
    # Choice i of the flat list belongs to token i // k.
    rows = x[order // per_token]
    before = tuple(jax.lax.ragged_dot(rows, kernel, sizes) for kernel in kernels.inputs)
    outputs = jax.lax.ragged_dot(_hidden(activation, before), kernels.down, sizes)
    # Choices of experts outside `kernels` are sorted last and belong to no group: set their rows to
    # 0.
    outputs = jnp.where((jnp.arange(experts.size) < jnp.sum(sizes))[:, None], outputs, 0)
    # Restore the order of the choices: [M · K, D] to [M, K, D].
    outputs = outputs[jnp.argsort(order)].reshape(*choice.experts.shape, -1)
    return jnp.einsum("MKD,MK->MD", outputs, choice.weight)


def _known(chosen: Int[Array, "M K"], num_experts: int) -> Int[Array, "M K"]:
    """Replaces expert indices that are out of range by `num_experts`."""
    return jnp.where((chosen >= 0) & (chosen < num_experts), chosen, num_experts)


class _Blocks(NamedTuple):
    """The M · K choices, sorted by expert and padded to R rows.

    The rows of each expert are padded to whole blocks. R is large enough for every distribution of
    the choices.
    """

    used: Int[Array, " E"]
    """The indices of the experts; the first `num_used` entries are the experts with at least one
    token."""
    num_used: Int[Array, ""]
    first: Int[Array, " E"]
    """The index of the first row of each expert."""
    size: Int[Array, " E"]
    """The number of rows of each expert, a multiple of the smallest block."""
    member: Int[Array, " R"]
    """For each row, the index of its choice among the M · K choices."""
    filled: Bool[Array, " R"]
    """Whether each row contains a choice and is not padding."""
    row: Int[Array, "M K"]
    """The index of the row of each choice, or R if `kernels` does not contain the expert."""


def _by_blocks(
    x: Float[Array, "M D"], choice: Choice, kernels: Kernels, *, activation: Activation
) -> Float[Array, "M D"]:
    """Returns the weighted sums of the experts' outputs, computed in blocks of rows of one expert.

    The rows of each expert are padded to whole blocks of the smallest size b. At most
    M · K / b + E blocks are needed, so shapes are static and no choice is dropped.
    """
    num_experts, block = kernels.down.shape[0], BLOCKS[-1]
    experts = _known(choice.experts, num_experts).reshape(-1)
    order = jnp.argsort(experts, stable=True)
    # The index of each expert's first choice among the sorted choices (`starts`), and of its first
    # row among the padded rows (`first`).
    counts = jnp.bincount(experts, length=num_experts)
    starts = jnp.cumsum(counts) - counts
    size = -(-counts // block) * block
    end = jnp.cumsum(size)
    first = end - size

    # Map rows to choices: find the expert of each row, and the choice that the row contains.
    rows = jnp.arange((-(-experts.size // block) + num_experts) * block)
    expert = jnp.minimum(jnp.searchsorted(end, rows, side="right"), num_experts - 1)
    rank = rows - first[expert]
    filled = (rank < counts[expert]) & (rows < end[-1])
    member = order[jnp.where(filled, starts[expert] + rank, 0)]
    # Also map choices to rows, so that the forward and the backward pass gather and never scatter.
    position = jnp.argsort(order)  # index of each choice in sorted order
    clipped = jnp.minimum(experts, num_experts - 1)
    row = jnp.where(experts < num_experts, first[clipped] + position - starts[clipped], rows.size)
    used = jnp.argsort(counts == 0, stable=True)
    row = row.reshape(choice.experts.shape)
    blocks = _Blocks(used, jnp.sum(counts > 0), first, size, member, filled, row)
    return _in_blocks(activation, (x, choice.weight), kernels, blocks)


_Weighted = tuple[Float[Array, "M D"], Float[Array, "M K"]]
"""The tokens, and the weights of their chosen experts."""
_Outputs = tuple[Array, tuple[Array, ...]]
"""The experts' output for each row, and the results of their linear maps before the activation."""
_Gradients = tuple[Array, Kernels]
"""The gradients with respect to all rows and to the kernels of the linear maps."""
_Residuals = tuple[_Weighted, Kernels, _Blocks, tuple[Array, ...], Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(
    activation: Activation, weighted: _Weighted, kernels: Kernels, blocks: _Blocks
) -> Float[Array, "M D"]:
    """Returns the weighted sums of the experts' outputs.

    The forward and the backward pass gather rows and never scatter.
    """
    return _blocks_forward(activation, weighted, kernels, blocks)[0]


def _blocks_forward(
    activation: Activation, weighted: _Weighted, kernels: Kernels, blocks: _Blocks
) -> tuple[Array, _Residuals]:
    x, weight = weighted
    num_rows, width = blocks.member.size, kernels.down.shape[1]
    # Compute the outputs [R, D] and, for the backward pass, the results [R, F] of the linear maps
    # before the activation.
    outputs = jnp.zeros((num_rows, x.shape[1]), x.dtype)
    wide = tuple(jnp.zeros((num_rows, width), x.dtype) for _ in kernels.inputs)

    def of_expert(i: Array, carry: _Outputs) -> _Outputs:
        expert = blocks.used[i]
        inputs, down = jax.tree.map(lambda kernel: kernel[expert], kernels)

        def of_block(start: Array, size: int, carry: _Outputs) -> _Outputs:
            rows = _rows_of(x, blocks, start, size=size, per_token=weight.shape[1])
            before = tuple(rows @ kernel for kernel in inputs)
            output = _hidden(activation, before) @ down
            return jax.tree.map(
                lambda rows, block: _put(rows, block, start), carry, (output, before)
            )

        return _over_blocks(blocks, expert, of_block, carry)

    outputs, kept = jax.lax.fori_loop(0, blocks.num_used, of_expert, (outputs, wide))
    # Restore the order of the tokens, with one row for each of a token's K choices.
    of_choice = _of_choices(outputs, blocks)  # [M, K, D]
    y = jnp.einsum("MKD,MK->MD", of_choice, weight)
    return y, (weighted, kernels, blocks, kept, outputs)


def _blocks_backward(
    activation: Activation, residuals: _Residuals, dy: Array
) -> tuple[_Weighted, Kernels, None]:
    (x, weight), kernels, blocks, kept, outputs = residuals
    per_token = weight.shape[1]

    def of_expert(i: Array, carry: _Gradients) -> _Gradients:
        expert = blocks.used[i]
        inputs, down = expert_kernels = jax.tree.map(lambda kernel: kernel[expert], kernels)

        def of_block(start: Array, size: int, carry: _Gradients) -> _Gradients:
            d_rows, d_expert = carry
            # The gradient of a row is the gradient of its token times the weight of the choice.
            d_output = _rows_of(dy, blocks, start, size=size, per_token=per_token)
            d_output *= weight.reshape(-1)[_take(blocks.member, start, size)][:, None]
            # The results of the linear maps were saved, so recompute only the activation.
            before = tuple(_take(all_, start, size) for all_ in kept)
            hidden, pullback = jax.vjp(functools.partial(_hidden, activation), before)
            (d_before,) = pullback(d_output @ down.T)
            rows = _rows_of(x, blocks, start, size=size, per_token=per_token)
            d_row = sum(d @ kernel.T for d, kernel in zip(d_before, inputs, strict=True))
            d_inputs = tuple(
                total + rows.T @ d for total, d in zip(d_expert.inputs, d_before, strict=True)
            )
            d_down = d_expert.down + hidden.T @ d_output
            return _put(d_rows, jnp.asarray(d_row), start), Kernels(d_inputs, d_down)

        # First add up the gradients of one expert, which may fit into a processor's cache, then
        # store them.
        d_rows, d_kernels = carry
        sums = d_rows, jax.tree.map(jnp.zeros_like, expert_kernels)
        d_rows, d_expert = _over_blocks(blocks, expert, of_block, sums)
        return d_rows, jax.tree.map(lambda d, d_one: d.at[expert].set(d_one), d_kernels, d_expert)

    zeros = (jnp.zeros_like(outputs), jax.tree.map(jnp.zeros_like, kernels))
    d_rows, d_kernels = jax.lax.fori_loop(0, blocks.num_used, of_expert, zeros)
    # The gradient of a token is the sum over its K choices, [M, K, D] to [M, D].
    dx = jnp.sum(_of_choices(d_rows, blocks), axis=1)
    d_weight = jnp.einsum("MKD,MD->MK", _of_choices(outputs, blocks), dy)
    return (dx, d_weight), d_kernels, None


_in_blocks.defvjp(_blocks_forward, _blocks_backward)


def _over_blocks(
    blocks: _Blocks, expert: Array, of_block: Callable[[Array, int, Carry], Carry], carry: Carry
) -> Carry:
    """Calls `of_block(first row, number of rows, carry)` for the blocks of an expert."""
    start, left = blocks.first[expert], blocks.size[expert]
    # The maximum number of rows of one expert. Skip larger block sizes, because if a block
    # contained all rows, XLA would hoist its matmuls out of the loop, and compute them even if the
    # loop never ran.
    most = blocks.member.size - blocks.first.size * BLOCKS[-1]

    def step(i: Array, carry: Carry, *, start: Array, size: int) -> Carry:
        return of_block(start + i * size, size, carry)

    # Fill large blocks first, then put the remaining tokens into smaller blocks.
    for size in BLOCKS:
        if size > most:
            continue
        num_blocks = left // size
        body = functools.partial(step, start=start, size=size)
        carry = jax.lax.fori_loop(0, num_blocks, body, carry)
        start, left = start + num_blocks * size, left - num_blocks * size
    return carry


def _take(x: Array, start: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _put(x: Array, part: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=0)


def _rows_of(
    x: Float[Array, "M D"], blocks: _Blocks, start: Array, *, size: int, per_token: int
) -> Float[Array, "{size} D"]:
    """Returns the tokens of a block, with zeros in padding rows."""
    member, filled = (_take(x, start, size) for x in (blocks.member, blocks.filled))
    return jnp.where(filled[:, None], x[member // per_token], 0)


def _of_choices(outputs: Float[Array, "R D"], blocks: _Blocks) -> Float[Array, "M K D"]:
    """Returns the output row of each choice, or zeros if `kernels` does not contain the expert."""
    return outputs.at[blocks.row].get(mode="fill", fill_value=0)
