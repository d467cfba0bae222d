"""Reads the configuration and weights of a folder in the Hugging Face format."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ...data.common.errors import UserError
from ...data.common.json_text import read_object
from ..config import TransformerConfig
from ..nn.typing import Params, PyTree
from .config_mapping import HFConfig
from .registry import mapping_of, mapping_of_type
from .tensors.locate import locate
from .tensors.mapping import WeightsError
from .tensors.read import read_parameter
from .tensors.safetensors_files import TensorFiles

MAX_THREADS = 8
"""Maximum number of threads that copy tensors. More threads would be limited by memory bandwidth.
"""


def config_of_weights(hf_config: HFConfig, source: str) -> TransformerConfig:
    """Returns the configuration that a `config.json` describes.

    Args:
      hf_config: The content of the file.
      source: The path of the file, for messages.

    Raises:
      WeightsError: The family, the head or a field is not supported, or a value is out of range.
    """
    mapping = mapping_of_type(hf_config.get("model_type"), source)
    try:
        return mapping.config_from_hf(hf_config, source)
    except WeightsError:
        raise
    except UserError as error:  # the original message does not name the file
        raise WeightsError(f"{source}: {error}") from error


def config_of_folder(folder: Path, hf_config: HFConfig) -> TransformerConfig:
    """Returns the configuration of a folder's model, given the content of its `config.json`."""
    config = config_of_weights(hf_config, str(folder / "config.json"))
    return mapping_of(config).as_stored(config, lambda: TensorFiles(folder))


def read_weights(folder: Path, config: TransformerConfig, shapes: PyTree) -> Params:
    """Reads the parameters of a model tensor by tensor, each shard directly to its device.

    Args:
      folder: A folder with `model.safetensors`, or with several files and their index.
      config: The configuration of the model.
      shapes: A `jax.ShapeDtypeStruct` with a sharding for each parameter.

    Raises:
      WeightsError: The files are broken or contain a different model.
    """
    targets: Params = flatten_dict(shapes, sep="/")
    flax = {path: target.shape for path, target in targets.items()}
    tensors = TensorFiles(folder)
    mapping = mapping_of(config).tensor_mapping(config)
    # Compare the names and shapes of all tensors before any tensor is read.
    file = folder / "config.json"
    stored = read_object(file) if file.is_file() else {}
    locations = locate(mapping, flax, tensors, str(folder), stored=stored)

    def read(path: str) -> jax.Array:
        target = targets[path]

        def read_shard(index: Any) -> np.ndarray:
            return read_parameter(
                locations[path], tensors, flax=flax, dtype=target.dtype, index=index
            )

        return jax.make_array_from_callback(target.shape, target.sharding, read_shard)

    # Start with the largest parameter, so that all threads finish at about the same time.
    order = sorted(targets, key=lambda path: -targets[path].size)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        params = dict(zip(order, pool.map(read, order), strict=True))
    return unflatten_dict({path: params[path] for path in targets}, sep="/")
