"""The base classes of all decoders with rotary positions, which extend `causal_lm.py`.

A rotary decoder consists of a token embedding, layers with rotary positions, a final RMSNorm, and a
head. A family derives its configuration from `CausalDecoderConfig` and its module from
`CausalDecoder`, and implements its layer in the order of its paper (`llama.py` is the shortest
example).
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...data.common.fields import Positive, PositiveInt, Rate, require, require_default
from ..config import (
    Activation,
    NormKind,
    PositionKind,
    RotatedFraction,
    Size,
    divisors_of,
    require_layers,
    require_pairs,
)
from ..nn.cache import Cache
from ..nn.dropout import RowKeys, dropout
from ..nn.layers import NORMS, Embedding
from ..nn.masks import AnyArray
from ..nn.positions import Positions
from ..nn.rotary import rotary_positions
from ..nn.typing import Array, Float, Int
from ..rotary_scaling import RotaryScaling
from .causal_lm import CausalLM, CausalLMConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalDecoderConfig(CausalLMConfig):
    """The fields that the rotary decoders share.

    Raises:
      UserError: a size or a rate is out of range.
    """

    use_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]
    attention_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    activation: Activation = "silu"
    """Non-linearity of the gate in the feed-forward layers."""
    norm_eps: Positive = 1e-5
    """Constant added to the mean square in normalization."""
    dropout_rate: Rate = 0.0
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers. The papers
    do not use dropout."""
    classifier_dropout: Rate | None = None
    """Dropout rate of the hidden states that token classification reads. Defaults to 0.1."""
    num_kv_heads: Size | None = None
    """Number of key/value heads, K. Defaults to `num_heads`."""
    d_head: Size | None = None
    """Size of each head, H. Defaults to D / N."""
    rope_base: Positive = 10_000.0
    """Base of the rotary wavelengths (theta)."""
    rope_fraction: RotatedFraction = 1.0
    """The fraction of each head's dimensions that is rotated: the first H · fraction dimensions."""
    rope_scaling: RotaryScaling | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """How rotary frequencies are scaled for sequences longer than the trained length."""
    positions: PositionKind = "rotary"
    """How the model represents positions; these families support only rotary positions."""
    tie_output: bool = False
    """Whether the output projection shares its matrix with the token embedding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_heads % self.kv_heads == 0,
            f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}: "
            f"choose num_kv_heads from {divisors_of(self.num_heads)}",
        )
        self._check_rotary()

    def _check_rotary(self) -> None:
        """Checks that the rotary options are consistent."""
        require_default(self, ["positions"], "must be rotary in this family")
        require_default(self, ["position_base"], "is not used by this family: set rope_base")
        require_pairs(self.rotated_dim, self.key_dim, f"rope_fraction {self.rope_fraction}")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, K; a divisor of `num_heads`."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of each head, H."""
        return self.d_model // self.num_heads if self.d_head is None else self.d_head

    @property
    def rotated_dim(self) -> int:
        """Number of rotated dimensions of each head, R."""
        return int(self.key_dim * self.rope_fraction)

    @property
    def classifier_dropout_rate(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Dropout rate of the hidden states that token classification reads."""
        return 0.1 if self.classifier_dropout is None else self.classifier_dropout

    # Properties that differ between families. If a property differs between the models of one
    # family, that family declares it as a field.

    windowed_rope_base: ClassVar[float | None] = None
    """Base of the rotary wavelengths in windowed layers. Defaults to `rope_base`. The frequencies
    of windowed layers are never scaled.
    """
    norm_kind: ClassVar[NormKind] = "rms"
    """How the residual stream is normalized."""
    embedding_scale: ClassVar[float] = 1.0
    """The factor that multiplies the token embeddings."""

    @property
    def unrotated_layers(self) -> tuple[bool, ...]:
        """Whether each layer leaves queries and keys unrotated; empty if all layers rotate them."""
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedDecoderConfig(CausalDecoderConfig):
    """A decoder whose layers may attend only to a window of tokens.

    Raises:
      UserError: a size or a rate is out of range.
    """

    window: PositiveInt | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of tokens that a token attends to, including itself. If None, each token attends to
    all tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedDecoderConfig(WindowedDecoderConfig):
    """A decoder with windowed layers and layers that attend to all tokens.

    Raises:
      UserError: a size or a rate is out of range.
    """

    full_layers: tuple[int, ...] | None = None
    """Zero-based indices of the layers that attend to all tokens despite the window. If None, the
    family determines these layers.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers("full_layers", self.full_layers, self.num_layers)

    @property
    def usual_full_layers(self) -> tuple[int, ...]:
        """The layers that attend to all tokens if `full_layers` is None."""
        return ()

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends only to the window; unused if `window` is None."""
        full = self.usual_full_layers if self.full_layers is None else self.full_layers
        return tuple(i not in full for i in range(self.num_layers))


class CausalDecoder(CausalLM):
    """A rotary decoder with its head. A family sets `layer`, the class of its layers.

    Attributes:
      config: sizes and options of the model.
      execution: how the model is run.
    """

    config: CausalDecoderConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def embed(
        self,
        input_ids: Int[AnyArray, "B T"],
        position_ids: Int[AnyArray, "#B #T"],
        cache: Cache | None,
        rng: RowKeys | None,
    ) -> tuple[Float[Array, "B T D"], Positions, Embedding]:
        """Returns the scaled embeddings, the rotary positions, and the token embedding matrix."""
        del cache
        c, e = self.config, self.execution
        table = Embedding(c.vocab_size, c.d_model, execution=e, name="token_embedding")
        x = table(input_ids)
        # First round the scale to the compute dtype, as Gemma's published code does.
        if c.embedding_scale != 1:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        return dropout(x, c.dropout_rate, rng, "embedding"), self._positions(position_ids), table

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the normalized output of the last layer."""
        return NORMS[self.config.norm_kind](self.config, self.execution, name="final_norm")(x)

    def _positions(self, position_ids: Int[AnyArray, "#B #T"]) -> Positions:
        """Returns the rotations of all tokens, which may differ in windowed layers."""
        c = self.config
        # Only the layers that attend to all tokens scale the rotary frequencies.
        full = rotary_positions(
            position_ids,
            c.rotated_dim,
            c.rope_base,
            scaling=c.rope_scaling,
            max_length=c.max_length,
        )
        windowed = None
        if c.windowed_rope_base is not None and c.window is not None:
            windowed = rotary_positions(position_ids, c.rotated_dim, c.windowed_rope_base)
        unrotated = c.unrotated_layers
        return Positions(rotary=full, windowed_rotary=windowed, unrotated_layers=unrotated)
