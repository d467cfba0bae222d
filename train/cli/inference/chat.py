"""The command `flaxzoo chat`."""

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ....data.common.errors import UserError
from ....data.common.fields import NonNegativeInt, Seed, require
from ....models.decoding.request import NewTokens
from ...compilation_cache import enable_compilation_cache
from ..options import log, parse, read_line
from .arguments import SamplingArguments

if TYPE_CHECKING:
    from ....models.text.chat.conversation import Conversation
    from ....models.text.chat.tools.tool import Tool

COMMANDS = """\
/system TEXT  replace the instructions of the model; without TEXT, remove them
/reset        forget all turns; with --transcript, keep a copy of them in a file NAME-1
/save FILE    write the conversation as JSON lines
/help         show these commands
/exit         end (also Ctrl-D)"""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Matches control characters other than tabs and line feeds, and lone surrogates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatArguments(SamplingArguments):
    """Talks with a language model in the terminal; see /help there.

    Each line of standard input is a turn of the user. The model's cache is kept between turns, so
    that each turn processes only its new tokens. When the context window is full, the oldest turns
    are dropped, but the instructions are kept.
    """

    system: str | None = None
    """Instructions to the model."""
    max_new_tokens: NewTokens | None = None
    """Maximum length of an answer, in tokens. Defaults to a quarter of the context window, at most
    256."""
    seed: Seed = 0
    """The seed of the first answer. The seed increases by one with each answer."""
    tools: tuple[str, ...] = ()
    """Tools that the model may call: arithmetic; search:FOLDER, which finds paragraphs in the text
    files of a folder; index:FOLDER, which searches an index of flaxzoo index; database:FILE, which
    queries an SQLite database (read only); python, which runs a program that the model writes,
    without access to the network or files (Linux only)."""
    max_calls: NonNegativeInt = 8
    """The maximum number of tool calls after one turn of the user."""
    template: str | None = None
    """A folder with a chat template. Defaults to the template of the model."""
    transcript: Path | None = None
    """A file of JSON lines. If the file exists, the conversation continues from it. The
    conversation is saved in this file after each turn."""


def chat_command(arguments: list[str]) -> None:
    """Runs `flaxzoo chat RUN`."""
    parsed = parse(ChatArguments, arguments, "flaxzoo chat")
    enable_compilation_cache()
    from ....data.chat_templates.chat_template import ChatTemplate
    from ....data.tokenizers.base import check_unicode
    from ....models.text.chat.conversation import Conversation

    conversation = Conversation.of_run(
        parsed.run,
        step=parsed.step,
        ema=parsed.ema,
        max_length=parsed.max_length,
        instructions=parsed.system,
        seed=parsed.seed,
        stop_strings=parsed.stop_strings,
        tools=list(map(_tool, parsed.tools)),
        max_calls=parsed.max_calls,
        template=None if parsed.template is None else ChatTemplate.of_folder(parsed.template),
        **parsed.requested(),
    )
    if parsed.transcript is not None:
        # The option --system replaces the saved instructions.
        conversation.check_path(parsed.transcript)
        if parsed.transcript.exists():
            conversation.load(parsed.transcript)
        if parsed.system is not None:
            conversation.instructions = parsed.system
    interactive = sys.stdin.isatty()
    if interactive:
        log("/help shows the commands, /exit or Ctrl-D ends")
    # Each line is a command that begins with a slash, or a turn of the user.
    for line in _lines():
        try:
            check_unicode(line)
            if line.startswith("/"):
                if line.split()[0] == "/exit":
                    return
                _obey(conversation, line, parsed.transcript)
            elif line.strip():
                _answer(conversation, line, parsed.transcript)
        except UserError as error:
            # If the input is a script, an error ends the program. At a terminal, the user may try
            # again.
            if not (interactive or line.startswith("/")):
                raise
            log(f"flaxzoo: {error}")
        except KeyboardInterrupt:
            if not interactive:
                raise
            log("\ninterrupted: the turn is dropped")


def _tool(name: str) -> "Tool":
    """Returns the tool with a given name; opens an index here, because its search needs a model."""
    from ....models.text.chat.tools.named import named_tool
    from ...search.tool import search_index

    kind, _, folder = name.partition(":")
    return search_index(folder, log=log) if kind == "index" and folder else named_tool(name)


def _answer(conversation: "Conversation", line: str, transcript: Path | None) -> None:
    """Prints the answer to a line, followed by an empty line if input or output is not a terminal.

    The empty line lets a program find the end of an answer.
    """
    answer = conversation.reply(
        line,
        on_text=lambda text: print(_printable(text), end="", flush=True),
        on_turn=lambda turn: print(_printable(f"\n[{turn.writer}] {turn.content}"), flush=True),
    )
    print(flush=True)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(flush=True)
    if not answer.content.strip():
        cut = answer.finish_reason == "length"
        log(f"(the answer is {'white space up to its maximum length' if cut else 'empty'})")
    if transcript is not None:
        conversation.save(transcript)


def _unused_name(path: Path) -> Path:
    """Returns the first of `NAME-1.jsonl`, `NAME-2.jsonl`, … that does not exist."""
    names = (path.with_name(f"{path.stem}-{i}{path.suffix}") for i in itertools.count(1))
    return next(itertools.filterfalse(Path.exists, names))


def _printable(text: str) -> str:
    """Replaces control characters, which a terminal would execute, with question marks."""
    return CONTROL.sub("?", text)


def _lines() -> Iterator[str]:
    """Yields what the user types, until the end of the input."""
    while True:
        try:
            yield read_line("user: ")
        except EOFError:
            return


def _obey(conversation: "Conversation", line: str, transcript: Path | None) -> None:
    """Executes a line that begins with a slash."""
    command, _, text = line.partition(" ")
    if command in HANDLERS:
        HANDLERS[command](conversation, text.strip(), transcript)
    else:
        log(f"unknown command {line!r}:\n{COMMANDS}")


def _system(conversation: "Conversation", text: str, transcript: Path | None) -> None:
    """Replaces the instructions."""
    del transcript
    conversation.instructions = text or None


def _reset(conversation: "Conversation", text: str, transcript: Path | None) -> None:
    """Removes the turns."""
    del text
    if transcript is not None and conversation.turns:
        # The next turn overwrites the transcript, so keep a copy.
        copy = _unused_name(transcript)
        conversation.save(copy)
        log(f"saved the earlier turns in {copy}")
    conversation.reset()


def _save(conversation: "Conversation", text: str, transcript: Path | None) -> None:
    """Writes the conversation to a file."""
    del transcript
    require(text, "/save has no file: name a file, as in /save conversation.jsonl")
    conversation.save(os.path.expanduser(text))
    log(f"saved {text}")


def _help(conversation: "Conversation", text: str, transcript: Path | None) -> None:
    """Shows the commands."""
    del conversation, text, transcript
    log(COMMANDS)


HANDLERS = {"/system": _system, "/reset": _reset, "/save": _save, "/help": _help}
"""Maps each command to the function that executes it."""
