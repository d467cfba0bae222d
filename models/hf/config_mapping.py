"""A configuration of theirs as one of ours, and back: a table of fields and its engine.

Every field that a `config.json` holds is honoured, or known to change nothing, or refused by name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .tensor_mapping import WeightsError

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Their names of a non-linearity; of several names of ours the first is written."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field that says the same on both sides."""

    theirs: str
    ours: str
    default: Any
    """What their library takes where a file does not say."""
    values: Mapping[Any, Any] | None = None
    """Their values, and what ours are called; None: the same."""


@dataclasses.dataclass(frozen=True)
class Only:
    """A field that has to have one of few values."""

    theirs: str
    values: tuple[Any, ...]
    """What is understood; the first is their library's default, and written."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """Everything that the configurations of a family may hold."""

    entries: tuple[Field | Only, ...]
    idle: frozenset[str] = frozenset()
    """Fields that change no number."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other names of fields."""


IDLE = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flax_model_name
    _name_or_path _num_labels architectures attn_implementation bos_token_id
    classifier_dropout decoder_start_token_id directionality dtype eos_token_id
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
    initializer_range is_encoder_decoder label2id
    model_type num_labels output_attentions output_hidden_states output_past
    output_scores pad_token_id prefix problem_type return_dict return_dict_in_generate
    sep_token_id task_specific_params tokenizer_class torch_dtype torchscript
    transformers_version use_cache
    """.split()
)
"""Fields of any family that say nothing of the forward pass, or that are read elsewhere."""


def ours_of(fields: Fields, theirs: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Our settings, from theirs.

    Raises:
      WeightsError: a field is unknown, has a value that is not understood, or two by two names.
    """
    theirs = _unaliased(fields.aliases, theirs, source)
    known = {entry.theirs for entry in fields.entries} | fields.idle | IDLE
    if unknown := sorted(theirs.keys() - known):
        raise WeightsError(
            f"{source} has fields that nothing here honours: {', '.join(unknown)}; take them out "
            "if the model does not depend on them"
        )
    settings: dict[str, Any] = {}
    for entry in fields.entries:
        if isinstance(entry, Only):
            value = theirs.get(entry.theirs, entry.values[0])
            _check(value in entry.values, entry.theirs, value, entry.values, source)
            continue
        value = theirs.get(entry.theirs, entry.default)
        _check_type(entry, value, source)
        if entry.values is not None:
            _check(value in entry.values, entry.theirs, value, entry.values, source)
            value = entry.values[value]
        settings[entry.ours] = value
    return settings


def _unaliased(
    aliases: Mapping[str, str], theirs: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """Every field by its own name."""
    named = {name: value for name, value in theirs.items() if name not in aliases}
    for alias, name in aliases.items():
        value = theirs.get(alias)
        if value is not None and named.setdefault(name, value) != value:
            raise WeightsError(
                f"{source}: {alias} {value!r} is another name of {name}, which is {named[name]!r}: "
                "take the wrong one out"
            )
    return named


def _check_type(entry: Field, value: Any, source: str) -> None:
    """A value is of the kind of the default; a whole number is also a fraction."""
    kind = type(entry.default)
    kinds = (int, float) if kind is float else (kind,)
    if kind is not type(None) and type(value) not in kinds:
        raise WeightsError(f"{source}: {entry.theirs} {value!r} is not of type {kind.__name__}")


def _check(fine: bool, name: str, value: Any, known: Any, source: str) -> None:
    if not fine:
        choices = ", ".join(map(repr, known))
        raise WeightsError(f"{source}: {name} {value!r} is not supported: only {choices}")


def class_of(theirs: Mapping[str, Any], classes: Sequence[str], source: str) -> str:
    """The class that wrote a model.

    Args:
      theirs: a `config.json`.
      classes: those that are supported; the first is taken where the file does not say.
      source: its path, for messages.

    Raises:
      WeightsError: another one wrote it.
    """
    named: Any = theirs.get("architectures") or classes
    written = named[0] if isinstance(named, list | tuple) else named
    if written not in classes:
        known = ", ".join(classes)
        raise WeightsError(f"{source}: a {written!s} is not supported: choose from {known}")
    return written


def theirs_of(fields: Fields, config: Any) -> dict[str, Any]:
    """Their fields, from our configuration."""
    written: dict[str, Any] = {}
    for entry in fields.entries:
        if isinstance(entry, Only):
            written[entry.theirs] = entry.values[0]
            continue
        value = getattr(config, entry.ours)
        if entry.values is not None:
            value = next(theirs for theirs, ours in entry.values.items() if ours == value)
        written[entry.theirs] = value
    return written
