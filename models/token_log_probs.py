"""Log-probabilities of tokens, computed in chunks of positions.

The logits `[B, T, V]` are by far the largest array in a training step of a language model.
`over_positions` processes one chunk of positions at a time: the logits of a chunk, their softmax
and their gradient are freed before the next chunk begins. On a mesh every device processes its
local positions.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .heads.outputs import Projection
from .mesh_axes import BATCH_AXES, CONTEXT, MESH_AXES, MESH_AXIS_NAMES, automatic, num_shards
from .nn.typing import Array, Bool, Float, Int, PyTree

MOST_POSITIONS = 1024
"""The maximum number of positions in a chunk, counted over all sequences on a device.

The gradient of the kernel, in float32, is read and written once per chunk. With 1,024 positions,
the matmul that computes this gradient has 256 operations per byte. A TPU v5e or an H200 has about
the same ratio of compute to memory bandwidth.
"""

Sums = tuple[PyTree, Array | None, Array | None]
"""A tree of losses, and the gradients of kernel `[D, V]` and bias, or None if they are not
computed."""
ChunkFn = Callable[..., tuple[Sums, PyTree]]
"""The type of a `function(projection, *others) -> (sums, per_position)` that processes one chunk of
positions."""
DeviceFn = Callable[[Array, Array | None, tuple[PyTree, ...]], tuple[Sums, PyTree]]
"""The type of a `function(kernel, bias, positions) -> (sums, per_position)` that processes all
positions on a device."""


def over_positions(
    function: ChunkFn, projection: Projection, *others: PyTree
) -> tuple[Sums, PyTree]:
    """Applies `function(projection, *others) -> (sums, per_position)` chunk by chunk.

    Args:
        function: returns `sums`, which are added over chunks and devices, and `per_position`, a
            tree of arrays `[B, T, …]` with an entry for each position.
        projection: hidden states `[B, T, D]`, and kernel and bias. Each call gets a chunk of the
          hidden states.
        others: trees of additional arrays `[B, T, …]`, such as labels.

    Returns:
        The sums over all chunks and devices, and the entries of all positions.
    """

    def over_chunks(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        # Choose the number of chunks from the local shape.
        rows, length = jax.tree.leaves(positions)[0].shape[:2]
        chunk = chunk_length(rows, length)
        num_chunks = -(-length // chunk)

        def split(x: Array) -> Array:  # [B, T, …] to [num_chunks, B, chunk, …]
            padding = ((0, 0), (0, num_chunks * chunk - length), *((0, 0),) * (x.ndim - 2))
            x = jnp.pad(x, padding)
            return jnp.moveaxis(x.reshape(rows, num_chunks, chunk, *x.shape[2:]), 1, 0)

        def of_chunk(part: PyTree) -> tuple[Sums, PyTree]:
            hidden, *arrays = part
            return function(Projection(hidden, kernel, bias, projection.cap), *arrays)

        def add(total: Sums, part: PyTree) -> tuple[Sums, PyTree]:
            sums, per_position = of_chunk(part)
            return jax.tree.map(jnp.add, total, sums), per_position

        chunks = jax.tree.map(split, positions)
        first = jax.tree.map(lambda x: x[0], chunks)
        # With one chunk, skip the scan and its initial zeros.
        if num_chunks == 1:
            sums, per_position = of_chunk(first)
            per_position = jax.tree.map(lambda x: x[None], per_position)
        else:
            # Trace the function to get the shapes of the sums.
            shapes, _ = jax.eval_shape(of_chunk, first)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            sums, per_position = jax.lax.scan(add, zeros, chunks)

        def join(x: Array) -> Array:  # [num_chunks, B, chunk, …] to [B, T, …]
            return jnp.moveaxis(x, 0, 1).reshape(rows, -1, *x.shape[3:])[:, :length]

        return sums, jax.tree.map(join, per_position)

    run = _on_each_device(over_chunks, projection.hidden.shape[1])
    return run(projection.kernel, projection.bias, (projection.hidden, *others))


def chunk_length(rows: int, length: int) -> int:
    """Returns the chunk length for `rows` sequences of `length` tokens."""
    needed = -(-length // min(max(MOST_POSITIONS // rows, 1), length))
    even = next(divisor for divisor in range(needed, length + 1) if length % divisor == 0)
    # Choose a chunk length that needs no padding, unless this at least doubles the number of
    # chunks.
    return -(-length // (even if even < 2 * needed else needed))


def _on_each_device(function: DeviceFn, length: int) -> DeviceFn:
    """Returns a function that calls `function(kernel, bias, positions)` on every device.

    Each device computes the result for its local positions.

    On a mesh (`jax.sharding.use_abstract_mesh`) the compiler would all-gather the kernel for every
    chunk and all-reduce its gradient after every chunk. Here, each device gathers the kernel once,
    and sums over its local chunks in float32 before the reduction. Each device stores the kernel
    and its gradient at full width. Only sharding over `tensor` is left to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # Outside a mesh and under pmap, the function already receives only local positions.
    if mesh.axis_names != MESH_AXIS_NAMES:
        return function
    positions = None if length % mesh.shape[CONTEXT] else CONTEXT
    # Some batch axes may already be manual; see train/distributed/fsdp.py.
    batch_axes = automatic(BATCH_AXES)
    axes = (*batch_axes, positions) if positions else batch_axes
    if num_shards(mesh, axes) == 1:
        return function
    width = automatic(MESH_AXES["model"])

    def on_one(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        whole = jax.lax.all_gather(kernel, width, axis=1, tiled=True)  # [V, D]
        # Compute the sums of this device, and the entries of its local positions.
        (total, kernel_gradient, bias_gradient), per_position = function(whole, bias, positions)
        # Reduce-scatter over the axes that shard the kernel, and all-reduce over the other axes.
        others = tuple(axis for axis in axes if axis not in width)
        if kernel_gradient is not None:
            part = jax.lax.psum_scatter(kernel_gradient, width, tiled=True)
            kernel_gradient = jax.lax.psum(part, others)
        return (*jax.lax.psum((total, bias_gradient), axes), kernel_gradient), per_position

    rows = PartitionSpec(batch_axes, positions)
    # If the vocabulary is sharded over `tensor`, leave that axis to the compiler; otherwise, all
    # axes are manual.
    cut = any(mesh.shape[axis] > 1 for axis in MESH_AXES["vocabulary"])
    manual = axes if cut else automatic(mesh.axis_names)

    def on_mesh(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        (total, bias_gradient, kernel_gradient), per_position = jax.shard_map(
            on_one,
            in_specs=(PartitionSpec(None, width), PartitionSpec(), rows),
            out_specs=((PartitionSpec(), PartitionSpec(), PartitionSpec(width)), rows),
            axis_names=set(manual),
            check_vma=False,  # the check would require the initial zeros to be declared as varying
        )(kernel, bias, positions)
        return (total, kernel_gradient, bias_gradient), per_position

    return on_mesh


def gradients_of_chunk(exact: Array, part: Projection) -> tuple[Array, Array, Array | None]:
    """Returns gradients of hidden states, kernel `[D, V]` and bias, given the logit gradient."""
    gradient = exact.astype(part.hidden.dtype)
    hidden_gradient = jnp.einsum("BTV,VD->BTD", gradient, part.kernel)

    def product(h: Array, gradient: Array) -> Array:
        # Sum over both axes. Merging the axes first would move 6% more bytes on a TPU (GPT-2, two
        # layers).
        return jnp.einsum("BTD,BTV->DV", h, gradient, preferred_element_type=jnp.float32)

    # XLA's CPU backend has no bfloat16 product over two axes.
    def on_cpu(h: Array, gradient: Array) -> Array:
        return product(h.astype(jnp.float32), gradient.astype(jnp.float32))

    kernel_gradient = jax.lax.platform_dependent(part.hidden, gradient, cpu=on_cpu, default=product)
    bias_gradient = None if part.bias is None else jnp.sum(exact, axis=(0, 1))
    return hidden_gradient, kernel_gradient, bias_gradient


def as_projection(
    hidden_gradient: Array, gradients: Sequence[Array | None], projection: Projection
) -> Projection:
    """Returns the gradients as a `Projection`, with the layout and dtypes of `projection`."""
    kernel, bias = projection.kernel, projection.bias
    kernel_gradient, bias_gradient = gradients
    assert kernel_gradient is not None
    in_dtype = None if bias is None or bias_gradient is None else bias_gradient.astype(bias.dtype)
    kernel_gradient = kernel_gradient.T.astype(kernel.dtype)
    return Projection(hidden_gradient, kernel_gradient, in_dtype, projection.cap)


class TokenLogProbs(NamedTuple):
    """Log-probabilities of tokens under a model, for one token at each position."""

    log_prob: Float[Array, "B T"]
    """log softmax(logits / temperature)[label], in nats."""
    entropy: Float[Array, "B T"]
    """The entropy of softmax(logits / temperature), in nats."""
    is_top1: Bool[Array, "B T"]
    """Whether the label has the highest logit. This field has no gradient."""


def token_log_probs(
    projection: Projection, labels: Int[Array, "B T"], *, temperature: float = 1.0
) -> TokenLogProbs:
    """Returns log-probabilities, entropies and top-1 matches without materializing `[B, T, V]`.

    The logits are computed in chunks of positions. The backward pass recomputes the logits once,
    for both log-probabilities and entropies. Logarithms are in float32 for any dtype of the hidden
    states. On a mesh each device computes its local positions, as in `cross_entropy`.

    Example::

        outputs = model.apply({"params": params}, **inputs)
        result = train.token_log_probs(outputs.projection, labels, temperature=0.7)
        loss = -jnp.mean(advantages * result.log_prob) - 0.01 * jnp.mean(result.entropy)

    Args:
        projection: hidden states `[B, T, D]`, vocabulary matrix `[V, D]` and its bias, if any.
        labels: the token at each position. A label outside [0, V) has a NaN log-probability; if
          a loss masks it with `jnp.where`, gradients stay finite.
        temperature: a positive number that divides the logits.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be positive: 1.0 leaves logits unchanged")
    return _token_log_probs(temperature, projection, labels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_log_probs(temperature: float, projection: Projection, labels: Array) -> TokenLogProbs:
    def chunk(part: Projection, label: Array) -> tuple[Sums, TokenLogProbs]:
        logits = part.logits() / temperature  # [B, T / chunks, V]
        log_probs, entropy = _log_softmax(logits)
        # Invalid labels give NaN. Negative labels would index from the end, so move them out of
        # range.
        label = jnp.where(label < 0, logits.shape[-1], label)[..., None]
        log_prob = jnp.take_along_axis(log_probs, label, axis=-1)[..., 0]
        per_position = TokenLogProbs(log_prob, entropy, log_prob >= jnp.max(log_probs, axis=-1))
        return (jnp.zeros(()), None, None), per_position

    return over_positions(chunk, projection, labels)[1]


def _log_softmax(logits: Array) -> tuple[Array, Array]:
    """Returns log softmax `[…, V]` and its entropy `[…]`."""
    log_probs = jax.nn.log_softmax(logits)
    return log_probs, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def _token_forward(
    temperature: float, projection: Projection, labels: Array
) -> tuple[TokenLogProbs, tuple[Projection, Array]]:
    return _token_log_probs(temperature, projection, labels), (projection, labels)


def _token_backward(
    temperature: float, residuals: tuple[Projection, Array], cotangent: TokenLogProbs
) -> tuple[Projection, None]:
    projection, labels = residuals

    def chunk(
        part: Projection, label: Array, cotangents: tuple[Array, Array]
    ) -> tuple[Sums, Array]:
        of_log_prob, of_entropy = (x[..., None] for x in cotangents)
        logits = part.logits()
        log_probs, entropy = _log_softmax(logits / temperature)
        probs = jnp.exp(log_probs)
        is_label = label[..., None] == jnp.arange(projection.kernel.shape[0])
        # With z = logits / temperature: ∂ log p_y / ∂z_j = [j = y] - p_j, and
        # ∂H / ∂z_j = -p_j (log p_j + H).
        exact = of_log_prob * (is_label - probs)
        exact -= of_entropy * probs * (log_probs + entropy[..., None])
        exact = part.uncapped(exact / temperature, logits)
        hidden_gradient, kernel_gradient, bias_gradient = gradients_of_chunk(exact, part)
        return (jnp.zeros(()), kernel_gradient, bias_gradient), hidden_gradient

    cotangents = (cotangent.log_prob, cotangent.entropy)
    (_, *gradients), hidden_gradient = over_positions(chunk, projection, labels, cotangents)
    return as_projection(hidden_gradient, gradients, projection), None


_token_log_probs.defvjp(_token_forward, _token_backward)
