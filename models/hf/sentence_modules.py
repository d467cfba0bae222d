"""The files that every folder of sentence-transformers has, for all kinds of models.

`modules.json` lists the modules in order, each with a `config.json` in a subfolder. The first
module is the transformer; `sentence_bert_config.json` has the options of its tokenizer.
`config_sentence_transformers.json` names the class of the model. A setting that is not supported is
rejected by name, because results would be wrong without it.

A run folder that was imported from such a folder keeps these files in a subfolder.
"""

from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from ...data.common.fields import require
from ...data.common.files import path_inside
from ...data.common.json_text import (
    JsonObject,
    JsonValue,
    optional_object,
    parse_json,
    read_object,
)
from .config_mapping import ConfigMapping, Field, FixedField, Settings, settings_from_hf
from .save_weights import write_json
from .tensors.mapping import WeightsError

IN_RUN = "sentence_transformers"
"""The subfolder of a run folder that contains the imported files."""
MODULES = "modules.json"
TRANSFORMER = "sentence_bert_config.json"
WHOLE_MODEL = "config_sentence_transformers.json"
Kind = Literal["SentenceTransformer", "CrossEncoder", "SparseEncoder"]
"""A class of sentence-transformers whose folders flaxzoo reads."""
ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "Sigmoid": jax.nn.sigmoid,
    "SiLU": jax.nn.silu,
}
"""Activation functions, by the last component of their class names in torch."""


def transformer_fields(task: str, output: str, result: str) -> ConfigMapping:
    """Returns the table of the settings of a transformer module.

    Args:
      task: The task of the transformer in version 6 of the package.
      output: The field of the model's output that the module returns.
      result: The name under which the modules that follow find the output.
    """
    return ConfigMapping(
        (
            Field("max_seq_length", "max_length", None, kind=int),
            Field("do_lower_case", "lowercase", False),
            FixedField("transformer_task", (task,)),
            FixedField(
                "modality_config.text", ({"method": "forward", "method_output_name": output},)
            ),
            FixedField("module_output_name", (result,)),
            FixedField("processing_kwargs", (None, {})),
            FixedField("query_length", (None,)),
            FixedField("document_length", (None,)),
            FixedField("query_expansion", (None,)),
        ),
        frozenset(
            """
            config_args model_args modality_config.message tokenizer_args unpad_inputs
            """.split()
        ),
    )


def whole_model_fields(kind: Kind, *fields: Field | FixedField) -> ConfigMapping:
    """Returns the table of `config_sentence_transformers.json` for a class of models."""
    # Version 5 and earlier write no class if it is the default.
    return ConfigMapping(
        (*fields, FixedField("model_type", (kind,))),
        # A class without this field has only one way to compare vectors.
        frozenset({"__version__", "similarity_fn_name"} - {field.hf for field in fields}),
    )


def settings_folder(folder: Path) -> Path:
    """Returns the folder that contains the files: the model's folder, or a subfolder of a run."""
    return folder if (folder / MODULES).is_file() else folder / IN_RUN


def kind_of(folder: Path) -> str | None:
    """Returns the class of the model in a folder or run, or None if it has no `modules.json`."""
    folder = settings_folder(folder)
    if not (folder / MODULES).is_file():
        return None
    return str(
        optional_object(folder / WHOLE_MODEL, WeightsError).get("model_type", "SentenceTransformer")
    )


def read_modules(file: Path) -> list[tuple[str, str]]:
    """Returns the class and the folder of each module in a `modules.json`, in order."""
    # If the file does not contain a list, its content is rejected as a module of an unknown class.
    content = parse_json(file.read_text(encoding="utf-8"), str(file), "restore it", WeightsError)
    modules = []
    for module in content if isinstance(content, list) else [content]:
        kind, path = (
            (str(module.get("type")), str(module.get("path")))
            if isinstance(module, dict)
            else (str(module), "")
        )
        problem = f"{file} points to {path!r}: modules must be in the folder of {MODULES}"
        require(path_inside(file.parent, path) is not None, problem, WeightsError)
        package, _, name = kind.rpartition(".")
        # Keep the full name of a class that belongs to another package, so that it is rejected.
        modules.append((name if package.startswith("sentence_transformers") else kind, path))
    return modules


def check_modules(file: Path, modules: list[tuple[str, str]], *kinds: str) -> None:
    """Checks the classes of the first modules, and that the transformer is in this folder.

    Raises:
      WeightsError: A class is not supported, or the transformer is in another folder.
    """
    first = [kind for kind, _ in modules[: len(kinds)]]
    listed = ", ".join([*first, *["nothing"] * (len(kinds) - len(first))])
    problem = f"{file} begins with {listed}: only {', '.join(kinds)} is supported"
    require(first == list(kinds), problem, WeightsError)
    path = modules[0][1]
    require(not path, f"{file} says that the model is in {path}: give that folder", WeightsError)


def read_settings(mapping: ConfigMapping, file: Path, *, optional: bool = False) -> Settings:
    """Returns the settings in a file, or the defaults if the file is optional and missing."""
    fields = optional_object(file, WeightsError) if optional else read_object(file, WeightsError)
    return settings_from_hf(mapping, fields, str(file))


def read_transformer(mapping: ConfigMapping, folder: Path) -> Settings:
    """Returns the tokenizer's options in a folder, `max_length` and `lowercase`."""
    settings = read_settings(mapping, folder / TRANSFORMER, optional=True)
    if settings["max_length"] is None:  # the name of the field since version 6
        settings["max_length"] = tokenizer_length(folder)
    return settings


def tokenizer_length(folder: Path) -> int | None:
    """Returns the number of tokens that a folder's tokenizer truncates to, if it is stated."""
    limit = optional_object(folder / "tokenizer_config.json", WeightsError).get("model_max_length")
    return limit if isinstance(limit, int) else None


def activation_name(path: str, file: Path, field: str) -> str:
    """Returns the key in `ACTIVATIONS` for the name of a torch class.

    Raises:
      WeightsError: `ACTIVATIONS` has no key for the class.
    """
    # A class with the same name in another package may be a different function.
    *package, name = path.split(".")
    problem = f"{file}: {field} {path} is not supported: only {', '.join(ACTIVATIONS)} of torch"
    require(package[:1] == ["torch"] and name in ACTIVATIONS, problem, WeightsError)
    return name


def activation_path(name: str) -> str:
    """Returns the full name of the torch class for a key of `ACTIVATIONS`."""
    return f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}.{name}"


def write_modules(folder: Path, classes: list[str]) -> list[str]:
    """Writes `modules.json`; returns the subfolder of each module, which is "" for the first.

    Args:
      folder: The folder of the model.
      classes: The class of each module, with its package.
    """
    names = [path.rpartition(".")[2] for path in classes]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], start=1))]
    modules: list[JsonValue] = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (kind, path) in enumerate(zip(classes, paths, strict=True))
    ]
    write_json(folder / MODULES, modules)
    return paths


def write_transformer(
    folder: Path, *, max_length: int, lowercase: bool, task: JsonObject | None = None
) -> None:
    """Writes the tokenizer's options and additional fields."""
    # The package counts positions from the first column, even if it is padding, so pad on the
    # right.
    tokenized: JsonObject = {
        "max_seq_length": max_length,
        "do_lower_case": lowercase,
        "tokenizer_args": {"padding_side": "right"},
    }
    write_json(folder / TRANSFORMER, tokenized | (task or {}))


def lower_case(text: str) -> str:
    """Lowercases character by character, as the tokenizers library does: a final Σ becomes σ."""
    return "".join(character.lower() for character in text)
