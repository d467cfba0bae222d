"""ALBERT: a BERT whose layers share their parameters, with narrow embeddings.

Lan et al. 2020, "ALBERT: a lite BERT for self-supervised learning of language representations",
section 3 and table 1. A linear map projects the embeddings to the width of the layers. The layers
are divided into groups of consecutive layers, and all layers of a group run the same few inner
layers with the same parameters. The published models have one group with one inner layer. The
presets have the sizes of version 2, without dropout in the layers. As in the authors' code, and
unlike in transformers, dropout also applies to the output of the feed-forward block. The second
training objective of ALBERT is to predict the order of two segments.
"""

import dataclasses
from typing import ClassVar

from ...data.common.fields import Rate, require
from ..config import Activation, Count, Size
from ..registry import Family, Preset, preset_maker
from .encoder import (
    ENCODER_AXES,
    ENCODER_HEADS,
    Encoder,
    EncoderConfig,
    head_field,
    smallest_inputs,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlbertConfig(EncoderConfig):
    """The configuration of an ALBERT and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    projects_embeddings: ClassVar[bool] = True
    pair_dropout: ClassVar[bool] = True

    d_embedding: Size = 128  # pyright: ignore[reportIncompatibleVariableOverride]
    """Width of the embeddings, which a linear map projects to D."""
    num_groups: Size = 1
    """Number of groups of consecutive layers that share their parameters, at most `num_layers`."""
    inner_layers: Size = 1  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of inner layers in each layer of a group. Each inner layer has its own parameters."""
    activation: Activation = "gelu_tanh"
    """Non-linearity of the feed-forward layers and of the head for masked words."""
    dropout_rate: Rate = 0.0
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers."""
    classifier_dropout: Rate | None = 0.1
    """Dropout rate of the inputs of classifiers; if None, `dropout_rate`. Question answering has no
    dropout before its head."""
    num_token_types: Count = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of token types; token types distinguish the two segments of an input."""
    body_pooler: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a model without a head also returns the pooled first token."""
    head: str = head_field((*ENCODER_HEADS, "pretraining"), default="pretraining")

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = f"num_groups must be at most num_layers {self.num_layers}, got {self.num_groups}"
        require(self.num_groups <= max(self.num_layers, 1), problem)

    @property
    def classifier_dropout_rate(self) -> float:
        """Dropout rate of the input of the head."""
        return super().classifier_dropout_rate if self.head_spec.has_dropout else 0.0

    @property
    def layer_order(self) -> tuple[int, ...]:
        """For each (inner) layer in order of execution, the index of its stored parameters."""
        size = self.num_layers / self.num_groups
        return tuple(
            int(layer / size) * self.inner_layers + inner
            for layer in range(self.num_layers)
            for inner in range(self.inner_layers)
        )


class ALBERT(Encoder):
    """The ALBERT model with its head."""


_preset = preset_maker(
    AlbertConfig,
    "Lan et al. 2020",
    ("num_layers", "d_model", "num_heads"),
    vocab_size=30000,
    max_length=512,
)

PRESETS: dict[str, Preset] = {
    "albert-base": _preset("12M", (12, 768, 12)),
    "albert-large": _preset("18M", (24, 1024, 16)),
    "albert-xlarge": _preset(
        "60M", (24, 2048, 16), note="the paper says 60M, computed from its sizes: 59M"
    ),
    "albert-xxlarge": _preset(
        "235M", (12, 4096, 64), note="the paper says 235M, computed from its sizes: 223M"
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "albert-base": 11_813_810, "albert-large": 17_847_474, "albert-xlarge": 59_021_490,
    "albert-xxlarge": 223_158_450,
}
# fmt: on

FAMILY = Family(
    config=AlbertConfig,
    module=ALBERT,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.albert",
)
