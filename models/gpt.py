"""The GPTs: decoder-only transformers, as three papers published them.

- GPT: Radford et al. 2018, "Improving language understanding by generative
  pre-training", section 4.1.  Normalisation after the residual sum.
- GPT-2: Radford et al. 2019, "Language models are unsupervised multitask
  learners", section 2.3.  Normalisation before each sublayer and once more at
  the end; residual projections initialised smaller by 1/√(2L).
- GPT-3: Brown et al. 2020, "Language models are few-shot learners", section 2.1
  and table 2.1.  Dense and locally banded attention in alternating layers.

Difference from the papers: GPT-3's band width is not published; 256, the width
of GPT-Neo, is taken.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp

from ..data.errors import UserError
from .config import Execution, TransformerConfig
from .nn.attention import (
    AnyArray,
    Cache,
    advance_cache,
    check_inputs,
    default_positions,
)
from .nn.dropout import RowKeys, dropout
from .nn.heads import CausalLMOutput, Projection
from .nn.layers import (
    LayerNorm,
    run_transformer_layers,
    share,
    sinusoidal_positions,
)
from .nn.linear import Embedding, look_up
from .nn.masks import Visible
from .nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, LAYER_AXES
from .nn.typing import Array, Bool, Float, Int
from .registry import Family, Preset


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A decoder-only transformer.

    Raises:
      UserError: a size or a rate is out of range.
    """

    head: ClassVar[str] = "causal_lm"

    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu_tanh"
    """Non-linearity of the feed-forward layer; GPTs use the tanh form of GELU."""
    dropout_rate: float = 0.1
    """Of embeddings, attention weights and both sublayers' outputs."""
    embedding_dropout: float | None = None
    """Of the sums of embeddings and positions, if not `dropout_rate`."""
    attention_dropout: float | None = None
    """Of attention weights, if not `dropout_rate`."""
    norm_position: Literal["pre", "post"] = "pre"
    """pre: before each sublayer, and a final one (GPT-2, GPT-3). post: after the sum (GPT)."""
    positions: Literal["learned", "sinusoidal"] = "learned"
    """Where position vectors come from."""
    position_base: float = 10_000.0
    """Base of the sinusoidal wavelengths."""
    use_bias: bool = True
    """Whether the affine maps have biases."""
    local_window: int | None = None
    """If given, every second layer sees only the last so many tokens (GPT-3)."""
    scale_residual_init: bool = True
    """Whether residual projections start smaller by 1/√(2L) (GPT-2, GPT-3)."""
    scale_scores: bool = True
    """Whether attention's scores are divided by √H."""
    scale_scores_by_layer: bool = False
    """Whether those of layer i, from 1, are divided by i too (Mistral's replicas of GPT-2)."""
    tie_output: bool = True
    """Whether scores are taken with the table of the tokens; else with one of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_window is not None and self.local_window < 1:
            raise UserError(f"local_window {self.local_window} must be at least 1, or None")
        if not self.position_base > 0:
            raise UserError(f"position_base {self.position_base} must be above 0")
        for name in ("embedding_dropout", "attention_dropout"):
            if not 0 <= getattr(self, f"{name}_rate") < 1:
                raise UserError(f"{name} {getattr(self, name)} is not in [0, 1)")

    @property
    def embedding_dropout_rate(self) -> float:
        """Probability that an element of the first layer's input is dropped."""
        return self.dropout_rate if self.embedding_dropout is None else self.embedding_dropout

    @property
    def attention_dropout_rate(self) -> float:
        """Probability that an attention weight is dropped."""
        return self.dropout_rate if self.attention_dropout is None else self.attention_dropout

    def score_scale(self, layer: Any) -> Any:
        """What the scores of a layer, counted from 0, are multiplied by."""
        scale = super().score_scale(layer) if self.scale_scores else 1.0
        return scale / (layer + 1) if self.scale_scores_by_layer else scale


