"""From a folder to `(model, params)`.

A run folder holds `config.json`, whose "model" entry rebuilds the model, and
`checkpoints/<step>/params`, written by Orbax.  A folder in Hugging Face's form
holds another `config.json`, which names its family, and safetensors files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..data.errors import UserError
from .checksums import find_damage
from .config import Execution, TransformerConfig
from .hf.load_weights import config_of_folder, read_weights
from .hub import local_folder
from .init import parameter_shapes
from .registry import config_from_dict, create

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
PARAMS = "params"


def load(
    path: str | Path,
    *,
    step: int | None = None,
    execution: Execution | None = None,
    shardings: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Loads the model of a run folder, or of a folder in Hugging Face's form.

    Args:
      path: what `flaxzoo train … --workdir` left, or `save_pretrained` of transformers; or a name
        on the Hugging Face hub.
      step: which checkpoint of a run; by default the newest.
      execution: how the model is to be run; by default in float32, scanned.
      shardings: from the tree of the parameters' shapes to one of their shardings
        (`train.parameter_shardings`); by default all lie on the first device.

    Returns:
      The Flax module and its parameters: `model.apply({"params": params}, input_ids=…).logits`.

    Raises:
      FileNotFoundError: there is no such folder, or the run has no such checkpoint.
      UserError: the folder is broken, or holds what there is no model for.
    """
    folder = local_folder(path).resolve()
    model = create(model_config(folder), execution)
    shapes = parameter_shapes(model)
    placed = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        (shardings or _on_first_device)(shapes),
    )
    return model, read_params(folder, chosen_step(folder, step), model.config, placed)


def model_config(folder: Path) -> TransformerConfig:
    """What the model of a folder of either form is."""
    fields = read_fields(folder)
    if is_foreign(fields):
        return config_of_folder(folder, fields)
    return config_from_dict(check_run(fields, folder)["model"])


def is_foreign(fields: dict[str, Any]) -> bool:
    """Whether a `config.json` is that of a folder in Hugging Face's form."""
    return "model_type" in fields


def chosen_step(folder: Path, step: int | None) -> int | None:
    """Which checkpoint is meant: by default a run's newest; None of a folder that has no steps.

    Raises:
      FileNotFoundError: the run has no such checkpoint.
      UserError: a step is given where there are none.
    """
    if is_foreign(read_fields(folder)):
        if step is not None:
            raise UserError(f"{folder} holds one model and no steps: leave step {step} out")
        return None
    return newest_step(folder) if step is None else check_step(folder, step)


def read_params(folder: Path, step: int | None, config: TransformerConfig, shapes: Any) -> Any:
    """The parameters of a folder of either form.

    Args:
      folder: where they are kept.
      step: as `chosen_step` answers it.
      config: of the folder's model.
      shapes: a `jax.ShapeDtypeStruct` with a sharding for each parameter: where it is to lie.
    """
    return (
        read_weights(folder, config, shapes)
        if step is None
        else restore_params(folder, step, shapes)
    )


def _on_first_device(shapes: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: sharding, shapes)


def restore_params(folder: str | Path, step: int, shapes: Any) -> Any:
    """The parameters of a checkpoint.

    Args:
      folder: a run folder.
      step: one of its checkpoints.
      shapes: a `jax.ShapeDtypeStruct` with a sharding for each parameter: where it is to lie.

    Raises:
      UserError: a file of theirs is not what was written.
    """
    import orbax.checkpoint as ocp

    checkpoint = Path(folder).resolve() / CHECKPOINTS / str(step)
    damage = find_damage(checkpoint, PARAMS)
    if damage is not None:
        raise UserError(
            f"checkpoint {step} of {folder} is damaged: {damage}; restore it, or use another step"
        )
    options = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:  # each reads for itself, and may be the only one that does
        options = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={jax.process_index()}
        )
    with ocp.StandardCheckpointer(multiprocessing_options=options) as checkpointer:
        return checkpointer.restore(checkpoint / PARAMS, shapes)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The `config.json` of a run folder.

    Raises:
      FileNotFoundError: the folder is not a run.
      UserError: it has another `config.json` than flaxzoo's, or a broken one.
    """
    return check_run(read_fields(folder), folder)


def check_run(fields: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """`fields`, if they are those of a run.

    Raises:
      UserError: they are not.
    """
    if not {"model", "train"} <= fields.keys():
        kind = "is in Hugging Face's form" if is_foreign(fields) else "is not of flaxzoo"
        raise UserError(f"{Path(folder) / CONFIG_FILE} {kind}: give a run folder")
    return fields


def read_fields(folder: str | Path) -> dict[str, Any]:
    """The `config.json` of any folder with a model.

    Raises:
      FileNotFoundError: there is none.
      UserError: it is broken.
    """
    file = Path(folder) / CONFIG_FILE
    if not file.is_file():
        what = "has no config.json" if Path(folder).is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {what}: give a run folder, as `flaxzoo train` leaves one, or a folder in "
            "Hugging Face's form"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}): restore it") from error
    if not isinstance(fields, dict):
        raise UserError(f"{file} is no JSON object: restore it")
    return fields


def steps(folder: str | Path) -> list[int]:
    """The steps of a run's whole checkpoints, ascending."""
    checkpoints = Path(folder) / CHECKPOINTS
    if not checkpoints.is_dir():
        return []
    return sorted(int(p.name) for p in checkpoints.iterdir() if p.name.isdigit())


def newest_step(folder: str | Path) -> int:
    """The step of the newest checkpoint.

    Raises:
      FileNotFoundError: there is none yet.
    """
    found = steps(folder)
    if not found:
        raise FileNotFoundError(f"{folder} has no checkpoint yet: let the run reach its first")
    return found[-1]


def check_step(folder: str | Path, step: int) -> int:
    """`step`, if the run kept its checkpoint.

    Raises:
      FileNotFoundError: it did not; the message names those it kept.
    """
    if step not in steps(folder):
        kept = ", ".join(map(str, steps(folder))) or "none"
        raise FileNotFoundError(f"{folder} has no checkpoint of step {step}: it has {kept}")
    return step
