"""How a cross-encoder scores pairs of texts: reads and writes folders of sentence-transformers.

A cross-encoder (Nogueira and Cho 2019, "Passage re-ranking with BERT") is a sequence classifier
that reads two texts at once. The class CrossEncoder applies an activation to the logits. Version 6
of the package stores the activation in `config_sentence_transformers.json`, versions 4 and 5 in
`config.json` under `sentence_transformers`, and earlier versions under
`sbert_ce_default_activation_function`.
"""

import dataclasses
from pathlib import Path

from ...data.common.fields import require, require_one_of
from ...data.common.json_text import JsonObject, optional_object, read_object
from ..nn.typing import Array, Float
from .config_mapping import Field, FixedField
from .save_weights import write_json
from .sentence_modules import (
    ACTIVATIONS,
    MODULES,
    WHOLE_MODEL,
    activation_name,
    activation_path,
    check_modules,
    kind_of,
    read_modules,
    read_settings,
    read_transformer,
    settings_folder,
    tokenizer_length,
    transformer_fields,
    whole_model_fields,
    write_modules,
    write_transformer,
)
from .tensors.mapping import WeightsError

_CONFIG = "config.json"
_TRANSFORMER = transformer_fields("sequence-classification", "logits", "scores")
_WHOLE = whole_model_fields(
    "CrossEncoder",
    Field("activation_fn", "activation", None, kind=str),
    FixedField("prompts", ({}, {"query": "", "document": ""})),
    FixedField("default_prompt_name", (None,)),
    # `keep_in_fp32_modules` has no effect, because scores are always float32 in flaxzoo.
    Field("keep_in_fp32_modules", "float32_modules", None),
)
_CLASS = "sentence_transformers.base.modules.transformer.Transformer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairScoring:
    """How the score of a pair of texts is computed from a classifier's logits.

    Raises:
      WeightsError: `activation` is unknown.
    """

    activation: str = "Sigmoid"
    """The function that maps logits to scores, as the name of its torch class, such as Identity."""
    max_length: int | None = None
    """Pairs are truncated to this number of tokens, at most the model's maximum."""
    lowercase: bool = False
    """Whether texts are lowercased before tokenization. The tokenizer may also lowercase them."""

    def __post_init__(self) -> None:
        require_one_of("activation", self.activation, ACTIVATIONS, error=WeightsError)

    def __call__(self, logits: Float[Array, "B L"]) -> Float[Array, "B L"]:
        """Returns the scores."""
        return ACTIVATIONS[self.activation](logits)

    @classmethod
    def of_labels(cls, number: int) -> "PairScoring":
        """Returns the default settings: the sigmoid for one label, the identity for more labels."""
        return cls(activation="Sigmoid" if number == 1 else "Identity")


def read_pair_scoring(folder: Path) -> PairScoring | None:
    """Reads the scoring settings from a folder, or from a run that was imported from such a folder.

    Args:
      folder: The folder.

    Returns:
      The settings; None if the folder does not state that its model is a cross-encoder.

    Raises:
      WeightsError: A file is broken, or a module or setting is not supported.
    """
    if kind_of(folder) == "CrossEncoder":
        return _read_modules(settings_folder(folder))
    # Versions before 6 store only the activation, in the model's `config.json`.
    file = folder / _CONFIG
    fields = optional_object(file, WeightsError)
    section = fields.get("sentence_transformers")
    stated = section.get("activation_fn") if isinstance(section, dict) else None
    stated = stated or fields.get("sbert_ce_default_activation_function")
    if not isinstance(stated, str):
        return None
    return PairScoring(
        activation=activation_name(stated, file, "activation_fn"),
        max_length=tokenizer_length(folder),
    )


def _read_modules(folder: Path) -> PairScoring:
    """Reads the settings of a folder that version 6 wrote. Its only module is the transformer."""
    file = folder / MODULES
    modules = read_modules(file)
    check_modules(file, modules, "Transformer")
    if others := [kind for kind, _ in modules[1:]]:
        raise WeightsError(f"{file}: the module {others[0]} is not supported after a classifier")
    file = folder / WHOLE_MODEL
    stated = read_settings(_WHOLE, file)["activation"]
    require(stated is not None, f"{file} has no activation_fn: restore it", WeightsError)
    return PairScoring(
        activation=activation_name(stated, file, "activation_fn"),
        **read_transformer(_TRANSFORMER, folder),
    )


def write_pair_scoring(folder: Path, settings: PairScoring, *, max_length: int) -> None:
    """Writes the additional files that the class CrossEncoder reads.

    Args:
      folder: The folder to write to; created if it does not exist.
      settings: The settings.
      max_length: The truncation length in tokens, if the settings specify none.
    """
    folder.mkdir(exist_ok=True)
    write_modules(folder, [_CLASS])
    task: JsonObject = {
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
    }
    length = settings.max_length or max_length
    write_transformer(folder, max_length=length, lowercase=settings.lowercase, task=task)
    activation = activation_path(settings.activation)
    whole: JsonObject = {"model_type": "CrossEncoder", "activation_fn": activation}
    write_json(folder / WHOLE_MODEL, whole)
    # Versions 4 and 5 read only config.json. A run folder has no `config.json` at this point, so
    # skip the file.
    if (folder / _CONFIG).is_file():
        fields = read_object(folder / _CONFIG, WeightsError)
        section: JsonObject = {"sentence_transformers": {"activation_fn": activation}}
        write_json(folder / _CONFIG, fields | section)
