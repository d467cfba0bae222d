"""Reads what a folder with a model says besides its parameters: a run or Hugging Face's form."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ...data.common.errors import RunError, UserError
from ...data.common.json_text import JsonObject
from ...data.tasks.sequence_classification import SequenceClassificationData, Target
from ...data.tasks.texts_to_predict import IMPORTED
from ...data.tasks.translation import start_and_end
from ...data.tokenizers.base import Tokenizer, load_tokenizer
from ...models.config import TransformerConfig
from ...models.decoding.request import GenerationRequest
from ...models.encoders.encoder import EncoderConfig
from ...models.hf.generation_config import GENERATION, generation_arguments, stored_request
from ...models.hf.save import check_vocabulary
from ...models.hub import local_folder
from ...models.loading import (
    check_run,
    is_foreign,
    model_config,
    naming_writer,
    object_field,
    read_fields,
)
from ...models.nn.heads import HEADS
from ..config import TrainConfig
from ..recipes import RECIPES, recipe
from .config_json import from_dict
from .params_only_run import IMPORTED_FROM, TOKENIZER

TARGETS: Mapping[str, Target] = {
    "regression": "regression",
    "multi_label_classification": "multi_label",
}
"""The kind of labels for each `problem_type` of a classifier; any other is single_label."""

PADDING_ROWS = 1024
"""Published embeddings have at most about as many rows without a token, as padding (phi-2: 943)."""


def open_run(folder: str | Path) -> tuple[TrainConfig, Tokenizer]:
    """Returns the configuration and tokenizer of a folder with a model.

    Args:
        folder: A run folder; or a folder in Hugging Face's form, or a name on the hub, whose
          configuration is that of a run that would have made such a model.

    Raises:
        FileNotFoundError: The folder is neither.
        UserError: It is broken, or its model or tokenizer is not supported.
    """
    folder = local_folder(folder)
    fields = read_fields(folder)
    if is_foreign(fields):
        return _open_foreign(folder, fields)
    config = config_of_run(folder)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    _check_vocabulary(folder, config.model, tokenizer)
    return config, tokenizer


def config_of_run(folder: Path) -> TrainConfig:
    """Returns the configuration in the `config.json` of a run.

    Raises:
        UserError: It is broken, or that of something else.
    """
    fields = read_fields(folder)
    check_run(fields, folder)
    train = object_field(fields, "train", folder)
    with naming_writer(fields, folder):
        return from_dict({**train, "model": fields["model"]})


def _open_foreign(folder: Path, fields: JsonObject) -> tuple[TrainConfig, Tokenizer]:
    """Returns the configuration of a run that would have made the folder, and its tokenizer."""
    model = model_config(folder)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(folder, model, tokenizer)
    pads = fields.get("pad_token_id"), tokenizer.special_ids.pad
    if isinstance(model, EncoderConfig) and None not in pads and pads[0] != pads[1]:
        raise RunError(
            f"the tokenizer of {folder} is of another model: it has {tokenizer.vocab_size:,} "
            f"tokens and pads with {pads[1]}, the model has {model.vocab_size:,} and pads with "
            f"{pads[0]}: give the model's own"
        )
    return config_of_model(model, fields.get("problem_type")), tokenizer


def _check_vocabulary(folder: Path, model: TransformerConfig, tokenizer: Tokenizer) -> None:
    """Raises RunError if the tokenizer has ids beyond the rows of the model's embedding.

    Fewer ids than rows are usual: published embeddings are padded to a multiple of some number.
    """
    try:
        check_vocabulary(tokenizer, model, f"the tokenizer of {folder}")
    except UserError as error:
        raise RunError(str(error)) from None


def vocabulary_note(
    folder: str | Path, model: TransformerConfig, tokenizer: Tokenizer
) -> str | None:
    """Returns a note if many rows of a published embedding have no token; None for other folders.

    The tokenizer may then be another model's, which cannot be told for sure.
    """
    tokens, rows = tokenizer.vocab_size, model.source_vocab_size or model.vocab_size
    if rows - tokens <= PADDING_ROWS or not is_foreign(read_fields(local_folder(folder))):
        return None
    return (
        f"note: the tokenizer of {folder} has {tokens:,} tokens, its model {rows:,}: make sure "
        "that it is the model's own"
    )


def config_of_model(model: TransformerConfig, problem_type: object = None) -> TrainConfig:
    """Returns the configuration of a run that would have made a model.

    Args:
        model: The configuration of the model.
        problem_type: The kind of a classifier's labels, as transformers names it; by default one
          label is a number, and several exclude each other.
    """
    config = recipe(HEADS[model.head].default_recipe)
    data = dataclasses.replace(config.data, length=min(config.data.length, model.max_length))
    if model.head == "sequence_classification" and isinstance(data, SequenceClassificationData):
        by_count = "regression" if len(model.labels) == 1 else None
        target = TARGETS.get(str(problem_type or by_count), "single_label")
        data = dataclasses.replace(data, target=target, source=IMPORTED, validation=None)
    return dataclasses.replace(config, model=model, data=data, sample_prompt=None)


def begin_with(name: str, folder: Path) -> TrainConfig:
    """Returns the configuration of a recipe for a run that begins with the model of a folder.

    A published model has the settings of a preset of its size, whether the folder is in Hugging
    Face's form or an imported run. A run that was trained here has the recipe's settings, and the
    precision and rematerialization that it was trained with.

    Args:
        name: A recipe that trains models of any family.
        folder: A folder that has a `config.json`.

    Raises:
        UserError: The `config.json` is broken, or its model is not supported.
    """
    config, of_model = RECIPES[name].config, RECIPES[name].of_model
    fields = read_fields(folder)
    if of_model is not None and (is_foreign(fields) or IMPORTED_FROM in fields):
        return dataclasses.replace(of_model(model_config(folder)), init_from=config.init_from)
    made = config_of_run(folder).execution
    execution = dataclasses.replace(config.execution, dtype=made.dtype, remat=made.remat)
    return dataclasses.replace(config, execution=execution)


def generation_defaults(folder: str | Path) -> JsonObject | None:
    """Returns the arguments of `models.generate` that are stored with a model.

    Args:
        folder: A run folder, a folder in Hugging Face's form, or a name on the hub.

    Returns:
        The arguments, under Hugging Face's names; None if none are stored, as in a run that was
        trained here, or if the model does not generate.

    Raises:
        UserError: A setting is not supported.
    """
    folder = local_folder(folder)
    fields = read_fields(folder)
    generates = HEADS[model_config(folder).head].generates
    stored = is_foreign(fields) or GENERATION in fields
    return generation_arguments(folder) if generates and stored else None


def target_start(folder: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a decoder reads before the first token of a target's text.

    These are the start token of the stored search with the token that it forces, as the language of
    an mBART-50's target, or else those that the frame puts before a text; or the start token that
    models are trained with here.

    Args:
        folder: A run folder, a folder in Hugging Face's form, or a name on the hub.
        tokenizer: The tokenizer of the folder.

    Raises:
        UserError: See ``beam_search_defaults``; or the vocabulary has no start token.
    """
    request = beam_search_defaults(folder, tokenizer)
    if request is None or request.start_id is None:
        return start_and_end(tokenizer)[:1]
    first = request.forced_bos_id
    return (request.start_id, *(tokenizer.target.frame.before if first is None else (first,)))


def beam_search_defaults(folder: str | Path, tokenizer: Tokenizer) -> GenerationRequest | None:
    """Returns the search that is stored with a translation model; None if none is stored.

    Args:
        folder: A run folder, a folder in Hugging Face's form, or a name on the hub.
        tokenizer: The tokenizer of the folder.

    Raises:
        UserError: A setting is not supported, or the start and end tokens are not those of the
          tokenizer.
    """
    folder = local_folder(folder)
    model = model_config(folder)
    if model.head != "seq2seq_lm" or generation_defaults(folder) is None:
        return None
    request = stored_request(folder, model.max_length)
    ids = [request.start_id, *request.eos_ids]
    start, end = start_and_end(tokenizer)
    # A BART's targets start with the token that ends them.
    if ids not in ([start, end], [end, end]):
        raise RunError(
            f"{folder}: targets begin and end with tokens {ids}, but those of its tokenizer are "
            f"{list(start_and_end(tokenizer))}: give the model's own"
        )
    return request
