"""The command `flaxzoo`.

Every command is a function, imported when it is asked for: `flaxzoo --help`
needs neither jax nor anything else that is slow to import.
"""

import os
import sys
from importlib import import_module

from ...data.errors import UserError, suggest
from ..errors import NonFiniteLoss, ReportedByPrimary

COMMANDS = {
    "train": ("commands", "train a model by a named recipe"),
    "plan": (
        "plan",
        "tell whether a run would fit other devices, and how fast",
    ),
    "bench": ("bench", "time a recipe's train step here, without any data"),
    "launch": ("commands", "train in several processes of this machine"),
    "evaluate": ("commands", "print a trained model's loss and scores, as JSON"),
    "generate": ("text_commands", "let a trained model continue a text"),
    "fill-mask": ("text_commands", "let a trained model fill the gaps of a text"),
    "predict": ("text_commands", "print a fine-tuned model's predictions, as JSON lines"),
    "translate": ("text_commands", "translate a file line by line"),
    "average": ("commands", "average the last checkpoints of a run"),
    "import": ("commands", "make a run folder of a model in Hugging Face's form"),
    "export": ("commands", "write a trained model for transformers and others"),
    "embed": ("text_commands", "write a vector for each line of a file"),
    "list": ("commands", "print the published model sizes and the recipes"),
    "tokenizer": ("commands", "train a vocabulary on texts"),
    "prepare": ("prepare", "tokenise and pack texts once, by any number of workers"),
}
"""The file of each, and what it does."""

HELP = """usage: flaxzoo COMMAND …

The JAX/Flax home of the transformer classics.

commands:
{commands}

Each command says more: flaxzoo train --help
Begin with: flaxzoo train quickstart"""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    A mistake of the user's (input, files, settings) is one line on standard
    error and status 2; a loss that is not finite, status 3; training that a
    signal stopped after saving, 128 and the signal's number.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())
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
    try:
        commands = import_module(f".{COMMANDS[command][0]}", __package__)
        return getattr(commands, f"{command.replace('-', '_')}_command")(arguments) or 0
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("flaxzoo", ""):
            raise
        return _fail(
            f"{command} needs the package {error.name}, which is not installed: install flaxzoo "
            "with all that it needs (pip without --no-deps)",
            2,
        )
    except NonFiniteLoss as error:
        return _fail(str(error), 3)
    except ReportedByPrimary:
        return 2
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        return _fail(" ".join(str(error).split()), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"flaxzoo: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
