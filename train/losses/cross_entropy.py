"""Losses as sums over weighted items, in float32, with the number of correct items.

Logits over a vocabulary `[B, T, V]` are by far the largest array of a language model's
step.  `cross_entropy` and `token_log_probs` compute them for a chunk of the positions at a
time (`over_positions`): the logits of a chunk, their softmax and their gradient are no longer
needed when the next chunk begins.  On a mesh every device goes through its own positions.  The
other heads have few logits, which are used whole.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...models.nn.heads import Projection
from ...models.nn.typing import Array, Bool, Float, Int, PyTree
from ..mesh import BATCH_AXES, CONTEXT, MESH_AXES, MESH_AXIS_NAMES, automatic

MOST_POSITIONS = 1024
"""The positions, over all sequences of a device, whose logits exist at one time.

The kernel's gradient, in float32, is read and written once a chunk: with so many positions its
product takes 256 operations for each of those bytes, about what a v5e or an H200 can do meanwhile.
"""

Sums = tuple[PyTree, Array | None, Array | None]
"""Losses, the gradient `[D, V]` of the kernel and that of the bias; None for those not computed."""
ChunkFn = Callable[..., tuple[Sums, PyTree]]
"""`function(projection, *others) -> (sums, own)` of a chunk of positions."""
DeviceFn = Callable[[Array, Array | None, tuple[PyTree, ...]], tuple[Sums, PyTree]]
"""`function(kernel, bias, positions) -> (sums, own)` of the positions of a device."""


class CrossEntropy(NamedTuple):
    """Sums over items."""

    loss: Float[Array, ""]
    """Σ weight · -log softmax(logits)[label], in nats; with label smoothing its KL form."""
    correct: Float[Array, ""]
    """Σ weight of the items whose label has the highest logit. No gradient."""
    nll: Float[Array, ""]
    """The loss without label smoothing. No gradient."""


def softmax_cross_entropy(
    logits: Float[Array, "*items L"], labels: Int[Array, "*items"], weights: Float[Array, "*items"]
) -> CrossEntropy:
    """Sums weight · -log softmax(logits)[label] over items, and counts correct labels.

    Args:
        logits: scores of the L labels: `[B, L]` of rows or choices, `[B, T, L]` of
          tokens, `[B, T]` of the places where a span may begin.
        labels: the correct label of each item.
        weights: 0 where there is nothing to predict; the label, for example
          -100, is ignored there.
    """
    sums, _ = _sums(logits.astype(jnp.float32), labels, weights, 0.0)
    return CrossEntropy(sums.loss, *map(jax.lax.stop_gradient, (sums.correct, sums.nll)))


def sigmoid_cross_entropy(
    logits: Float[Array, "B L"], labels: Float[Array, "B L"], weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """Sums weight · the mean cross-entropy of L binary labels over sequences, in nats.

    Args:
        logits: the logit of each label.
        labels: 1 for labels that apply, else 0.
        weights: 0 for sequences that do not count.
    """
    x = logits.astype(jnp.float32)
    losses = jax.nn.softplus(x) - labels * x
    return jnp.sum(jnp.where(weights != 0, weights * jnp.mean(losses, axis=-1), 0))


def squared_error(
    predictions: Float[Array, " B"], labels: Float[Array, " B"], weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """Sums weight · (prediction - label)² over sequences; weight 0 for those that do not count."""
    errors = jnp.square(predictions.astype(jnp.float32) - labels)
    return jnp.sum(jnp.where(weights != 0, weights * errors, 0))


def _sums(
    logits: Array, labels: Array, weights: Array, smoothing: float
) -> tuple[CrossEntropy, Array]:
    """Returns the sums, and the logarithm of each item's softmax denominator."""
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    exponentials = jnp.exp(logits - highest[..., None])
    log_normalizer = highest + jnp.log(jnp.sum(exponentials, axis=-1))
    # A label that does not exist gives NaN, negative ones included.
    labels = jnp.where(weights != 0, jnp.where(labels < 0, logits.shape[-1], labels), 0)
    label_logit = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    correct = jnp.sum(weights * (label_logit >= highest))
    each = log_normalizer - label_logit
    nll = jnp.sum(weights * each)
    if not smoothing:
        return CrossEntropy(nll, correct, nll), log_normalizer
    others = logits.shape[-1] - 1
    mean_of_others = (jnp.sum(logits, axis=-1) - label_logit) / others
    right, wrong = 1 - smoothing, smoothing / others
    negative_entropy = right * math.log(right) + others * (wrong * math.log(wrong))
    smoothed = each + smoothing * (label_logit - mean_of_others) + negative_entropy
    return CrossEntropy(jnp.sum(weights * smoothed), correct, nll), log_normalizer


