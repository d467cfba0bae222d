"""How a translation model of Hugging Face's form wants to be searched: `generation_config.json`.

Every field is honoured, or known to change nothing, or refused by name. Older folders have the same
fields in their `config.json`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..beam import BeamSearch
from .fields import Field, Fields, Only, ours_of
from .rules import WeightsError

FIELDS = Fields(
    (
        Field("num_beams", "num_beams", 1),
        Field("length_penalty", "length_penalty", 1.0),
        Field("num_return_sequences", "num_return", 1),
        Field("renormalize_logits", "renormalize", False),
        # Read one by one.
        Field("max_length", "max_length", 0),
        Field("max_new_tokens", "max_new_tokens", 0),
        Only("early_stopping", (False, True, "never")),
        # Another way to choose tokens, which nothing here knows.
        Only("do_sample", (False,)),
        Only("min_length", (0,)),
        Only("min_new_tokens", (0,)),
        Only("forced_bos_token_id", (None,)),
        Only("force_bos_token_to_be_generated", (False,)),
        Only("repetition_penalty", (1.0,)),
        Only("encoder_repetition_penalty", (1.0,)),
        Only("no_repeat_ngram_size", (0,)),
        Only("encoder_no_repeat_ngram_size", (0,)),
        Only("num_beam_groups", (1,)),
        Only("diversity_penalty", (0.0,)),
        Only("penalty_alpha", (None, 0.0)),
        Only("begin_suppress_tokens", (None, [])),
        Only("sequence_bias", (None,)),
        Only("exponential_decay_length_penalty", (None,)),
        Only("constraints", (None,)),
        Only("force_words_ids", (None,)),
        Only("remove_invalid_values", (False,)),
        Only("guidance_scale", (None, 1.0)),
        Only("watermarking_config", (None,)),
        Only("dola_layers", (None,)),
        Only("prompt_lookup_num_tokens", (None,)),
        Only("token_healing", (False,)),
        Only("stop_strings", (None,)),
        Only("max_time", (None,)),
    ),
    # Of sampling, of how it is computed, and of what is answered beside tokens.
    frozenset(
        """
        _from_model_config assistant_confidence_threshold assistant_early_exit
        assistant_ensemble_weight assistant_lookbehind bad_words_ids cache_config
        cache_implementation compile_config decoder_start_token_id disable_compile epsilon_cutoff
        eta_cutoff is_assistant low_memory max_cache_len max_matching_ngram_size min_p
        num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states
        output_logits output_scores prefill_chunk_size return_dict_in_generate return_legacy_cache
        speculation_type suppress_tokens target_lookbehind temperature top_h top_k top_p typical_p
        use_cache use_mtp
        """.split()
    ),
)
NAMES = frozenset(entry.theirs for entry in FIELDS.entries) | FIELDS.idle
"""Fields that say how a model is searched or sampled, and nothing of its forward pass."""
TOKENS = {"bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_eos_token_id"}

NEW_TOKENS = 20
"""How many there are by default."""
# Of a `config.json` of Marian's, where there is no other file.
DEFAULTS = {"decoder_start_token_id": 58100, "eos_token_id": 0, "forced_eos_token_id": 0}


def search_settings(folder: str | Path) -> tuple[BeamSearch, int, int]:
    """How a folder's model is to be searched, as transformers would.

    Args:
      folder: with the `config.json` of a translation model; with `generation_config.json`, or
        of the time when `config.json` said it.

    Returns:
      The settings, the token that targets begin with, and the one that they end with.

    Raises:
      WeightsError: a field is not supported, or says nothing that can be done.
    """
    folder = Path(folder)
    source, config = folder / "generation_config.json", _read(folder / "config.json")
    if source.is_file():
        given = _read(source)
    else:
        source, asked = folder / "config.json", NAMES | TOKENS
        given = DEFAULTS | {name: value for name, value in config.items() if name in asked}
    # Null is what transformers would fill in.
    theirs: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    where = str(source)
    settings = ours_of(FIELDS, theirs, where)
    start = "decoder_start_token_id" if "decoder_start_token_id" in theirs else "bos_token_id"
    eos_id, start_id = _token(theirs, "eos_token_id", where), _token(theirs, start, where)
    # The start token is counted.
    by_default = min(NEW_TOKENS + 1, config.get("max_position_embeddings") or NEW_TOKENS + 1)
    longest = settings.pop("max_length") or by_default
    settings["max_new_tokens"] = settings["max_new_tokens"] or longest - 1
    settings["early_stopping"] = theirs.get("early_stopping", False)
    settings["suppressed_tokens"] = _suppressed(theirs, eos_id, where)
    settings["force_eos"] = _ends(theirs, eos_id, where)
    try:
        search = BeamSearch(**settings, penalty_form="power", max_extra_tokens=None)
    except ValueError as error:
        raise WeightsError(f"{where}: {error}") from error
    return search, start_id, eos_id


def _read(file: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read ({error}): restore it") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{file} is no JSON object: restore it")
    return content


def _token(theirs: Mapping[str, Any], name: str, source: str) -> int:
    """The one token of a field, which may be a list of it."""
    value = theirs.get(name)
    tokens = value if isinstance(value, list) else [value]
    if len(tokens) != 1 or type(tokens[0]) is not int:
        raise WeightsError(f"{source}: {name} {value!r} is not supported: only one token's id")
    return tokens[0]


def _ends(theirs: Mapping[str, Any], eos_id: int, source: str) -> bool:
    """Whether the last token that there is room for is the end token."""
    name = "forced_eos_token_id"
    if name not in theirs:
        return False
    if _token(theirs, name, source) != eos_id:
        raise WeightsError(
            f"{source}: {name} {theirs[name]!r} is not supported: only eos_token_id {eos_id}"
        )
    return True


def _suppressed(theirs: Mapping[str, Any], eos_id: int, source: str) -> tuple[int, ...]:
    """Tokens that are never chosen."""
    words = theirs.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(_are_ids(w) and len(w) == 1 for w in words):
        raise WeightsError(
            f"{source}: bad_words_ids {words!r} is not supported: only words of one token"
        )
    tokens = theirs.get("suppress_tokens", [])
    if not _are_ids(tokens) or eos_id in tokens:
        raise WeightsError(
            f"{source}: suppress_tokens {tokens!r} is not supported: only ids of tokens other "
            f"than eos_token_id {eos_id}"
        )
    # The end is never a bad word, whatever they say.
    return tuple(sorted({*(word[0] for word in words), *tokens} - {eos_id}))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
