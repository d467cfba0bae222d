"""GPTs with the options that the lectures discuss, such as Primer (So et al. 2021)."""

import dataclasses

from ..decoders.gpt import gpt
from ..nn.stack import Layer
from .axes import variant_of
from .layers import LectureLayer
from .options import LectureOptions, LecturePositionKind
from .positions import make_lecture_positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LectureGPTConfig(LectureOptions, gpt.GPTConfig):
    """A decoder-only transformer with the options that the lectures discuss.

    Raises:
      UserError: a size or a rate is out of range, or options contradict each other.
    """

    positions: LecturePositionKind = "learned"  # pyright: ignore[reportIncompatibleVariableOverride]
    """How the model represents positions: one of the kinds of `GPTConfig`, or one of the following.
    relative: a learned vector for each clipped distance, added to keys and values (Shaw et al.
    2018). counter: 1, 2, 3, … in the last dimension. appended_counter: embeddings of D - 1
    dimensions, with 1, 2, 3, … appended to them. binary: binary digits in the last dimensions.
    table: the vectors in `position_table`."""
    output_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the logits have a bias, so that the output layer is affine."""


class PreNormLayer(LectureLayer[gpt.GPTConfig], gpt.PreNormLayer):
    """A GPT-2 layer with the options that the lectures discuss."""


class PostNormLayer(LectureLayer[gpt.GPTConfig], gpt.PostNormLayer):
    """A layer of the first GPT with the options that the lectures discuss."""


class LectureGPT(gpt.GPT):
    """A GPT with the options that the lectures discuss."""

    make_positions = staticmethod(make_lecture_positions)

    @property
    def layer(self) -> type[Layer]:
        """The class of the model's layers."""
        return PreNormLayer if self.config.norm_position == "pre" else PostNormLayer


FAMILY = variant_of(gpt.FAMILY, LectureGPTConfig, LectureGPT)
