"""MPNet: a BERT with relative position biases in the attention scores, trained on permuted tokens.

Song et al. 2020, "MPNet: masked and permuted pre-training for language understanding". As in the
authors' code, positions are learned as in RoBERTa, and all layers share one table of biases, with
T5's distance buckets. Unlike in the paper, pretraining masks tokens, but does not permute tokens.
"""

import dataclasses

from ..config import Count, Execution
from ..nn.cache import Cache
from ..nn.masks import AnyArray, Size
from ..nn.positions import Positions, bucket_bias, make_positions, query_and_key_positions
from ..nn.typing import Int
from ..registry import Family, Preset
from .encoder import ENCODER_AXES, ENCODER_HEADS, Encoder, head_field, smallest_inputs
from .roberta import RobertaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MPNetConfig(RobertaConfig):
    """The configuration of an MPNet and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    num_token_types: Count = 0
    """Number of token types."""
    head: str = head_field(ENCODER_HEADS)

    @property
    def scores_by_distance(self) -> bool:
        """Whether attention scores depend on the distance between query and key."""
        return True


def _positions(
    config: MPNetConfig,
    execution: Execution,
    position_ids: Int[AnyArray, "#B #T"],
    length: Size,
    *,
    cache: Cache | None,
    causal: bool,
) -> Positions:
    """Returns the position vectors, and the biases of the attention scores."""
    vectors = make_positions(config, execution, position_ids, length, cache=cache, causal=causal)
    queries, keys, _ = query_and_key_positions(position_ids, length, cache)
    bias = bucket_bias(config, execution, bidirectional=True)
    return dataclasses.replace(vectors, bias=bias(queries, keys))


class MPNet(Encoder):
    """The MPNet model with its head."""

    make_positions = staticmethod(_positions)


_BASE = MPNetConfig(vocab_size=30_527, max_length=512, num_layers=12, d_model=768, num_heads=12)

PRESETS: dict[str, Preset] = {
    "mpnet-base": Preset(_BASE, "Song et al. 2020", "110M"),
    "all-mpnet-base-v2": Preset(
        _BASE.with_head("none", ()),
        "Reimers and Gurevych 2019",
        "109M",
    ),
}

FAMILY = Family(
    config=MPNetConfig,
    module=MPNet,
    presets=PRESETS,
    num_parameters={"mpnet-base": 109_518_527, "all-mpnet-base-v2": 109_486_464},
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.mpnet",
)
