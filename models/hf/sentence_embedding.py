"""Settings of sentence embeddings: reads and writes folders of sentence-transformers.

Such a folder is in Hugging Face's form with a few more files. `modules.json` lists the modules in
order: the transformer, `1_Pooling`, and optionally `2_Dense` or `2_Normalize`, each with a
`config.json` in a subfolder. `sentence_bert_config.json` has the tokenizer's options, and
`config_sentence_transformers.json` the prompts that precede texts. Every setting is honored or
rejected by name, because vectors would be wrong without it.

A run folder that was imported from such a folder keeps these files in a subfolder.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.errors import suggest
from ...data.common.files import path_inside
from ...data.common.json_text import JsonObject, JsonValue, parse_json, read_object
from ..nn.pooling import POOLING_MODES, PoolingMode
from ..nn.typing import Array, Float
from .config_mapping import ConfigMapping, Field, FixedField, Settings, settings_from_hf
from .safetensors_files import WHOLE, TensorFiles
from .save_weights import write_json
from .tensor_mapping import WeightsError

IN_RUN = "sentence_transformers"
"""The subfolder of a run folder that holds the imported files."""
MODULES = "modules.json"
TRANSFORMER = "sentence_bert_config.json"
WHOLE_MODEL = "config_sentence_transformers.json"
CLASSES = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Pooling": "sentence_transformers.models.Pooling",
    "Dense": "sentence_transformers.models.Dense",
    "Normalize": "sentence_transformers.models.Normalize",
}
"""The classes of written modules, under names that all versions of the package know."""
ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "Sigmoid": jax.nn.sigmoid,
    "SiLU": jax.nn.silu,
}

_KEYS: Mapping[PoolingMode, str] = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""The fields of the pooling modes before version 6 of the package."""
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
_TRANSFORMER = ConfigMapping(
    (
        Field("max_seq_length", "max_length", None, kind=int),
        Field("do_lower_case", "lowercase", False),
        FixedField("transformer_task", ("feature-extraction",)),
        FixedField(
            "modality_config.text",
            ({"method": "forward", "method_output_name": "last_hidden_state"},),
        ),
        FixedField("module_output_name", ("token_embeddings",)),
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
_WHOLE = ConfigMapping(
    (
        Field("prompts", "prompts", {}),
        Field("default_prompt_name", "default_prompt", None, kind=str),
        Field("truncate_dim", "num_dimensions", None, kind=int),
        FixedField("model_type", ("SentenceTransformer",)),
    ),
    frozenset({"__version__", "similarity_fn_name"}),
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
    """The last part of its class name in torch; a key of `ACTIVATIONS`."""

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
    """The maps that follow, in order."""
    num_dimensions: int | None = None
    """Number of leading dimensions to keep at the end. If None, all."""
    max_length: int | None = None
    """Number of tokens that texts are truncated to, at most the model's maximum."""
    lowercase: bool = False
    """Whether texts are lowercased before tokenization; the tokenizer may lowercase as well."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prompts, which are prepended to each text, by name."""
    default_prompt: str | None = None
    """The name of the default prompt. If None, no prompt is used by default."""
    pool_prompt: bool = True
    """Whether the tokens of the prompt are pooled."""

    def __post_init__(self) -> None:
        if not self.pooling:
            raise WeightsError(f"pooling is missing: choose from {', '.join(POOLING_MODES)}")
        if self.default_prompt is not None:
            self.prompt(self.default_prompt)

    def prompt(self, name: str | None) -> str:
        """Returns the text of a prompt, by default of `default_prompt`.

        Raises:
          WeightsError: No prompt has this name.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = suggest(name, list(self.prompts)) if self.prompts else "the model has none"
            raise WeightsError(f"prompt-name {name!r} is not a prompt of the model: {known}")
        return self.prompts[name]

    def width(self, d_model: int) -> int:
        """Returns the number of dimensions of a vector, given that of a hidden state.

        Raises:
          WeightsError: A layer expects another number of inputs.
        """
        width = d_model * len(self.pooling)
        for layer in self.layers:
            if isinstance(layer, Dense):
                if layer.kernel.shape[0] != width:
                    raise WeightsError(
                        f"pooling {' '.join(self.pooling)} gives {width} dimensions, the model's "
                        f"Dense layer takes {layer.kernel.shape[0]}: pool as the model does"
                    )
                width = layer.kernel.shape[1]
        return width if self.num_dimensions is None else min(width, self.num_dimensions)

    def normalized(self, wanted: bool) -> "EmbeddingSettings":
        """Returns settings that normalize vectors at the end, or not at all."""
        layers = tuple(layer for layer in self.layers if not isinstance(layer, Normalize))
        return dataclasses.replace(self, layers=(*layers, Normalize()) if wanted else layers)


def read_embedding_settings(folder: Path) -> EmbeddingSettings | None:
    """Reads the settings of a sentence-transformers folder, or of a run imported from one.

    Args:
      folder: The folder.

    Returns:
      The settings; None if the folder has no `modules.json`, or scores pairs.

    Raises:
      WeightsError: A file is missing or broken, or a module or setting is not supported.
    """
    if not (folder / MODULES).is_file():
        folder = folder / IN_RUN
    file = folder / MODULES
    if not file.is_file() or is_cross_encoder(folder):
        return None
    # The first two modules are always the transformer and its pooling; maps may follow.
    modules = _modules(file)
    (first, path), (second, pooling_path), *further = modules + 2 * [("nothing", "")]
    if (first, second) != ("Transformer", "Pooling"):
        raise WeightsError(
            f"{file} begins with {first}, {second}: only Transformer, Pooling is supported"
        )
    if path:
        raise WeightsError(f"{file} says that the model is in {path}: give that folder")
    layers: list[Dense | Normalize] = []
    for kind, path in further[: len(modules) - 2]:
        if kind == "Dense":
            layers.append(_read_dense(folder / path))
        elif kind == "Normalize":
            _settings(_NORMALIZE, folder / path / "config.json", optional=True)
            layers.append(Normalize())
        elif kind != "Dropout":  # which does nothing outside training
            raise WeightsError(f"{file}: the module {path} ({kind}) is not supported")
    # The pooling modes: one field since version 6, a flag for each mode before.
    pooled = _settings(_POOLING, folder / pooling_path / "config.json")
    stated = pooled["pooling_mode"] or [mode for mode in _KEYS if pooled[mode]] or ["mean"]
    stated = [stated] if isinstance(stated, str) else stated
    by_name: dict[str, PoolingMode] = {mode: mode for mode in POOLING_MODES}
    modes: tuple[PoolingMode, ...] = tuple(by_name[name] for name in stated if name in by_name)
    if len(modes) < len(stated):
        raise WeightsError(
            f"{folder / pooling_path / 'config.json'}: pooling_mode {stated!r} is not supported: "
            f"only {', '.join(POOLING_MODES)}"
        )
    # The tokenizer's options and the prompts.
    tokenized = _settings(_TRANSFORMER, folder / TRANSFORMER, optional=True)
    with_tokenizer = folder / "tokenizer_config.json"
    if tokenized["max_length"] is None and with_tokenizer.is_file():  # since version 6
        limit = read_object(with_tokenizer, WeightsError).get("model_max_length")
        tokenized["max_length"] = limit if isinstance(limit, int) else None
    whole = _settings(_WHOLE, folder / WHOLE_MODEL, optional=True)
    return EmbeddingSettings(
        pooling=modes, layers=tuple(layers), pool_prompt=pooled["pool_prompt"], **tokenized, **whole
    )


def is_cross_encoder(folder: Path) -> bool:
    """Returns whether a folder scores pairs of texts (sentence-transformers 6 and later)."""
    file = folder / WHOLE_MODEL
    return file.is_file() and read_object(file, WeightsError).get("model_type") == "CrossEncoder"


def _modules(file: Path) -> list[tuple[str, str]]:
    """Returns the class and the folder of each module in a `modules.json`, in order."""
    # A file that is not a list is rejected as one module of an unknown class.
    content = parse_json(file.read_text(encoding="utf-8"), str(file), "restore it", WeightsError)
    modules = []
    for module in content if isinstance(content, list) else [content]:
        kind, path = (
            (str(module.get("type")), str(module.get("path")))
            if isinstance(module, dict)
            else (str(module), "")
        )
        if path_inside(file.parent, path) is None:
            raise WeightsError(
                f"{file} points to {path!r}: modules must be in the folder of {MODULES}"
            )
        package, _, name = kind.rpartition(".")
        # Keep the full name of a class of another package, so that it is rejected.
        modules.append((name if package.startswith("sentence_transformers") else kind, path))
    return modules


def _settings(mapping: ConfigMapping, file: Path, *, optional: bool = False) -> Settings:
    """Returns the settings in a file, or the defaults if the file is optional and missing."""
    fields = {} if optional and not file.is_file() else read_object(file, WeightsError)
    return settings_from_hf(mapping, fields, str(file))


def _read_dense(folder: Path) -> Dense:
    """Reads the map of a Dense module."""
    file = folder / "config.json"
    # Only activations of torch are known; another package may define the same name differently.
    *package, activation = str(_settings(_DENSE, file)["activation"]).split(".")
    if package[:1] != ["torch"] or activation not in ACTIVATIONS:
        raise WeightsError(
            f"{file}: activation_function {'.'.join([*package, activation])} is not supported: "
            f"only {', '.join(ACTIVATIONS)} of torch"
        )
    tensors = TensorFiles(folder)
    names = tensors.shapes().keys()
    if not {"linear.weight"} <= names <= {"linear.weight", "linear.bias"}:
        raise WeightsError(
            f"{folder / WHOLE} has {', '.join(names)}: only linear.weight, and linear.bias"
        )
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
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], start=1))]
    modules: list[JsonValue] = [
        {"idx": i, "name": str(i), "path": path, "type": CLASSES[name]}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    write_json(folder / MODULES, modules)
    length = settings.max_length or max_length
    # The package counts positions from the first column, padding or not, so pad on the right.
    tokenized: JsonObject = {
        "max_seq_length": length,
        "do_lower_case": settings.lowercase,
        "tokenizer_args": {"padding_side": "right"},
    }
    write_json(folder / TRANSFORMER, tokenized)
    whole: JsonObject = {
        "prompts": dict(settings.prompts),
        "default_prompt_name": settings.default_prompt,
    }
    if settings.num_dimensions is not None:
        whole["truncate_dim"] = settings.num_dimensions
    write_json(folder / WHOLE_MODEL, whole)
    # Flags lose the order of modes, so write them only if the order is the usual one.
    pooled: JsonObject = {"word_embedding_dimension": d_model}
    if settings.pooling == tuple(mode for mode in POOLING_MODES if mode in settings.pooling):
        pooled |= {key: mode in settings.pooling for mode, key in _KEYS.items()}
    else:  # an order that only version 6 can express
        pooled["pooling_mode"] = list(settings.pooling)
    pooled["include_prompt"] = settings.pool_prompt
    for path, layer in zip(paths[1:], (None, *settings.layers), strict=True):
        (folder / path).mkdir()
        if layer is None:
            write_json(folder / path / "config.json", pooled)
        elif isinstance(layer, Dense):
            _write_dense(folder / path, layer)


def keep_embedding_settings(source: Path, run: Path, *, d_model: int, max_length: int) -> None:
    """Copies the settings of a model's folder, if it has any, into a run created from it.

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
    package = "torch.nn.modules." + ("linear" if layer.activation == "Identity" else "activation")
    in_features, out_features = layer.kernel.shape
    write_json(
        folder / "config.json",
        {
            "in_features": in_features,
            "out_features": out_features,
            "bias": layer.bias is not None,
            "activation_function": f"{package}.{layer.activation}",
        },
    )
    tensors = {"linear.weight": np.ascontiguousarray(layer.kernel.T)}
    if layer.bias is not None:
        tensors["linear.bias"] = layer.bias
    from safetensors.numpy import save_file  # imported late, so that `bench` runs without it

    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})
    (folder / WHOLE).chmod(0o644)  # the library's 0600 would hide the file from the group