class GPT(nn.Module):
    """A GPT with its language-model head.

    Attributes:
      config: what it is.
      execution: how it is run.
    """

    config: GPTConfig
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
    ) -> CausalLMOutput:
        """Scores every next token.

        Args:
          input_ids: token ids.
          attention_mask: 1 where a token may be seen. With a cache it covers
            the S slots of the cache, those written now included. Or, `[B, T,
            S]`, all that each token may see, itself included.
          position_ids: position of each token; by default counted over the
            real tokens of the row, from 0 in every document of a packed row.
          segment_ids: number of the document that each token of a packed row
            belongs to, 0 for padding. Documents do not see each other.
          cache: what earlier calls left; `input_ids` continue it. Beyond its
            last slot all scores are NaN.
          rng: one key per row (`models.row_keys`) switches dropout on.
          output_attentions: whether to answer the attention weights as well.

        Raises:
          UserError: T is longer than `max_length`, `attention_mask` does not
            cover the tokens (or slots) or is one for each token and nothing
            says where they stand, or a cache is given together with packed rows.
        """
        c, e = self.config, self.execution
        check_inputs(c, input_ids, attention_mask, segment_ids, cache)
        length = input_ids.shape[1]
        num_keys = length if cache is None else cache.length
        start = jnp.zeros((), jnp.int32) if cache is None else cache.index
        if position_ids is None:
            position_ids = default_positions(start, length, attention_mask, segment_ids)
        embed = Embedding(c.vocab_size, c.d_model, execution=e, name="token_embedding")
        x = embed(input_ids) + self._positions(position_ids)
        x = dropout(x, c.embedding_dropout_rate, rng, "embedding")

        visible = Visible(length, num_keys, attention_mask, segment_ids, causal=True, start=start)
        shared = share(c, e, visible, cache, rng, output_attentions, window=c.local_window)
        x, (layers, attentions) = run_transformer_layers(c, e, x, cache, shared)
        if c.norm_position == "pre":
            x = LayerNorm(c.norm_eps, e, name="final_norm")(x)
        if cache is not None:
            x, cache = advance_cache(cache, layers, x)
        if not c.tie_output:
            embed = Embedding(c.vocab_size, c.d_model, execution=e, name="output_embedding")
        projection = Projection(x, embed.embedding.astype(e.dtype))
        return CausalLMOutput(x, projection, cache, attentions)

    def _positions(self, position_ids: Int[AnyArray, "#B #T"]) -> Float[Array, "#B #T D"]:
        c, e = self.config, self.execution
        if c.positions == "learned":
            table = Embedding(c.max_length, c.d_model, execution=e, name="position_embedding")
            return table(position_ids)
        table = sinusoidal_positions(c.max_length, c.d_model, c.position_base)
        return look_up(jnp.asarray(table, e.dtype), position_ids)


def _preset(paper: str, published: str, note: str = "", **fields: Any) -> Preset:
    return Preset(GPTConfig(**fields), paper, published, note)


def _gpt2(published: str, num_layers: int, d_model: int, num_heads: int) -> Preset:
    return _preset(
        "Radford et al. 2019",
        published,
        "the paper's counts are wrong, as its authors later said (124M, 355M, 774M, 1558M)",
        vocab_size=50257,
        max_length=1024,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
    )


def _gpt3(published: str, num_layers: int, d_model: int, num_heads: int, note: str = "") -> Preset:
    return _preset(
        "Brown et al. 2020",
        published,
        note,
        vocab_size=50257,
        max_length=2048,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        local_window=256,
    )


PRESETS: dict[str, Preset] = {
    "gpt": _preset(
        "Radford et al. 2018",
        "117M",
        vocab_size=40478,
        max_length=512,
        num_layers=12,
        d_model=768,
        num_heads=12,
        norm_position="post",
        scale_residual_init=False,
    ),
    "gpt2": _gpt2("117M", 12, 768, 12),
    "gpt2-medium": _gpt2("345M", 24, 1024, 16),
    "gpt2-large": _gpt2("762M", 36, 1280, 20),
    "gpt2-xl": _gpt2("1542M", 48, 1600, 25),
    "gpt3-small": _gpt3("125M", 12, 768, 12),
    "gpt3-medium": _gpt3("350M", 24, 1024, 16, "table 2.1 says 350M, its sizes make 356M"),
    "gpt3-large": _gpt3("760M", 24, 1536, 16),
    "gpt3-xl": _gpt3("1.3B", 24, 2048, 16, "table 2.1 says 24 heads of 128, which is not 2,048"),
    "gpt3-2.7b": _gpt3("2.7B", 32, 2560, 32),
    "gpt3-6.7b": _gpt3("6.7B", 32, 4096, 32),
    "gpt3-13b": _gpt3("13B", 40, 5120, 40, "table 2.1 says width 5,140, which is not 40 × 128"),
    "gpt3-175b": _gpt3("175B", 96, 12288, 96),
}

FAMILY = Family(
    config=GPTConfig,
    module=GPT,
    presets=PRESETS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES},
    hf_module="gpt",
)
