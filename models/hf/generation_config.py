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
from .config_mapping import (
    ConfigMapping,
    Field,
    FixedField,
    Settings,
    settings_from_hf,
    typed_field,
)
from .registry import mapping_of_family, mapping_of_type
from .tensors.mapping import WeightsError

HFSettings: TypeAlias = Mapping[str, JsonValue]
"""Fields of transformers' `GenerationConfig`, by name."""

UNSUPPORTED_SAMPLING = (
    FixedField("top_h", (None,)),
    FixedField("typical_p", (1.0,)),
    FixedField("epsilon_cutoff", (0.0,)),
    FixedField("eta_cutoff", (0.0,)),
)
"""The fields of unsupported sampling methods. Beam search ignores these fields."""
OF_SAMPLING = (
    FixedField("do_sample", (False,)),
    FixedField("temperature", (1.0,)),
    FixedField("top_k", (50, 0)),
    FixedField("top_p", (1.0,)),
    FixedField("min_p", (None,)),
)
"""Fields that beam search ignores if `do_sample` is false, and does not support if it is true."""
NOT_WITH_SEARCH = (FixedField("repetition_penalty", (1.0,)),)
"""Fields that beam search does not support."""
NOT_WITH_CAUSAL = (
    FixedField("min_length", (0,)),
    FixedField("min_new_tokens", (0, None)),
    FixedField("no_repeat_ngram_size", (0,)),
    FixedField("forced_bos_token_id", (None,)),
)
"""Fields that are only supported for encoder-decoders."""
UNSUPPORTED_NAMES = frozenset(field.hf for field in UNSUPPORTED_SAMPLING)
SINGLE_TOKENS = (
    "bos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "pad_token_id",
)
TOKENS = frozenset({"eos_token_id", *SINGLE_TOKENS})
SAMPLING = frozenset(field.hf for field in OF_SAMPLING) - {"do_sample"}
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
                "min_length": 0,
                "no_repeat_ngram_size": 0,
            }.items()
        ),
        Field("min_p", "min_p", None, kind=float),
        *(Field(name, name, None, kind=int) for name in ("min_new_tokens", *SINGLE_TOKENS)),
        Field("eos_token_id", "eos_token_id", [], kind=int | Sequence[int]),
        Field("bad_words_ids", "bad_words_ids", [], kind=Sequence[Sequence[int]]),
        Field("suppress_tokens", "suppress_tokens", [], kind=Sequence[int]),
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
    UNSUPPORTED_NAMES
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
"""Fields of a `config.json` that are generation settings, which do not affect the forward pass."""
ARGUMENTS = _NAMES | UNSUPPORTED_NAMES
"""Fields that affect the generated tokens."""
EFFECTIVE = frozenset(field.hf for field in FIELDS.fields if isinstance(field, Field))
"""The fields of `ARGUMENTS` that may have more than one value in flaxzoo."""

GENERATION = "generation"
"""The key of the imported folder's generation settings in a run's `config.json`."""

LARGEST_VOCABULARY = 2**31
"""The vocabulary size that is assumed if a model's `config.json` does not state one."""

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
    # Check the fields that only some decoding methods support. Encoder-decoders always search.
    searches = not causal or settings["num_beams"] > 1
    kind = "a causal language model" if causal else "an encoder-decoder"
    for limited, applies in (
        (NOT_WITH_CAUSAL, causal),
        (OF_SAMPLING, searches and settings["do_sample"]),
        (NOT_WITH_SEARCH, searches),
        (UNSUPPORTED_SAMPLING, not searches),
    ):
        refused = [
            f"{field.hf} {fields[field.hf]!r}"
            for field in limited
            if fields.get(field.hf, field.values[0]) not in field.values
        ]
        require(
            not applies or not refused,
            f"{where}: {', '.join(refused)} is not supported with num_beams "
            f"{settings['num_beams']} of {kind}: leave it out",
            WeightsError,
        )
    try:
        settings |= _token_settings(settings, fields, causal)
        settings["max_new_tokens"] = _max_new_tokens(fields, prompt_length, longest)
        # `min_new_tokens` overrides `min_length`, which includes the start token.
        if settings["min_new_tokens"] is None:
            settings["min_new_tokens"] = max(settings["min_length"] - 1, 0)
        settings["top_k"] = settings["top_k"] or None  # 0 stands for all tokens
        settings["early_stopping"] = fields.get("early_stopping", False)
        # Greedy search and beam search ignore sampling settings, as in transformers. A value out of
        # range is rejected nevertheless, because it is a mistake.
        Sampling(**{name: settings[name] for name in SAMPLING})
        unused = frozenset[str]() if settings["do_sample"] else SAMPLING
        names = field_names(GenerationRequest) & settings.keys() - unused
        return GenerationRequest(**{name: settings[name] for name in names})
    except UserError as error:
        raise WeightsError(f"{where}: {error}") from error


