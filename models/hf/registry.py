"""The families that can be read and written, by the name that a `config.json` has for them."""

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any

from ...data.errors import suggest
from ..bert import BertConfig
from ..config import TransformerConfig
from ..gpt import GPTConfig
from ..transformer import EncoderDecoderConfig
from . import bert, gpt, marian
from . import equivalent_params as basis
from .tensor_mapping import TensorMapping, WeightsError


@dataclasses.dataclass(frozen=True)
class Family:
    """What there is to know of a family: its configuration either way, and its tensors."""

    config: Callable[[Mapping[str, Any], str], TransformerConfig]
    """Ours of theirs, given where theirs stands, for messages."""
    fields: Callable[[Any], dict[str, Any]]
    """Theirs of ours."""
    table: Callable[[Any], TensorMapping]
    in_its_terms: Callable[[Any, Any], tuple[Any, Any]] = lambda config, params: (config, params)
    """Another configuration and parameters of ours for the same model, nearer to theirs."""
    as_stored: Callable[[Any, Callable[[], Set[str]]], Any] = lambda config, names: config
    """The configuration again, given the names of the tensors, for what only these say."""


BERT = Family(bert.config_from_hf, bert.config_to_hf, bert.tensor_mapping, as_stored=bert.as_stored)
GPT = Family(gpt.config_from_hf, gpt.config_to_hf, gpt.tensor_mapping, basis.as_gpt2)
MARIAN = Family(marian.config_from_hf, marian.config_to_hf, marian.tensor_mapping, basis.as_marian)
FAMILIES: dict[str, Family] = {
    "bert": BERT,
    "roberta": BERT,
    "distilbert": BERT,
    "openai-gpt": GPT,
    "gpt2": GPT,
    "marian": MARIAN,
    "pegasus": MARIAN,
}
"""By their `model_type`."""
FAMILY_OF: dict[type[TransformerConfig], Family] = {
    BertConfig: BERT,
    GPTConfig: GPT,
    EncoderDecoderConfig: MARIAN,
}


def family_of(config: TransformerConfig) -> Family:
    """The family that writes models of ours.

    Raises:
      WeightsError: there is none.
    """
    if type(config) not in FAMILY_OF:
        raise WeightsError(f"models of {type(config).__name__} have no form but ours")
    return FAMILY_OF[type(config)]


def family(model_type: Any, source: str) -> Family:
    """The family of a `model_type`.

    Raises:
      WeightsError: there is none of that name.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise WeightsError(
            f"{source} is of the family {model_type!r}, which is not here: "
            f"{suggest(str(model_type), list(FAMILIES))}"
        )
    return FAMILIES[model_type]
