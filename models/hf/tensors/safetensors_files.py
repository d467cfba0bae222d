"""Reads the tensors of a folder: one safetensors file, or several with an index.

Files are memory-mapped, so that each requested tensor is read once, directly to its destination.
Nothing is ever unpickled.
"""

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

from ....data.common.fields import require
from ....data.common.files import path_inside
from .layout import Shape
from .mapping import WeightsError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
"""The supported types, by their names in a file's header."""


class TensorFiles:
    """The names, shapes and values of the tensors in a folder.

    Raises:
      WeightsError: The files are missing or broken; the message names the file.
    """

    def __init__(self, folder: Path) -> None:
        self._files = _files(folder)

    def shapes(self) -> dict[str, Shape]:
        """Returns the shape of every tensor, by name."""
        return {name: file.shape(name) for name, file in self._files.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor in its stored precision, as a view of the file."""
        return self._files[name].view(name)

    def release(self) -> None:
        """Releases the memory pages that were read; reading them again is cheap."""
        for file in set(self._files.values()):
            file.memory.madvise(mmap.MADV_DONTNEED)

    def file_of(self, name: str) -> str:
        """Returns the file that contains a tensor."""
        return str(self._files[name].path)


def open_tensors(file: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of one file in their stored precision, as views of the file.

    Raises:
      WeightsError: The file is broken.
    """
    opened = _File(file)
    return {name: opened.view(name) for name in opened.names()}


class _File:
    """A memory-mapped safetensors file: the length of the header, the header, and the data."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        with _errors_of(path):
            safe_open(path, framework="np")  # this validates the header, which the next lines read
            with path.open("rb") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._start = 8 + int.from_bytes(self.memory[:8], "little")
        self._header = json.loads(self.memory[8 : self._start])
        self._header.pop("__metadata__", None)

    def names(self) -> list[str]:
        return list(self._header)

    def shape(self, name: str) -> Shape:
        return tuple(self._header[name]["shape"])

    def view(self, name: str) -> np.ndarray:
        entry = self._header[name]
        require(
            entry["dtype"] in DTYPES,
            f"{name} in {self.path} has the type {entry['dtype']}, which is not supported: "
            f"only {', '.join(DTYPES)}",
            WeightsError,
        )
        dtype, (start, end) = np.dtype(DTYPES[entry["dtype"]]), entry["data_offsets"]
        # The offsets of a tensor count from the end of the header.
        content = memoryview(self.memory)[self._start + start : self._start + end]
        return np.frombuffer(content, dtype).reshape(entry["shape"])


def _files(folder: Path) -> dict[str, _File]:
    """Returns the file that contains each tensor, by the tensor's name."""
    whole, index = folder / WHOLE, folder / INDEX
    if whole.is_file():
        file = _File(whole)
        return dict.fromkeys(file.names(), file)
    if index.is_file():
        return _indexed(folder, index)
    require(
        not [*folder.glob("*.bin"), *folder.glob("*.pt")],
        f"{folder} has weights in pickled files only, which may run any code and are never "
        "opened: save them as safetensors with the library that wrote them "
        "(`model.save_pretrained(folder)` in transformers 5)",
        WeightsError,
    )
    raise WeightsError(f"{folder} has neither {WHOLE} nor {INDEX}: give a folder with weights")


def _indexed(folder: Path, index: Path) -> dict[str, _File]:
    """Returns the file of each tensor according to an index, after checking the files."""
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted = {str(name): str(file) for name, file in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{index} is not an index of safetensors files (no object weight_map of names to "
            "files): download it again"
        ) from error
    # Check that every file that the index names exists in the same folder.
    files: dict[str, _File] = {}
    for name in sorted(set(wanted.values())):
        file = path_inside(folder, name)
        if file is None or Path(name).name != name:
            raise WeightsError(f"{index} points to {name!r}: its files must be in the same folder")
        problem = f"{index} names {name}, which is missing: download it again"
        require(file.is_file(), problem, WeightsError)
        opened = _File(file)
        files |= dict.fromkeys(opened.names(), opened)
    # Check that every tensor is in the file that the index names.
    for name, file in wanted.items():
        require(
            name in files and files[name].path == folder / file,
            f"{index} says that {name} is in {file}, which lacks it",
            WeightsError,
        )
    return files


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Converts errors of the library to WeightsErrors that name the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} is not a complete safetensors file ({error}): download it again"
        ) from error
