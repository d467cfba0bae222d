"""The command `flaxzoo`.

Each command is imported when it is called, so that `flaxzoo --help` imports neither
jax nor any other package that is slow to load.
"""

import os
import re
import sys
import traceback
from importlib import import_module

from ...data.errors import UserError, suggest
from ..errors import NonFiniteLoss, ReportedByPrimary
from .options import forget_flags, with_flags

COMMANDS = {
    "train": ("training.train", "train a model by a named recipe"),
    "plan": ("training.plan", "check whether a run fits other devices, and estimate its speed"),
    "bench": ("training.bench", "time a recipe's train step on this machine, without data"),
    "launch": ("training.train", "train in several processes on this machine"),
    "evaluate": ("inference.evaluate", "print the loss and metrics of a trained model as JSON"),
    "generate": ("inference.generate", "continue a text with a trained model"),
    "prompt": ("inference.prompt", "answer queries after examples of a task"),
    "chat": ("inference.chat", "talk with a language model"),
    "attend": ("inference.attend", "show what each word of a text looks at"),
    "fill-mask": ("inference.predict", "fill the masks in a text with a trained model"),
    "score": ("inference.score", "print the probability of a text, token by token"),
    "next": ("inference.score", "print the most probable next tokens, or compare words"),
    "predict": ("inference.predict", "print the predictions of a fine-tuned model as JSON lines"),
    "translate": ("inference.translate", "translate a file line by line"),
    "average": ("training.convert", "average the last checkpoints of a run"),
    "import": ("training.convert", "make a run folder from a model in the Hugging Face format"),
    "export": ("training.convert", "write a trained model for transformers and other programs"),
    "embed": ("inference.embed", "write a vector for each line of a file"),
    "list": ("training.list", "print the recipes and the published model sizes"),
    "tokenizer": ("training.tokenizer", "train a tokenizer on text"),
    "prepare": (
        "training.prepare",
        "tokenize and pack text in advance, with any number of workers",
    ),
}
"""Name of a command → its module, and what it does."""

VIRTUAL_DEVICES = r"--xla_force_host_platform_device_count=(\d+)"
"""The flag of XLA that divides a CPU into virtual devices."""

HELP = """usage: flaxzoo COMMAND …

Train, fine-tune and convert transformers in JAX and Flax.

commands:
{commands}

Help for a command: flaxzoo train --help
To begin: flaxzoo train quickstart"""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command and its options; None: those of this process.

    Returns:
        The exit status: 0 for success; 2 for a mistake in the input, files or settings, with one
        line on standard error; 3 for a loss that is not finite; 130 after Ctrl-C; 128 plus the
        number of the signal if a signal stopped training after a checkpoint was saved.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<10} {purpose}" for name, (_, purpose) in COMMANDS.items())
        print(HELP.format(commands=listed))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"flaxzoo {version('flaxzoo')}")
        return 0
    return _run(arguments[0], arguments[1:])


def _run(command: str, arguments: list[str]) -> int:
    if command not in COMMANDS:
        return _fail(f"no command named {command!r}: {suggest(command, list(COMMANDS))}", 2)
    forget_flags()
    _give_threads_to_virtual_devices()
    try:
        module = import_module(f".{COMMANDS[command][0]}", __package__)
        return getattr(module, f"{command.replace('-', '_')}_command")(arguments) or 0
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("flaxzoo", ""):
            raise
        return _fail(
            f"{command} needs the package {error.name}, which is not installed: install flaxzoo "
            "with its dependencies (pip without --no-deps)",
            2,
        )
    except NonFiniteLoss as error:
        return _fail(with_flags(str(error)), 3)
    except ReportedByPrimary:
        return 2
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        return _fail(with_flags(" ".join(str(error).split())), 2)
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        if not platforms or not _is_of_backends(error):
            raise
        return _fail(
            f"JAX_PLATFORMS {platforms!r}: jax has no such devices here: unset it, or install what "
            "they need (pip install -e '.[cuda]', '.[tpu]')",
            2,
        )
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _give_threads_to_virtual_devices() -> None:
    """Lets XLA have four threads for each virtual device, unless `NPROC` says how many.

    A device blocks a thread for each collective that it waits in. With one for each, devices that
    wait for different collectives of a step wait forever.
    """
    found = re.search(VIRTUAL_DEVICES, os.environ.get("XLA_FLAGS", ""))
    if found is not None:
        os.environ.setdefault("NPROC", str(4 * int(found[1])))


def _is_of_backends(error: Exception) -> bool:
    """Returns whether jax failed to start the devices that it was asked for."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__") == "jax._src.xla_bridge"


def _fail(message: str, status: int) -> int:
    print(f"flaxzoo: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
