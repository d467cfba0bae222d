"""The tensors of a folder in Hugging Face's form: one safetensors file, or several and an index.

Tensors are read one by one, and nothing is ever unpickled.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from .rules import Shape, WeightsError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class TensorFiles:
    """Names, shapes and values of a folder's tensors.

    Raises:
      WeightsError: there are no such files, or they are broken; the message names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _files(folder)
        self._open: dict[Path, Any] = {}
        self._shapes: dict[str, Shape] = {}
        for name, file in self._files.items():
            with _errors_of(file):
                tensor = self._opened(file).get_slice(name)
            self._shapes[name] = tuple(tensor.get_shape())

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="np")
        return self._open[file]

    def shapes(self) -> dict[str, Shape]:
        """Of every tensor, by name."""
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the precision it is stored in."""
        file = self._files[name]
        with _errors_of(file):
            return self._opened(file).get_tensor(name)

    def where(self, name: str) -> str:
        """The file that a tensor lies in."""
        return str(self._files[name])


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    whole, index = folder / WHOLE, folder / INDEX
    if whole.is_file():
        return dict.fromkeys(_names(whole), whole)
    if index.is_file():
        return _indexed(folder, index)
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
        raise WeightsError(
            f"{folder} has weights in pickled files only, which may run any code and are never "
            "opened: save them as safetensors with the library that wrote them "
            "(`model.save_pretrained(folder)` in transformers 5)"
        )
    raise WeightsError(f"{folder} has neither {WHOLE} nor {INDEX}: give a folder with weights")


def _names(file: Path) -> list[str]:
    with _errors_of(file), safe_open(file, framework="np") as tensors:
        return list(tensors.keys())


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    """The file of each tensor, as an index says, and as its files confirm."""
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted = {str(name): str(file) for name, file in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{index} is not an index of safetensors files (no object weight_map of names to "
            "files): download it again"
        ) from error
    files: dict[str, Path] = {}
    for name in sorted(set(wanted.values())):
        file = folder / name
        if Path(name).name != name:
            raise WeightsError(f"{index} points to {name!r}: its files must lie beside it")
        if not file.is_file():
            raise WeightsError(f"{index} names {name}, which is missing: download it again")
        files |= dict.fromkeys(_names(file), file)
    for name, file in wanted.items():
        if files.get(name) != folder / file:
            raise WeightsError(f"{index} says that {name} is in {file}, but it is not there")
    return files


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Says which file is broken."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} is not a whole safetensors file ({error}): download it again"
        ) from error
