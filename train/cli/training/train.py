"""The commands `flaxzoo train` and `flaxzoo launch`."""

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import Annotated

from ....data.common.fields import PositiveInt, Suffix, require
from ....models.run_files import CONFIG_FILE
from ...compilation_cache import enable_compilation_cache
from ...config import TrainConfig
from ...settings.configure import is_run
from ...settings.settings_file import SUFFIX, write_settings
from ..options import asks_for_help, log, parse, reader, split_at_dashes, with_flags
from ..recipe_list import listed_recipes
from ..recipe_options import RecipeParser, default_workdir


def train_command(arguments: list[str]) -> int:
    """Runs `flaxzoo train RECIPE [options]`; the recipe may also be a file or a run folder.

    Returns:
        0, or 128 plus the signal number if a signal stopped the run, as shells do.
    """
    if asks_for_help(arguments):
        print(
            "usage: flaxzoo train RECIPE [--workdir RUN] [--steps N] …\n"
            "       flaxzoo train FILE.toml, with a recipe and options\n"
            "       flaxzoo train RUN, to resume or change a run\n\n"
            f"{listed_recipes()}\n\n"
            "Options of a recipe: flaxzoo train quickstart --help"
        )
        return 0
    parsed, config = _parse(arguments)
    if parsed.save_config is not None:
        write_settings(parsed.save_config, config)
        log(f"the settings are in {parsed.save_config}: flaxzoo train {parsed.save_config}")
        return 0
    enable_compilation_cache()
    _silence_orbax()
    # Import after the options are checked: help and errors should not wait for jax.
    from ....data.common.progress import Progress
    from ...distributed.multiprocess import distributed_session, is_primary
    from ...engine.compile import check_devices
    from ...engine.stop_signals import ended_by_second_signal
    from ...engine.train import train

    Progress.rewrite = with_flags
    folder = Path(arguments[0]).expanduser()
    stored = folder / CONFIG_FILE if is_run(folder) else None
    with ended_by_second_signal(), distributed_session(parsed.rendezvous_timeout):
        check_devices(config, stored)
        result = train(
            config,
            parsed.workdir,
            resume=parsed.resume,
            extend=parsed.extend_to is not None,
        )
    if result.sample is not None:
        log(f"the trained model's output for --sample-prompt {config.sample_prompt!r}:")
        print(result.sample)
    # Suggest the command that uses a model with this objective.
    if result.finished and is_primary():
        command = config.objective.next_command.format(run=parsed.workdir)
        log(f"report: {parsed.workdir / 'report.md'}; try the model: flaxzoo {command}")
    return 0 if result.signal is None else 128 + result.signal


def _add_options(parser: RecipeParser, workdir: Path) -> None:
    """Adds the options that belong to a run, not to its configuration."""
    parser.add_argument(
        "--workdir",
        type=Path,
        default=workdir,
        metavar="PATH",
        help=f"The run folder. An unfinished run continues from its newest checkpoint. "
        f"(default: {workdir})",
    )
    saving = parser.groups["checkpoints and evaluation"]
    saving.add_argument(
        "--resume",
        action="store_true",
        default=True,
        help="Continue a run folder that has checkpoints. (default: True)",
    )
    saving.add_argument(
        "--no-resume",
        dest="resume",
        action="store_false",
        help="Refuse a run folder that has checkpoints.",
    )
    parser.groups["run"].add_argument(
        "--extend-to",
        type=reader(PositiveInt),
        metavar="STEPS",
        help="Add a stage to a run, from its newest checkpoint to this step. Batch size, learning "
        "rate, schedule and data may differ. (at least 1)",
    )
    saving.add_argument(
        "--save-config",
        type=reader(Annotated[Path, Suffix((SUFFIX,))]),
        metavar="FILE",
        help="Write the recipe and all changed options to this file, and train nothing. "
        "flaxzoo train FILE reads this file. (a file name with the ending .toml)",
    )
    parser.groups["devices"].add_argument(
        "--rendezvous-timeout",
        type=reader(PositiveInt),
        default=300,
        metavar="INT",
        help="Seconds to wait for the other processes of the run. (default: 300)",
    )


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, TrainConfig]:
    parser = RecipeParser("train", arguments)
    workdir = default_workdir(arguments[0])
    _add_options(parser, workdir)
    parsed, config = parser.read_recipe()
    if parsed.extend_to is not None:
        problem = f"--extend-to {parsed.extend_to} is the last step: leave --steps out"
        require(not hasattr(parsed, "steps"), problem)
        config = dataclasses.replace(config, steps=parsed.extend_to)
    if parsed.workdir != workdir:  # the file has the settings of a run, but the folder is new
        config = dataclasses.replace(config, stage=None)
    # A recipe that starts from another recipe's run needs that run first.
    init_from, has_checkpoints = config.init_from, (parsed.workdir / "checkpoints").is_dir()
    if init_from is None or hasattr(parsed, "init_from") or has_checkpoints:
        return parsed, config
    require(
        Path(init_from).exists(),
        f"the recipe {arguments[0]} starts from the run {init_from}, which does not exist: "
        f"create it with flaxzoo train {Path(init_from).name}, or name another model with "
        "--init-from",
    )
    return parsed, config


@dataclasses.dataclass(frozen=True)
class LaunchArguments:
    """Trains in several processes on this machine and divides its GPUs among them.

    The command to run follows two dashes: flaxzoo launch --processes 2 -- train quickstart
    """

    processes: PositiveInt
    """The number of processes, which must divide the number of GPUs, if the machine has GPUs."""


def launch_command(arguments: list[str]) -> int:
    """Runs `flaxzoo launch --processes N -- train RECIPE [options]`."""
    options, command = split_at_dashes(arguments)
    require(
        command[:1] == ["train"] or not {"-h", "--help"}.isdisjoint(options),
        "flaxzoo launch starts the command train after two dashes, got "
        f"{' '.join(command[:1])!r}: flaxzoo launch --processes 2 -- train quickstart",
    )
    parsed = parse(LaunchArguments, options, "flaxzoo launch")
    if asks_for_help(command[1:]):
        return train_command(command[1:])
    # Report errors in the options once, before any process starts.
    _parse(command[1:])
    from ...distributed.launch import launch

    # The package may be installed under a different parent package.
    module = f"{__package__}".removesuffix(".training")
    return launch([sys.executable, "-m", f"{module}.main", *command], parsed.processes)


def _silence_orbax() -> None:
    """Silences orbax's per-thread tracebacks; other code reports write errors in one line."""
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
