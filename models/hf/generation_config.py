"""How tokens are asked for in Hugging Face's words: by arguments, or by a `generation_config.json`.

Every field is honoured, or known to change nothing, or refused by name. Older folders have the same
fields in their `config.json`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...data.io.json_text import read_object
from ..decoding.beam_search import BeamSearch
from ..decoding.sample import Sampling
from ..hub import local_folder
from .config_mapping import ConfigMapping, Field, FixedField, settings_from_hf
from .tensor_mapping import WeightsError

DRAWN = ConfigMapping(
    (
        Field("temperature", "temperature", 1.0),
        Field("top_k", "top_k", 50),
        Field("top_p", "top_p", 1.0),
        FixedField("min_p", (None,)),
        FixedField("top_h", (None,)),
        FixedField("typical_p", (1.0,)),
        FixedField("epsilon_cutoff", (0.0,)),
        FixedField("eta_cutoff", (0.0,)),
    )
)
"""How tokens are drawn; they change nothing where none is."""
PICKED = ConfigMapping(
    (
        Field("do_sample", "do_sample", False),
        Field("repetition_penalty", "repetition_penalty", 1.0),
    )
)
SEARCHED = ConfigMapping(
    (FixedField("do_sample", (False,)), FixedField("repetition_penalty", (1.0,)))
)
"""The same fields where tokens are searched for."""
TOKENS = frozenset(
    """
    bos_token_id decoder_start_token_id eos_token_id forced_eos_token_id pad_token_id
    """.split()
)
WORDS = frozenset({"bad_words_ids", "suppress_tokens"})


def _names(fields: ConfigMapping) -> frozenset[str]:
    return frozenset(field.hf for field in fields.fields)


FIELDS = ConfigMapping(
    (
        Field("num_beams", "num_beams", 1),
        Field("length_penalty", "length_penalty", 1.0),
        Field("num_return_sequences", "num_return", 1),
        Field("renormalize_logits", "renormalize", False),
        Field("max_length", "max_length", 0),
        Field("max_new_tokens", "max_new_tokens", 0),
        FixedField("early_stopping", (False, True, "never")),
        FixedField("min_length", (0,)),
        FixedField("min_new_tokens", (0,)),
        FixedField("forced_bos_token_id", (None,)),
        FixedField("force_bos_token_to_be_generated", (False,)),
        FixedField("encoder_repetition_penalty", (1.0,)),
        FixedField("no_repeat_ngram_size", (0,)),
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
    # Those that are read one by one; and of how it is computed, and of what is answered beside
    # tokens.
    TOKENS
    | WORDS
    | _names(DRAWN)
    | _names(PICKED)
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
NAMES = _names(FIELDS) | FIELDS.ignored - TOKENS
"""Fields that say how a model is searched or sampled, and nothing of its forward pass."""
ARGUMENTS = _names(FIELDS) | _names(DRAWN) | _names(PICKED) | TOKENS | WORDS
"""Of these fields those on which the tokens depend."""

GENERATION = "generation"
"""In a run's `config.json`: what the folder asked for that it was imported from."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": None, "top_p": None}

NEW_TOKENS = 20
"""How many there are by default."""
SEQUENCE_TO_SEQUENCE = {"marian", "pegasus", "transformer"}
"""Encoder-decoders: their families, and our architecture."""
# Of a `config.json`, where there is no other file: what their configurations fill in.
DEFAULTS: dict[str, dict[str, int]] = {
    "marian": {
        "decoder_start_token_id": 58100,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "pad_token_id": 58100,
    },
    "pegasus": {
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "forced_eos_token_id": 1,
        "pad_token_id": 0,
    },
    "gpt2": {"bos_token_id": 50256, "eos_token_id": 50256},
    "bert": {"pad_token_id": 0},
    "roberta": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
}


