"""The files of a run folder: `config.json`, and `checkpoints/<step>` with `params`.

A folder in the Hugging Face format has no steps, and its `config.json` names the family.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from ..data.common.errors import UserError
from ..data.common.fields import require
from ..data.common.json_text import JsonObject, read_object
from .adapters.peft import is_peft_folder
from .checksums import CHECKSUMS_FILE

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
PARAMS = "params"
EMA = "ema"
"""The folder of the moving average of the parameters in a checkpoint, if the run maintains one."""
EMA_AUXILIARY = "ema_auxiliary"
"""The folder of the moving averages of auxiliary models."""
DATA = "data"
"""The folder of the position in the data in a checkpoint."""
TOKENIZER = "tokenizer"
IMPORTED_FROM = "imported_from"
"""The key in a run's `config.json` that records the imported folder."""
READINGS = 5
"""Number of attempts to read the newest checkpoint, because training may remove it meanwhile."""

T = TypeVar("T")


def read_config(folder: str | Path) -> JsonObject:
    """Reads the `config.json` of a run folder.

    Raises:
      FileNotFoundError: The folder is not a run.
      UserError: The `config.json` of the folder is broken, or was not written by flaxzoo.
    """
    return check_run(read_fields(folder), folder)


def check_run(fields: JsonObject, folder: str | Path) -> JsonObject:
    """Returns the content of a `config.json`, after checking that it belongs to a run.

    Raises:
      UserError: A different program wrote the file, or the file does not describe a run.
    """
    kind = "has neither the fields of flaxzoo nor the model_type of transformers"
    if is_foreign(fields):
        kind = "is in the Hugging Face format"
    problem = f"{Path(folder) / CONFIG_FILE} {kind}: give a run folder"
    require({"model", "train"} <= fields.keys(), problem)
    return fields


def read_fields(folder: str | Path) -> JsonObject:
    """Reads the `config.json` of a run folder or of a folder in the Hugging Face format.

    Raises:
      FileNotFoundError: The folder has no `config.json`.
      UserError: The `config.json` is broken.
    """
    file = Path(folder) / CONFIG_FILE
    if not file.is_file():
        # A PEFT folder contains only the adapter. The folder of the base model has the config.json.
        require(
            not is_peft_folder(Path(folder)),
            f"{folder} is an adapter of peft: make a run of it and its base with flaxzoo "
            "import, or give it to models.load",
        )
        path = Path(folder)
        what = "is no folder" if path.exists() else "does not exist"
        if path.is_dir():
            what = "has no config.json"
        raise FileNotFoundError(
            f"{folder} {what}: give a run folder, which `flaxzoo train` makes, or a folder "
            f"in the Hugging Face format"
        )
    return read_object(file)


def object_field(fields: JsonObject, name: str, folder: str | Path) -> JsonObject:
    """Returns a field of a folder's `config.json` whose value is a JSON object.

    Args:
      fields: The content of the file.
      name: The name of the field.
      folder: The folder of the file, for messages.

    Raises:
      UserError: The field is not an object.
    """
    value = fields[name]
    if not isinstance(value, dict):
        raise UserError(
            f"{Path(folder) / CONFIG_FILE}: {name} {value!r} is not an object: restore it"
        )
    return value


@contextlib.contextmanager
def naming_writer(fields: JsonObject, folder: str | Path) -> Iterator[None]:
    """Adds the file's path, the writer's version and a remedy to errors about a `config.json`.

    Args:
        fields: The content of the file.
        folder: The folder of the file.

    Raises:
        UserError: The block raises a UserError.
    """
    try:
        yield
    except UserError as error:
        installed, writer = version("flaxzoo"), fields.get("flaxzoo")
        if writer is None:
            remedy = f"its flaxzoo version is not stated (this version is {installed}): restore it"
        elif writer == installed:
            remedy = f"this version, {installed}, wrote the file: restore it"
        else:
            remedy = (
                f"flaxzoo {writer} wrote the file (this version is {installed}): "
                f"use flaxzoo {writer}"
            )
        raise UserError(f"{Path(folder) / CONFIG_FILE}: {error}; {remedy}") from error


def is_foreign(fields: JsonObject) -> bool:
    """Returns whether a `config.json` is in the Hugging Face format."""
    return "model_type" in fields


class CheckpointRemoved(UserError):
    """Raised if training removes a checkpoint while it is being read."""


def chosen_step(folder: Path, step: int | None) -> int | None:
    """Returns the step of the requested checkpoint, or the newest step of a run.

    Args:
      folder: A run folder, or one in the Hugging Face format.
      step: The requested step, if any.

    Returns:
      The step, or None for a folder in the Hugging Face format, which has no steps.

    Raises:
      FileNotFoundError: The run does not have the checkpoint.
      UserError: A step is requested from a folder that has no steps.
    """
    if is_foreign(read_fields(folder)):
        require(step is None, f"{folder} has no checkpoints: leave step {step} out")
        return None
    return newest_step(folder) if step is None else check_step(folder, step)


def read_step(folder: Path, step: int | None, read: Callable[[int | None], T]) -> T:
    """Reads a checkpoint of a run, even if the run is training and removes old checkpoints.

    Args:
      folder: A run folder, or one in the Hugging Face format.
      step: The requested step. If None, reads the newest checkpoint.
      read: The function that reads a checkpoint, given the result of `chosen_step`.

    Raises:
      CheckpointRemoved: The requested checkpoint was removed during the read.
    """
    for _ in range(READINGS - 1):
        try:
            return read(chosen_step(folder, step))
        # There may be a newer checkpoint, so choose again, unless the caller chose the step.
        except CheckpointRemoved:
            if step is not None:
                raise
    return read(chosen_step(folder, step))


def steps(folder: str | Path) -> list[int]:
    """Returns the steps of a run's checkpoints, in ascending order.

    A checkpoint's folder is renamed to its step when the checkpoint is complete. Empty folders are
    ignored.
    """
    return [step for step in numbered(folder) if _holds_checkpoint(Path(folder), step)]


def numbered(folder: str | Path) -> list[int]:
    """Returns the steps of all checkpoint folders of a run, in ascending order."""
    checkpoints = Path(folder) / CHECKPOINTS
    if not checkpoints.is_dir():
        return []
    names = (path.name for path in checkpoints.iterdir() if path.is_dir())
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def _holds_checkpoint(folder: Path, step: int) -> bool:
    """Returns whether the folder of a step contains a checkpoint, which may be damaged."""
    checkpoint = folder / CHECKPOINTS / str(step)
    params = checkpoint / PARAMS
    # Training may remove the checkpoint at this moment.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (checkpoint / CHECKSUMS_FILE).is_file() or any(params.iterdir())
    return False


def newest_step(folder: str | Path) -> int:
    """Returns the step of the newest checkpoint.

    Raises:
      FileNotFoundError: The run has no checkpoint yet.
    """
    existing = steps(folder)
    if not existing:
        empty = ", ".join(f"{CHECKPOINTS}/{step}" for step in numbered(folder))
        note = f" ({empty} is incomplete)" if empty else ""
        raise FileNotFoundError(
            f"{folder} has no checkpoint yet{note}: wait for its first checkpoint"
        )
    return existing[-1]


def check_step(folder: str | Path, step: int) -> int:
    """Returns `step`, after checking that its checkpoint exists.

    Raises:
      FileNotFoundError: The checkpoint does not exist. The message names the existing checkpoints.
    """
    if step not in steps(folder):
        kept = ", ".join(map(str, steps(folder))) or "none"
        raise FileNotFoundError(f"{folder} has no checkpoint of step {step}: it has {kept}")
    return step
