"""The base model of a run's adapters: its location and a checksum of its parameters."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from ...data.common.errors import UserError
from ...data.common.fields import field_names, require
from ...data.common.json_text import JsonObject
from ..checksums import checksum_of_files
from ..hub import local_folder

BASE = "base"
"""The key of the base model's record in the `config.json` of a run that trained adapters."""


@dataclasses.dataclass(frozen=True)
class Base:
    """A model that adapters were trained on."""

    folder: str
    """The absolute path of a run folder or Hugging Face folder, or a name on the hub."""
    relative: str
    """The path relative to the run folder, for folders that are moved together, or the hub name."""
    step: int | None
    """The checkpoint of a run, or None for a folder in the Hugging Face format."""
    checksum: str
    """A hash of the files that contain the model's parameters."""

    @classmethod
    def describe(cls, source: str, step: int | None, run: Path) -> "Base":
        """Returns the record that describes an existing model.

        Args:
            source: A folder, or a name on the hub.
            step: The checkpoint of a run.
            run: The folder of the run that trains adapters.
        """
        # A path may be relative to the working directory; a name on the hub is not a path.
        folder = local_folder(source)
        checksum = checksum_of_files(_parameters(folder, step))
        if not Path(source).expanduser().exists():  # a name on the hub, found in its cache
            return cls(source, source, step, checksum)
        absolute = folder.resolve()
        relative = os.path.relpath(absolute, run.resolve())
        return cls(str(absolute), relative, step, checksum)

    @classmethod
    def from_fields(cls, fields: JsonObject, run: Path) -> "Base":
        """Returns the base model that a run's `config.json` describes.

        Raises:
            UserError: The record of the base is missing or broken.
        """
        stored = fields.get(BASE)
        names = field_names(cls)
        if not isinstance(stored, Mapping) or stored.keys() != names:
            raise UserError(f"{run}/config.json does not name the base of its adapters: restore it")
        texts = (stored[name] for name in ("folder", "relative", "checksum"))
        step = stored["step"]
        require(
            all(isinstance(x, str) for x in texts) and (step is None or type(step) is int),
            f"{run}/config.json: {BASE} has values of wrong types: restore it",
        )
        return cls(**stored)  # pyright: ignore[reportArgumentType]

    def find(self, run: Path) -> Path:
        """Returns the folder of the base, after checking that its parameters have not changed.

        Args:
            run: The folder of the run with the adapters.

        Raises:
            UserError: The base is missing or has changed.
        """
        named = self.folder if self.step is None else f"step {self.step} of {self.folder}"
        moved = run.resolve() / self.relative
        missing = UserError(f"{run} has adapters of {named}, which does not exist: restore it")
        try:
            # Prefer the relative path: the folders may have been moved together.
            folder = moved if moved.exists() else local_folder(self.folder)
        except FileNotFoundError:
            raise missing from None
        # A base that changed would give other outputs without a warning.
        files = _parameters(folder, self.step)
        if not files:
            raise missing
        require(
            checksum_of_files(files) == self.checksum,
            f"{run} has adapters of {named}, whose parameters have changed since: restore them",
        )
        return folder


def _parameters(folder: Path, step: int | None) -> tuple[Path, ...]:
    """Returns the files that contain a model's parameters."""
    if step is None:
        return tuple(sorted(filter(Path.is_file, folder.glob("*.safetensors"))))
    params = folder / "checkpoints" / str(step) / "params"
    return tuple(sorted(filter(Path.is_file, params.rglob("*"))))
