"""The subcommands of `flaxzoo`: each turns arguments into one call of the public API."""

import dataclasses
import json
import logging
import math
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from ...data.errors import UserError
from ...data.tokenizers.training import TokenizerKind
from ..compilation_cache import enable_compilation_cache
from ..config import TrainConfig
from ..recipes import RECIPES, describe, recipe

Positional = tyro.conf.Positional


def named(name: str) -> Any:
    """What an argument is called in the help, rather than by its type."""
    return tyro.conf.arg(metavar=name)


RunName = Positional[Annotated[str, named("RUN")]]


def say(line: str) -> None:
    """What is not the answer goes to standard error."""
    print(line, file=sys.stderr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments(TrainConfig):
    """A recipe's configuration, and where its run is kept."""

    workdir: Path
    """The run folder; an existing run goes on from its newest checkpoint."""
    resume: bool = True
    """Whether a run folder with checkpoints is taken up (otherwise it is refused)."""
    rendezvous_timeout: int = 300
    """Seconds to wait for the other processes of a run of several (see `flaxzoo launch`)."""


Arguments = TypeVar("Arguments", bound=TrainConfig)


def parse_recipe(
    kind: type[Arguments],
    arguments: list[str],
    program: str,
    description: str | None = None,
    **own: Any,
) -> tuple[Arguments, TrainConfig]:
    """Reads the name of a recipe and the options behind it.

    Args:
      kind: what is read: a run's configuration, and what else the command takes.
      arguments: the recipe's name, and options.
      program: what the command is called.
      description: of the command, for its help; by default the recipe's.
      **own: defaults of what is not the configuration's.

    Returns:
      All that was read, and the configuration in it.

    Raises:
      UserError: there is no such recipe, or an option is out of range.
    """
    base = recipe(arguments[0])
    names = [field.name for field in dataclasses.fields(base)]
    parsed = tyro.cli(
        kind,
        default=kind(**{name: getattr(base, name) for name in names}, **own),
        args=arguments[1:],
        prog=program,
        description=description or RECIPES[arguments[0]].__doc__,
    )
    return parsed, TrainConfig(**{name: getattr(parsed, name) for name in names})


def train_command(arguments: list[str]) -> int:
    """The command `flaxzoo train RECIPE [options]`.

    Answers 0, or of a run that a signal stopped what a shell calls it, 128 and its number.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<18} {describe(name)}" for name in RECIPES)
        print(
            "usage: flaxzoo train RECIPE [--workdir RUN] [--steps N] …\n\n"
            f"recipes:\n{listed}\n\nAll options of a recipe: flaxzoo train quickstart --help"
        )
        return 0
    parsed, config = _parse_train(arguments)
    enable_compilation_cache()
    _silence_orbax()
    from ..distributed.multiprocess import distributed_session, is_primary
    from ..engine.loop import train
    from ..objectives.tasks import task_of

    with distributed_session(parsed.rendezvous_timeout):
        result = train(config, parsed.workdir, resume=parsed.resume)
    if result.sample is not None:
        print(result.sample)
    if result.finished and is_primary():
        use = task_of(config.data).use.format(run=parsed.workdir)
        say(f"report: {parsed.workdir / 'report.md'}; go on with: flaxzoo {use}")
    return 0 if result.signal is None else 128 + result.signal


def _parse_train(arguments: list[str]) -> tuple[TrainArguments, TrainConfig]:
    name = arguments[0]
    program = f"flaxzoo train {name}"
    return parse_recipe(TrainArguments, arguments, program, workdir=Path("runs") / name)


def at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before two dashes, and what behind them is for somebody else."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:cut], arguments[cut + 1 :]


@dataclasses.dataclass(frozen=True)
class LaunchArguments:
    """Trains in several processes of this machine, each with its share of the GPUs.

    What is to be trained follows two dashes: flaxzoo launch --processes 2 -- train quickstart
    """

    processes: int
    """How many; a divisor of the number of GPUs, where there are any."""


def launch_command(arguments: list[str]) -> int:
    """The command `flaxzoo launch --processes N -- train RECIPE [options]`."""
    own, command = at_dashes(arguments)
    if command[:1] != ["train"] and not {"-h", "--help"} & set(own):
        instead = f", not {command[0]!r}" if command else ""
        raise UserError(
            f"flaxzoo launch starts the command train{instead}, after two dashes: "
            "flaxzoo launch --processes 2 -- train quickstart"
        )
    parsed = tyro.cli(LaunchArguments, args=own, prog="flaxzoo launch")
    if not command[1:] or command[1] in ("-h", "--help"):
        return train_command(command[1:])
    _parse_train(command[1:])  # what is wrong with it is told once, before any process starts
    from ..distributed.launch import launch

    return launch([sys.executable, "-m", f"{__package__}.main", *command], parsed.processes)


@dataclasses.dataclass(frozen=True)
class EvaluateArguments:
    """Prints loss (nats) and the scores of a run's kind of data as JSON."""

    run: RunName
    """The run folder; or a folder in Hugging Face's form, or a name on its hub."""
    data: str | None = None
    """A source such as the run was trained on; by default what it validates on."""
    step: int | None = None
    """The checkpoint; by default the newest."""
    num_beams: int | None = None
    """Of a model that translates: the width of its search, by default 4; 1 is greedy."""


def evaluate_command(arguments: list[str]) -> None:
    """The command `flaxzoo evaluate RUN [--data SOURCE]`."""
    parsed = tyro.cli(EvaluateArguments, args=arguments, prog="flaxzoo evaluate")
    enable_compilation_cache()
    from ..inference.evaluate import score_run

    scores = score_run(
        parsed.run, parsed.data, step=parsed.step, num_beams=parsed.num_beams, say=say
    )
    print(json.dumps(scores))


@dataclasses.dataclass(frozen=True)
class AverageArguments:
    """Averages the last checkpoints of a run into a run folder of its own."""

    run: Positional[Annotated[Path, named("RUN")]]
    """The run folder; train with --keep-last N to have N checkpoints."""
    last: int = 5
    """How many checkpoints, the newest."""
    output: Path | None = None
    """The folder that is made; by default RUN-averaged."""


def average_command(arguments: list[str]) -> None:
    """The command `flaxzoo average RUN --last N`."""
    parsed = tyro.cli(AverageArguments, args=arguments, prog="flaxzoo average")
    from ..convert.average_checkpoints import average_checkpoints

    run = parsed.run.resolve()  # a run may be named "."
    output = parsed.output or run.with_name(f"{run.name}-averaged")
    taken = average_checkpoints(parsed.run, output, last=parsed.last)
    say(f"{output}: the mean of the checkpoints {', '.join(map(str, taken))}")


@dataclasses.dataclass(frozen=True)
class ImportArguments:
    """Makes a run folder of a model in Hugging Face's form: to be used, and to begin runs with."""

    source: Positional[Annotated[str, named("SOURCE")]]
    """A folder with config.json, model.safetensors (or several and their index) and the
    tokenizer's files; or a name on the Hugging Face hub."""
    output: Positional[Annotated[Path, named("OUTPUT")]]
    """The run folder that is made."""


def import_command(arguments: list[str]) -> None:
    """The command `flaxzoo import HF_DIR RUN`."""
    parsed = tyro.cli(ImportArguments, args=arguments, prog="flaxzoo import")
    from ..convert.import_hf import import_model

    say(f"{parsed.output}: {import_model(parsed.source, parsed.output)}")


@dataclasses.dataclass(frozen=True)
class ExportArguments:
    """Writes a model for others: for transformers, as plain arrays, or as a program."""

    run: RunName
    """The run folder; or a folder in Hugging Face's form, or a name on its hub."""
    output: Positional[Annotated[Path, named("OUTPUT")]]
    """What is made: of the forms huggingface and stablehlo a folder, else a file."""
    form: Literal["huggingface", "safetensors", "npz", "stablehlo"] = "huggingface"
    """huggingface: what transformers reads. safetensors, npz: the arrays by our own paths.
    stablehlo: the forward pass as a program that needs jax alone, and its parameters."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """In which precision parameters are written."""
    file_gb: float | None = None
    """How large a file of the form huggingface may be, in 10^9 bytes, by default 5; a tensor is
    never cut."""
    step: int | None = None
    """The checkpoint; by default the newest."""


def export_command(arguments: list[str]) -> None:
    """The command `flaxzoo export RUN OUTPUT`."""
    parsed = tyro.cli(ExportArguments, args=arguments, prog="flaxzoo export")
    if parsed.file_gb is not None and parsed.form != "huggingface":
        raise UserError(f"file-gb is of the form huggingface: leave it out for {parsed.form}")
    file_gb = 5.0 if parsed.file_gb is None else parsed.file_gb
    if not 0 < file_gb < math.inf:
        raise UserError(f"file-gb {file_gb} must be above 0, for example 5")
    from ..convert.export import export_model

    notes = export_model(
        parsed.run,
        parsed.output,
        form=parsed.form,
        step=parsed.step,
        dtype=parsed.dtype,
        file_bytes=int(file_gb * 1e9),
    )
    for line in [f"{parsed.output}: {parsed.run}, {parsed.form}, {parsed.dtype}", *notes]:
        say(line)


def list_command(arguments: list[str]) -> None:
    """The command `flaxzoo list`."""
    tyro.cli(_NoArguments, args=arguments, prog="flaxzoo list")
    from .list import print_catalogue

    print_catalogue()


@dataclasses.dataclass(frozen=True)
class _NoArguments:
    """Prints the published model sizes and the recipes."""


@dataclasses.dataclass(frozen=True)
class TokenizerArguments:
    """Trains a tokenizer on a source of text and saves it in a folder."""

    source: Positional[Annotated[str, named("SOURCE")]]
    """builtin:python-docs, text:GLOB[#line|#block], jsonl:GLOB#field or tfds:NAME/CONFIG#field."""
    output: Positional[Annotated[Path, named("OUTPUT")]]
    """The folder that is made."""
    kind: TokenizerKind = "byte-bpe"
    """Which kind of tokenizer."""
    vocab_size: int | None = None
    """Tokens in the vocabulary, special ones included; not for characters."""


def tokenizer_command(arguments: list[str]) -> None:
    """The command `flaxzoo tokenizer train SOURCE OUTPUT`."""
    if not arguments or arguments[0] != "train":
        print("usage: flaxzoo tokenizer train SOURCE OUTPUT [--kind KIND] [--vocab-size N]")
        if not arguments or arguments[0] not in ("-h", "--help"):
            raise UserError("flaxzoo tokenizer knows one action: train")
        return
    parsed = tyro.cli(TokenizerArguments, args=arguments[1:], prog="flaxzoo tokenizer train")
    if parsed.output.exists():
        raise UserError(f"{parsed.output} exists: give a folder that does not")
    from ...data.sources.documents import load_documents
    from ...data.tokenizers.training import TokenizerConfig, train_tokenizer

    documents = load_documents(parsed.source, "train", validation_fraction=0.0)
    tokenizer = train_tokenizer(documents, TokenizerConfig(parsed.kind, parsed.vocab_size))
    tokenizer.save(parsed.output)
    say(f"{parsed.output}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens")


def _silence_orbax() -> None:
    """Of a fault while it writes we tell in one line, and it in a traceback for each thread."""
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