def _token_settings(settings: Settings, fields: HFSettings, causal: bool) -> Settings:
    """Returns the special tokens and the banned sequences of a request."""
    ends, suppressed = _listed(settings["eos_token_id"]), settings["suppress_tokens"]
    # The forced token must be an end token, so that it ends the text.
    forced = settings["forced_eos_token_id"]
    require(
        forced in (None, *ends),
        f"forced_eos_token_id must be one of eos_token_id {fields.get('eos_token_id')}, got "
        f"{forced}: add it to eos_token_id",
    )
    # If no start token is stated, a decoder begins with `bos_token_id`.
    start = settings["decoder_start_token_id"]
    start = None if causal else settings["bos_token_id"] if start is None else start
    require(
        causal or start is not None,
        "decoder_start_token_id is missing: give one token id, or all settings of the "
        "model's folder (models.generation_arguments)",
    )
    words = settings["bad_words_ids"]
    require(all(words), f"bad_words_ids {words!r} has a word without tokens: remove the word")
    require(
        not {*ends} & {*suppressed},
        f"suppress_tokens {suppressed!r} is not supported: only ids of tokens other than "
        f"eos_token_id {fields.get('eos_token_id')}",
    )
    # A suppressed token is a banned sequence of one token. transformers never bans an end token.
    banned = {*map(tuple, words), *zip(suppressed)} - {*zip(ends)}
    return {
        "eos_token_id": tuple(ends),
        "decoder_start_token_id": start,
        "bad_words_ids": tuple(sorted(banned)),
    }


def _listed(value: Any) -> list[Any]:
    """Returns the tokens of a field that is an id or a list of ids."""
    return value if isinstance(value, list) else [value]


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
    value = fields.get("eos_token_id")
    problem = f"{where}: eos_token_id {value!r} is not supported: only one token id"
    require(len(request.eos_token_id) == 1, problem, WeightsError)
    return request


def generation_arguments(folder: str | Path) -> JsonObject:
    """Returns the arguments of `models.generate` that are stored in a folder.

    `models.generate(model, params, input_ids, **models.generation_arguments(folder))` returns the
    same tokens as transformers' `model.generate(input_ids)`.

    Args:
      folder: a folder in the Hugging Face format, its name on the hub, or a run imported from it. A
          folder has `config.json` and `generation_config.json`; in old folders `config.json` has
          all fields.

    Raises:
      FileNotFoundError: the folder does not exist.
      WeightsError: a file is broken, a field is not supported, or the folder is a run that was not
        imported and therefore has no such settings.
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
        where, kind = str(folder / "config.json"), Mapping[str, object]
        given, model = (typed_field(config, x, {}, where, kind=kind) for x in (GENERATION, "model"))
        family = mapping_of_family(str(model["architecture"]))
        return given, not family.is_encoder_decoder, where
    model_type = str(config["model_type"])
    family = mapping_of_type(model_type, str(folder / "config.json"))
    # Without a generation_config.json, the settings are in the model's config.json.
    if source.is_file():
        given = read_object(source, WeightsError)
    else:
        source = folder / "config.json"
        stated = {name: x for name, x in config.items() if name in NAMES | TOKENS}
        given = {**family.generation_defaults.get(model_type, {}), **stated}
    # transformers replaces null with its default.
    fields: JsonObject = without_none(given)
    config_file = str(folder / "config.json")
    size = typed_field(without_none(config), "vocab_size", LARGEST_VOCABULARY, config_file)
    _leave_out(fields, size)
    return fields, not family.is_encoder_decoder, str(source)


def _leave_out(fields: JsonObject, vocab_size: int) -> None:
    """Removes end and padding tokens beyond the vocabulary, which some published folders have.

    The model never generates or reads such tokens.
    """
    for name in fields.keys() & {"eos_token_id", "pad_token_id"}:
        value = fields.pop(name)
        known = [x for x in _listed(value) if type(x) is not int or 0 <= x < vocab_size]
        if known:
            fields[name] = known if isinstance(value, list) else value


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
