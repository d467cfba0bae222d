"""Opens the kinds of work on single texts that a model does, such as embedding."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ....data.common.errors import UserError
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
        name: its name in `Served.workers`.
        fits: returns whether a model with a configuration does it.
        make: returns the function of the rows, given a folder and its model.
        shapes: returns the numbers of rows and lengths to compile before the first request.
    """

    name: str
    fits: Callable[[TransformerConfig], bool]
    make: Callable[[str | Path, Loaded], RowFunction]
    shapes: Shapes = shapes_of_short_rows


KINDS = (
    Kind(embeddings.KIND, embeddings.fits, embeddings.embedding_function),
    Kind(classify.KIND, classify.fits, classify.classification_function),
    Kind(rerank.KIND, rerank.fits, rerank.rerank_function),
    Kind(translate.KIND, translate.fits, translate.translation_function, shapes_of_searches),
)
"""All kinds. The last kind that a model supports is the most specific."""
ENDPOINTS = (
    *(*embeddings.EMBEDDINGS, *rerank.RERANK),
    *(*classify.CLASSIFY, *translate.TRANSLATE),
)
"""The endpoints of this folder."""


def open_rows(name: str, folder: str, settings: RowSettings, log: LogFn) -> Served:
    """Opens an encoder or an encoder-decoder."""
    loaded = load_finite(local_folder(folder))
    workers = row_workers(name, folder, loaded, settings=settings, log=log)
    if not workers:
        raise UserError(f"{folder} has the head {loaded[0].config.head}, which is not served")
    return Served(name, folder, [*workers.values()][-1].front, workers)


def row_workers(
    name: str,
    folder: str,
    loaded: Loaded,
    *,
    settings: RowSettings,
    log: LogFn,
    is_main: bool = True,
) -> dict[str, RowWorker]:
    """Opens all work on single texts that a model does.

    Args:
        name: the name of the model in requests.
        folder: the folder of the model.
        loaded: the model and its parameters.
        settings: how rows are batched.
        log: called with a line about each kind of work that the folder does not support.
        is_main: whether programs of the most specific kind are compiled before the first request.
    """
    functions: dict[Kind, RowFunction] = {}
    for kind in KINDS:
        if kind.fits(loaded[0].config):
            # A folder may lack the files of one kind of work, and still serve the others.
            try:
                functions[kind] = kind.make(folder, loaded)
            except UserError as error:
                log(f"{name}: no {kind.name} ({error})")
    main = [*functions][-1] if functions and is_main else None
    return {
        kind.name: RowWorker(
            f"{name}: {kind.name}",
            function,
            settings,
            shapes=kind.shapes(function, settings) if kind is main else (),
            log=log,
        )
        for kind, function in functions.items()
    }
