"""A conversation with a language model. Earlier turns stay in the key/value cache."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....data.chat.encoding import EncodedChat, TurnEnds, encode_chat, turn_ends
from ....data.chat_templates.chat_template import ChatTemplate, Message, check_role
from ....data.common.atomic_io import check_file, write_file
from ....data.common.errors import DataError, UserError
from ....data.common.fields import require
from ....data.common.files import input_lines
from ....data.common.json_lines import parse_line
from ....data.common.json_text import JsonValue
from ....data.common.progress import ignore
from ...decoding.generator import SEEDS, check_seed, sampling_keys
from ..completions import FinishReason, Prompt
from ..generate import TextGenerator
from ..growing_text import GrowingText
from ..text_model import require_texts
from .tools.call_forms import CallForm, Written
from .tools.tool import Tool, ToolCall, as_error

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
OnText = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Turn:
    """A message of a conversation and its author."""

    role: str
    content: str
    writer: str
    """The author: `user`, or the name of a model or a tool."""
    finish_reason: FinishReason | None = None
    """Why the model's answer ended: `stop`, `end` or `length`."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls of the message, if the chat template writes them separately from the content.
    """

    @property
    def message(self) -> Message:
        """The turn as a dict, as chat templates expect it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.role == TOOL:
            message["name"] = self.writer
        if self.calls:
            message["tool_calls"] = [call.message for call in self.calls]
        return message


