"""The mean of a run's last checkpoints (Vaswani et al. 2017, section 6.1)."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...models.init import parameter_shapes
from ...models.load import read_config, restore_params, steps
from ...models.registry import config_from_dict, create
from ..errors import RunError
from ..runs.params_only_run import (
    AVERAGED_STEPS,
    TOKENIZER,
    check_place_is_free,
    make_model_folder,
)


def average_checkpoints(folder: str | Path, output: str | Path, *, last: int) -> list[int]:
    """Makes a run folder whose one checkpoint holds the mean of another's last ones.

    It can be evaluated, used and begun with as any run, and not trained on: it has no
    state of an optimizer.

    Args:
      folder: a run folder.
      output: the folder that is made, whole or not at all.
      last: how many checkpoints, at least 1; the newest are taken.

    Returns:
      Their steps, ascending.

    Raises:
      FileNotFoundError: `folder` is not a run folder.
      RunError: it kept fewer checkpoints, or `output` exists.
    """
    folder, output = Path(folder), Path(output)
    config = read_config(folder)
    kept = steps(folder)
    if last < 1:
        raise RunError(f"last {last} must be at least 1")
    if len(kept) < last:
        listed = ", ".join(map(str, kept)) or "none"
        raise RunError(
            f"{folder} kept {len(kept)} checkpoints ({listed}), fewer than {last}: average "
            f"fewer, or train with --keep-last {last}"
        )
    check_place_is_free(output)
    taken = kept[-last:]
    mean = _mean(folder, taken, parameter_shapes(create(config_from_dict(config["model"]))))
    make_model_folder(
        output,
        {**config, AVERAGED_STEPS: taken},
        lambda place: shutil.copytree(folder / TOKENIZER, place),
        taken[-1],
        mean,
    )
    return taken


def _mean(folder: Path, taken: list[int], shapes: Any) -> Any:
    """On the host, one checkpoint at a time; summed in float64."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    total = jax.tree.map(lambda x: np.zeros(x.shape, np.float64), shapes)
    for step in taken:
        params = restore_params(folder, step, placed)
        total = jax.tree.map(lambda a, x: np.add(a, np.asarray(x), out=a), total, params)
    return jax.tree.map(lambda a, x: (a / len(taken)).astype(x.dtype), total, shapes)
