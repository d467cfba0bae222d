"""Convert arrays of transformers in memory, through the mapping that reads its files."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from flaxzoo import models
from flaxzoo.models.hf.registry import mapping_of
from flaxzoo.models.hf.tensors.layout import Shape
from flaxzoo.models.hf.tensors.locate import locate
from flaxzoo.models.hf.tensors.read import read_parameter
from flaxzoo.models.init import parameter_shapes
from transformers.core_model_loading import revert_weight_conversion


class Arrays:
    """Tensors in memory with the interface of tensor files."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = {name: np.asarray(x) for name, x in arrays.items()}

    def shapes(self) -> dict[str, Shape]:
        return {name: x.shape for name, x in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def release(self) -> None:
        pass

    def file_of(self, name: str) -> str:
        return "memory"


def parameters_of(arrays: Mapping[str, Any], config: models.TransformerConfig) -> Any:
    """Convert parameters or gradients by their HF names to a flaxzoo tree; each must be used."""
    flat: dict[str, Any] = flatten_dict(parameter_shapes(models.create(config)), sep="/")
    ours = {path: x.shape for path, x in flat.items()}
    tensors = Arrays(arrays)
    places = locate(mapping_of(config).tensor_mapping(config), ours, tensors, "memory")
    tree = {
        path: read_parameter(
            places[path],
            tensors,
            flax=ours,
            dtype=np.float32,
            index=tuple(slice(None) for _ in shape),
        )
        for path, shape in ours.items()
    }
    return unflatten_dict(tree, sep="/")


def gradients_of(theirs: Any, config: models.TransformerConfig) -> Any:
    """Convert the gradients of a torch model to a flaxzoo tree."""
    # A tied matrix has two names, of which files have one.
    tensors = dict(theirs.named_parameters(remove_duplicate=False)) | dict(theirs.named_buffers())
    gradients = {name: x.grad for name, x in tensors.items() if x.grad is not None}
    # In memory transformers joins what its files have apart, such as the maps of experts.
    return parameters_of(revert_weight_conversion(theirs, gradients), config)
