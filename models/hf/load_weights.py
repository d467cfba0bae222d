"""The weights of a folder in Hugging Face's form."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from ..config import TransformerConfig
from .registry import mapping_of, mapping_of_type
from .safetensors_files import TensorFiles
from .tensor_mapping import locate, read_parameter

MAX_THREADS = 8
"""Of those that copy: more are held up by the memory."""


def config_of_weights(fields: Mapping[str, Any], source: str) -> TransformerConfig:
    """Our configuration of a `config.json`.

    Args:
      fields: what it holds.
      source: its path, for messages.

    Raises:
      WeightsError: the family, the head or a field is not supported.
    """
    return mapping_of_type(fields.get("model_type"), source).config_from_hf(fields, source)


def config_of_folder(folder: Path, fields: Mapping[str, Any]) -> TransformerConfig:
    """Our configuration of a folder, given what its `config.json` holds."""
    config = config_of_weights(fields, str(folder / "config.json"))
    return mapping_of(config).as_stored(config, lambda: TensorFiles(folder).shapes().keys())


def read_weights(folder: Path, config: TransformerConfig, shapes: Any) -> Any:
    """The parameters of a model, read tensor by tensor to where they are to lie.

    Args:
      folder: with `model.safetensors`, or with several files and their index.
      config: of the model.
      shapes: a `jax.ShapeDtypeStruct` with a sharding for each parameter.

    Raises:
      WeightsError: the files are broken, or hold another model.
    """
    targets: dict[str, Any] = flatten_dict(shapes, sep="/")
    ours = {path: target.shape for path, target in targets.items()}
    tensors = TensorFiles(folder)
    places = locate(mapping_of(config).tensor_mapping(config), ours, tensors, str(folder))

    def parameter(path: str) -> jax.Array:
        target = targets[path]

        def piece(index: Any) -> Any:
            return read_parameter(places[path], tensors, flax=ours, dtype=target.dtype, index=index)

        return jax.make_array_from_callback(target.shape, target.sharding, piece)

    # The largest first, so that threads end together.
    order = sorted(targets, key=lambda path: -targets[path].size)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        read = dict(zip(order, pool.map(parameter, order), strict=True))
    return unflatten_dict({path: read[path] for path in targets}, sep="/")
