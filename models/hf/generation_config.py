"""Generation settings under transformers' names, from arguments or a `generation_config.json`.

A field that changes the generated tokens is applied. If it is not supported, it is rejected by
name. Older folders have the same fields in their `config.json`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ...data.common.errors import UserError
from ...data.common.fields import field_names, require, without_none
from ...data.common.json_text import JsonObject, JsonValue, read_object
from ..decoding.request import GenerationRequest, Sampling
from ..hub import local_folder
from .config_mapping import ConfigMapping, Field, FixedField, Settings, settings_from_hf
from .registry import mapping_of_family, mapping_of_type
from .tensors.mapping import WeightsError

HFSettings: TypeAlias = Mapping[str, JsonValue]
"""Fields of transformers' `GenerationConfig`, by name."""

UNSUPPORTED_SAMPLING = ConfigMapping(
    (
        FixedField("top_h", (None,)),
        FixedField("typical_p", (1.0,)),
        FixedField("epsilon_cutoff", (0.0,)),
        FixedField("eta_cutoff", (0.0,)),
    )
)
"""The fields of unsupported sampling methods. Beam search ignores these fields."""
UNSUPPORTED_NAMES = frozenset(field.hf for field in UNSUPPORTED_SAMPLING.fields)
TOKENS = frozenset(
    """
    bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id
    pad_token_id
    """.split()
)
SAMPLING = {"temperature", "top_k", "top_p", "min_p"}
SEQUENCES = frozenset({"bad_words_ids", "suppress_tokens"})
FIELDS = ConfigMapping(
    (
        *(
            Field(name, name, default)
            for name, default in {
                "num_beams": 1,
                "length_penalty": 1.0,
                "num_return_sequences": 1,
                "renormalize_logits": False,
                "do_sample": False,
                "repetition_penalty": 1.0,
                "temperature": 1.0,
                "top_k": 50,
                "top_p": 1.0,
                "max_length": 0,
                "max_new_tokens": 0,
            }.items()
        ),
        Field("min_p", "min_p", None, kind=float),
        *(
            Field(name, name, None, kind=int)
            for name in ("min_length", "min_new_tokens", "no_repeat_ngram_size")
        ),
        FixedField("early_stopping", (False, True, "never")),
        FixedField("force_bos_token_to_be_generated", (False,)),
        FixedField("encoder_repetition_penalty", (1.0,)),
        FixedField("encoder_no_repeat_ngram_size", (0,)),
        FixedField("num_beam_groups", (1,)),
        FixedField("diversity_penalty", (0.0,)),
        FixedField("penalty_alpha", (None, 0.0)),
        FixedField("begin_suppress_tokens", (None, [])),
        FixedField("sequence_bias", (None,)),
        FixedField("exponential_decay_length_penalty", (None,)),
        FixedField("constraints", (None,)),
        FixedField("force_words_ids", (None,)),
        FixedField("remove_invalid_values", (False,)),
        FixedField("guidance_scale", (None, 1.0)),
        FixedField("watermarking_config", (None,)),
        FixedField("dola_layers", (None,)),
        FixedField("prompt_lookup_num_tokens", (None,)),
        FixedField("token_healing", (False,)),
        FixedField("stop_strings", (None,)),
        FixedField("max_time", (None,)),
    ),
    # Ignore fields that `request_from_hf` handles itself, and fields that only affect how tokens
    # are computed or what is returned in addition to tokens.
    TOKENS
    | SEQUENCES
    | UNSUPPORTED_NAMES
    | frozenset(
        """
        _from_model_config assistant_confidence_threshold assistant_early_exit
        assistant_ensemble_weight assistant_lookbehind cache_config cache_implementation
        compile_config disable_compile is_assistant low_memory max_cache_len max_matching_ngram_size
        num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states
        output_logits output_scores prefill_chunk_size return_dict_in_generate return_legacy_cache
        speculation_type target_lookbehind use_cache use_mtp
        """.split()
    ),
)
_NAMES = frozenset(field.hf for field in FIELDS.fields)
NAMES = (_NAMES | FIELDS.ignored) - TOKENS
"""Fields of a `config.json` that are generation settings and do not affect the forward pass."""
ARGUMENTS = _NAMES | UNSUPPORTED_NAMES | TOKENS | SEQUENCES
"""Fields that affect the generated tokens."""
EFFECTIVE = SEQUENCES | TOKENS | {field.hf for field in FIELDS.fields if isinstance(field, Field)}
"""The fields of `ARGUMENTS` that may have more than one value in flaxzoo."""

GENERATION = "generation"
"""The key of the imported folder's generation settings in a run's `config.json`."""

NEW_TOKENS = 20
"""Default number of new tokens."""


