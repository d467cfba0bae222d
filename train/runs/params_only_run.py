"""A run folder that holds a model and was not trained: it has no optimizer to go on with."""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...data.io.atomic_io import build_folder
from ...models.load import CHECKPOINTS, CONFIG_FILE, PARAMS
from ..errors import RunError

TOKENIZER = "tokenizer"
AVERAGED_STEPS = "averaged_steps"
"""In its config.json: of which checkpoints it is the mean."""
IMPORTED_FROM = "imported_from"
"""In its config.json: the folder it was read from."""
ORIGINS = {AVERAGED_STEPS: "averaged checkpoints", IMPORTED_FROM: "an imported model"}


def check_place_is_free(output: Path) -> None:
    """Raises RunError if there is something."""
    if output.exists():
        raise RunError(f"{output} exists: give a folder that does not")


def check_trainable(fields: dict[str, Any], folder: Path) -> None:
    """Raises RunError if a folder with this config.json has no optimizer to go on with."""
    for name, what in ORIGINS.items():
        if name in fields:
            raise RunError(
                f"{folder} holds {what}, which have no optimizer to go on with: give another "
                f"--workdir, and begin it with --init-from {folder}"
            )


def make_model_folder(
    output: Path,
    fields: dict[str, Any],
    save_tokenizer: Callable[[Path], Any],
    step: int,
    params: Any,
) -> None:
    """Makes a folder with one checkpoint, whole or not at all.

    Args:
      output: a place that is free.
      fields: its config.json, where the model came from included.
      save_tokenizer: writes the tokenizer into a folder.
      step: the number of the checkpoint.
      params: the model's parameters.
    """

    def fill(place: Path) -> None:
        import orbax.checkpoint as ocp

        save_tokenizer(place / TOKENIZER)
        facts = {"flaxzoo": importlib.metadata.version("flaxzoo"), **fields}
        text = json.dumps(facts, indent=2) + "\n"
        (place / CONFIG_FILE).write_text(text, encoding="utf-8")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(place.resolve() / CHECKPOINTS / str(step) / PARAMS, params)

    build_folder(output, fill)
