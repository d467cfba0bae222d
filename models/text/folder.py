"""Opens a folder with a text model: a run folder or a folder in the Hugging Face format."""

from pathlib import Path

from ...data.common.errors import RunError, UserError
from ...data.common.fields import require
from ...data.common.json_text import JsonObject
from ...data.tasks.translation import start_and_end
from ...data.tokenizers.base import Tokenizer
from ...data.tokenizers.load import load_tokenizer
from ..config import TransformerConfig
from ..decoding.request import GenerationRequest
from ..encoders.encoder import EncoderConfig
from ..heads.specs import HEADS
from ..hf.generation_config import GENERATION, generation_arguments, stored_request
from ..hf.save import check_vocabulary
from ..hub import local_folder
from ..loading import model_config
from ..run_files import TOKENIZER, is_foreign, read_fields

PADDING_ROWS = 1024
"""The approximate maximum number of rows without a token in published embedding tables. For
example, phi-2 has 943 such rows."""


def open_folder(folder: str | Path) -> tuple[TransformerConfig, Tokenizer]:
    """Returns the configuration and the tokenizer of the model in a folder.

    Args:
        folder: A run folder, a folder in the Hugging Face format, or a name on the hub.

    Raises:
        FileNotFoundError: No such folder or model exists.
        UserError: The folder is broken, or its model or tokenizer is not supported.
    """
    # A run keeps its tokenizer in a subfolder.
    folder = local_folder(folder)
    fields = read_fields(folder)
    model = model_config(folder)
    tokenizer = load_tokenizer(folder if is_foreign(fields) else folder / TOKENIZER)
    _check_vocabulary(folder, model, tokenizer)
    if is_foreign(fields):
        _check_padding(folder, fields, model, tokenizer)
    return model, tokenizer


def _check_vocabulary(folder: Path, model: TransformerConfig, tokenizer: Tokenizer) -> None:
    """Raises RunError if the model's embedding table lacks a row for an id of the tokenizer.

    An embedding table may have more rows than there are ids, because the number of rows in
    published models is often rounded up to a multiple of a power of two.
    """
    try:
        check_vocabulary(tokenizer, model, f"the tokenizer of {folder}")
    except UserError as error:
        raise RunError(str(error)) from None


def _check_padding(
    folder: Path, fields: JsonObject, model: TransformerConfig, tokenizer: Tokenizer
) -> None:
    """Raises RunError if an encoder and its tokenizer have different padding tokens."""
    pads = fields.get("pad_token_id"), tokenizer.special_ids.pad
    require(
        not isinstance(model, EncoderConfig) or None in pads or pads[0] == pads[1],
        f"the tokenizer of {folder} belongs to another model: it has {tokenizer.vocab_size:,} "
        f"tokens and pads with {pads[1]}, the model has {model.vocab_size:,} and pads with "
        f"{pads[0]}: give the tokenizer of the model",
        RunError,
    )


def vocabulary_note(
    folder: str | Path, model: TransformerConfig, tokenizer: Tokenizer
) -> str | None:
    """Returns a note if many rows of a published embedding table have no token, otherwise None.

    In this case, the tokenizer may belong to another model, but this is not certain.
    """
    tokens, rows = tokenizer.vocab_size, model.input_vocab_size
    if rows - tokens <= PADDING_ROWS or not is_foreign(read_fields(local_folder(folder))):
        return None
    return (
        f"note: the tokenizer of {folder} has {tokens:,} tokens, and its model has {rows:,} rows: "
        "make sure that it belongs to the model"
    )


def generation_defaults(folder: str | Path) -> JsonObject | None:
    """Returns the arguments of `models.generate` that are stored with a model.

    Args:
        folder: A run folder, a folder in the Hugging Face format, or a name on the hub.

    Returns:
        The arguments with their names in Hugging Face's format. None if no arguments are stored (as
        in a run trained with flaxzoo) or if the model does not generate text.

    Raises:
        UserError: A setting is not supported.
    """
    folder = local_folder(folder)
    fields = read_fields(folder)
    generates = HEADS[model_config(folder).head].generates
    stored = is_foreign(fields) or GENERATION in fields
    return generation_arguments(folder) if generates and stored else None


def target_start(folder: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a decoder reads before the text of a target.

    If search settings are stored with the model, the first token is their start token. It is
    followed by their forced first token (such as the target language of mBART-50). If they force no
    token, the special tokens that the tokenizer adds before a text follow instead. If no search
    settings are stored, the only token is the start token that flaxzoo uses in training.

    Args:
        folder: A run folder, a folder in the Hugging Face format, or a name on the hub.
        tokenizer: The tokenizer of the folder.

    Raises:
        UserError: See ``beam_search_defaults``; or the vocabulary has no start token.
    """
    request = beam_search_defaults(folder, tokenizer)
    if request is None or request.decoder_start_token_id is None:
        return start_and_end(tokenizer)[:1]
    first = request.forced_bos_token_id
    return (
        request.decoder_start_token_id,
        *(tokenizer.target.frame.before if first is None else (first,)),
    )


def beam_search_defaults(folder: str | Path, tokenizer: Tokenizer) -> GenerationRequest | None:
    """Returns the search settings that are stored with a translation model, or None.

    Args:
        folder: A run folder, a folder in the Hugging Face format, or a name on the hub.
        tokenizer: The tokenizer of the folder.

    Raises:
        UserError: A setting is not supported, or the start and end tokens differ from the
          tokenizer's start and end tokens.
    """
    folder = local_folder(folder)
    model = model_config(folder)
    if model.head != "seq2seq_lm" or generation_defaults(folder) is None:
        return None
    # The tokenizer and the stored search must begin and end targets with the same tokens.
    request = stored_request(folder, model.max_length)
    ids = [request.decoder_start_token_id, *request.eos_token_id]
    start, end = start_and_end(tokenizer)
    # The targets of a BART model begin and end with the same token.
    require(
        ids in ([start, end], [end, end]),
        f"{folder}: targets begin and end with tokens {ids}, but the tokenizer uses "
        f"{list(start_and_end(tokenizer))}: give the tokenizer of the model",
        RunError,
    )
    return request