def request_from_hf(
    fields: HFSettings,
    where: str,
    *,
    causal: bool,
    prompt_length: int = 1,
    longest: int | None = None,
) -> GenerationRequest:
    """Converts generation settings to a request with the same meaning as in transformers.

    Args:
      fields: settings by name; missing settings have transformers' defaults.
      where: the file or function that the settings come from, for messages.
      causal: whether the model is a causal language model. Otherwise it is an encoder-decoder.
      prompt_length: the number of prompt tokens, which `max_length` includes.
      longest: the maximum length of the model, in tokens.

    Raises:
      WeightsError: a field is not supported or out of range.
    """
    settings = settings_from_hf(FIELDS, fields, where)
    if causal and settings["num_beams"] == 1:
        unsupported = {name: x for name, x in fields.items() if name in UNSUPPORTED_NAMES}
        settings_from_hf(UNSUPPORTED_SAMPLING, unsupported, where)
    try:
        _check_method(settings, fields, causal)
        settings |= _token_settings(fields, causal)
        settings["max_new_tokens"] = _max_new_tokens(fields, prompt_length, longest)
        # `min_new_tokens` overrides `min_length`, which includes the start token.
        if settings["min_new_tokens"] is None:
            settings["min_new_tokens"] = max((settings["min_length"] or 0) - 1, 0)
        settings["no_repeat_ngram_size"] = settings["no_repeat_ngram_size"] or 0
        settings["top_k"] = settings["top_k"] or None  # 0 stands for all tokens
        settings["early_stopping"] = fields.get("early_stopping", False)
        # Greedy and beam search ignore the settings of sampling, as in transformers, but a value
        # out of range is a mistake.
        Sampling(**{name: settings[name] for name in SAMPLING})
        unused = set[str]() if settings["do_sample"] else SAMPLING
        names = field_names(GenerationRequest) - unused
        return GenerationRequest(**{n: x for n, x in settings.items() if n in names})
    except UserError as error:
        raise WeightsError(f"{where}: {error}") from error


def _token_settings(fields: HFSettings, causal: bool) -> Settings:
    """Returns the special tokens and the banned sequences of a request."""
    eos_ids = _token_ids(fields, "eos_token_id")
    tokens: Settings = {name: _token_id(fields, name) for name in TOKENS - {"eos_token_id"}}
    # The forced end must be an end token, so that the text is finished.
    forced, first = tokens["forced_eos_token_id"], tokens["forced_bos_token_id"]
    if forced is not None and forced not in eos_ids:
        raise UserError(
            f"forced_eos_token_id must be one of eos_token_id {fields.get('eos_token_id')}, "
            f"got {forced}: add it to eos_token_id"
        )
    require(
        first is None or not causal,
        f"forced_bos_token_id {first} is not supported by a causal language model: put "
        f"it into the prompts",
    )
    # If no start token is stated, a decoder begins with `bos_token_id`.
    start, bos = tokens["decoder_start_token_id"], tokens.pop("bos_token_id")
    start = tokens["decoder_start_token_id"] = None if causal else bos if start is None else start
    require(
        start is not None or causal,
        "decoder_start_token_id is missing: give one token id, or all settings of the "
        "model's folder (models.generation_arguments)",
    )
    return {**tokens, "eos_token_id": eos_ids, "bad_words_ids": _banned(fields, eos_ids)}


def _check_method(settings: Settings, fields: HFSettings, causal: bool) -> None:
    """Checks that the decoding method supports all fields.

    Args:
      settings: the converted settings.
      fields: the original settings, for messages.
      causal: whether the model is a causal language model; encoder-decoders always use a search.

    Raises:
      UserError: a field is not supported.
    """
    refused: list[str] = []
    kind = f"num_beams {settings['num_beams']}" if causal else "an encoder-decoder"
    if causal:
        # Constraints on new tokens are implemented for encoder-decoders only.
        names = "min_length", "min_new_tokens", "no_repeat_ngram_size"
        refused = list(filter(fields.get, names))
        kind = "a causal language model" if refused else kind
    if not refused and (settings["num_beams"] > 1 or not causal):
        refused += ("do_sample", *SAMPLING) if settings["do_sample"] else ()
        refused += ("repetition_penalty",) if settings["repetition_penalty"] != 1 else ()
    if refused:
        named = ", ".join(f"{name} {fields[name]!r}" for name in refused if name in fields)
        raise UserError(f"{named} is not supported with {kind}: leave it out")


def stored_request(folder: str | Path, longest: int | None = None) -> GenerationRequest:
    """Returns the stored request of a folder's translation model, as transformers would use it.

    Args:
      folder: as in `generation_arguments`.
      longest: the maximum length of the model, in tokens.

    Raises:
      WeightsError: a field is not supported or out of range, or there is not exactly one end token.
    """
    fields, _, where = _stored_fields(local_folder(folder))
    request = request_from_hf(fields, where, causal=False, longest=longest)
    if len(request.eos_token_id) != 1:
        value = fields.get("eos_token_id")
        raise WeightsError(f"{where}: eos_token_id {value!r} is not supported: only one token id")
    return request


