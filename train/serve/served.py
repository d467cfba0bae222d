"""Opens the models that are served, and lists their endpoints."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...models.heads.specs import CAUSAL_HEADS
from ...models.hub import local_folder
from ...models.loading import model_config
from .app import Endpoint, Served
from .chat import CHAT
from .completions import COMPLETIONS
from .generation import open_generation
from .openapi import OPENAPI
from .page import PAGE
from .rows import opening
from .rows.settings import RowSettings
from .status import STATUS

ENDPOINTS: tuple[Endpoint, ...] = (
    *PAGE,
    *OPENAPI,
    *STATUS,
    *COMPLETIONS,
    *CHAT,
    *opening.ENDPOINTS,
)
"""All endpoints."""


def open_models(
    names: Sequence[str], settings: RowSettings, log: LogFn, *, ema: bool = False
) -> dict[str, Served]:
    """Opens models.

    Args:
        names: for each model, a run folder, a folder in the Hugging Face format, a name on the hub,
          or NAME=FOLDER. The default for NAME is the last part of the folder's path.
        settings: the settings for batching texts.
        log: called with lines about the models.
        ema: whether to use the moving averages of the parameters.

    Raises:
        UserError: two models have the same name, a model cannot be served, or a model has no moving
          average.
    """
    models: dict[str, Served] = {}
    for entry in names:
        name, folder = "", entry
        # The name of a folder may contain an equals sign, as in runs/lr=0.1.
        if "=" in entry and not Path(entry).exists():
            name, _, folder = entry.partition("=")
        name = name or Path(folder).resolve().name
        problem = f"two models are named {name!r}: give one of the models as NAME=FOLDER"
        require(name not in models, problem)
        # The head in the configuration determines the workers of the model.
        generates = model_config(local_folder(folder)).head in CAUSAL_HEADS
        opened = _open_causal if generates else opening.open_rows
        models[name] = opened(name, folder, settings, log, ema=ema)
    return models


def _open_causal(name: str, folder: str, settings: RowSettings, log: LogFn, *, ema: bool) -> Served:
    """Opens a causal language model, which generates and embeds texts."""
    served = open_generation(name, folder, settings, log, ema=ema)
    functions, refused = opening.row_functions(folder, served.front.loaded)
    for reason in refused:
        log(f"{name}: {reason}")
    rows = opening.row_workers(name, functions, settings=settings, log=log, is_main=False)
    return dataclasses.replace(served, workers={**served.workers, **rows})
