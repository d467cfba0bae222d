"""From a folder to `(model, params)`.

A run folder holds `config.json`, whose "model" entry rebuilds the model, and
`checkpoints/<step>/params`, written by Orbax.
"""

import json
from pathlib import Path
from typing import Any

import jax

from .config import Execution, config_from_dict, create
from .shapes import parameter_shapes

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
PARAMS = "params"


def load(
    path: str | Path, *, step: int | None = None, execution: Execution | None = None
) -> tuple[Any, Any]:
    """Loads the model of a run folder.

    Args:
      path: what `flaxzoo train … --workdir` left.
      step: which checkpoint; by default the newest.
      execution: how the model is to be run; by default in float32, scanned.

    Returns:
      The Flax module and its parameters, on the default device:
      `model.apply({"params": params}, input_ids=…).logits`.

    Raises:
      FileNotFoundError: there is no such run, or it has no such checkpoint.
    """
    folder = Path(path).resolve()
    model = create(config_from_dict(read_config(folder)["model"]), execution)
    step = newest_step(folder) if step is None else check_step(folder, step)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        parameter_shapes(model),
    )
    return model, restore_params(folder, step, shapes)


def restore_params(folder: str | Path, step: int, shapes: Any) -> Any:
    """The parameters of a checkpoint.

    Args:
      folder: a run folder.
      step: one of its checkpoints.
      shapes: a `jax.ShapeDtypeStruct` with a sharding for each parameter: where it is to lie.
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder).resolve() / CHECKPOINTS / str(step) / PARAMS
        return checkpointer.restore(path, shapes)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The `config.json` of a run folder.

    Raises:
      FileNotFoundError: the folder is not a run.
      ValueError: it has another `config.json` than flaxzoo's, or a broken one.
    """
    file = Path(folder) / CONFIG_FILE
    if not file.is_file():
        what = "has no config.json" if Path(folder).is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {what}: give a run folder, as `flaxzoo train` leaves one"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): restore it") from error
    if not isinstance(fields, dict) or not {"model", "train"} <= fields.keys():
        raise ValueError(
            f"{file} was not written by flaxzoo: give a run folder (folders of other libraries "
            "cannot be read yet)"
        )
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
