"""Averages a run's last checkpoints (Vaswani et al. 2017, section 6.1)."""

import shutil
from pathlib import Path
from typing import cast

import jax
import numpy as np

from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.common.json_text import JsonObject, JsonValue
from ...models.adapters.base import BASE
from ...models.config import TransformerConfig
from ...models.finite import check_finite
from ...models.hf.sentence_embedding import IN_RUN
from ...models.loading import model_config, read_params, target_shapes
from ...models.nn.typing import Params
from ...models.registry import create
from ...models.run_files import TOKENIZER, read_config, steps
from ..runs.params_only_run import AVERAGED_STEPS, check_not_existing, make_params_only_run


def average_checkpoints(folder: str | Path, output: str | Path, *, last: int) -> list[int]:
    """Creates a run folder whose only checkpoint is the mean of another run's last checkpoints.

    The new folder works like any run folder for evaluation, prediction and `--init-from`. Its
    training cannot be resumed, because it has no optimizer state.

    Args:
        folder: A run folder.
        output: The folder to create. It is written completely or not at all.
        last: The number of newest checkpoints to average, at least 1.

    Returns:
        The steps of the averaged checkpoints, in ascending order.

    Raises:
        FileNotFoundError: `folder` is not a run folder.
        RunError: The run has fewer than `last` checkpoints, `output` exists, or a parameter of the
          mean is NaN or infinite.
    """
    folder, output = Path(folder), Path(output)
    config = read_config(folder)
    kept = steps(folder)
    require(last >= 1, f"last must be at least 1, got {last}", RunError)
    require(
        len(kept) >= last,
        f"{folder} kept {len(kept)} checkpoints ({', '.join(map(str, kept)) or 'none'}), fewer "
        f"than {last}: average fewer, or train with --keep-last {last}",
        RunError,
    )
    check_not_existing(output)
    averaged = kept[-last:]
    # First compute and check the mean, so that an error leaves no file.
    mean = _mean(folder, averaged, model_config(folder))
    check_finite(mean, folder)

    def copy_embedding_settings(run: Path) -> None:
        # These settings exist only if the model computes vectors of texts.
        if (folder / IN_RUN).is_dir():
            shutil.copytree(folder / IN_RUN, run / IN_RUN)

    make_params_only_run(
        output,
        {**_without_adapters(config), AVERAGED_STEPS: list[JsonValue](averaged)},
        save_tokenizer=lambda target: shutil.copytree(folder / TOKENIZER, target),
        save_more=copy_embedding_settings,
        step=averaged[-1],
        params=mean,
    )
    return averaged


def _without_adapters(config: JsonObject) -> JsonObject:
    """Returns the content of `config.json` without adapters, which are merged into the model."""
    fields, train = dict(config), dict(cast(JsonObject, config["train"]))
    fields.pop(BASE, None)
    train.pop("lora", None)
    return {**fields, "train": train}


def _mean(folder: Path, averaged: list[int], config: TransformerConfig) -> Params:
    """Computes the mean of checkpoints on the host in float64; loads one checkpoint at a time."""
    shapes = target_shapes(create(config))
    total = jax.tree.map(lambda x: np.zeros(x.shape, np.float64), shapes)
    for step in averaged:
        params = read_params(folder, step, config, shapes)
        # Add in place, so that host memory holds only the sum and a single checkpoint.
        total = jax.tree.map(lambda a, x: np.add(a, np.asarray(x), out=a), total, params)
    return jax.tree.map(lambda a, x: (a / len(averaged)).astype(x.dtype), total, shapes)
