"""A model as a folder in Hugging Face's form."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from ...data.io.json_text import JsonObject
from ..config import TransformerConfig
from ..decoding.request import BeamSearch, GenerationRequest
from .registry import mapping_of
from .safetensors_files import INDEX, WHOLE
from .tensor_mapping import ExportedTensor, WeightsError, export_tensors

Precision = Literal["float32", "float16", "bfloat16"]
DTYPES: Mapping[Precision, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
FILE_BYTES = 5_000_000_000


def write_weights(
    folder: Path,
    config: TransformerConfig,
    params: Any,
    *,
    dtype: Precision = "float32",
    file_bytes: int = FILE_BYTES,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Writes `config.json` and the tensors of a model.

    Args:
      folder: where to; it exists.
      config: of the model.
      params: its parameters, layers stacked.
      dtype: in which precision.
      file_bytes: how large a file may be; with more there are several and an index. A tensor is
        never cut.
      fields: what `config.json` says beside the model: ids of special tokens, say.

    Raises:
      WeightsError: the model cannot be said in their terms.
    """
    mapping = mapping_of(config)
    config, params = mapping.to_equivalent(config, params)
    said = {**_agreeing(mapping.config_to_hf(config), fields or {}), "dtype": dtype}
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    tensors = export_tensors(mapping.tensor_mapping(config), flat)
    groups = list(_grouped(tensors, DTYPES[dtype], file_bytes))
    for name, group in zip(_file_names(len(groups)), groups, strict=True):
        made = {tensor.name: in_precision(tensor.name, tensor.make(), dtype) for tensor in group}
        save_file(made, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # the library's 0600 would hide it from the group
    if len(groups) > 1:
        write_json(folder / INDEX, _index(groups, DTYPES[dtype]))
    write_json(folder / "config.json", said)


def _agreeing(of_model: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of both; what a model says of a special token stands."""
    said = dict(of_model)
    for name, value in beside.items():
        known = said.get(name)
        if known is not None and value not in (None, known):
            raise WeightsError(
                f"{name} is {known} by the model, which counts its positions from it, and {value} "
                "by its tokenizer: give the model's own"
            )
        said[name] = value if known is None else known
    return said


def in_precision(name: str, x: np.ndarray, dtype: Precision) -> np.ndarray:
    """An array as it is to be written.

    Raises:
      WeightsError: its numbers are beyond what float16 holds.
    """
    if dtype == "float16" and np.abs(x).max(initial=0) > np.finfo(np.float16).max:
        raise WeightsError(f"{name} has numbers beyond float16: choose bfloat16 or float32")
    return np.ascontiguousarray(x, DTYPES[dtype])


def _grouped(
    tensors: Iterator[ExportedTensor], dtype: Any, file_bytes: int
) -> Iterator[Sequence[ExportedTensor]]:
    """Tensors of one file after the other, in their order."""
    group, size = [], 0
    for tensor in tensors:
        own = _bytes(tensor, dtype)
        if group and size + own > file_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += own
    yield group


def _bytes(tensor: ExportedTensor, dtype: Any) -> int:
    return math.prod(tensor.shape) * np.dtype(dtype).itemsize


def _file_names(number: int) -> list[str]:
    if number == 1:
        return [WHOLE]
    return [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]


def _index(groups: Sequence[Sequence[ExportedTensor]], dtype: Any) -> dict[str, Any]:
    """Which file each tensor is in."""
    names = _file_names(len(groups))
    total = sum(_bytes(tensor, dtype) for group in groups for tensor in group)
    places = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
    return {"metadata": {"total_size": total}, "weight_map": places}


def search_fields(request: GenerationRequest, max_length: int) -> JsonObject:
    """Returns the fields of `generation_config.json` for a search, but for ids of special tokens.

    Args:
      request: the search of a run that was trained here: all banned sequences are single tokens.
      max_length: the model's: the longest target.
    """
    assert isinstance(request.method, BeamSearch)
    return {
        "num_beams": request.method.num_beams,
        "length_penalty": request.method.length_penalty,
        "early_stopping": request.method.early_stopping,
        "max_length": max_length + 1,  # the start token is counted
        "suppress_tokens": [token for (token,) in request.banned] or None,
    }


def write_json(file: Path, content: Any) -> None:
    """Writes a file as transformers does."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
