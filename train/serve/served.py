"""Opens the models that are served, and lists their endpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ...data.common.errors import UserError
from ...data.common.progress import LogFn
from ...models.hub import local_folder
from ...models.loading import model_config
from ...models.nn.heads import CAUSAL_HEADS
from .app import Endpoint, Served
from .generation import open_generation
from .status import STATUS

Opener = Callable[[str, str, LogFn], Served]
"""`open(name, folder, log)` opens a model and its workers."""

OPENERS: dict[str | None, Opener] = {
    **dict.fromkeys(CAUSAL_HEADS, open_generation),
}
"""Head of a model → how it is served."""

ENDPOINTS: tuple[Endpoint, ...] = (*STATUS,)
"""All endpoints."""


def open_models(names: Sequence[str], log: LogFn) -> dict[str, Served]:
    """Opens models.

    Args:
        names: a run folder, a folder in Hugging Face's form or a name on the hub each, or
          NAME=FOLDER. The name defaults to the last part of the folder.
        log: called with lines about the models.

    Raises:
        UserError: two models have the same name, or a model cannot be served.
    """
    models: dict[str, Served] = {}
    for given in names:
        name, _, folder = given.rpartition("=")
        name = name or Path(folder).resolve().name
        if name in models:
            raise UserError(f"two models are named {name!r}: give one as NAME=FOLDER")
        head = model_config(local_folder(folder)).head
        if head not in OPENERS:
            known = ", ".join(map(str, OPENERS))
            raise UserError(f"{folder} has the head {head}, which is not served: use {known}")
        models[name] = OPENERS[head](name, folder, log)
    return models
