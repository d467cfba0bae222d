"""A model in Hugging Face's form as a run folder: to be used, and to begin other runs with."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.tokenizer import load_tokenizer
from ..models.config import architecture_of
from ..models.loading import CONFIG_FILE, load, read_fields
from ..models.weights.folder import config_of_weights
from .config import TrainConfig, to_dict
from .errors import RunError
from .model_folder import IMPORTED_FROM, check_place_is_free, make_model_folder
from .recipes import recipe
from .state import count_parameters

RECIPES: Mapping[str, str] = {
    "none": "bert-quickstart",
    "pretraining": "bert-quickstart",
    "masked_lm": "bert-quickstart",
    "next_sentence": "bert-quickstart",
    "sequence": "bert-classify",
    "token": "bert-tag",
    "span": "bert-span",
    "choice": "bert-choice",
    "causal_lm": "quickstart",
}
"""For each head the recipe that says how texts become rows for it."""


def import_model(source: str | Path, output: str | Path) -> str:
    """Makes a run folder of a folder in Hugging Face's form.

    Args:
      source: with `config.json`, safetensors and the tokenizer's files.
      output: the folder that is made, whole or not at all.

    Returns:
      What it is, in a line.

    Raises:
      FileNotFoundError: `source` has no config.json.
      ValueError: it is broken, or holds what there is no model or tokenizer for.
      RunError: `output` exists, or the tokenizer is not the model's.
    """
    source, output = Path(source), Path(output)
    check_place_is_free(output)
    _check_head(source)
    tokenizer = load_tokenizer(source)
    model, params = load(source)
    config: Any = model.config
    if tokenizer.vocab_size > config.vocab_size:
        raise RunError(
            f"the tokenizer of {source} has {tokenizer.vocab_size:,} tokens, more than the "
            f"{config.vocab_size:,} of its model: give the model's own"
        )
    fields = to_dict(_as_if_trained(config))
    facts = {"model": fields.pop("model"), "train": fields, IMPORTED_FROM: str(source.resolve())}
    make_model_folder(output, facts, tokenizer.save, 0, params)
    kind = f"{architecture_of(config)}, head {config.head}"
    return f"{kind}, {count_parameters(params):,} parameters, from {source}"


def _check_head(source: Path) -> None:
    """Raises RunError for a model that no run folder can hold."""
    config: Any = config_of_weights(read_fields(source), str(source / CONFIG_FILE))
    if config.head not in RECIPES:
        raise RunError(
            f"{source} holds a translation model, whose two vocabularies a run folder has no place "
            "for yet: read it in Python with models.load"
        )


def _as_if_trained(model: Any) -> TrainConfig:
    """The configuration of a run that would have made such a model."""
    config = recipe(RECIPES[model.head])
    data = config.data
    length = min(data.length, model.max_length)
    return dataclasses.replace(
        config, model=model, data=dataclasses.replace(data, length=length), sample_prompt=None
    )
