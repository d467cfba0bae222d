"""Writes a model as a folder in the Hugging Face format."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict
from numpy.typing import DTypeLike

from ...data.common.fields import require
from ...data.common.json_text import JsonObject, JsonValue, to_json
from ..config import TransformerConfig
from ..decoding.request import GenerationRequest
from ..nn.typing import Params
from .config_mapping import HFConfig
from .registry import mapping_of
from .tensors.export import ExportedTensor, export_tensors
from .tensors.mapping import WeightsError
from .tensors.safetensors_files import INDEX, WHOLE

Precision: TypeAlias = Literal["float32", "float16", "bfloat16"]
DTYPES: Mapping[Precision, DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
FILE_BYTES = 5_000_000_000
"""Default maximum size of a safetensors file."""


def write_weights(
    folder: Path,
    config: TransformerConfig,
    params: Params,
    *,
    dtype: Precision = "float32",
    file_bytes: int = FILE_BYTES,
    fields: HFConfig | None = None,
) -> None:
    """Writes `config.json` and the tensors of a model.

    Args:
      folder: The existing folder to write to.
      config: The configuration of the model.
      params: Its parameters, with stacked layers.
      dtype: The precision of the written parameters.
      file_bytes: The largest size of a file. A larger model is written as several files with an
        index; no tensor is split.
      fields: Additional fields of `config.json`, such as the ids of special tokens.

    Raises:
      WeightsError: The model has no counterpart in transformers.
    """
    from safetensors.numpy import (
        save_file,
    )  # imported late, because `bench` must run without safetensors

    mapping = mapping_of(config)
    config, params = mapping.to_hf_equivalent(config, params)
    hf_config = _merged(mapping.config_to_hf(config), fields or {})
    flat: Params = flatten_dict(params, sep="/")
    tensors = export_tensors(mapping.tensor_mapping(config), flat)
    # Tensors are computed when their file is written, so that only one file at a time is in memory.
    groups = list(_grouped(tensors, DTYPES[dtype], file_bytes))
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        names = [WHOLE]
    for name, group in zip(names, groups, strict=True):
        arrays = {tensor.name: in_precision(tensor.name, tensor.make(), dtype) for tensor in group}
        save_file(arrays, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # the library's mode 0600 would hide the file from the group
    if len(groups) > 1:
        # Several files need an index from tensors to files.
        weight_map: JsonObject = {
            tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group
        }
        total = sum(_num_bytes(tensor, DTYPES[dtype]) for tensor in itertools.chain(*groups))
        index: JsonObject = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    write_json(folder / "config.json", hf_config | {"dtype": dtype})


def _merged(of_model: HFConfig, of_tokenizer: HFConfig) -> JsonObject:
    """Merges the fields of model and tokenizer; both must agree on the special tokens."""
    merged = dict(of_model)
    for name, value in of_tokenizer.items():
        known = merged.get(name)
        require(
            known is None or value in (None, known),
            f"{name} is {known} in the model, whose positions depend on it, but {value} in the "
            "tokenizer: give the tokenizer of the model",
            WeightsError,
        )
        merged[name] = value if known is None else known
    return merged


def in_precision(name: str, x: np.ndarray, dtype: Precision) -> np.ndarray:
    """Converts an array to the precision of the written file.

    Args:
      name: The name of the tensor, for messages.
      x: The array.
      dtype: The precision.

    Raises:
      WeightsError: A number exceeds the range of float16.
    """
    require(
        # NaN is allowed: every comparison with NaN is false, so negate the comparison.
        dtype != "float16" or not np.abs(x).max(initial=0) > np.finfo(np.float16).max,
        f"{name} has numbers beyond float16: choose bfloat16 or float32",
        WeightsError,
    )
    return np.ascontiguousarray(x, DTYPES[dtype])


def _grouped(
    tensors: Iterable[ExportedTensor], dtype: DTypeLike, file_bytes: int
) -> Iterator[Sequence[ExportedTensor]]:
    """Yields the tensors of each file, in order."""
    group, size = [], 0
    for tensor in tensors:
        num_bytes = _num_bytes(tensor, dtype)
        if group and size + num_bytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += num_bytes
    yield group


def _num_bytes(tensor: ExportedTensor, dtype: DTypeLike) -> int:
    return math.prod(tensor.shape) * np.dtype(dtype).itemsize


def search_fields(request: GenerationRequest, max_length: int) -> JsonObject:
    """Returns the fields of `generation_config.json` for a beam search, except for token ids.

    Args:
      request: The search of a run trained with flaxzoo. Each banned sequence is a single token.
      max_length: The longest target of the model, in tokens.
    """
    return {
        "num_beams": request.num_beams,
        "length_penalty": request.length_penalty,
        "early_stopping": request.early_stopping,
        "max_length": max_length + 1,  # transformers' `max_length` includes the start token
        "suppress_tokens": [token for (token,) in request.bad_words_ids] or None,
    }


def write_json(file: Path, content: JsonValue) -> None:
    """Writes a JSON file in the format of transformers."""
    file.write_text(to_json(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
