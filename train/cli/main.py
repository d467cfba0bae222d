"""The command `flaxzoo`.

Each command is imported when it is called, so that `flaxzoo --help` imports neither
jax nor any other package that is slow to load.
"""

import codecs
import io
import json
import os
import re
import sys
import traceback
from importlib import import_module
from typing import cast

from ...data.common.errors import NonFiniteLoss, ReportedByPrimary, UserError, suggest
from ...data.common.fields import require
from .options import asks_for_help, forget_flags, with_flags

COMMANDS = {
    "train": ("training.train", "train a model by a named recipe"),
    "plan": ("training.plan", "check whether a run fits other devices, and estimate its speed"),
    "bench": ("training.bench", "time a recipe's train step on this machine, without data"),
    "launch": ("training.train", "train in several processes on this machine"),
    "evaluate": ("inference.evaluate", "print the loss and metrics of a trained model as JSON"),
    "generate": ("inference.generate", "continue a text with a trained model"),
    "prompt": ("inference.prompt", "answer queries after examples of a task"),
    "chat": ("inference.chat", "talk with a language model"),
    "rank": ("inference.rank", "rank answers of a model, as data for a reward model"),
    "attend": ("inference.attend", "show what each word of a text attends to"),
    "fill-mask": ("inference.predict", "fill the masks in a text with a trained model"),
    "score": ("inference.score", "print the probability of a text, token by token"),
    "next": ("inference.score", "print the most probable next tokens, or compare words"),
    "predict": ("inference.predict", "print the predictions of a fine-tuned model as JSON lines"),
    "translate": ("inference.translate", "translate a file line by line"),
    "average": ("training.convert", "average the last checkpoints of a run"),
    "import": ("training.convert", "make a run folder from a model in the Hugging Face format"),
    "export": ("training.convert", "write a trained model for transformers and other programs"),
    "embed": ("inference.embed", "write a vector for each line of a file"),
    "index": ("inference.search", "embed texts, so that they can be searched"),
    "search": ("inference.search", "find the texts that are nearest to a query"),
    "serve": ("inference.serve", "serve models over HTTP, with OpenAI's interface"),
    "list": ("training.list", "print the recipes and the published model sizes"),
    "tokenizer": ("training.tokenizer", "train a tokenizer on text"),
    "prepare": (
        "training.prepare",
        "tokenize and pack text in advance, with any number of workers",
    ),
}
"""Maps the name of each command to the module that implements it and a summary of the command."""

VIRTUAL_DEVICES = r"--xla_force_host_platform_device_count=(\d+)"
"""Matches the XLA flag that splits a CPU into virtual devices."""

STREAMS = (
    ("stdin", "r", "surrogateescape"),
    ("stdout", "w", "flaxzoo.escape"),
    ("stderr", "w", "flaxzoo.escape"),
)
"""The name, mode and error handler of the standard streams, in the order of file descriptors 0 to
2."""

