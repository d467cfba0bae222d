"""Ring attention over sharded sequences: keys and values rotate around a ring of devices.

Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context", section 3.
Each of n devices has T / n tokens. In each of n steps, a device attends to the keys that it
currently holds, and sends them to the next device. The results of all steps are merged by their
log-sum-exps (`models.nn.kernels.blockwise`). In the backward pass keys and values rotate again,
together with their gradients. A device stores the keys of at most two devices at once, and saves
only the arrays of its own tokens for the backward pass.

**Causal order.** If each device had T / n consecutive tokens, the first device would be idle in n -
1 of n steps, while the last device would compute in all n steps. Therefore the sequence is cut into
2n chunks, and device i gets the chunks i and 2n - 1 - i ("zigzag"). In the code, these chunks are
called parts. In a step, there are four pairs, each of a part of the queries and a part of the keys.
In each step after the first, every device computes exactly two of these pairs, because the mask
hides the other two. The computed pairs have no masked entries:

- the queries of the device's second part attend to the first part of the arriving keys, which
  always comes earlier in the sequence;
- if the keys come from a device with a smaller index, the queries of the device's first part also
  attend to the first part of the keys; otherwise the queries of its second part attend to the
  second part of the keys.

Queries, keys and values are permuted into this order before the ring, and the outputs are permuted
back after it. A permutation takes a single exchange: each device sends half of its tokens to one
device and half to another. Outside of the ring, the tokens, positions and labels keep their order.
(Brandon et al. 2023, "Striped attention", distribute single tokens instead of chunks; then half of
every pair of blocks is masked.)

**Windows.** With a sliding window, queries see only the nearest keys, so the work is balanced
without zigzag order. Tokens keep their order, and keys are sent only up to the last device
whose queries see them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...models.nn.dropout import GROUP, HeadKeys
from ...models.nn.fused_attention import AttentionCall, refusal
from ...models.nn.kernels import KERNEL_RESIDUALS, blockwise, splash_parts
from ...models.nn.kernels.blockwise import (
    Attended,
    Band,
    DroppedWeights,
    Gradients,
    Inputs,
    merge,
)
from ...models.nn.masks import Segments
from ...models.nn.typing import Array, Float, Int

T = TypeVar("T")
U = TypeVar("U")
Half = Array | int
Halves = tuple[Half, Half] | None
"""The two halves of a device's tokens that are stacked along the batch axis; None if all tokens are
used."""


@dataclasses.dataclass(frozen=True)
class PartKernel:
    """A kernel that attends to one part of the keys at a time."""

    forward: Callable[..., Attended]
    """Has the same signature as `models.nn.kernels.blockwise.forward`."""
    backward: Callable[..., Gradients]
    """Has the same signature as `models.nn.kernels.blockwise.backward`."""


PART_KERNELS: dict[str, PartKernel] = {
    "blocks": PartKernel(blockwise.forward, blockwise.backward),
    "splash": PartKernel(splash_parts.forward, splash_parts.backward),
}
"""The kernels that a ring can use, by name. Other kernels do not return log-sum-exps, which are
needed to merge results."""


def ring_refusal(kernel: str, call: AttentionCall, num_devices: int) -> str | None:
    """Returns why a ring of devices does not support an attention call, or None if it does."""
    if kernel not in PART_KERNELS:
        return f"the tokens of a sequence are sharded over mesh.context {num_devices}"
    if call.two_sided:
        return "windows have two sides, but a ring supports only causal windows"
    parts = 2 * num_devices  # zigzag order needs two parts on each device
    if call.num_queries % parts or call.num_keys % parts:
        return (
            f"rows have {call.lengths} tokens, but mesh.context {num_devices} requires {parts} "
            "equal parts"
        )
    # Each call of the kernel gets one part of the queries and one part of the keys.
    sizes = {"num_queries": call.num_queries // parts, "num_keys": call.num_keys // parts}
    if call.dropout_rate > 0 and sizes["num_keys"] % GROUP:
        return (
            f"the {parts} parts of a row have {sizes['num_keys']} keys, but dropout of weights "
            f"requires a multiple of {GROUP}"
        )
    reason = refusal(kernel, dataclasses.replace(call, **sizes))
    return reason and reason.replace("rows have", f"the {parts} parts of a row have")


def holder(part: int, num_devices: int) -> int:
    """Returns the device that has a part; device i has the parts i and 2n - 1 - i of 2n parts."""
    return min(part, 2 * num_devices - 1 - part)


def visible_pairs(is_later: Half) -> tuple[tuple[Half, Half], tuple[Half, Half]]:
    """Returns the visible pairs (half of the queries, half of the keys) in a step after the first.

    The mask hides the other two pairs.

    Args:
        is_later: 1 if the keys come from a device with a larger index, else 0.
    """
    return (1, 0), (is_later, is_later)


def window_steps(length: int, window: int, num_devices: int) -> tuple[int, int]:
    """Counts the steps after the first whose keys are all visible, and those with any visible key.

    Args:
        length: the number of tokens of a device.
        window: the number of keys that a query attends to, including its own key.
        num_devices: n.
    """
    # The number of steps to the farthest visible key, rounded up.
    seen = min(-(-(window - 1) // length), num_devices - 1)
    # In step i, all keys are visible if the farthest key is visible, which is (i + 1) · length - 1
    # tokens away.
    return min(max(window // length - 1, 0), seen), seen


_Pair = tuple[Array, Array]


class _Keys(NamedTuple):
    """The arrays of keys, which rotate around the ring."""

    key: Array
    value: Array
    segments: Array | None
    positions: Array | None
    """The positions of the keys in their row; None without dropout."""


class _Queries(NamedTuple):
    """The arrays of queries, which stay on their device; the last two only in the backward pass."""

    query: Array
    segments: Array | None
    positions: Array | None
    """The positions of the queries in their row; None without dropout."""
    head_keys: HeadKeys | None
    """The random keys of dropout. The second axis of these arrays is the head axis, not the token
    axis."""
    attended: Attended | None = None
    gradient: Array | None = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """Attention on one device of a ring, called within a `shard_map`.

    Attributes:
        axis: the axis of the mesh that the devices are on.
        size: the number of devices, n.
        kernel: computes attention to a part of the keys.
        causal: whether a query attends only to its own key and to earlier keys.
        window: if given, a query attends only to the last `window` keys among these.
        cap: if given, each score s becomes cap · tanh(s / cap).
        dropout_rate: the probability that an attention weight is dropped, if dropout keys are
          given.
    """

    axis: str
    size: int
    kernel: PartKernel
    causal: bool
    window: int | None
    cap: float | None
    dropout_rate: float = 0.0

    def __call__(
        self, inputs: Inputs, segments: Segments | None, head_keys: HeadKeys | None
    ) -> Float[Array, "B T N V"]:
        """Returns the outputs of attention for the device's queries.

        Args:
            inputs: the arrays for the device's T of the n · T tokens: scaled queries
              `[B, T, N, H]`, keys `[B, S, K, H]` and values `[B, S, K, V]`.
            segments: the segment ids of the device's queries and of its keys.
            head_keys: dropout keys for the device's heads and sequences; None without dropout.
        """
        if not self.is_zigzag:
            return _on_ring(self, inputs, segments, head_keys)
        inputs, segments = jax.tree.map(self.to_zigzag, (inputs, segments))
        return self.from_zigzag(_on_ring(self, inputs, segments, head_keys))

    @property
    def is_zigzag(self) -> bool:
        """Whether device i has the parts i and 2n - 1 - i within the ring."""
        return self.causal and self.window is None

    def to_zigzag(self, x: Array) -> Array:
        """Exchanges the device's parts 2i and 2i + 1 `[B, T, …]` for the parts i and 2n - 1 - i."""
        even, odd = (
            jax.lax.ppermute(half, self.axis, self._exchange(first))
            for first, half in enumerate(jnp.split(x, 2, axis=1))
        )
        return self._in_turn(even, odd)

    def from_zigzag(self, x: Array) -> Array:
        """Exchanges the parts back. This is the inverse of `to_zigzag`."""
        even, odd = jnp.split(self._in_turn(*jnp.split(x, 2, axis=1)), 2, axis=1)
        halves = (
            jax.lax.ppermute(half, self.axis, [(b, a) for a, b in self._exchange(first)])
            for first, half in enumerate((even, odd))
        )
        return jnp.concatenate(list(halves), axis=1)

    def positions(self, x: Float[Array, "B T _ _"]) -> Int[Array, "B T"]:
        """Returns the positions of the device's tokens in their row, in the order of the ring."""
        device, length = jax.lax.axis_index(self.axis), x.shape[1]
        tokens = jnp.arange(length)
        positions = device * length + tokens
        if self.is_zigzag:
            half = length // 2
            # In zigzag order, the two halves of the tokens are the parts i and 2n - 1 - i.
            part = jnp.where(tokens < half, device, 2 * self.size - 1 - device)
            positions = part * half + tokens % half
        return jnp.broadcast_to(positions, x.shape[:2])

    def _exchange(self, first: int) -> list[tuple[int, int]]:
        """Returns pairs (from, to) of devices, to send the parts 2i + `first` to their `holder`."""
        return [(i, holder(2 * i + first, self.size)) for i in range(self.size)]

    def _in_turn(self, a: Array, b: Array) -> Array:
        """Concatenates two halves, and swaps them if the index of the device is odd."""
        odd = jax.lax.axis_index(self.axis) % 2 == 1
        return jnp.concatenate([jnp.where(odd, b, a), jnp.where(odd, a, b)], axis=1)

    def attend(self, mine: _Queries, keys: _Keys) -> Attended:
        """Returns the attention of the device's queries to the keys of all devices."""
        # The first step uses the device's own keys.
        own = self._forward(mine, keys, self._own_band)

        def visit(
            total: Attended, none: None, keys: _Keys, *, step: Array | int, band: Band | None
        ) -> tuple[Attended, None]:
            (queries, of_queries), (keys, _) = self._cut(mine, keys, step)
            part = self._forward(queries, keys, band)
            return self._join(total, part, of_queries, merge), none

        return self._go_round(visit, (own, None), keys)[0]

    def gradients(self, mine: _Queries, keys: _Keys) -> Gradients:
        """Returns the gradients with respect to the device's own queries, keys and values."""
        add = functools.partial(jax.tree.map, jnp.add)

        def visit(
            total: Array, sums: _Pair, keys: _Keys, *, step: Array | int, band: Band | None
        ) -> tuple[Array, _Pair]:
            (queries, of_queries), (keys, of_keys) = self._cut(mine, keys, step)
            query, key, value = self._backward(queries, keys, band)
            total = self._join(total, query, of_queries, add)
            return total, self._join(sums, (key, value), of_keys, add)

        # Start with the device's own keys. The gradients of keys and values travel around the ring
        # together with the keys and values.
        query, key, value = self._backward(mine, keys, self._own_band)
        query, (key, value) = self._go_round(visit, (query, (key, value)), keys)
        return Gradients(query, key, value)

    @property
    def _own_band(self) -> Band | None:
        """The usual mask, for the device's own keys, which are also ascending in zigzag order."""
        return Band(window=self.window) if self.causal else None

    def _forward(self, mine: _Queries, keys: _Keys, band: Band | None) -> Attended:
        segments, dropped = _segments(mine, keys), self._dropped(mine, keys)
        inputs = mine.query, keys.key, keys.value
        return self.kernel.forward(*inputs, segments, band=band, cap=self.cap, dropped=dropped)

    def _backward(self, mine: _Queries, keys: _Keys, band: Band | None) -> Gradients:
        segments = _segments(mine, keys)
        return self.kernel.backward(
            mine.query,
            keys.key,
            keys.value,
            segments,
            band=band,
            cap=self.cap,
            dropped=self._dropped(mine, keys),
            attended=cast(Attended, mine.attended),
            gradient=cast(Array, mine.gradient),
        )

    def _dropped(self, mine: _Queries, keys: _Keys) -> DroppedWeights | None:
        if mine.head_keys is None:
            return None
        positions = cast(_Pair, (mine.positions, keys.positions))
        return DroppedWeights(mine.head_keys, *positions, self.dropout_rate)

    def _go_round(
        self, visit: Callable[..., tuple[T, U]], first: tuple[T, U], keys: _Keys
    ) -> tuple[T, U]:
        """Calls `visit` with the keys of each other device, in order.

        The keys are sent to the next device independently of the computation, so that both can
        overlap.

        Args:
            visit: takes the results so far, the current keys, the step number and the mask of these
              keys, and returns the results after it has added the contribution of these keys.
            first: the results for the device's own keys: sums that stay on the device, and sums
              that rotate with the keys.
            keys: the device's own keys.

        Returns:
            The sums. The rotating sums have come back, so they belong to the device's own keys.
        """
        alike, bands = self._later_steps(keys.key.shape[1])
        last = alike + len(bands)
        if last == 0:
            return first
        in_loop = alike if bands else alike - 1  # the last step sends no keys

        def step(
            stays: T, travels: U, keys: _Keys, *, number: Array | int, band: Band | None
        ) -> tuple[T, U]:
            def visited(stays: T, travels: U) -> tuple[T, U]:
                return visit(stays, travels, keys, step=number, band=band)

            # The sums that belong to the keys follow them around the ring.
            travels = self._hand_on(travels)
            if self.window is None:
                return visited(stays, travels)
            # Keys that have passed the end of the ring are later in the sequence than all queries
            # of this device.
            earlier = jax.lax.axis_index(self.axis) >= number
            return jax.lax.cond(earlier, visited, lambda *sums: sums, stays, travels)

        def loop(carry: tuple[T, U, _Keys], number: Array) -> tuple[tuple[T, U, _Keys], None]:
            stays, travels, keys = carry
            arriving = self._hand_on(keys)
            return (*step(stays, travels, keys, number=number, band=None), arriving), None

        # All steps whose keys are all visible run the same program, so run them in a loop. The
        # other steps have different masks, so unroll them.
        carry = (*first, self._hand_on(keys))
        if in_loop:
            carry, _ = jax.lax.scan(loop, carry, jnp.arange(1, in_loop + 1))
        stays, travels, keys = carry
        for number, band in enumerate([None] * (alike - in_loop) + bands, in_loop + 1):
            arriving = self._hand_on(keys) if number < last else keys
            stays, travels = step(stays, travels, keys, number=number, band=band)
            keys = arriving
        # Send the sums that belong to keys back to the devices that own these keys.
        return stays, self._hand_on(travels, -last)

    def _later_steps(self, length: int) -> tuple[int, list[Band]]:
        """Counts the steps whose keys are all visible; also returns the masks of later steps."""
        if self.window is None:
            return self.size - 1, []
        alike, seen = window_steps(length, self.window, self.size)
        return alike, [Band(i * length, self.window) for i in range(alike + 1, seen + 1)]

    def _hand_on(self, tree: T, by: int = 1) -> T:
        """Sends arrays to the device `by` places further along the ring."""
        pairs = [(i, (i + by) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

    def _cut(
        self, mine: _Queries, keys: _Keys, step: Array | int
    ) -> tuple[tuple[_Queries, Halves], tuple[_Keys, Halves]]:
        """Selects the visible queries and keys of a step, and returns which halves these are.

        In zigzag order, two pairs of halves are visible, and they are stacked along the batch axis.
        """
        if not self.is_zigzag:
            return (mine, None), (keys, None)
        # Keys that have passed the end of the ring come from a device with a larger index.
        is_later = (jax.lax.axis_index(self.axis) < step).astype(jnp.int32)
        of_queries, of_keys = zip(*visible_pairs(is_later), strict=True)
        queries = _halves(mine._replace(head_keys=None), of_queries)
        # Dropout keys have no token axis to halve, so repeat them for both pairs.
        head_keys = jax.tree.map(lambda x: jnp.concatenate([x, x]), mine.head_keys)
        queries = queries._replace(head_keys=head_keys)
        return (queries, of_queries), (_halves(keys, of_keys), of_keys)

    def _join(self, total: T, part: T, halves: Halves, join: Callable[[T, T], T]) -> T:
        """Merges the result of a step for two stacked halves into the sums for all tokens."""
        if halves is None:
            return join(total, part)
        # Both may be the same half of the tokens, so write the first result before the second half
        # is read.
        for half, of_half in zip(halves, _two(part), strict=True):
            total = _put(total, join(_half(total, half), of_half), half)
        return total


def _half(tree: T, half: Half) -> T:
    """Returns the first or the second half of arrays `[B, T, …]` along the token axis."""

    def of_array(x: Array) -> Array:
        size = x.shape[1] // 2
        return jax.lax.dynamic_slice_in_dim(x, half * size, size, axis=1)

    return jax.tree.map(of_array, tree)


def _halves(tree: T, halves: tuple[Half, Half]) -> T:
    """Takes two halves along the token axis, and stacks them along the batch axis."""
    a, b = (_half(tree, half) for half in halves)
    # Two arrays [B, T / 2, …] to [2B, T / 2, …].
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b)


def _two(tree: T) -> tuple[T, T]:
    """Splits arrays that `_halves` stacked."""
    first, second = (jax.tree.map(lambda x, i=i: jnp.split(x, 2)[i], tree) for i in range(2))
    return first, second


def _put(total: T, part: T, half: Half) -> T:
    """Returns arrays `[B, T, …]` with one half of the tokens replaced."""

    def of_array(x: Array, y: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, y, half * y.shape[1], axis=1)

    return jax.tree.map(of_array, total, part)


def _segments(mine: _Queries, keys: _Keys) -> Segments | None:
    # Either both queries and keys have segment ids, or neither do.
    return None if keys.segments is None else (cast(Array, mine.segments), keys.segments)


def _placed(
    ring: Ring, inputs: Inputs, segments: Segments | None, head_keys: HeadKeys | None
) -> tuple[_Queries, _Keys]:
    """Collects the arrays of a device's queries and the arrays of its keys."""
    query, key, value = inputs
    of_queries, of_keys = (None, None) if segments is None else segments
    # Positions are needed only to determine which weights dropout drops.
    positions = (None, None) if head_keys is None else (ring.positions(query), ring.positions(key))
    queries = _Queries(query, of_queries, positions[0], head_keys)
    return queries, _Keys(key, value, of_keys, positions[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_ring(
    ring: Ring, inputs: Inputs, segments: Segments | None, head_keys: HeadKeys | None
) -> Array:
    return _on_ring_forward(ring, inputs, segments, head_keys)[0]


_Residuals = tuple[Inputs, Segments | None, HeadKeys | None, Attended]


def _on_ring_forward(
    ring: Ring, inputs: Inputs, segments: Segments | None, head_keys: HeadKeys | None
) -> tuple[Array, _Residuals]:
    attended = ring.attend(*_placed(ring, inputs, segments, head_keys))
    attended = attended._replace(output=attended.output.astype(inputs[2].dtype))
    # The name allows a remat policy to save these residuals, so that the forward ring does not run
    # again.
    attended = checkpoint_name(attended, KERNEL_RESIDUALS)
    return attended.output, (inputs, segments, head_keys, attended)


def _on_ring_backward(
    ring: Ring, residuals: _Residuals, gradient: Array
) -> tuple[Inputs, None, None]:
    inputs, segments, head_keys, attended = residuals
    mine, keys = _placed(ring, inputs, segments, head_keys)
    mine = mine._replace(attended=attended, gradient=gradient)
    gradients = jax.tree.map(
        lambda g, x: g.astype(x.dtype), tuple(ring.gradients(mine, keys)), inputs
    )
    return gradients, None, None


_on_ring.defvjp(_on_ring_forward, _on_ring_backward)
