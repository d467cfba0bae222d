"""The parts of a layer: affine maps and embeddings, norms, dropout, feed-forward blocks."""

import functools
import math
import zlib
from collections.abc import Callable
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike

from ...data.common.errors import UserError
from ..config import Execution, TransformerConfig
from .typing import Array, Bool, Float, Int, Key, UInt

FEW_ROWS = range(2, 9)
"""Numbers of rows for which the order of the operands on CPU was measured to matter (`affine`)."""


class Linear(nn.Module):
    """x W + b over the last `num_input_axes` axes of x.

    The kernel W has the shape `[*inputs, *features]`; with separate layers it is the matrix
    `[outputs, inputs]`, which is faster for few rows of x on a CPU (`affine`).

    Attributes:
      features: shape of the output axes, e.g. `(N, H)` for attention heads.
      init_std: standard deviation of the initial W; None: it follows from the sizes of W
        (`initial_kernel`). The initial b is 0.
      num_input_axes: how many axes of the input are contracted.
      use_bias: whether to add b.
      execution: precision.
    """

    features: tuple[int, ...]
    init_std: float | None
    num_input_axes: int = 1
    use_bias: bool = True
    execution: Execution = Execution()

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Maps `[..., *inputs]` to `[..., *features]`."""
        e = self.execution
        batch, inputs = x.shape[: -self.num_input_axes], x.shape[-self.num_input_axes :]
        kernel_init = initial_kernel(self.init_std, math.prod(inputs), math.prod(self.features))
        separate = e.layers == "separate"
        matrix = math.prod(self.features), math.prod(inputs)
        shape = matrix if separate else (*inputs, *self.features)
        kernel = self.param("kernel", kernel_init, shape, e.param_dtype).astype(e.dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, self.features, e.param_dtype)
            bias = bias.astype(e.dtype)
        x = x.astype(e.dtype)
        if separate:
            flat = None if bias is None else bias.reshape(-1)
            y = affine(x.reshape(*batch, -1), kernel, flat)
            return y.reshape(*batch, *self.features)
        y = jnp.tensordot(x, kernel, axes=self.num_input_axes)
        return y if bias is None else y + bias


def affine(
    x: Float[Array, "*rest I"],
    matrix: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*rest O"]:
    """Returns x · matrixᵀ + bias, accumulated in `dtype` (None: that of x).

    XLA's matrix products on CPU copy their right operand to another layout in every call. If x has
    few rows, the matrix is therefore the left operand: GPT-2 generates eight rows in 0.82 of the
    time, and searches with four beams in 0.78 of the time (a single product with many inputs takes
    half of the time; with 32 rows there is no difference).
    """

    def rows_first(x: Array, matrix: Array) -> Array:
        y = jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=dtype)
        return y if bias is None else y + bias.astype(y.dtype)

    def matrix_first(x: Array, matrix: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        y = jnp.einsum("oi,mi->om", matrix, rows, preferred_element_type=dtype)
        # Without an operation in between, XLA would rewrite (W xᵀ)ᵀ to x Wᵀ.
        barrier = jax.lax.optimization_barrier
        y = barrier(y) if bias is None else y + bias.astype(y.dtype)[:, None]
        return y.T.reshape(*x.shape[:-1], -1)

    if math.prod(x.shape[:-1]) not in FEW_ROWS:
        return rows_first(x, matrix)
    return jax.lax.platform_dependent(x, matrix, cpu=matrix_first, default=rows_first)


def initial_kernel(
    std: float | None, inputs: int, outputs: int
) -> Callable[[Array, tuple[int, ...], DTypeLike], Array]:
    """Returns the initializer of a kernel: normal, or uniform (Glorot and Bengio 2010).

    Args:
      std: standard deviation of the normal distribution; None: uniform in
        ±√(6 / (inputs + outputs)), which keeps the variance the same in the forward and in the
        backward pass.
      inputs: number of inputs of the kernel as a matrix.
      outputs: number of outputs; those of all heads together.
    """
    if std is not None:
        return nn.initializers.normal(std)
    limit = math.sqrt(6 / (inputs + outputs))

    return lambda rng, shape, dtype: jax.random.uniform(rng, shape, dtype, -limit, limit)


class Embedding(nn.Module):
    """A table of `num_embeddings` vectors of size `features`, called `embedding`."""

    num_embeddings: int
    features: int
    init_std: float = 0.02
    execution: Execution = Execution()

    def setup(self) -> None:
        """Declares the table."""
        init = nn.initializers.normal(self.init_std)
        shape = (self.num_embeddings, self.features)
        self.embedding = self.param("embedding", init, shape, self.execution.param_dtype)

    def __call__(self, ids: Int[Array | np.ndarray, "*rest"]) -> Float[Array, "*rest D"]:
        """Returns the vector of each id; NaN for an id outside the table."""
        return embedding_lookup(self.embedding, ids).astype(self.execution.dtype)


def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array | np.ndarray, "*rest"]
) -> Float[Array, "*rest D"]:
    """Returns the row of each id; NaN for an id outside the table, negative ones included."""
    return table.at[ids].get(mode="fill", wrap_negative_indices=False)


class LayerNorm(nn.Module):
    """Layer normalization over the last axis, in float32 (Ba et al. 2016).

    Attributes:
      eps: added to the variance.
      execution: precision.
      affine: whether there are a scale and a bias.
    """

    eps: float
    execution: Execution
    affine: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns (x - mean) / √(variance + eps) · scale + bias."""
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(variance + self.eps)
        if self.affine:
            shape, dtype = x.shape[-1:], self.execution.param_dtype
            scale = self.param("scale", nn.initializers.ones, shape, dtype)
            y = y * scale + self.param("bias", nn.initializers.zeros, shape, dtype)
        return y.astype(self.execution.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last axis, in float32 (Zhang and Sennrich 2019).

    Attributes:
      eps: added to the mean square.
      execution: precision.
      affine: whether there is a scale.
      offset: added to the parameter `scale`, which begins at 1 - offset.
    """

    eps: float
    execution: Execution
    affine: bool = True
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x / √(mean(x²) + eps) · (offset + scale)."""
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        y = x32 * jax.lax.rsqrt(mean_square + self.eps)
        if self.affine:
            dtype = self.execution.param_dtype
            first = nn.initializers.constant(1 - self.offset)
            scale = self.param("scale", first, x.shape[-1:], dtype)
            y = y * (scale if self.offset == 0 else self.offset + scale.astype(jnp.float32))
        return y.astype(self.execution.dtype)


class Residual(nn.Module):
    """The sum of the residual stream and a sublayer's output.

    With `config.residual_scalar` one learned number multiplies the output. It begins at 1, which
    is the plain sum; 0 takes the sublayer out.
    """

    config: TransformerConfig
    execution: Execution

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Returns x + scalar · output."""
        if not self.config.residual_scalar:
            return x + output
        scalar = self.param("scalar", nn.initializers.ones, (), self.execution.param_dtype)
        return x + scalar.astype(output.dtype) * output


DROPOUT_MASK = "dropout_mask"
"""The name under which rematerialization may keep the masks, one byte per element."""
KERNEL_RESIDUALS = "kernel_residuals"
"""The name under which it may keep what the backward pass of an attention kernel reads."""

RowKeys = Key[Array, " B"]
"""One key per sequence of a batch."""
Keys = TypeVar("Keys", bound=RowKeys | None)


def row_keys(rng: Key[Array, ""], num_rows: int, first_row: int | Array = 0) -> RowKeys:
    """Returns one key per sequence, for `num_rows` sequences of a batch from `first_row` on."""
    rows = jnp.arange(num_rows) + first_row
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, rows)


def fold_in(rng: Keys, data: int | Array) -> Keys:
    """Derives the keys of one layer, or of one dropout in it, by its number; None stays None."""
    if rng is None:
        return rng
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(rng, data)  # pyright: ignore[reportReturnType]


def key_words(keys: Key[Array, "*shape"] | UInt[Array, "*shape 2"]) -> UInt[Array, "*shape 2"]:
    """Returns the two words of each key of Threefry-2x32, by which this module draws.

    Raises:
      UserError: the keys are of another generator.
    """
    implementation = jax.random.key_impl(keys)
    if str(implementation) != "threefry2x32":
        raise UserError(
            f"keys of {implementation} cannot draw what is dropped: give "
            "jax.random.key(seed, impl='threefry2x32'), or no keys"
        )
    return jax.random.key_data(keys)


def dropout(
    x: Float[Array, "B *rest"], rate: float, rng: RowKeys | None, place: str
) -> Float[Array, "B *rest"]:
    """Sets elements of `x` to 0 with probability `rate` and divides the others by 1 - rate.

    Srivastava et al. 2014. The mask depends on the sequence, not on the layout of the batch: every
    sequence of the global batch has its own key, a function of seed, step and index. The mask is
    therefore the same on one device and on many, for a whole batch and for micro-batches: all of
    them train the same model. Without a key there is no dropout; there is no `deterministic`
    switch.

    The probability is rounded to a multiple of 2⁻¹⁶, so that one word of Threefry decides about
    two elements.

    Args:
      x: any array whose first axis is the sequences.
      rate: in [0, 1); 0 changes nothing.
      rng: one key per sequence; None changes nothing.
      place: the name of this dropout in its layer.

    Raises:
      UserError: the keys are not of Threefry-2x32.
    """
    if rate == 0 or rng is None:
        return x
    keys = key_words(fold_in(rng, zlib.crc32(place.encode())))
    size = x[0].size
    counters = jnp.arange(-(-size // 2), dtype=jnp.uint32)
    words = jax.vmap(lambda key: threefry_2x32(key, counters))(keys)
    drawn = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(x.shape[0], -1)[:, :size]
    keep = checkpoint_name(drawn.reshape(x.shape) >= dropped_below(rate), DROPOUT_MASK)
    return jnp.where(keep, x / (1 - rate), 0)


# Which attention weights are dropped is drawn by a function of (key of the head, query, key) that a
# kernel can compute too, for any block, in any order and more than once.
#
# One block of Threefry-2x32 has 64 bits and decides about four keys of a query. They lie 8 apart,
# because a TPU's registers have 8 rows: keys r, r + 8, r + 16 and r + 24 of each 32 keys have the
# number g = 8 · (32 keys before) + r in common, and the counter is (query, g).

GROUP = 32
"""Keys of a query whose bits come from the same 8 Threefry blocks."""
ROWS = 8
"""Distance of the keys that share a block."""
ROUNDS = 13
"""Salmon et al., table 2: the fewest with which Threefry-2x32 passes BigCrush. (jax draws with 20,
which here would be paid two or three times, once for each pass of a kernel.)"""

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA

HeadKeys = UInt[Array, "B N 2"]
"""One key of Threefry-2x32 for each head of each sequence: two words, uint32."""
Word = UInt[Array, "..."]
"""Words of 32 bits, uint32."""


def threefry(
    key: tuple[Word, Word], counter: tuple[Word, Word], rounds: int = ROUNDS
) -> tuple[Word, Word]:
    """Returns the words of Threefry-2x32 (Salmon et al. 2011, section 4), element by element."""
    parity = key[0] ^ key[1] ^ np.uint32(_PARITY)
    schedule = *key, parity
    x, y = counter[0] + key[0], counter[1] + key[1]
    for i in range(rounds):
        left = _ROTATIONS[i // 4 % 2][i % 4]
        x = x + y
        y = x ^ (jax.lax.shift_left(y, np.uint32(left)) | _shift_right(y, 32 - left))
        if i % 4 == 3:
            step = i // 4 + 1
            x = x + schedule[step % 3]
            y = y + (schedule[(step + 1) % 3] + np.uint32(step))
    return x, y


def _shift_right(x: Word, by: int) -> Word:
    return jax.lax.shift_right_logical(x, np.uint32(by))


def dropped_below(rate: float) -> int:
    """Returns the number that a draw of 16 bits must reach for its element to be kept."""
    return min(round(rate * 2**16), 2**16 - 1)


def draws(words: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Returns the 16 bits of the first, second, third and fourth key of a Threefry block."""
    low, high = np.uint32(0xFFFF), 16
    first, second = words
    return first & low, _shift_right(first, high), second & low, _shift_right(second, high)


def head_keys(rng: RowKeys, num_heads: int) -> HeadKeys:
    """Returns the keys of the heads' draws, from a layer's key for each sequence.

    Raises:
      UserError: the keys are not of Threefry-2x32, whose blocks the draws are.
    """
    rng = fold_in(rng, zlib.crc32(b"attention_weights"))
    per_head = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return key_words(per_head(rng, jnp.arange(num_heads)))


def kept_weights(
    keys: HeadKeys,
    num_queries: int,
    num_keys: int,
    rate: float,
    *,
    places: tuple[Int[Array, "B {num_queries}"], Int[Array, "B {num_keys}"]] | None = None,
) -> Bool[Array, "B N {num_queries} {num_keys}"]:
    """Returns whether each attention weight is kept, for all queries and keys or for some.

    Args:
      keys: from `head_keys`.
      num_queries: T.
      num_keys: S.
      rate: probability that a weight is dropped, in [0, 1); rounded to a multiple of 2⁻¹⁶.
      places: those of the queries and of the keys in their row. Each `GROUP` keys of the call
        follow each other, from a multiple of `GROUP` on. None: the call has whole rows.
    """
    shape = num_queries, -(-num_keys // GROUP) * ROWS
    query, number = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    if places is not None:
        queries, firsts = places[0].astype(jnp.uint32), places[1][:, ::GROUP].astype(jnp.uint32)
        query = queries[:, None, :, None]
        number = firsts[..., None] // np.uint32(GROUP // ROWS) + jnp.arange(ROWS, dtype=jnp.uint32)
        number = number.reshape(-1, 1, 1, shape[1])
        query, number = jnp.broadcast_arrays(query, number)
    first, second = (keys[..., word, None, None] for word in (0, 1))
    words = threefry((first, second), (query, number))
    # Without the barrier, XLA would compute a block anew for each of its four keys.
    words = (x.reshape(*x.shape[:-1], -1, ROWS) for x in jax.lax.optimization_barrier(words))
    below = dropped_below(rate)
    kept = jax.lax.platform_dependent(
        *words,
        cpu=functools.partial(_kept_elementwise, below=below),
        default=functools.partial(_kept_stacked, below=below),
    )
    return kept[..., :num_keys]


def _kept_stacked(first: Word, second: Word, below: int) -> Bool[Array, "B N T S"]:
    """Returns whether the elements are kept, from words [B, N, T, S / 32, 8]."""
    # Flat, and bytes up to the barrier: with the axes of the weights, or as booleans, the compiler
    # for TPUs (libtpu 0.0.42) ends with a segmentation fault for a scan of layers of 1,024 tokens
    # whose masks are kept for the backward pass.
    words = (x.reshape(-1, *x.shape[-2:]) for x in (first, second))
    bytes_ = [(x >= below).astype(jnp.int8) for x in draws((next(words), next(words)))]
    kept = jax.lax.optimization_barrier(jnp.stack(bytes_, axis=-2))
    return kept.reshape(*first.shape[:3], -1) != 0


def _kept_elementwise(first: Word, second: Word, below: int) -> Bool[Array, "B N T S"]:
    """Returns the same, in a sixth of the time on a CPU; a TPU would write words for each key."""
    part = jnp.arange(GROUP // ROWS, dtype=jnp.uint32)[:, None]
    both = jnp.where(part < 2, first[..., None, :], second[..., None, :])
    kept = jnp.where(part % 2 == 0, both & 0xFFFF, _shift_right(both, 16)) >= below
    return kept.reshape(*kept.shape[:3], -1)


def drop_weights(
    weights: Float[Array, "B N T S"], rate: float, rng: RowKeys | None
) -> Float[Array, "B N T S"]:
    """Sets attention weights to 0 with probability `rate` and divides the others by 1 - rate.

    The laws of `dropout` hold here too. The draws are those that a kernel can repeat.

    Args:
      weights: of all queries and keys.
      rate: in [0, 1); 0 changes nothing.
      rng: a layer's key for each sequence; None changes nothing.
    """
    if rate == 0 or rng is None:
        return weights
    _, num_heads, num_queries, num_keys = weights.shape
    kept = kept_weights(head_keys(rng, num_heads), num_queries, num_keys, rate)
    return jnp.where(checkpoint_name(kept, DROPOUT_MASK), weights / (1 - rate), 0)


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the exact GELU, x · Φ(x), computed in float32 (Hendrycks and Gimpel 2016).

    Uses `erf`; `jax.nn.gelu` uses `erfc`, which keeps the last digits of tiny values and is slower
    on CPU.
    """
    x32 = x.astype(jnp.float32)
    return (0.5 * x32 * (1 + jax.lax.erf(x32 * math.sqrt(0.5)))).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": exact_gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, "Primer"
    "silu": jax.nn.silu,
}


class FeedForward(nn.Module):
    """activation(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, section 3.3).

    Attributes:
      config: sizes, activation, and `use_bias`.
      execution: precision.
      output_init_std: standard deviation of the initial W₂.
    """

    config: TransformerConfig
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rng: RowKeys | None = None
    ) -> Float[Array, "B T D"]:
        """Maps every position in the same way; `rng` switches on dropout after the activation."""
        c = self.config
        linear = functools.partial(Linear, use_bias=c.use_bias, execution=self.execution)
        x = linear((c.feed_forward_dim,), c.init_std, name="up")(x)  # [B, T, F]
        x = dropout(ACTIVATIONS[c.activation](x), c.activation_dropout_rate, rng, "activation")
        return linear((c.d_model,), self.output_init_std, name="down")(x)


class GatedFeedForward(nn.Module):
    """(activation(x W_gate) · x W_up) W_down, a gated linear unit (Shazeer 2020).

    Attributes:
      config: sizes, activation, and `use_bias`.
      execution: precision.
      output_init_std: standard deviation of the initial W_down.
    """

    config: TransformerConfig
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rng: RowKeys | None = None
    ) -> Float[Array, "B T D"]:
        """Maps every position in the same way; `rng` switches on dropout after the product."""
        c = self.config
        linear = functools.partial(Linear, use_bias=c.use_bias, execution=self.execution)
        gate = linear((c.feed_forward_dim,), c.init_std, name="gate")(x)  # [B, T, F]
        up = linear((c.feed_forward_dim,), c.init_std, name="up")(x)  # [B, T, F]
        x = ACTIVATIONS[c.activation](gate) * up
        x = dropout(x, c.activation_dropout_rate, rng, "activation")
        return linear((c.d_model,), self.output_init_std, name="down")(x)
