"""Phi-3: a Llama whose checkpoints store fewer, larger matrices.

Abdin et al. 2024, "Phi-3 technical report", section 2: the layers are Llama layers. Versions for
128,000 tokens scale the rotary frequencies with LongRoPE; Phi-4-mini rotates three quarters of each
head.
"""

import dataclasses

from ...data.common.fields import Rate
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..registry import Family, Preset, preset_maker
from ..rotary_scaling import RotaryScaling
from .causal_decoder import CausalDecoder, WindowedDecoderConfig
from .llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(WindowedDecoderConfig):
    """A decoder-only transformer of the Phi-3 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    residual_dropout: Rate | None = None
    """Dropout rate of the outputs of both sublayers. Defaults to `dropout_rate`."""

    def residual_dropout_rate(self, sublayer: str) -> float:
        """Returns the dropout rate of the output of a sublayer."""
        del sublayer
        return self.dropout_rate if self.residual_dropout is None else self.residual_dropout

    @property
    def reread_length(self) -> int | None:
        """Returns the length beyond which the cache is recomputed (LongRoPE), or None.

        Keys that were cached before a sequence reached this length were rotated with the factors
        for short sequences. The authors' code recomputes the cache as well.
        """
        scaling = self.rope_scaling
        return scaling.original_length if scaling and scaling.kind == "longrope" else None


class Phi3(CausalDecoder):
    """The Phi-3 model with its head, built from Llama layers."""

    layer = LlamaLayer


_preset = preset_maker(
    Phi3Config, "Abdin et al. 2024a", vocab_size=32_064, max_length=4096, window=2047
)
# fmt: off
_MINI_SCALING = RotaryScaling(
    kind="longrope",
    original_length=4096,
    short_factors=(1.0,) * 48,
    long_factors=(
        1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817,
        2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023,
        4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372,
        10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807,
        22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64,
        32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
    ),
)
# fmt: on

PRESETS: dict[str, Preset] = {
    "phi3-mini": _preset("3.8B", num_layers=32, d_model=3072, num_heads=32, d_ff=8192),
    "phi3-medium": _preset(
        "14B", num_layers=40, d_model=5120, num_heads=40, num_kv_heads=10, d_ff=17_920
    ),
    "phi4": _preset(
        "14B",
        paper="Abdin et al. 2024b",
        vocab_size=100_352,
        max_length=16_384,
        num_layers=40,
        d_model=5120,
        num_heads=40,
        num_kv_heads=10,
        d_ff=17_920,
        rope_base=250_000.0,
        window=None,
    ),
    "phi4-mini": _preset(
        "3.8B",
        paper="Abouelenin et al. 2025",
        vocab_size=200_064,
        max_length=131_072,
        num_layers=32,
        d_model=3072,
        num_heads=24,
        num_kv_heads=8,
        d_ff=8192,
        rope_fraction=0.75,
        rope_scaling=_MINI_SCALING,
        window=262_144,
        tie_output=True,
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "phi3-mini": 3_821_079_552, "phi3-medium": 13_960_238_080, "phi4": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
}
# fmt: on

FAMILY = Family(
    config=Phi3Config,
    module=Phi3,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.phi3",
)
