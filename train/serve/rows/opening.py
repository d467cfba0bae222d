"""Opens the kinds of work on single texts that a model supports, such as embedding."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ....data.common.errors import UserError
from ....data.common.fields import require
from ....data.common.progress import LogFn
from ....models.config import TransformerConfig
from ....models.finite import load_finite
from ....models.hub import local_folder
from ....models.text.text_model import Loaded
from ..app import Served
from . import classify, embeddings, rerank, translate
from .settings import RowSettings
from .worker import RowFunction, RowWorker, shapes_of_searches, shapes_of_short_rows

Shapes = Callable[[RowFunction, RowSettings], list[tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of work on single texts.

    Attributes:
        name: the name of the kind in `Served.workers`.
        fits: returns whether a model with a given configuration supports this kind of work.
        make: returns the function that computes rows with the model in a folder, or None if the
          files in the folder do not suit this kind of work.
        shapes: returns the batch shapes (number of rows, padded length) to compile before the first
          request.
    """

    name: str
    fits: Callable[[TransformerConfig], bool]
    make: Callable[[str | Path, Loaded], RowFunction | None]
    shapes: Shapes = shapes_of_short_rows


KINDS = (
    Kind(embeddings.KIND, embeddings.fits, embeddings.embedding_function),
    Kind(classify.KIND, classify.fits, classify.classification_function),
    Kind(rerank.KIND, rerank.fits, rerank.rerank_function),
    Kind(translate.KIND, translate.fits, translate.translation_function, shapes_of_searches),
)
"""All kinds of work on single texts. If a model supports several kinds, the last one is the most
specific."""
ENDPOINTS = (
    *(*embeddings.EMBEDDINGS, *rerank.RERANK),
    *(*classify.CLASSIFY, *translate.TRANSLATE),
)
"""The endpoints of this folder."""


def open_rows(name: str, folder: str, settings: RowSettings, log: LogFn, *, ema: bool) -> Served:
    """Opens an encoder or an encoder-decoder.

    Raises:
        UserError: the server does not support any kind of work of this model.
    """
    loaded = load_finite(local_folder(folder), ema=ema)
    functions, refused = row_functions(folder, loaded)
    reasons = ". ".join(refused) or f"it has the head {loaded[0].config.head}"
    require(functions, f"{folder} is not served: {reasons}")
    for reason in refused:
        log(f"{name}: {reason}")
    workers = row_workers(name, functions, settings=settings, log=log)
    return Served(name, [*workers.values()][-1].front, workers)


def row_functions(folder: str, loaded: Loaded) -> tuple[dict[Kind, RowFunction], list[str]]:
    """Opens all kinds of work on single texts that a model supports.

    Args:
        folder: the folder of the model.
        loaded: the model and its parameters.

    Returns:
        The function for each kind of work, and a log line about each kind that the model supports
        but the folder does not.
    """
    functions: dict[Kind, RowFunction] = {}
    refused: list[str] = []
    for kind in KINDS:
        if kind.fits(loaded[0].config):
            # A folder may lack the files for one kind of work, but still support other kinds.
            try:
                function = kind.make(folder, loaded)
            except UserError as error:
                refused.append(f"no {kind.name} ({error})")
            else:
                functions |= {} if function is None else {kind: function}
    return functions, refused


def row_workers(
    name: str,
    functions: dict[Kind, RowFunction],
    *,
    settings: RowSettings,
    log: LogFn,
    is_main: bool = True,
) -> dict[str, RowWorker]:
    """Returns the workers of a model, one for each kind of work.

    Args:
        name: the name of the model in requests.
        functions: the function for each kind of work that the model supports.
        settings: the settings of batches.
        log: called with lines about the warm-up.
        is_main: whether the programs for the most specific kind are compiled before the first
          request.
    """
    main = next(reversed(functions), None) if is_main else None
    compiled = functions if settings.warm_up_all else {main}
    return {
        kind.name: RowWorker(
            f"{name}: {kind.name}",
            function,
            settings,
            shapes=kind.shapes(function, settings) if kind in compiled else (),
            log=log,
        )
        for kind, function in functions.items()
    }