def over_positions(
    function: ChunkFn, projection: Projection, *others: PyTree
) -> tuple[Sums, PyTree]:
    """Applies `function(projection, *others) -> (sums, own)` chunk by chunk.

    Args:
        function: its `sums` are added up over chunks and devices; `own` is a tree of arrays
          `[B, T, …]` with an entry for each position.
        projection: hidden states `[B, T, D]`, of which the function gets a chunk, kernel and bias.
        others: trees of further arrays `[B, T, …]`, such as labels.

    Returns:
        The sums over all chunks and devices, and the entries of all positions.
    """

    def over_chunks(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        rows, length = jax.tree.leaves(positions)[0].shape[:2]
        chunk = chunk_length(rows, length)
        num_chunks = -(-length // chunk)

        def split(x: Array) -> Array:  # [B, T, …] to [num_chunks, B, chunk, …]
            padding = ((0, 0), (0, num_chunks * chunk - length), *((0, 0),) * (x.ndim - 2))
            x = jnp.pad(x, padding)
            return jnp.moveaxis(x.reshape(rows, num_chunks, chunk, *x.shape[2:]), 1, 0)

        def of_chunk(part: PyTree) -> tuple[Sums, PyTree]:
            hidden, *further = part
            return function(Projection(hidden, kernel, bias, projection.cap), *further)

        def add(total: Sums, part: PyTree) -> tuple[Sums, PyTree]:
            sums, own = of_chunk(part)
            return jax.tree.map(jnp.add, total, sums), own

        chunks = jax.tree.map(split, positions)
        first = jax.tree.map(lambda x: x[0], chunks)
        if num_chunks == 1:  # nothing is summed, and no zeros are made to begin with
            sums, own = of_chunk(first)
            own = jax.tree.map(lambda x: x[None], own)
        else:
            shapes, _ = jax.eval_shape(of_chunk, first)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            sums, own = jax.lax.scan(add, zeros, chunks)

        def join(x: Array) -> Array:  # [num_chunks, B, chunk, …] to [B, T, …]
            return jnp.moveaxis(x, 0, 1).reshape(rows, -1, *x.shape[3:])[:, :length]

        return sums, jax.tree.map(join, own)

    run = _on_each_device(over_chunks, projection.hidden.shape[1])
    return run(projection.kernel, projection.bias, (projection.hidden, *others))


def chunk_length(rows: int, length: int) -> int:
    """Returns how many positions of each of `rows` sequences of `length` are taken together."""
    needed = -(-length // min(max(MOST_POSITIONS // rows, 1), length))
    even = next(number for number in range(needed, length + 1) if length % number == 0)
    # Nothing is padded where that takes less than twice as many chunks.
    return -(-length // (even if even < 2 * needed else needed))


def _on_each_device(function: DeviceFn, length: int) -> DeviceFn:
    """Returns `function(kernel, bias, positions)` run on each device, for its own positions.

    On a mesh (`jax.sharding.use_abstract_mesh`) the compiler, left to itself, gathers the kernel
    for every chunk and sums its gradient over all devices after every chunk. Here a device gathers
    it once and sums over its own chunks first, in float32: it holds both at full width, except
    for what is sharded over `tensor`, which is left to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != MESH_AXIS_NAMES:  # none, or that of pmap
        return function
    positions = None if length % mesh.shape[CONTEXT] else CONTEXT
    # The step may have divided the batch over some axes itself: train/distributed/fsdp.py.
    batch_axes = automatic(BATCH_AXES)
    axes = (*batch_axes, positions) if positions else batch_axes
    if math.prod(mesh.shape[axis] for axis in axes) == 1:
        return function
    width = automatic(MESH_AXES["model"])

    def on_one(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        whole = jax.lax.all_gather(kernel, width, axis=1, tiled=True)  # [V, D]
        (total, kernel_gradient, bias_gradient), own = function(whole, bias, positions)
        others = tuple(axis for axis in axes if axis not in width)
        if kernel_gradient is not None:
            part = jax.lax.psum_scatter(kernel_gradient, width, tiled=True)
            kernel_gradient = jax.lax.psum(part, others)
        return (*jax.lax.psum((total, bias_gradient), axes), kernel_gradient), own

    rows = PartitionSpec(batch_axes, positions)
    cut = any(mesh.shape[axis] > 1 for axis in MESH_AXES["vocabulary"])
    manual = axes if cut else automatic(mesh.axis_names)

    def on_mesh(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        (total, bias_gradient, kernel_gradient), own = jax.shard_map(
            on_one,
            in_specs=(PartitionSpec(None, width), PartitionSpec(), rows),
            out_specs=((PartitionSpec(), PartitionSpec(), PartitionSpec(width)), rows),
            axis_names=set(manual),
            check_vma=False,  # the zeros of a scan would have to be declared to vary
        )(kernel, bias, positions)
        return (total, kernel_gradient, bias_gradient), own

    return on_mesh


def cross_entropy(
    projection: Projection,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    label_smoothing: float = 0.0,
) -> CrossEntropy:
    """Sums weight · -log softmax(h Wᵀ + b)[label] over positions, and counts correct labels.

    With label smoothing ε (Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4)
    the loss is KL(q ‖ softmax), where q has 1 - ε at the label and ε / (V - 1) at every
    other token: its least value is 0, unlike that of the cross-entropy of q.

    The gradient is computed together with the loss, while a chunk's logits are
    at hand, so that each of the three matrix products is computed once.

    Args:
        projection: hidden states `[B, T, D]`, vocabulary matrix `[V, D]` and its
          bias, if any. T is the number of positions that are predicted.
        labels: the correct token at each position.
        weights: 0 where there is nothing to predict; the label is ignored
          there. Not differentiated.
        label_smoothing: ε, at least 0 and below 1.
    """
    return _cross_entropy(label_smoothing, projection, labels, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    smoothing: float, projection: Projection, labels: Array, weights: Array
) -> CrossEntropy:
    def chunk(part: Projection, label: Array, weight: Array) -> tuple[Sums, None]:
        return (_sums(part.logits(), label, weight, smoothing)[0], None, None), None

    (total, _, _), _ = over_positions(chunk, projection, labels, weights)
    return total


def _forward(
    smoothing: float, projection: Projection, labels: Array, weights: Array
) -> tuple[CrossEntropy, Projection]:
    """Returns the sums and their gradient by the projection."""
    vocabulary = projection.kernel.shape[0]

    def chunk(part: Projection, label: Array, weight: Array) -> tuple[Sums, Array]:
        logits = part.logits()  # [B, T / chunks, V]
        total, log_normalizer = _sums(logits, label, weight, smoothing)
        softmax = jnp.exp(logits - log_normalizer[..., None])
        is_label = label[..., None] == jnp.arange(vocabulary)
        target = is_label
        if smoothing:
            target = jnp.where(is_label, 1 - smoothing, smoothing / (vocabulary - 1))
        exact = part.uncapped(weight[..., None] * (softmax - target), logits)
        hidden_gradient, kernel_gradient, bias_gradient = _gradients(exact, part)
        return (total, kernel_gradient, bias_gradient), hidden_gradient

    (total, *gradients), hidden_gradient = over_positions(chunk, projection, labels, weights)
    return total, _as_projection(hidden_gradient, gradients, projection)


def _gradients(exact: Array, part: Projection) -> tuple[Array, Array, Array | None]:
    """Returns the gradients of hidden states, kernel `[D, V]` and bias from that of the logits."""
    gradient = exact.astype(part.hidden.dtype)
    hidden_gradient = jnp.einsum("BTV,VD->BTD", gradient, part.kernel)

    def product(h: Array, gradient: Array) -> Array:
        # Sums over both axes: merged into one, a TPU's program moves 6% more (GPT-2, two layers).
        return jnp.einsum("BTD,BTV->DV", h, gradient, preferred_element_type=jnp.float32)

    def on_cpu(h: Array, gradient: Array) -> Array:  # has no bfloat16 product over two axes
        return product(h.astype(jnp.float32), gradient.astype(jnp.float32))

    kernel_gradient = jax.lax.platform_dependent(part.hidden, gradient, cpu=on_cpu, default=product)
    bias_gradient = None if part.bias is None else jnp.sum(exact, axis=(0, 1))
    return hidden_gradient, kernel_gradient, bias_gradient


def _as_projection(
    hidden_gradient: Array, gradients: Sequence[Array | None], projection: Projection
) -> Projection:
    """Returns the gradients, those of kernel and bias in the parameters' layout and dtype."""
    kernel, bias = projection.kernel, projection.bias
    kernel_gradient, bias_gradient = gradients
    assert kernel_gradient is not None
    in_dtype = None if bias is None or bias_gradient is None else bias_gradient.astype(bias.dtype)
    kernel_gradient = kernel_gradient.T.astype(kernel.dtype)
    return Projection(hidden_gradient, kernel_gradient, in_dtype, projection.cap)


def _backward(
    smoothing: float, gradient: Projection, cotangent: CrossEntropy
) -> tuple[Projection, None, None]:
    del smoothing  # the gradient has it
    scaled = jax.tree.map(lambda g: (cotangent.loss * g).astype(g.dtype), gradient)
    return scaled, None, None


_cross_entropy.defvjp(_forward, _backward)


class TokenLogProbs(NamedTuple):
    """Log-probabilities of given tokens under a model, at each position."""

    log_prob: Float[Array, "B T"]
    """log softmax(logits / temperature)[label], in nats."""
    entropy: Float[Array, "B T"]
    """The entropy of softmax(logits / temperature), in nats."""
    is_top1: Bool[Array, "B T"]
    """Whether the label has the highest logit. No gradient."""


def token_log_probs(
    projection: Projection, labels: Int[Array, "B T"], *, temperature: float = 1.0
) -> TokenLogProbs:
    """Returns log-probability, entropy and top-1 of tokens, without logits `[B, T, V]`.

    The logits are computed for a chunk of the positions at a time, and once more for the gradient
    of both log-probabilities and entropies. The logarithms are in float32 whatever the dtype of
    the hidden states. On a mesh each device computes its own positions, as in `cross_entropy`.

    Example::

        outputs = model.apply({"params": params}, **inputs)
        result = train.token_log_probs(outputs.projection, labels, temperature=0.7)
        loss = -jnp.mean(advantages * result.log_prob) - 0.01 * jnp.mean(result.entropy)

    Args:
        projection: hidden states `[B, T, D]`, vocabulary matrix `[V, D]` and its bias, if any.
        labels: the token at each position. One outside of [0, V) has a NaN log-probability, which
          harms no gradient if a loss leaves it out by `jnp.where`.
        temperature: a divisor of the logits, positive.

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
        # A label that does not exist gives NaN, negative ones included.
        label = jnp.where(label < 0, logits.shape[-1], label)[..., None]
        log_prob = jnp.take_along_axis(log_probs, label, axis=-1)[..., 0]
        own = TokenLogProbs(log_prob, entropy, log_prob >= jnp.max(log_probs, axis=-1))
        return (jnp.zeros(()), None, None), own

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

    def chunk(part: Projection, label: Array, given: tuple[Array, Array]) -> tuple[Sums, Array]:
        of_log_prob, of_entropy = (x[..., None] for x in given)
        logits = part.logits()
        log_probs, entropy = _log_softmax(logits / temperature)
        probs = jnp.exp(log_probs)
        is_label = label[..., None] == jnp.arange(projection.kernel.shape[0])
        # With z = logits / temperature: ∂ log p_y / ∂z_j = [j = y] - p_j, and
        # ∂H / ∂z_j = -p_j (log p_j + H).
        exact = of_log_prob * (is_label - probs)
        exact -= of_entropy * probs * (log_probs + entropy[..., None])
        exact = part.uncapped(exact / temperature, logits)
        hidden_gradient, kernel_gradient, bias_gradient = _gradients(exact, part)
        return (jnp.zeros(()), kernel_gradient, bias_gradient), hidden_gradient

    given = (cotangent.log_prob, cotangent.entropy)
    (_, *gradients), hidden_gradient = over_positions(chunk, projection, labels, given)
    return _as_projection(hidden_gradient, gradients, projection), None


_token_log_probs.defvjp(_token_forward, _token_backward)