def generation_arguments(folder: str | Path) -> JsonObject:
    """Returns the arguments of `models.generate` that are stored in a folder.

    `models.generate(model, params, input_ids, **models.generation_arguments(folder))` returns the
    same as transformers' `model.generate(input_ids)`.

    Args:
      folder: a folder in the Hugging Face format, its name on the hub, or a run imported from it. A
          folder has `config.json` and `generation_config.json`; in old folders `config.json` has
          all fields.

    Raises:
      FileNotFoundError: the folder does not exist.
      WeightsError: a file is broken, a field is not supported, or the folder is a run that was not
        imported, which has no such settings.
    """
    fields, causal, where = _stored_fields(local_folder(folder))
    request_from_hf(fields, where, causal=causal)
    return {name: value for name, value in fields.items() if name in ARGUMENTS}


def _stored_fields(folder: Path) -> tuple[JsonObject, bool, str]:
    """Returns a folder's settings, whether its model is causal, and the file with the settings."""
    source = folder / "generation_config.json"
    config = read_object(folder / "config.json", WeightsError)
    # A run folder keeps the settings of the folder it was imported from.
    if "model_type" not in config:
        require(
            GENERATION in config,
            f"{folder} has no generation settings: give a folder in the Hugging Face "
            f"format, or a run imported from one",
            WeightsError,
        )
        source, given, model = folder / "config.json", config[GENERATION], config["model"]
        if not isinstance(given, dict) or not isinstance(model, dict):
            raise WeightsError(f"{source}: {GENERATION} {given!r} is not an object: restore it")
        family = mapping_of_family(str(model["architecture"]))
        return given, not family.is_encoder_decoder, str(source)
    model_type = str(config["model_type"])
    family = mapping_of_type(model_type, str(folder / "config.json"))
    # Without a generation_config.json, the settings are in the model's config.json.
    if source.is_file():
        given = read_object(source, WeightsError)
    else:
        source = folder / "config.json"
        stated = {name: x for name, x in config.items() if name in NAMES | TOKENS}
        given = {**family.generation_defaults.get(model_type, {}), **stated}
    # transformers fills in its default for null.
    fields: JsonObject = without_none(given)
    _leave_out(fields, config.get("vocab_size"))
    return fields, not family.is_encoder_decoder, str(source)


def _leave_out(fields: JsonObject, vocab_size: JsonValue) -> None:
    """Removes end and padding tokens beyond the vocabulary, which some published folders have.

    The model never generates or reads such tokens.
    """
    for name in ("eos_token_id", "pad_token_id"):
        value = fields.get(name)
        tokens = _ids(value if isinstance(value, list) else [value])
        if type(vocab_size) is not int or not tokens:
            continue
        known = [token for token in tokens if 0 <= token < vocab_size]
        if not known:
            del fields[name]
        elif isinstance(value, list):
            fields[name] = [*known]


def _max_new_tokens(fields: HFSettings, prompt_length: int, longest: int | None) -> int:
    number: Any = fields.get("max_new_tokens")
    if number is not None:
        return number
    # `max_length` includes the prompt. The default is limited by the maximum length of the model.
    default = NEW_TOKENS + prompt_length
    total: Any = fields.get("max_length", min(default, longest or default))
    require(
        total > prompt_length,
        f"max_length {total} leaves no room for new tokens after {prompt_length} "
        f"tokens: give max_new_tokens",
    )
    return total - prompt_length


def _token_ids(fields: HFSettings, name: str) -> tuple[int, ...]:
    """Returns the tokens of a field that is an id or a list of ids; empty if it is missing."""
    value = fields.get(name, [])
    tokens = _ids(value if isinstance(value, list) else [value])
    if tokens is None:
        raise UserError(f"{name} {value!r} is not supported: only token ids")
    return tokens


def _token_id(fields: HFSettings, name: str) -> int | None:
    """Returns the token of a field that is an id or a list of one id; None if it is missing."""
    tokens = _token_ids(fields, name)
    if name in fields and len(tokens) != 1:
        raise UserError(f"{name} {fields[name]!r} is not supported: only one token id")
    return tokens[0] if tokens else None


def _banned(fields: HFSettings, eos_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the banned sequences of one or more tokens."""
    given = fields.get("bad_words_ids", [])
    sequences = list(map(_ids, given)) if isinstance(given, list) else [None]
    require(
        all(sequences),
        f"bad_words_ids {given!r} is not supported: only a list of words, each a list of its "
        "tokens' ids",
    )
    # A suppressed token is a banned sequence of one token.
    tokens = _ids(fields.get("suppress_tokens", []))
    if tokens is None or set(eos_ids) & set(tokens):
        raise UserError(
            f"suppress_tokens {fields.get('suppress_tokens')!r} is not supported: only ids of "
            f"tokens other than eos_token_id {fields.get('eos_token_id')}"
        )
    # transformers never bans an end token.
    banned = {*filter(None, sequences), *((token,) for token in tokens)}
    return tuple(sorted(banned - {(end,) for end in eos_ids}))


def _ids(value: JsonValue) -> tuple[int, ...] | None:
    """Returns a list of ids as a tuple, or None if the value is not such a list."""
    if not isinstance(value, list):
        return None
    ids = tuple(token for token in value if type(token) is int)
    return ids if len(ids) == len(value) else None
