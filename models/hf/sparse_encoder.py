"""How a sparse encoder (SPLADE) weighs tokens: reads and writes folders of sentence-transformers.

The modules of such a folder are a masked language model and `1_SpladePooling`. The weight of token
v in a text is the maximum over its positions of log(1 + max(0, logit)) (Formal et al. 2021, "SPLADE
v2", equation 6).
"""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from ...data.common.fields import require
from ...data.common.json_text import JsonObject
from ..nn.typing import Array, Float
from .config_mapping import ConfigMapping, Field, FixedField
from .save_weights import write_json
from .sentence_embedding import (
    EmbeddingSettings,
    read_embedding_settings,
    write_embedding_settings,
)
from .sentence_modules import (
    MODULES,
    WHOLE_MODEL,
    check_modules,
    kind_of,
    read_modules,
    read_settings,
    read_transformer,
    settings_folder,
    transformer_fields,
    whole_model_fields,
    write_modules,
    write_transformer,
)
from .tensors.mapping import WeightsError

SparseActivation = Literal["relu", "log1p_relu"]
_TRANSFORMER = transformer_fields("fill-mask", "logits", "token_embeddings")
_POOLING = ConfigMapping(
    (
        FixedField("pooling_strategy", ("max",)),
        Field("activation_function", "activation", "relu", kind=str),
    ),
    frozenset({"embedding_dimension", "word_embedding_dimension"}),
)
_WHOLE = whole_model_fields(
    "SparseEncoder",
    Field("prompts", "prompts", {}),
    Field("default_prompt_name", "default_prompt", None, kind=str),
    FixedField("max_active_dims", (None,)),
)
_CLASSES = (
    "sentence_transformers.sparse_encoder.models.MLMTransformer",
    "sentence_transformers.sparse_encoder.models.SpladePooling",
)
"""The classes of the modules that are written, under names that versions 5 and 6 of the package
know."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseSettings:
    """How the weights of tokens are computed from the logits of a masked language model."""

    activation: SparseActivation = "relu"
    """relu: log(1 + max(0, logit)). log1p_relu: log(1 + log(1 + max(0, logit)))."""
    texts: EmbeddingSettings = EmbeddingSettings()
    """The truncation length, the lowercasing and the prompts of texts. The pooling and the layers
    in these settings are not used."""

    def __call__(self, greatest: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns the weights, given the maximum logit of each token over all positions."""
        weights = jnp.log1p(jax.nn.relu(greatest))
        return weights if self.activation == "relu" else jnp.log1p(weights)


VectorSettings = EmbeddingSettings | SparseSettings
"""How a model computes dense or sparse vectors of texts; `texts` has the settings for texts."""


def read_vector_settings(folder: Path) -> VectorSettings | None:
    """Returns the settings for the vectors of a folder's model, or None if there are none."""
    return read_sparse_settings(folder) or read_embedding_settings(folder)


def write_vector_settings(
    folder: Path, settings: VectorSettings, *, d_model: int, max_length: int
) -> None:
    """Writes the additional files of dense or sparse vectors that sentence-transformers reads."""
    if isinstance(settings, SparseSettings):
        write_sparse_settings(folder, settings, max_length=max_length)
    else:
        write_embedding_settings(folder, settings, d_model=d_model, max_length=max_length)


def read_sparse_settings(folder: Path) -> SparseSettings | None:
    """Reads the settings of a folder of a sparse encoder, or of a run imported from one.

    Args:
      folder: The folder.

    Returns:
      The settings; None if the model is not a sparse encoder.

    Raises:
      WeightsError: A file is missing or broken, or a module or setting is not supported.
    """
    if kind_of(folder) != "SparseEncoder":
        return None
    folder = settings_folder(folder)
    file = folder / MODULES
    modules = read_modules(file)
    # Version 5 has a different class for this transformer.
    names = [("Transformer" if x == "MLMTransformer" else x, path) for x, path in modules]
    check_modules(file, names, "Transformer", "SpladePooling")
    if others := [kind for kind, _ in modules[2:]]:
        raise WeightsError(f"{file}: the module {others[0]} is not supported after SpladePooling")
    pooling = folder / modules[1][1] / "config.json"
    stated = str(read_settings(_POOLING, pooling)["activation"])
    known: dict[str, SparseActivation] = {name: name for name in get_args(SparseActivation)}
    problem = f"{pooling}: activation_function {stated!r} is not supported: only {', '.join(known)}"
    require(stated in known, problem, WeightsError)
    tokenized = read_transformer(_TRANSFORMER, folder)
    whole = read_settings(_WHOLE, folder / WHOLE_MODEL, optional=True)
    return SparseSettings(activation=known[stated], texts=EmbeddingSettings(**tokenized, **whole))


def write_sparse_settings(folder: Path, settings: SparseSettings, *, max_length: int) -> None:
    """Writes the additional files that the class SparseEncoder reads.

    Args:
      folder: The folder to write to; created if it does not exist.
      settings: The settings.
      max_length: The truncation length in tokens, if the settings specify none.
    """
    folder.mkdir(exist_ok=True)
    texts = settings.texts
    _, pooling = write_modules(folder, list(_CLASSES))
    length = texts.max_length or max_length
    task: JsonObject = {
        "transformer_task": "fill-mask",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "token_embeddings",
    }
    write_transformer(folder, max_length=length, lowercase=texts.lowercase, task=task)
    whole: JsonObject = {
        "model_type": "SparseEncoder",
        "prompts": dict(texts.prompts),
        "default_prompt_name": texts.default_prompt,
    }
    write_json(folder / WHOLE_MODEL, whole)
    (folder / pooling).mkdir()
    pooled: JsonObject = {"pooling_strategy": "max", "activation_function": settings.activation}
    write_json(folder / pooling / "config.json", pooled)
