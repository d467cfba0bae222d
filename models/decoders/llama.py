"""Llama: decoder-only transformers with normalized inputs, rotary positions and gated sublayers.

- LLaMA: Touvron et al. 2023, "LLaMA: open and efficient foundation language models", section 2.2.
  RMSNorm before each sublayer (as in GPT-3), a feed-forward gated by silu of width 2/3 · 4 D (as
  in PaLM), rotary positions (as in GPT-NeoX); no biases.
- Llama 2: Touvron et al. 2023, "Llama 2: open foundation and fine-tuned chat models", section 2.2.
  In the largest model several query heads share a key/value head.
- Llama 3: Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.2. A vocabulary of
  128,256 tokens, and a larger base of the rotary wavelengths.

Rotary frequencies are not scaled for longer contexts (Llama 3.1 and later scale them).
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn

from ...data.errors import UserError
from ..config import Activation, Execution, PositionKind, Settings, TransformerConfig, divisors
from ..nn.attention import MultiHeadAttention
from ..nn.cache import Cache, advance_cache
from ..nn.heads import CausalLMOutput, Projection
from ..nn.layers import Embedding, GatedFeedForward, Residual, RMSNorm, RowKeys, dropout, fold_in
from ..nn.masks import AnyArray
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, LAYER_AXES
from ..nn.positions import Positions, rotary_positions
from ..nn.stack import (
    Layer,
    LayerContext,
    LayerInputs,
    LayerOutputs,
    make_layer_context,
    prepare_inputs,
    run_layers,
)
from ..nn.typing import Array, Bool, Float, Int
from ..registry import Family, Preset

WIDTH_MULTIPLE = 256
"""The authors round the width of feed-forward layers up to a multiple of this number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(TransformerConfig):
    """A decoder-only transformer of the Llama family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    head: ClassVar[str] = "causal_lm"
    use_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    d_ff: int | None = None
    """Width of the feed-forward layer, F; if not given 8/3 D, rounded up to a multiple of 256."""
    activation: Activation = "silu"
    """Non-linearity of the gate."""
    norm_eps: float = 1e-5
    """Added to the mean square in normalization; 1e-6 in the first Llama."""
    dropout_rate: float = 0.0
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers; the papers
    have no dropout."""
    num_kv_heads: int | None = None
    """Number of key/value heads, K, if not `num_heads`."""
    d_head: int | None = None
    """Size of one head, H, if not D / N."""
    rope_base: float = 10_000.0
    """Base of the rotary wavelengths (theta); 500,000 in Llama 3."""
    positions: PositionKind = "rotary"
    """The kind of positions; a Llama has no others."""
    tie_output: bool = False
    """Whether the output projection is the token embedding; else it has its own matrix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_kv_heads", "d_head"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value} is not positive: choose at least 1")
        if self.num_heads % self.kv_heads:
            choices = ", ".join(map(str, divisors(self.num_heads)))
            raise UserError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}: "
                f"choose num_kv_heads from {choices}"
            )
        if self.positions != "rotary":
            raise UserError(
                f"positions {self.positions!r} are none of a Llama's, which are rotary: choose "
                "another family, such as gpt"
            )
        if self.position_base != 10_000:
            raise UserError(
                f"position_base {self.position_base} is named rope_base in a Llama: give that"
            )
        if not self.rope_base > 0:
            raise UserError(f"rope_base {self.rope_base} must be above 0, for example 10000")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, K; a divisor of `num_heads`."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of one head, H."""
        return self.d_model // self.num_heads if self.d_head is None else self.d_head

    @property
    def feed_forward_dim(self) -> int:
        """Width of the feed-forward layer, F."""
        if self.d_ff is not None:
            return self.d_ff
        return -(-(8 * self.d_model // 3) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


class LlamaLayer(Layer[LlamaConfig]):
    """Self-attention with rotary positions and a gated feed-forward, each with a residual."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the other outputs."""
        c, e = self.config, self.execution
        rng = fold_in(context.rng, inputs.index)

        y = RMSNorm(c.norm_eps, e, c.norm_affine, name="attention_norm")(x)
        y, cache, weights = MultiHeadAttention(c, e, c.init_std, name="attention")(
            y,
            context.mask,
            cache=inputs.cache,
            index=context.cache_index,
            rng=rng,
            output_attentions=context.output_attentions,
            head_mask=context.head_mask_of(inputs.index),
            earlier=context.earlier,
            positions=context.positions,
        )
        y = dropout(y, c.dropout_rate, rng, "attention")
        x = Residual(c, e, name="attention_residual")(x, y)

        y = RMSNorm(c.norm_eps, e, c.norm_affine, name="feed_forward_norm")(x)
        y = GatedFeedForward(c, e, c.init_std, name="feed_forward")(y, rng)
        y = dropout(y, c.dropout_rate, rng, "feed_forward")
        x = Residual(c, e, name="feed_forward_residual")(x, y)
        return x, LayerOutputs(cache, weights)


class Llama(nn.Module):
    """A Llama with its language-model head.

    Attributes:
      config: sizes and options of the model.
      execution: how it is run.
    """

    config: LlamaConfig
    execution: Execution = Execution()

    @nn.compact
    def __call__(
        self,
        input_ids: Int[AnyArray, "B T"],
        attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None = None,
        *,
        position_ids: Int[AnyArray, "#B #T"] | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        cache: Cache | None = None,
        rng: RowKeys | None = None,
        output_attentions: bool = False,
        head_mask: Float[AnyArray, "*L N"] | None = None,
    ) -> CausalLMOutput:
        """Computes the logits of every next token.

        Args:
          input_ids: token ids.
          attention_mask: 1 for the tokens that may be attended to. With a cache
            it covers the S slots of the cache, those written by this call
            included. A mask `[B, T, S]` states for each token all tokens that it
            may attend to, itself included.
          position_ids: position of each token; by default counted over the real
            tokens of each sequence, from 0 in every document of a packed one.
          segment_ids: number of the document that each token of a packed sequence
            belongs to, 0 for padding. No document attends to another.
          cache: keys and values of earlier calls, continued by `input_ids`.
            Beyond its last slot all logits are NaN.
          rng: one key per sequence (`models.row_keys`) switches dropout on.
          output_attentions: whether to return the attention weights too.
          head_mask: factor of the attention weights of each head, `[N]` or `[L, N]` for each
            layer; 0 takes a head out.

        Raises:
          UserError: `attention_mask` does not cover the tokens (or slots), it is
            `[B, T, S]` and no `position_ids` are given, or a cache is given together
            with packed sequences.
        """
        c, e = self.config, self.execution
        position_ids, mask = prepare_inputs(
            c,
            input_ids,
            attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            cache=cache,
            causal=True,
        )
        embed = Embedding(c.vocab_size, c.d_model, execution=e, name="token_embedding")
        x = dropout(embed(input_ids), c.dropout_rate, rng, "embedding")
        context = make_layer_context(
            c,
            e,
            mask,
            cache=cache,
            rng=rng,
            output_attentions=output_attentions,
            head_mask=head_mask,
            positions=Positions(rotary=rotary_positions(position_ids, c.key_dim, c.rope_base)),
        )
        x, outputs = run_layers(LlamaLayer, c, e, x, cache=cache, context=context)
        x = RMSNorm(c.norm_eps, e, c.norm_affine, name="final_norm")(x)
        if cache is not None:
            assert outputs.cache is not None
            x, cache = advance_cache(cache, outputs.cache, x)
        if not c.tie_output:
            embed = Embedding(c.vocab_size, c.d_model, execution=e, name="output_embedding")
        projection = Projection(x, embed.embedding.astype(e.dtype))
        return CausalLMOutput(x, projection, cache, outputs.attentions)


def _preset(
    paper: str, published: str, sizes: tuple[int, int, int], note: str = "", **fields: Any
) -> Preset:
    """Builds a preset of the sizes (layers, width, heads)."""
    num_layers, d_model, num_heads = sizes
    config = LlamaConfig(num_layers=num_layers, d_model=d_model, num_heads=num_heads, **fields)
    return Preset(config, paper, published, note)


_LLAMA, _LLAMA_2 = "Touvron et al. 2023a", "Touvron et al. 2023b"
_LLAMA_3 = "Grattafiori et al. 2024"
_FIRST: Settings = {"vocab_size": 32_000, "max_length": 2048, "norm_eps": 1e-6}
_SECOND: Settings = {"vocab_size": 32_000, "max_length": 4096}
_THIRD: Settings = {
    "vocab_size": 128_256,
    "max_length": 8192,
    "num_kv_heads": 8,
    "rope_base": 500_000.0,
}

PRESETS: dict[str, Preset] = {
    "llama-7b": _preset(_LLAMA, "6.7B", (32, 4096, 32), **_FIRST),
    "llama-13b": _preset(_LLAMA, "13.0B", (40, 5120, 40), **_FIRST),
    "llama-33b": _preset(_LLAMA, "32.5B", (60, 6656, 52), **_FIRST),
    "llama-65b": _preset(
        _LLAMA, "65.2B", (80, 8192, 64), "table 2 says 65.2B, its sizes make 65.3B", **_FIRST
    ),
    "llama2-7b": _preset(_LLAMA_2, "7B", (32, 4096, 32), **_SECOND),
    "llama2-13b": _preset(_LLAMA_2, "13B", (40, 5120, 40), **_SECOND),
    "llama2-70b": _preset(
        _LLAMA_2,
        "70B",
        (80, 8192, 64),
        "the paper says 70B, its sizes make 69B",
        num_kv_heads=8,
        d_ff=28_672,
        **_SECOND,
    ),
    "llama3-8b": _preset(_LLAMA_3, "8B", (32, 4096, 32), d_ff=14_336, **_THIRD),
    "llama3-70b": _preset(
        _LLAMA_3,
        "70B",
        (80, 8192, 64),
        "the paper says 70B, its sizes make 71B",
        d_ff=28_672,
        **_THIRD,
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672, "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
}
# fmt: on

FAMILY = Family(
    config=LlamaConfig,
    module=Llama,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES},
    hf_module="decoders.llama",
)
