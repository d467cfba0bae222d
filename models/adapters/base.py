"""The base model of a run's adapters: its location and a checksum of its parameters."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data.common.errors import UserError
from ...data.common.fields import Checked, check_value, make_record, require
from ...data.common.json_text import JsonObject
from ..checksums import checksum_of_files
from ..hub import local_folder

BASE = "base"
"""The key of the base model's record in the `config.json` of a run that trained adapters."""


@dataclasses.dataclass(frozen=True)
class Base(Checked):
    """A model that adapters were trained on."""

    folder: str
    """The absolute path of a run folder or Hugging Face folder, or a name on the hub."""
    relative: str
    """The path relative to the run folder, in case both folders are moved together; or the hub
    name."""
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
        stored: Any = fields.get(BASE)
        try:
            check_value(BASE, stored, Mapping[str, object])
            return make_record(cls, stored, f"{BASE}.")
        except UserError as error:
            raise UserError(f"{run}/config.json: {error}: restore it") from error

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
        # If the base has changed, the outputs would differ without a warning.
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
