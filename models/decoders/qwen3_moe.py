"""Qwen3-MoE: a Qwen3 whose feed-forward layers are mixtures of many small experts.

Yang et al. 2025, "Qwen3 technical report", section 2: 128 experts, eight experts per token, and no
shared experts. Queries and keys are normalized, as in Qwen3. Some layers may have one feed-forward
layer instead of experts; no published model has such layers.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ...data.common.fields import Positive
from ..config import Depth, QueryKeyNorm, Size, require_layers
from ..nn.dropout import RowKeys
from ..nn.experts import Experts, RouterStatistics
from ..nn.layers import GatedFeedForward
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..nn.stack import LayerContext
from ..nn.typing import Array, Float, Int
from ..registry import Family, Preset, preset_maker
from .causal_decoder import CausalDecoder
from .mixtral import MixtureDecoderConfig, MixtureLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MixtureDecoderConfig):
    """A decoder-only transformer of the Qwen3-MoE family; `d_ff` is the width of one expert.

    Raises:
      UserError: a size or a rate is out of range.
    """

    query_key_norm: ClassVar[QueryKeyNorm | None] = "head"

    num_experts: Depth = 128
    """Number of experts in each feed-forward layer, E."""
    experts_per_token: Size = 8
    """Number of experts that process each token, k."""
    normalize_experts: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the weights of a token's experts add up to 1."""
    norm_eps: Positive = 1e-6
    """Constant added to the mean square in normalization."""
    rope_base: Positive = 1_000_000.0
    """Base of the rotary wavelengths (theta)."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the four attention projections have biases; no published Qwen3 has them."""
    dense_layers: tuple[int, ...] = ()
    """Zero-based indices of the layers with one feed-forward layer instead of experts. If the list
    is not empty, every layer stores the parameters of both kinds of layers, because layers are
    stacked. The unused parameters have no effect.
    """
    d_ff_dense: Size | None = None
    """Width of the feed-forward layer in `dense_layers`. Defaults to 4 D."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers("dense_layers", self.dense_layers, self.num_layers)

    @property
    def dense_dim(self) -> int:
        """Width of the feed-forward layer in `dense_layers`."""
        return 4 * self.d_model if self.d_ff_dense is None else self.d_ff_dense


class Qwen3MoeLayer(MixtureLayer):
    """A Mixtral layer; some layers have one feed-forward layer instead of experts."""

    config: Qwen3MoeConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def feed_forward(
        self,
        y: Float[Array, "B T D"],
        layer: int | Int[Array, ""],
        context: LayerContext,
        rng: RowKeys | None,
    ) -> tuple[Float[Array, "B T D"], RouterStatistics]:
        """Returns the output of the experts or the feed-forward layer, and router statistics."""
        c, e = self.config, self.execution
        sparse, router = Experts(c, e, c.init_std, name="experts")(y, context.real, rng)
        if not c.dense_layers:
            return sparse, router
        # The index of a scanned layer is traced, so compute both and select one.
        of_dense = dataclasses.replace(c, d_ff=c.dense_dim)
        dense = GatedFeedForward(of_dense, e, c.init_std, name="feed_forward")(y, rng)
        flags = jnp.asarray([i in c.dense_layers for i in range(c.num_layers)])
        # The statistics count no tokens in layers without experts.
        router = jax.tree.map(lambda x: jnp.where(flags[layer], 0, x), router)
        return jnp.where(flags[layer], dense, sparse), router


class Qwen3Moe(CausalDecoder):
    """The Qwen3-MoE model with its head: Mixtral layers with normalized queries and keys."""

    layer = Qwen3MoeLayer


_preset = preset_maker(
    Qwen3MoeConfig,
    "Yang et al. 2025",
    ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff"),
    vocab_size=151_936,
    max_length=40_960,
    d_head=128,
)

PRESETS: dict[str, Preset] = {
    "qwen3-30b-a3b": _preset("30.5B", (48, 2048, 32, 4, 768)),
    "qwen3-235b-a22b": _preset("235B", (94, 4096, 64, 4, 1536)),
}

NUM_PARAMETERS = {"qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560}

FAMILY = Family(
    config=Qwen3MoeConfig,
    module=Qwen3Moe,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.qwen3_moe",
)
