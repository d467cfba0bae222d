"""BERTs with the options that the lectures discuss."""

import dataclasses

from ...data.common.fields import require_default
from ..encoders import bert
from ..encoders.encoder import EncoderConfig, PostNormLayer
from .axes import variant_of
from .layers import LectureLayer
from .options import LectureOptions, LecturePositionKind
from .positions import make_lecture_positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LectureBertConfig(LectureOptions, bert.BertConfig):
    """A BERT with the options that the lectures discuss.

    Raises:
      UserError: a size is out of range, options contradict each other, or the head needs labels
        and has none.
    """

    positions: LecturePositionKind = "learned"  # pyright: ignore[reportIncompatibleVariableOverride]
    """How the model represents positions; see `LectureGPTConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head != "causal_lm":
            require_default(self, ["head_convolution"], f"is causal, and head {self.head!r} is not")


class LectureBertLayer(LectureLayer[EncoderConfig], PostNormLayer):
    """A BERT layer with the options that the lectures discuss."""


class LectureBERT(bert.BERT):
    """A BERT with the options that the lectures discuss."""

    layer = LectureBertLayer
    make_positions = staticmethod(make_lecture_positions)


FAMILY = variant_of(bert.FAMILY, LectureBertConfig, LectureBERT)
