"""Creates run folders without an optimizer state, for imported, averaged or saved models."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

from ...data.common.atomic_io import new_folder
from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.common.json_text import JsonObject, to_json
from ...models.checksums import write_checksums
from ...models.nn.typing import Params
from ...models.run_files import CHECKPOINTS, CONFIG_FILE, IMPORTED_FROM, PARAMS, TOKENIZER

AVERAGED_STEPS = "averaged_steps"
"""The key in `config.json` for the steps of the averaged checkpoints."""
SAVED_FROM_PYTHON = "saved_from_python"
"""The key in `config.json` for whether `save_run` received the data of the model."""
ORIGINS = {
    AVERAGED_STEPS: "averaged checkpoints",
    IMPORTED_FROM: "an imported model",
    SAVED_FROM_PYTHON: "a model saved from Python",
}


def check_not_existing(output: Path) -> None:
    """Raises RunError if `output` exists."""
    require(
        not output.exists(), f"{output} exists: give a folder that does not exist", error=RunError
    )


def check_trainable(fields: JsonObject, folder: Path) -> None:
    """Raises RunError if the `config.json` describes a run without an optimizer state."""
    contents = [what for name, what in ORIGINS.items() if name in fields]
    require(
        not contents,
        f"{folder} contains {', '.join(contents)}, without an optimizer state to resume from: give "
        f"another --workdir, and initialize it with --init-from {folder}",
        error=RunError,
    )


def make_params_only_run(
    output: Path,
    fields: JsonObject,
    *,
    save_tokenizer: Callable[[Path], object],
    save_more: Callable[[Path], object] = lambda folder: None,
    step: int,
    params: Params,
) -> None:
    """Creates a complete run folder with a single checkpoint, or nothing if an error occurs.

    Args:
        output: The folder to create. The folder may exist if it is empty.
        fields: The content of its `config.json`, including the origin of the model.
        save_tokenizer: Writes the tokenizer into a folder.
        save_more: Writes additional files into the run folder.
        step: The step of the checkpoint.
        params: The parameters of the model.

    Raises:
        DataError: The folder is not empty, or cannot be written.
    """

    def fill(folder: Path) -> None:
        # Import late, because orbax is slow to load.
        import orbax.checkpoint as ocp

        save_tokenizer(folder / TOKENIZER)
        save_more(folder)
        content = {"flaxzoo": importlib.metadata.version("flaxzoo"), **fields}
        text = to_json(content, indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        # Compute the checksums after the `with` block, because it ends only when all files are
        # complete.
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.resolve() / CHECKPOINTS / str(step) / PARAMS, params)
        write_checksums(folder / CHECKPOINTS / str(step))

    new_folder(output, fill)