Words = Sequence[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for, in our words."""

    method: BeamSearch | Sampling
    max_new_tokens: int
    num_return: int
    """How many answers each row is to have."""
    start_id: int | None
    """What targets of an encoder-decoder begin with."""
    eos_ids: tuple[int, ...]
    forced_id: int | None
    """The last token that there is room for; one of `eos_ids`."""
    pad_id: int | None

    def search_ends(self, vocab_size: int) -> list[int]:
        """`eos_ids` as a search takes them: the one that may be forced first.

        Those that are not among the `vocab_size` tokens are left out: they end nothing.
        """
        ends = [token for token in self.eos_ids if token < vocab_size or token == self.forced_id]
        return sorted(ends, key=lambda token: token != self.forced_id)


def request_of(
    theirs: Mapping[str, Any],
    where: str,
    *,
    causal: bool,
    prompt_length: int = 1,
    longest: int | None = None,
) -> Request:
    """What is asked for, as transformers would understand it.

    Args:
      theirs: fields by their names; those that are not there have transformers' default.
      where: they stand, for messages.
      causal: whether the model continues prompts; else it is an encoder-decoder.
      prompt_length: tokens before the first new one; `max_length` counts them.
      longest: how many tokens the model has positions for.

    Raises:
      WeightsError: a field is not supported, or says nothing that can be done.
    """
    settings = settings_from_hf(FIELDS, theirs, where)
    searched = settings["num_beams"] != 1 or not causal
    settings |= _part(SEARCHED if searched else PICKED, theirs, where)
    settings["max_new_tokens"] = _max_new_tokens(theirs, where, prompt_length, longest)
    _check_number(settings, where)
    eos_ids, forced_id = _ends(theirs, where)
    starts = ("decoder_start_token_id", "bos_token_id")  # the second where the first is not there
    start = next((name for name in starts if name in theirs), starts[0])
    words = _bad_words(theirs, eos_ids, where)
    try:
        method = (
            _search(settings, theirs, words, forced_id is not None)
            if searched
            else _sampling(settings, _part(DRAWN, theirs, where), words)
        )
    except ValueError as error:
        raise WeightsError(f"{where}: {error}") from error
    return Request(
        method,
        settings["max_new_tokens"],
        settings["num_return"],
        None if causal else _token(theirs, start, where),
        eos_ids,
        forced_id,
        _token(theirs, "pad_token_id", where) if "pad_token_id" in theirs else None,
    )


def search_settings(folder: str | Path, longest: int | None = None) -> tuple[BeamSearch, int, int]:
    """How a folder's translation model is to be searched, as transformers would.

    Args:
      folder: as `generation_arguments` takes it.
      longest: how many tokens the model has positions for.

    Returns:
      The settings, the token that targets begin with, and the one that they end with.

    Raises:
      WeightsError: a field is not supported, or says nothing that can be done.
    """
    theirs, _, where = _asked(local_folder(folder))
    request = request_of(theirs, where, causal=False, longest=longest)
    assert isinstance(request.method, BeamSearch)
    assert request.start_id is not None
    return request.method, request.start_id, _token(theirs, "eos_token_id", where)


def generation_arguments(folder: str | Path) -> dict[str, Any]:
    """What a folder asks of `models.generate`, under its names.

    `models.generate(model, params, input_ids, **models.generation_arguments(folder))` answers as
    transformers' `model.generate(input_ids)` does.

    Args:
      folder: in Hugging Face's form, with `config.json`, and `generation_config.json` unless it is
        of the time when `config.json` said it; or its name on the hub; or a run imported from it.

    Raises:
      FileNotFoundError: there is no such folder.
      WeightsError: a file is broken, a field is not supported, or it is a run that was trained
        here, which asks for nothing.
    """
    theirs, causal, where = _asked(local_folder(folder))
    request_of(theirs, where, causal=causal)
    return {name: value for name, value in theirs.items() if name in ARGUMENTS}


def _asked(folder: Path) -> tuple[dict[str, Any], bool, str]:
    """What a folder asks for; whether its model is causal; and the file that asks."""
    source = folder / "generation_config.json"
    config: dict[str, Any] = read_object(folder / "config.json", WeightsError)
    if "model_type" not in config:
        if GENERATION not in config:
            raise WeightsError(
                f"{folder} asks for nothing: only a folder in Hugging Face's form does, and a run "
                "imported from one"
            )
        given, source = config[GENERATION], folder / "config.json"
        if not isinstance(given, dict):
            raise WeightsError(f"{source}: {GENERATION} {given!r} is not an object: restore it")
        return given, config["model"]["architecture"] not in SEQUENCE_TO_SEQUENCE, str(source)
    if source.is_file():
        given = read_object(source, WeightsError)
    else:
        source, asked = folder / "config.json", NAMES | TOKENS
        said = {name: value for name, value in config.items() if name in asked}
        given = DEFAULTS.get(config["model_type"], {}) | said
    # Null is what transformers would fill in.
    theirs = {name: value for name, value in given.items() if value is not None}
    return theirs, config["model_type"] not in SEQUENCE_TO_SEQUENCE, str(source)


def _part(fields: ConfigMapping, theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Our settings of one table's fields alone."""
    names = _names(fields)
    return settings_from_hf(fields, {name: theirs[name] for name in theirs if name in names}, where)


def _search(
    settings: Mapping[str, Any], theirs: Mapping[str, Any], words: Words, force_eos: bool
) -> BeamSearch:
    return BeamSearch(
        **{name: settings[name] for name in ("num_beams", "num_return", "length_penalty")},
        penalty_form="power",
        early_stopping=theirs.get("early_stopping", False),
        max_extra_tokens=None,
        max_new_tokens=settings["max_new_tokens"],
        suppressed_tokens=tuple(word[0] for word in words if len(word) == 1),
        bad_words=tuple(word for word in words if len(word) > 1),
        renormalize=settings["renormalize"],
        force_eos=force_eos,
    )


def _sampling(settings: Mapping[str, Any], drawn: Mapping[str, Any], words: Words) -> Sampling:
    penalty = settings["repetition_penalty"]
    drawn = dict(drawn) | {"top_k": drawn["top_k"] or None}  # 0: all
    method = Sampling(**drawn, repetition_penalty=penalty, bad_words=tuple(words))
    return method if settings["do_sample"] else dataclasses.replace(method, **GREEDY)


def _check_number(settings: Mapping[str, Any], where: str) -> None:
    """Raises WeightsError unless there can be as many answers as are asked for."""
    number, beams = settings["num_return"], settings["num_beams"]
    if beams < 1:
        raise WeightsError(f"{where}: num_beams {beams} must be at least 1 (1: no beams)")
    if number < 1 or (number > beams and not settings.get("do_sample")):
        raise WeightsError(
            f"{where}: num_return_sequences {number} must be at least 1, and at most num_beams "
            f"{beams} unless do_sample is true"
        )


def _max_new_tokens(
    theirs: Mapping[str, Any], where: str, prompt_length: int, longest: int | None
) -> int:
    number = theirs.get("max_new_tokens")
    if number is None:
        by_default = min(NEW_TOKENS + prompt_length, longest or NEW_TOKENS + prompt_length)
        total = theirs.get("max_length", by_default)
        number = total - prompt_length
        if number < 1:
            raise WeightsError(
                f"{where}: max_length {total} leaves no room behind {prompt_length} tokens: "
                "give max_new_tokens"
            )
    if number < 1:
        raise WeightsError(f"{where}: max_new_tokens {number} must be at least 1")
    return number


def _token(theirs: Mapping[str, Any], name: str, where: str) -> int:
    """The one token of a field, which may be a list of it."""
    tokens = _tokens(theirs, name, where)
    if name not in theirs:
        raise WeightsError(f"{where} has no {name}: give it, one token's id")
    if len(tokens) != 1:
        value = theirs.get(name)
        raise WeightsError(f"{where}: {name} {value!r} is not supported: only one token's id")
    return tokens[0]


def _tokens(theirs: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    """The tokens of a field, one or a list of them; none where it is not there."""
    value = theirs.get(name, [])
    tokens = value if isinstance(value, list) else [value]
    if not _are_ids(tokens):
        raise WeightsError(f"{where}: {name} {value!r} is not supported: only ids of tokens")
    return tuple(tokens)


def _ends(theirs: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], int | None]:
    """The tokens that end a row, and the one that the last there is room for has to be."""
    name = "forced_eos_token_id"
    eos_ids = _tokens(theirs, "eos_token_id", where)
    forced_id = _token(theirs, name, where) if name in theirs else None
    if forced_id is not None and forced_id not in eos_ids:
        known = theirs.get("eos_token_id")
        raise WeightsError(
            f"{where}: {name} {theirs[name]!r} is not supported: only of eos_token_id {known} (add "
            "it there)"
        )
    return eos_ids, forced_id


def _bad_words(theirs: Mapping[str, Any], eos_ids: tuple[int, ...], where: str) -> Words:
    """Words that are never written, of one token or more."""
    words = theirs.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(word and _are_ids(word) for word in words):
        raise WeightsError(
            f"{where}: bad_words_ids {words!r} is not supported: only a list of words, each a "
            "list of its tokens' ids"
        )
    tokens = theirs.get("suppress_tokens", [])
    if not _are_ids(tokens) or set(eos_ids) & set(tokens):
        raise WeightsError(
            f"{where}: suppress_tokens {tokens!r} is not supported: only ids of tokens other "
            f"than eos_token_id {theirs.get('eos_token_id')}"
        )
    # The end is never a bad word, whatever they say.
    unwanted = {*map(tuple, words), *((token,) for token in tokens)}
    return sorted(unwanted - {(token,) for token in eos_ids})


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
