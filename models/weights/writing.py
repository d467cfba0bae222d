"""A model as a folder in Hugging Face's form."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from ..config import TransformerConfig
from .families import family_of
from .rules import Written, write_tensors
from .tensor_files import INDEX, WHOLE

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def write_weights(
    folder: Path,
    config: TransformerConfig,
    params: Any,
    *,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    file_bytes: int = 5_000_000_000,
) -> None:
    """Writes `config.json` and the tensors of a model.

    Args:
      folder: where to; it exists.
      config: of the model.
      params: its parameters, layers stacked.
      dtype: in which precision.
      file_bytes: how large a file may be; with more there are several and an index. A tensor is
        never cut.

    Raises:
      WeightsError: the model cannot be said in their terms.
    """
    family = family_of(config)
    fields = {**family.fields(config), "dtype": dtype}
    tensors = write_tensors(family.table(config), flatten_dict(params, sep="/"))
    groups = list(_grouped(tensors, DTYPES[dtype], file_bytes))
    for name, group in zip(_file_names(len(groups)), groups, strict=True):
        made = {tensor.name: tensor.make().astype(DTYPES[dtype]) for tensor in group}
        save_file(made, folder / name, metadata={"format": "pt"})
    if len(groups) > 1:
        _write_json(folder / INDEX, _index(groups, DTYPES[dtype]))
    _write_json(folder / "config.json", fields)


def _grouped(
    tensors: Iterator[Written], dtype: Any, file_bytes: int
) -> Iterator[Sequence[Written]]:
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


def _bytes(tensor: Written, dtype: Any) -> int:
    return math.prod(tensor.shape) * np.dtype(dtype).itemsize


def _file_names(number: int) -> list[str]:
    if number == 1:
        return [WHOLE]
    return [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]


def _index(groups: Sequence[Sequence[Written]], dtype: Any) -> dict[str, Any]:
    """Which file each tensor is in."""
    names = _file_names(len(groups))
    total = sum(_bytes(tensor, dtype) for group in groups for tensor in group)
    places = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
    return {"metadata": {"total_size": total}, "weight_map": places}


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
