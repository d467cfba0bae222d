"""Writes shards with Apache Beam workers. The extra ``prepare`` installs Beam."""

import contextlib
import io
import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..common.errors import DataError, required_package
from ..sources.source_names import Source
from .shard_format import Settings
from .write_shards import Workers, prepare_shard

# Beam's default runner would first download a program, so use a different runner.
_IN_PROCESS = "--runner=FnApiRunner"


def beam_workers(options: Sequence[str] = ()) -> Workers:
    """Returns a function that writes the shards with Apache Beam and waits for the workers.

    Every worker must be able to access the folder and the input files under the same paths.

    Args:
      options: Beam's options, as on a command line. By default Beam runs in this process.

    Returns:
      A value for the argument ``workers`` of ``write_shards.prepare``.

    Raises:
      DataError: Beam is not installed, or rejects the options.
    """
    beam = _import_beam()
    printed = io.StringIO()
    # Fail before any shard is written if Beam rejects an option. Beam only warns about unknown
    # options, because a remote runner may know them.
    try:
        with contextlib.redirect_stderr(printed):
            parsed = beam.options.pipeline_options.PipelineOptions([_IN_PROCESS, *options])
            parsed.get_all_options()
        pipeline = beam.Pipeline(options=parsed)
    except (SystemExit, ValueError) as error:
        # Beam parses with argparse, which prints the reason and exits.
        exited = isinstance(error, SystemExit)
        reason = printed.getvalue().splitlines()[-1] if exited else error
        raise DataError(f"Apache Beam refuses {' '.join(options)}: {reason}") from None

    def work(parts: Sequence[Source], folder: Path, settings: Settings) -> None:
        # Without the reshuffle, a runner may fuse the steps and write all shards in one worker.
        with pipeline:
            _ = (
                pipeline
                | "input files" >> beam.Create(list(dict.fromkeys(parts)))
                | "to any worker" >> beam.Reshuffle()
                | "shards" >> beam.Map(_attempt, str(folder.absolute()), settings)
            )

    return work


def _import_beam() -> ModuleType:
    disabled = logging.root.manager.disable
    # Hide Beam's warnings about missing packages for cloud services.
    logging.disable(logging.WARNING)
    try:
        with required_package("apache-beam", "preparing", "pip install 'flaxzoo[prepare]'"):
            import_module("apache_beam.options.pipeline_options")
            return import_module("apache_beam")
    finally:
        logging.disable(disabled)


def _attempt(part: Source, folder: str, settings: Settings) -> None:
    """Writes a shard, and ignores an error in its input file.

    If this function raised the error, the runner would retry the file, and fail again.
    ``write_shards.finish`` reports the error later.
    """
    with contextlib.suppress(DataError, OSError):
        prepare_shard(part, Path(folder), settings)