class Conversation:
    """A conversation between a user and a model, who take turns.

    The chat template formats the whole conversation as one text. Keys and values are cached, so
    that each turn processes only its new tokens. When the context window is full, the oldest
    exchanges are dropped, but the instructions are kept.

    Example::

        conversation = models.Conversation.of_run("runs/sft", instructions="Answer briefly.")
        print(conversation.reply("What is a list?").content)
        conversation.save("conversation.jsonl")

    Args:
        generator: the model and its tokenizer.
        instructions: a description of how the model should behave. It is the first message, with
          the role `system`.
        name: the name of the model in transcripts.
        template: replaces the chat template of the tokenizer.
        max_new_tokens: the maximum length of an answer, in tokens. Defaults to a quarter of the
          window, but at most 256.
        seed: the seed of the first answer. It is incremented for each later answer.
        stop_strings: additional strings that end an answer and are not part of it.
        tools: tools that the model may call. The model generates a call in the format of its chat
          template, reads the output as a turn with the role `tool`, and continues.
        max_calls: the maximum number of calls after each user turn. Any later call returns an
            error.
        **options: arguments of `models.generate` such as `temperature`.

    Raises:
        UserError: an option is not supported or out of range, or the chat template has no known
          format of tool calls.
    """

    def __init__(
        self,
        generator: TextGenerator,
        *,
        instructions: str | None = None,
        name: str = ASSISTANT,
        template: ChatTemplate | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        stop_strings: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        max_calls: int = 8,
        **options: JsonValue,
    ) -> None:
        check_seed(seed)
        require_texts(stop_strings, "stop_strings")
        self.instructions = instructions
        self.turns: list[Turn] = []
        self._generator, self._name, self._seed = generator, name, seed
        self._template = generator.tokenizer.chat_template if template is None else template
        self._stop_strings = tuple(stop_strings)
        # By default, reserve a quarter of the window for the answer, which leaves most of the
        # window for the earlier turns.
        self._wanted = min(256, generator.max_length // 4)
        if max_new_tokens is not None:
            self._wanted = max_new_tokens
        self._tools = {tool.name: tool for tool in tools}
        self._max_calls = max_calls
        self._form = CallForm.of(self._template) if tools else CallForm()
        self._request = generator.context_request(max_new_tokens=self._wanted, **options)
        self._context = generator.cached_context()

    @classmethod
    def of_run(
        cls,
        folder: str | Path,
        *,
        step: int | None = None,
        ema: bool = False,
        max_length: int | None = None,
        **options: Any,
    ) -> "Conversation":
        """Opens the model of a run folder and starts a conversation with it.

        Args:
            folder: a run folder, a folder in the Hugging Face format, or a name on the hub.
            step: the checkpoint. Defaults to the newest checkpoint.
            ema: whether to use the moving average of the parameters.
            max_length: the size of the window, in tokens. Defaults to the maximum length of the
              model.
            **options: arguments of `Conversation`.

        Raises:
            FileNotFoundError: `folder` is not a run folder, or has no such checkpoint.
            UserError: the model is not a causal language model, or an option is out of range.
        """
        generator = TextGenerator.of_run(folder, step=step, max_length=max_length, ema=ema)
        return cls(generator, **{"name": str(folder), **options})

    @property
    def num_read(self) -> int:
        """The number of tokens that the model has read, including generated tokens."""
        return self._context.num_read

    def prompt(self, text: str) -> str:
        """Returns the text that the model would read for the user's next turn."""
        return self._prompt([*self.turns, Turn(USER, text, USER)])[0].text

    def reply(
        self,
        text: str,
        *,
        on_text: OnText = ignore,
        on_turn: Callable[[Turn], None] = ignore,
    ) -> Turn:
        """Sends a message to the model and returns its answer. Both are added to the turns.

        Tool calls and their outputs are added as turns before the answer.

        Args:
            text: the user's message.
            on_text: called with each new piece of the model's text.
            on_turn: called with the output of each tool, as a turn.

        Raises:
            UserError: the text is empty, or the text and the instructions do not fit into the
                window. In this case, the conversation is unchanged.
        """
        require(text.strip(), "the message is empty: write a text")
        turns = [*self.turns, Turn(USER, text, USER)]
        left = self._max_calls
        # Answer the calls of the model until it answers without a call.
        while True:
            answer, written = self._answer(turns, on_text)
            turns.append(answer)
            if left < 0 or not (written.calls or written.malformed):
                break
            # Count a malformed call as one call.
            outputs: list[Turn] = []
            if written.malformed:
                outputs.append(Turn(TOOL, as_error(written.malformed), TOOL))
            for i, call in enumerate(written.calls):
                outputs.append(Turn(TOOL, self._call(call, left - i), call.name))
            left -= len(outputs)
            for turn in self._fitting(turns, outputs):
                turns.append(turn)
                on_turn(turn)
        self.turns = turns
        return turns[-1]

    def _answer(self, turns: Sequence[Turn], on_text: OnText) -> tuple[Turn, Written]:
        """Returns the model's answer to the given turns, and its parsed content.

        Raises:
            UserError: the instructions and the last exchange do not fit into the window.
        """
        # Prepare the prompt, the settings and the random key for this answer.
        encoded, room = self._prompt(turns)
        growing = GrowingText(
            self._generator.tokenizer,
            Prompt(
                encoded.text,
                stop_strings=(*self._ends.strings, *self._stop_strings),
                max_new_tokens=room,
            ),
            encoded.ids,
            end_ids=(*self._request.eos_token_id, *self._ends.ids),
        )
        request = dataclasses.replace(self._request, max_new_tokens=room)
        answered = sum(turn.role == ASSISTANT for turn in turns)
        keys = sampling_keys((self._seed + answered) % SEEDS, 1)
        shown = 0
        # Generate token by token, until a stop string, an end token or the end of a tool call.
        for token in self._context.stream(encoded.ids, request, keys):
            growing.grow([token])
            end = self._form.end_of_call(growing.text)
            if end is not None:
                growing.text, growing.reason = growing.text[:end], "stop"
            until = growing.num_settled if end is None else end
            shown = _show(growing, shown, on_text, until=until)
            if growing.reason is not None:
                break
        _show(growing, shown, on_text, until=len(growing.text.rstrip()))
        # Separate the tool calls from the text.
        reason = growing.reason or "length"
        answer = Turn(ASSISTANT, growing.text.strip(), self._name, reason)
        written = self._form.read(answer.content, tuple(self._tools.values()))
        if not self._form.in_content:
            answer = dataclasses.replace(answer, content=written.content, calls=written.calls)
        return answer, written

    def _fitting(self, turns: Sequence[Turn], outputs: Sequence[Turn]) -> Sequence[Turn]:
        """Shortens tool outputs until half of `max_new_tokens` or more fit after the prompt."""
        # Halve the longest tool output until the prompt is short enough.
        short, longest = outputs, max(len(turn.content) for turn in outputs)
        while longest > 100:
            try:
                if 2 * self._prompt([*turns, *short])[1] >= self._wanted:
                    break
            except UserError:
                pass  # not even one token fits
            longest //= 2
            note = "\n[the rest does not fit into the window]"
            short = [
                turn
                if len(turn.content) <= longest
                else dataclasses.replace(turn, content=turn.content[:longest] + note)
                for turn in outputs
            ]
        return short

    def _call(self, call: ToolCall, left: int) -> str:
        """Returns the output of the called tool, or an error."""
        if left <= 0:
            return as_error(f"no more than {self._max_calls} calls: answer without a tool")
        tool = self._tools.get(call.name)
        if tool is None:
            return as_error(
                f"tool {call.name!r} does not exist: choose from {', '.join(self._tools)}"
            )
        return tool(call.arguments)

    def reset(self) -> None:
        """Removes all turns, but keeps the instructions."""
        self.turns = []

    def save(self, path: str | Path) -> None:
        """Writes a transcript: a JSON object for each message, with its author.

        Args:
            path: the file. An existing file is overwritten only if it is a transcript.

        Raises:
            DataError: the file cannot be written, or is not a transcript.
        """
        self.check_path(path)
        turns = self.turns
        if self.instructions is not None:
            turns = [Turn(SYSTEM, self.instructions, USER), *turns]
        # Leave out fields without a value.
        lines = [
            json.dumps({k: v for k, v in row.items() if v not in (None, ())}, ensure_ascii=False)
            for row in map(dataclasses.asdict, turns)
        ]
        write_file(Path(path), "".join(f"{line}\n" for line in lines).encode())

    @staticmethod
    def check_path(path: str | Path) -> None:
        """Checks that a transcript can be written to a path.

        Raises:
            DataError: the path cannot be written, or is a file other than a transcript.
        """
        path = Path(path)
        check_file(path)
        problem = f"{path} is not a transcript: name another file"
        require(not path.exists() or _is_transcript(path), problem, DataError)

    def load(self, path: str | Path) -> None:
        """Replaces the turns and instructions with the content of a transcript.

        Raises:
            DataError: the file is not a transcript.
        """
        instructions, turns = None, []
        for _, number, line in input_lines(str(path)):
            row = parse_line(line, location := f"{path} line {number}")
            role, content = row.get("role"), row.get("content")
            require(
                isinstance(role, str) and isinstance(content, str),
                f"{location} has the fields {', '.join(row)}: a transcript has role, content and "
                "writer",
            )
            check_role(role := str(role), location)
            writer = str(row.get("writer", role))
            turn = Turn(role, str(content), writer, calls=_calls(row, location))
            # A system message in the first line contains the instructions. A later system message
            # is a turn.
            if turn.role == SYSTEM and number == 1:
                instructions = turn.content
            else:
                turns.append(turn)
        self.instructions, self.turns = instructions, turns

    def _prompt(self, turns: Sequence[Turn]) -> tuple[EncodedChat, int]:
        """Returns the model's input, and the maximum number of tokens of the answer."""
        window, wanted = self._generator.max_length, self._wanted
        # The first message contains the instructions. It also lists the tools, unless the chat
        # template does so itself.
        tools = tuple(self._tools.values())
        listed = self._form.instructions(tools)
        system = "\n".join(filter(None, [self.instructions, listed]))
        first = [Turn(SYSTEM, system, USER)] if system else []
        schemas = [tool.schema for tool in tools] if listed is None else None
        # Drop the oldest exchanges until the answer fits.
        begins = [i for i, turn in enumerate(turns) if turn.role == USER]
        encoded: Any = None
        for begin in begins:
            messages = [turn.message for turn in (*first, *turns[begin:])]
            encoded = encode_chat(
                self._generator.tokenizer,
                messages,
                tools=schemas,
                add_generation_prompt=True,
                template=self._template,
            )
            if len(encoded.ids) + wanted <= window:
                return encoded, wanted
        # Only the last exchange is left: shorten the answer.
        require(
            len(encoded.ids) < window,
            f"the message and the instructions have {len(encoded.ids)} tokens, more than "
            f"the {window} that the model reads: shorten them",
        )
        return encoded, window - len(encoded.ids)

    @functools.cached_property
    def _ends(self) -> TurnEnds:
        """The tokens and strings that end an answer."""
        return turn_ends(self._generator.tokenizer, self._template, tools=bool(self._tools))


def answer_options(generator: TextGenerator, stop_strings: Sequence[str] = ()) -> dict[str, Any]:
    """Returns options of `TextGenerator.complete` that end an answer at the end of its turn.

    Args:
        generator: the model, whose tokenizer contains the chat template.
        stop_strings: additional strings that end an answer.
    """
    ends = turn_ends(generator.tokenizer, generator.tokenizer.chat_template)
    stored = generator.context_request().eos_token_id
    return {
        "eos_token_id": [*dict.fromkeys((*stored, *ends.ids))],
        "stop_strings": (*ends.strings, *stop_strings),
    }


def _is_transcript(path: Path) -> bool:
    """Returns whether every line of a file is a message with an author."""
    try:
        with path.open(encoding="utf-8") as lines:
            return all({"role", "content", "writer"} <= set(json.loads(line)) for line in lines)
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _calls(row: Mapping[str, JsonValue], location: str) -> tuple[ToolCall, ...]:
    """Returns the tool calls in a message of a transcript."""
    calls = row.get("calls", [])
    problem = f"{location}: calls must be a list of objects with name and arguments"
    require(isinstance(calls, list), problem)
    try:
        return tuple(ToolCall(**call) for call in calls)  # pyright: ignore
    except TypeError:
        raise UserError(problem) from None


def _show(growing: GrowingText, shown: int, on_text: OnText, *, until: int) -> int:
    """Passes new final text to `on_text`; returns the number of characters passed so far."""
    text = growing.text
    if shown == 0:  # the template adds the white space before an answer
        shown = min(len(text) - len(text.lstrip()), until)
    # Trailing white space is not shown until more text follows.
    until = len(text[:until].rstrip())
    if until > shown:
        on_text(text[shown:until])
        return until
    return shown