HELP = """usage: flaxzoo COMMAND …

Train, fine-tune and convert transformers in JAX and Flax.

commands:
{commands}

Help for a command: flaxzoo train --help
To begin: flaxzoo train quickstart"""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command and its options. Defaults to `sys.argv[1:]`.

    Returns:
        The exit status: 0 for success; 2 for an error in the input, files or settings, with one
        line on standard error; 3 for a loss that is not finite; 130 after Ctrl-C; 128 plus the
        signal number if a signal stopped training after a checkpoint was saved.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    _mend_streams()
    _give_threads_to_virtual_devices()
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        # A missing module of flaxzoo itself is a bug, so its traceback is shown.
        if (error.name or "").partition(".")[0] in ("flaxzoo", ""):
            raise
        return _fail(
            f"{arguments[0]} needs the package {error.name}, which is not installed: install "
            "flaxzoo with its dependencies (pip without --no-deps)",
            2,
        )
    except NonFiniteLoss as error:
        return _fail(with_flags(str(error)), 3)
    except ReportedByPrimary:
        # The primary process prints the message.
        return 2
    except BrokenPipeError:
        # The reader of the output has closed the pipe, as `head` does.
        _forget_output()
    except (UserError, OSError) as error:
        try:
            sys.stdout.flush()
        except OSError:
            # The disk may be full. Discard the buffered output; otherwise the interpreter reports
            # the same error again at exit.
            _forget_output()
        return _fail(with_flags(" ".join(str(error).split())), 2)
    except (RuntimeError, AssertionError) as error:
        # pathlib raises RuntimeError for a symlink loop and for a missing home folder.
        if _raised_in(error).partition(".")[0] == "pathlib":
            return _fail(f"{str(error).rstrip('.')}: correct the path", 2)
        # jax raises these types when JAX_PLATFORMS names a missing backend. Other errors are bugs.
        platforms = os.environ.get("JAX_PLATFORMS")
        if not platforms or _raised_in(error) != "jax._src.xla_bridge":
            raise
        return _fail(
            f"JAX_PLATFORMS {platforms!r} must name devices that jax finds: unset the variable, or "
            "install the packages of these devices (pip install 'flaxzoo[cuda]' or 'flaxzoo[tpu]')",
            2,
        )
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    finally:
        # A program may train after a command; its messages must name fields, not options.
        forget_flags()
    return 0


def _dispatch(arguments: list[str]) -> int:
    """Runs a command; returns its status."""
    if asks_for_help(arguments):
        listed = "\n".join(f"  {name:<10} {purpose}" for name, (_, purpose) in COMMANDS.items())
        print(HELP.format(commands=listed))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"flaxzoo {version('flaxzoo')}")
        return 0
    command = arguments[0]
    require(
        command in COMMANDS, f"no command named {command!r}: {suggest(command, list(COMMANDS))}"
    )
    _check_unicode(arguments)
    # Import only the module of this command; the others may import jax.
    module = import_module(f".{COMMANDS[command][0]}", __package__)
    try:
        return getattr(module, f"{command.replace('-', '_')}_command")(arguments[1:]) or 0
    # argparse exits after --help.
    except SystemExit as end:
        return int(end.code or 0)


def _give_threads_to_virtual_devices() -> None:
    """Gives XLA four threads per virtual device, unless `NPROC` is set.

    A device blocks one thread per collective that it waits for. With one thread per device, devices
    deadlock if they wait for different collectives of a step.
    """
    match = re.search(VIRTUAL_DEVICES, os.environ.get("XLA_FLAGS", ""))
    if match is not None:
        os.environ.setdefault("NPROC", str(4 * int(match[1])))


def _raised_in(error: Exception) -> str:
    """Returns the name of the module that raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__"))


def _mend_streams() -> None:
    """Makes standard input, output and error usable, whatever terminal or program started flaxzoo.

    A closed stream is opened on the null device, because the next opened file would otherwise get
    the file descriptor of the stream. Output characters that the encoding cannot represent are
    escaped as in JSON. Invalid input bytes become lone surrogates, which are rejected where the
    text is used.
    """
    codecs.register_error("flaxzoo.escape", _escape)
    for number, (name, mode, errors) in enumerate(STREAMS):
        stream = getattr(sys, name)
        if stream is None:
            opened = os.open(os.devnull, os.O_RDWR)
            # `os.open` returns the lowest free file descriptor, which may differ from the
            # descriptor of this stream.
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _forget_output() -> None:
    """Redirects standard output to the null device, which discards the buffered output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape(error: UnicodeError) -> tuple[str, int]:
    lacking = cast(UnicodeEncodeError, error)  # only output uses this handler
    return json.dumps(lacking.object[lacking.start : lacking.end])[1:-1], lacking.end


def _check_unicode(arguments: list[str]) -> None:
    """Raises UserError if an argument was not valid text in the terminal's encoding."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"the argument {argument!r} is not UTF-8: give it in UTF-8, and rename "
                f"files whose names are not UTF-8"
            ) from None


def _fail(message: str, status: int) -> int:
    print(f"flaxzoo: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
