"""What a folder with a model was made for: of a run, or in Hugging Face's form."""

import dataclasses
from pathlib import Path
from typing import Any

from ...data.tasks.translation import start_and_end
from ...data.tokenizers.base import Tokenizer, load_tokenizer
from ...models.decoding.request import GenerationRequest
from ...models.hf.generation_config import GENERATION, generation_arguments, stored_request
from ...models.hub import local_folder
from ...models.load import check_run, is_foreign, model_config, object_field, read_fields
from ...models.nn.heads import HEADS
from ..config import TrainConfig
from ..errors import RunError
from ..recipes import recipe
from .config_json import from_dict
from .params_only_run import IMPORTED_FROM, TOKENIZER

TARGETS = {"regression": "regression", "multi_label_classification": "multi_label"}
"""For each `problem_type` of a classifier what its labels are."""


def open_run(folder: str | Path) -> tuple[TrainConfig, Tokenizer]:
    """The configuration and tokenizer of a folder with a model.

    Args:
      folder: a run folder; or one in Hugging Face's form, or a name on its hub, whose configuration
        is that of a run that would have made such a model.

    Raises:
      FileNotFoundError: it is neither.
      UserError: it is broken, or holds what there is no model or tokenizer for.
    """
    folder = local_folder(folder)
    fields = read_fields(folder)
    if is_foreign(fields):
        return _open_foreign(folder, fields)
    check_run(fields, folder)
    train = object_field(fields, "train", folder)
    return from_dict({**train, "model": fields["model"]}), load_tokenizer(folder / TOKENIZER)


def _open_foreign(folder: Path, fields: dict[str, Any]) -> tuple[TrainConfig, Tokenizer]:
    model: Any = model_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.target.vocab_size > model.vocab_size:
        raise RunError(
            f"the tokenizer of {folder} has {tokenizer.target.vocab_size:,} tokens, more than the "
            f"{model.vocab_size:,} of its model: give the model's own"
        )
    sources = model.source_vocab_size or model.vocab_size
    if tokenizer.vocab_size > sources:
        raise RunError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size:,} tokens for sources, more than "
            f"the {sources:,} of its model: give the model's own"
        )
    config = recipe(HEADS[model.head].default_recipe)
    changes: dict[str, Any] = {"length": min(config.data.length, model.max_length)}
    if model.head == "sequence_classification":
        changes["target"] = _target(fields, len(model.labels))
    data = dataclasses.replace(config.data, **changes)
    return dataclasses.replace(config, model=model, data=data, sample_prompt=None), tokenizer


def _target(fields: dict[str, Any], num_labels: int) -> str:
    """What the labels of a classifier are, as transformers takes it."""
    kind = fields.get("problem_type") or ("regression" if num_labels == 1 else None)
    return TARGETS.get(kind, "single_label") if kind else "single_label"


def generation_defaults(folder: str | Path) -> dict[str, Any] | None:
    """What the folder of a model that writes asks of `models.generate`, in its words.

    Args:
      folder: of either form, or its name on the hub.

    Returns:
      None where it does not say, as a run that was trained here, or where the model does not write.

    Raises:
      UserError: it asks for what is not supported, or is of an older version.
    """
    folder = local_folder(folder)
    fields = read_fields(folder)
    writes = HEADS[model_config(folder).head].generates
    says = is_foreign(fields) or GENERATION in fields
    if writes and not says and IMPORTED_FROM in fields:
        raise RunError(f"{folder} was imported by an older flaxzoo: import it once more")
    return generation_arguments(folder) if writes and says else None


def beam_search_defaults(folder: str | Path, tokenizer: Tokenizer) -> GenerationRequest | None:
    """How the model of a folder asks to be searched; None: it does not say.

    Args:
      folder: that of a translation model, of either form, or its name on the hub.
      tokenizer: the folder's.

    Raises:
      UserError: it asks for what is not supported, or for other tokens than the tokenizer's to
        begin and to end with.
    """
    folder = local_folder(folder)
    model: Any = model_config(folder)
    if model.head != "seq2seq_lm" or generation_defaults(folder) is None:
        return None
    request = stored_request(folder, model.max_length)
    ids = [request.start_id, *request.eos_ids]
    if tuple(ids) != start_and_end(tokenizer):
        raise RunError(
            f"{folder}: targets begin and end with tokens {ids}, but those of its tokenizer are "
            f"{list(start_and_end(tokenizer))}: give the model's own"
        )
    return request
