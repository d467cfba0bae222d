"""The Transformer with the options that the lectures discuss, in the encoder and in the decoder."""

import dataclasses

from ..encoder_decoders import transformer
from .axes import variant_of
from .layers import LectureLayer
from .options import LectureOptions, LecturePositionKind
from .positions import make_lecture_positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LectureTransformerConfig(LectureOptions, transformer.EncoderDecoderConfig):
    """An encoder and a decoder with the options that the lectures discuss.

    Raises:
      UserError: a size is out of range, or options contradict each other.
    """

    positions: LecturePositionKind = "sinusoidal"  # pyright: ignore[reportIncompatibleVariableOverride]
    """How the encoder and the decoder represent positions; see `LectureGPTConfig`."""

    @property
    def encoder(self) -> "LectureTransformerConfig":
        """The configuration of the encoder. It omits head convolution, which is causal."""
        return dataclasses.replace(self, head_convolution=None)


class EncoderLayer(LectureLayer[transformer.EncoderDecoderConfig], transformer.EncoderLayer):
    """An encoder layer with the options that the lectures discuss."""


class PreNormEncoderLayer(
    LectureLayer[transformer.EncoderDecoderConfig], transformer.PreNormEncoderLayer
):
    """A pre-norm encoder layer with the options that the lectures discuss."""


class DecoderLayer(LectureLayer[transformer.EncoderDecoderConfig], transformer.DecoderLayer):
    """A decoder layer with the options that the lectures discuss."""


class PreNormDecoderLayer(
    LectureLayer[transformer.EncoderDecoderConfig], transformer.PreNormDecoderLayer
):
    """A pre-norm decoder layer with the options that the lectures discuss."""


class LectureStack(transformer.TransformerStack):
    """The encoder or the decoder of a Transformer with the options that the lectures discuss."""

    make_positions = staticmethod(make_lecture_positions)


class LectureTransformer(transformer.EncoderDecoder):
    """A Transformer with the options that the lectures discuss."""

    stack = LectureStack
    layers = {  # noqa: RUF012
        "post": (EncoderLayer, DecoderLayer),
        "pre": (PreNormEncoderLayer, PreNormDecoderLayer),
    }


FAMILY = variant_of(transformer.FAMILY, LectureTransformerConfig, LectureTransformer)
