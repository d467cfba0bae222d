"""Input files to shards on the workers of Apache Beam, which the extra ``prepare`` installs."""

import contextlib
import io
import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..sources.source_names import Source
from .shard_format import Settings
from .write_shards import Workers, prepare_shard

# Beam's own default first downloads a program to run pipelines with.
_IN_PROCESS = "--runner=FnApiRunner"


def beam_workers(options: Sequence[str] = ()) -> Workers:
    """Has Apache Beam make the shards of all files that can be read, and waits for it.

    Args:
        options: Beam's, as on a command line; by default it works in this process. Every worker
            must see the folder and the input files under the same names.

    Returns:
        What ``preparing.prepare`` takes.

    Raises:
        DataError: Beam is not installed, or refuses the options.
    """
    beam = _import_beam()
    given = _options(beam, options)
    try:
        pipeline = beam.Pipeline(options=given)
    except ValueError as error:
        listed = " ".join(options)
        raise DataError(f"Apache Beam refuses {listed} ({error}): see its options") from None

    def work(parts: Sequence[Source], folder: Path, settings: Settings) -> None:
        with pipeline:
            _ = (
                pipeline
                | "input files" >> beam.Create(list(dict.fromkeys(parts)))
                | "to any worker" >> beam.Reshuffle()
                | "shards" >> beam.Map(_attempt, str(folder.absolute()), settings)
            )

    return work


def _import_beam() -> Any:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of packages for clouds
    try:
        import_module("apache_beam.options.pipeline_options")
        return import_module("apache_beam")
    except ImportError:
        raise DataError(
            "preparing needs Apache Beam, which is not installed: pip install 'flaxzoo[prepare]'"
        ) from None
    finally:
        logging.disable(disabled)


def _options(beam: Any, options: Sequence[str]) -> Any:
    """Parses Beam's options, all of them before any work.

    Of those it does not know Beam only warns, for a runner elsewhere may know them.
    """
    pipeline_options = beam.options.pipeline_options
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            given = pipeline_options.PipelineOptions([_IN_PROCESS, *options])
            given.get_all_options()
    except SystemExit:
        raise DataError(
            f"Apache Beam refuses {' '.join(options)}: {told.getvalue().splitlines()[-1]}"
        ) from None
    return given


def _attempt(part: Source, folder: str, settings: Settings) -> None:
    """Makes a shard, or leaves it unmade.

    A fault of the file would only be tried again by the runner; ``preparing.finish`` meets it
    once more and tells it.
    """
    with contextlib.suppress(DataError, OSError):
        prepare_shard(part, Path(folder), settings)
