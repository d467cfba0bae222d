"""Settings of sentence embeddings: reads and writes folders of sentence-transformers.

The modules of such a folder are the transformer, `1_Pooling`, and optionally `2_Dense` or
`2_Normalize`. `config_sentence_transformers.json` has the prompts that precede texts. See
`sentence_modules`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from ...data.common.errors import suggest
from ...data.common.fields import require, without_none
from ...data.common.json_text import JsonObject
from ..nn.pooling import POOLING_MODES, PoolingMode
from ..nn.typing import Array, Float
from .config_mapping import ConfigMapping, Field, FixedField
from .save_weights import write_json
from .sentence_modules import (
    ACTIVATIONS,
    IN_RUN,
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
    transformer_fields,
    whole_model_fields,
    write_modules,
    write_transformer,
)
from .tensors.mapping import WeightsError
from .tensors.safetensors_files import WHOLE, TensorFiles

CLASSES = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Pooling": "sentence_transformers.models.Pooling",
    "Dense": "sentence_transformers.models.Dense",
    "Normalize": "sentence_transformers.models.Normalize",
}
"""The classes of the modules that are written, under names that all versions of the package know.
"""
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""The names of prompts for the documents of a search, in the order of preference."""
_KEYS: Mapping[PoolingMode, str] = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""For each pooling mode, its field in package versions before 6."""
_ON_SENTENCES = (
    FixedField("module_input_name", ("sentence_embedding",)),
    FixedField("module_output_name", ("sentence_embedding", None)),
)
_POOLING = ConfigMapping(
    (
        Field("pooling_mode", "pooling_mode", None),
        *(Field(key, mode, False) for mode, key in _KEYS.items()),
        Field("include_prompt", "pool_prompt", True),
    ),
    frozenset({"embedding_dimension", "word_embedding_dimension"}),
)
_DENSE = ConfigMapping(
    (
        *_ON_SENTENCES,
        FixedField("use_residual", (False,)),
        Field("activation_function", "activation", "torch.nn.modules.activation.Tanh"),
    ),
    frozenset({"in_features", "out_features", "bias"}),
)
_NORMALIZE = ConfigMapping(_ON_SENTENCES)
_TRANSFORMER = transformer_fields("feature-extraction", "last_hidden_state", "token_embeddings")
_WHOLE = whole_model_fields(
    "SentenceTransformer",
    Field("prompts", "prompts", {}),
    Field("default_prompt_name", "default_prompt", None, kind=str),
    Field("truncate_dim", "num_dimensions", None, kind=int),
    Field("similarity_fn_name", "similarity", None, kind=str),
)


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Divides each vector by its Euclidean norm."""

    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        """Returns vectors of norm 1; vectors of norm 0 are unchanged."""
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """Maps each vector to activation(x W + b)."""

    kernel: np.ndarray
    """W, float32 `[D, E]`."""
    bias: np.ndarray | None
    """b, float32 `[E]`."""
    activation: str
    """The last component of the activation's class name in torch; a key of `ACTIVATIONS`."""

    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B E"]:
        """Returns the mapped vectors."""
        x = jnp.dot(x, self.kernel, precision="highest")
        return ACTIVATIONS[self.activation](x if self.bias is None else x + self.bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """How a text's vector is computed from a model's hidden states; by default their mean.

    Raises:
      WeightsError: `pooling` is empty, or no prompt is named `default_prompt`.
    """

    pooling: tuple[PoolingMode, ...] = ("mean",)
    """The pooling modes, whose vectors are concatenated; see `models.nn.pooling.pool`."""
    layers: tuple[Dense | Normalize, ...] = ()
    """The layers that follow the pooling, in order."""
    num_dimensions: int | None = None
    """The number of leading dimensions of the final vector that are kept. If None, all are kept."""
    max_length: int | None = None
    """Texts are truncated to this number of tokens, at most the model's maximum."""
    lowercase: bool = False
    """Whether texts are lowercased before tokenization. The tokenizer may also lowercase them."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prompts by name. A prompt is prepended to each text."""
    default_prompt: str | None = None
    """The name of the default prompt. If None, no prompt is used by default."""
    pool_prompt: bool = True
    """Whether the tokens of the prompt are pooled."""
    similarity: str | None = None
    """How sentence-transformers compares vectors: cosine, dot, euclidean or manhattan. If None,
    vectors are compared by their cosine.
    """

    @property
    def texts(self) -> "EmbeddingSettings":
        """These settings, so that dense and sparse encoders both have `texts`."""
        return self

    def __post_init__(self) -> None:
        problem = f"pooling is missing: choose from {', '.join(POOLING_MODES)}"
        require(self.pooling, problem, WeightsError)
        if self.default_prompt is not None:
            self.prompt(self.default_prompt)

    def prompt(self, name: str | None) -> str:
        """Returns the text of a prompt, which defaults to `default_prompt`; "" for the name "".

        Raises:
          WeightsError: No prompt has this name.
        """
        name = self.default_prompt if name is None else name
        if not name:
            return ""
        if name not in self.prompts:
            known = (
                suggest(name, list(self.prompts)) if self.prompts else "the model has no prompts"
            )
            raise WeightsError(f"prompt-name {name!r} is not a prompt of the model: {known}")
        return self.prompts[name]

    @property
    def compares_by_cosine(self) -> bool:
        """Whether the cosine ranks texts in the same order as the model's own similarity."""
        # For vectors of length 1, dot product, Euclidean distance and cosine give the same order.
        return self.similarity in (None, "cosine") or (
            self.has_length_1 and self.similarity in ("dot", "euclidean")
        )

    @property
    def has_length_1(self) -> bool:
        """Whether all vectors have length 1."""
        is_normalized = bool(self.layers) and isinstance(self.layers[-1], Normalize)
        return is_normalized and self.num_dimensions is None

    @property
    def query_prompt(self) -> str:
        """The name of the prompt for the queries of a search, or ""."""
        return self._first_prompt("query")

    @property
    def document_prompt(self) -> str:
        """The name of the prompt for the documents of a search, or ""."""
        return self._first_prompt(*DOCUMENT_PROMPTS)

    def _first_prompt(self, *names: str) -> str:
        # The package writes an empty prompt by default, so treat an empty prompt as absent.
        return next(filter(self.prompts.get, names), "")

    def width(self, d_model: int) -> int:
        """Returns the number of dimensions of a vector, given the size of a hidden state.

        Raises:
          WeightsError: A layer expects a different number of inputs.
        """
        width = d_model * len(self.pooling)
        for layer in self.layers:
            if isinstance(layer, Dense):
                inputs, outputs = layer.kernel.shape
                require(
                    inputs == width,
                    f"pooling {' '.join(self.pooling)} gives {width} dimensions, but the "
                    f"model's Dense layer takes {inputs}: use the pooling of the model",
                    WeightsError,
                )
                width = outputs
        return width if self.num_dimensions is None else min(width, self.num_dimensions)

    def normalized(self, wanted: bool) -> "EmbeddingSettings":
        """Returns settings with or without a normalization as the last layer."""
        layers = self.layers
        # A normalization before a Dense layer is part of the model.
        while layers and isinstance(layers[-1], Normalize):
            layers = layers[:-1]
        return dataclasses.replace(self, layers=(*layers, Normalize()) if wanted else layers)


def read_embedding_settings(folder: Path) -> EmbeddingSettings | None:
    """Reads the settings of a sentence-transformers folder, or of a run imported from one.

    Args:
      folder: The folder.

    Returns:
      The settings; None if the folder has no `modules.json`, or if its model scores pairs or
      computes sparse vectors.

    Raises:
      WeightsError: A file is missing or broken, or a module or setting is not supported.
    """
    if kind_of(folder) in (None, "CrossEncoder", "SparseEncoder"):
        return None
    folder = settings_folder(folder)
    file = folder / MODULES
    # The first two modules are always the transformer and its pooling; other layers may follow.
    modules = read_modules(file)
    check_modules(file, modules, "Transformer", "Pooling")
    pooling_path = modules[1][1]
    layers: list[Dense | Normalize] = []
    for kind, path in modules[2:]:
        if kind == "Dense":
            layers.append(_read_dense(folder / path))
        elif kind == "Normalize":
            read_settings(_NORMALIZE, folder / path / "config.json", optional=True)
            layers.append(Normalize())
        else:  # a Dropout module has an effect only in training
            problem = f"{file}: the module {path} ({kind}) is not supported"
            require(kind == "Dropout", problem, WeightsError)
    # The pooling modes: one field since version 6, and before version 6 a flag for each mode.
    pooled = read_settings(_POOLING, folder / pooling_path / "config.json")
    stated = pooled["pooling_mode"] or [mode for mode in _KEYS if pooled[mode]] or ["mean"]
    stated = [stated] if isinstance(stated, str) else stated
    by_name: dict[str, PoolingMode] = {mode: mode for mode in POOLING_MODES}
    modes: tuple[PoolingMode, ...] = tuple(by_name[name] for name in stated if name in by_name)
    require(
        len(modes) == len(stated),
        f"{folder / pooling_path / 'config.json'}: pooling_mode {stated!r} is not supported: "
        f"only {', '.join(POOLING_MODES)}",
        WeightsError,
    )
    # The tokenizer's options and the prompts.
    tokenized = read_transformer(_TRANSFORMER, folder)
    whole = read_settings(_WHOLE, folder / WHOLE_MODEL, optional=True)
    return EmbeddingSettings(
        pooling=modes, layers=tuple(layers), pool_prompt=pooled["pool_prompt"], **tokenized, **whole
    )


def _read_dense(folder: Path) -> Dense:
    """Reads the linear map of a Dense module."""
    file = folder / "config.json"
    stated = str(read_settings(_DENSE, file)["activation"])
    activation = activation_name(stated, file, "activation_function")
    tensors = TensorFiles(folder)
    names = tensors.shapes().keys()
    require(
        {"linear.weight"} <= names <= {"linear.weight", "linear.bias"},
        f"{folder / WHOLE} has {', '.join(names)}: only linear.weight, and linear.bias",
        WeightsError,
    )
    # torch stores the matrix as [outputs, inputs].
    kernel = np.array(tensors.read("linear.weight").T, np.float32)
    bias = np.array(tensors.read("linear.bias"), np.float32) if "linear.bias" in names else None
    return Dense(kernel, bias, activation)


def write_embedding_settings(
    folder: Path, settings: EmbeddingSettings, *, d_model: int, max_length: int
) -> None:
    """Writes the additional files that sentence-transformers reads.

    Args:
      folder: The folder to write to; created if it does not exist.
      settings: The settings.
      d_model: The size of the hidden states.
      max_length: The truncation length if the settings have none, in tokens.
    """
    folder.mkdir(exist_ok=True)
    names = ["Transformer", "Pooling", *(type(layer).__name__ for layer in settings.layers)]
    paths = write_modules(folder, [CLASSES[name] for name in names])
    length = settings.max_length or max_length
    write_transformer(folder, max_length=length, lowercase=settings.lowercase)
    whole: JsonObject = {
        "prompts": dict(settings.prompts),
        "default_prompt_name": settings.default_prompt,
    }
    whole |= without_none(
        {"truncate_dim": settings.num_dimensions, "similarity_fn_name": settings.similarity}
    )
    write_json(folder / WHOLE_MODEL, whole)
    # Flags lose the order of modes, so write flags only if the modes have the default order.
    pooled: JsonObject = {"word_embedding_dimension": d_model}
    if settings.pooling == tuple(filter(settings.pooling.__contains__, POOLING_MODES)):
        pooled |= {key: mode in settings.pooling for mode, key in _KEYS.items()}
    else:  # an order that only version 6 can express
        pooled["pooling_mode"] = list(settings.pooling)
    pooled["include_prompt"] = settings.pool_prompt
    _, pooling_path, *layer_paths = paths
    (folder / pooling_path).mkdir()
    write_json(folder / pooling_path / "config.json", pooled)
    for path, layer in zip(layer_paths, settings.layers, strict=True):
        (folder / path).mkdir()
        if isinstance(layer, Dense):
            _write_dense(folder / path, layer)


def keep_embedding_settings(source: Path, run: Path, *, d_model: int, max_length: int) -> None:
    """Copies the embedding settings of a model's folder, if any, into a run that starts from it.

    Args:
      source: The folder of the model: a sentence-transformers folder or another run.
      run: The run folder.
      d_model: The size of the hidden states.
      max_length: The truncation length if the settings have none, in tokens.
    """
    settings = read_embedding_settings(source)
    if settings is not None:
        write_embedding_settings(run / IN_RUN, settings, d_model=d_model, max_length=max_length)


def _write_dense(folder: Path, layer: Dense) -> None:
    in_features, out_features = layer.kernel.shape
    write_json(
        folder / "config.json",
        {
            "in_features": in_features,
            "out_features": out_features,
            "bias": layer.bias is not None,
            "activation_function": activation_path(layer.activation),
        },
    )
    tensors = {"linear.weight": np.ascontiguousarray(layer.kernel.T)}
    if layer.bias is not None:
        tensors["linear.bias"] = layer.bias
    # imported late, because `bench` must run without safetensors
    from safetensors.numpy import save_file

    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})
    (folder / WHOLE).chmod(0o644)  # the library's mode 0600 would hide the file from the group
