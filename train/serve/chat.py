"""The endpoint `/v1/chat/completions`."""

import asyncio
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from ...data.chat.encoding import encode_chat, turn_ends
from ...data.chat_templates.chat_template import LECTURES
from ...data.common.fields import (
    Checked,
    PositiveInt,
    Range,
    require,
)
from ...data.common.json_text import JsonObject, JsonValue
from ...data.tokenizers.base import Tokenizer
from ...models.text.chat.tools.call_forms import CallForm
from ...models.text.completions import Prompt
from ...models.text.generate import TextGenerator
from .app import Answer, Endpoint, Served, Service, event_of
from .chat_messages import JsonFields, read_message, read_tools, with_instructions
from .completions import DONE, head, usage
from .engine import Job
from .generation import (
    FINISH,
    GENERATION,
    Piece,
    TextWork,
    make_works,
    num_tokens,
)
from .text_fields import TextFields, seeds_of

Alternatives = Annotated[int, Range(least=0, most=20)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseFormat(Checked):
    """The format of an answer."""

    type: Literal["text"] = "text"
    """The format. It must be text, because the server cannot guarantee other formats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFields(TextFields):
    """A conversation to continue."""

    messages: tuple[JsonFields, ...]
    """Messages with role and content."""
    max_tokens: PositiveInt | None = None
    """The maximum number of new tokens. Defaults to the number of tokens that fit into the context.
    The server's limit of tokens in the queue (`--max-tokens`) counts this maximum."""
    max_completion_tokens: PositiveInt | None = None
    """The same as `max_tokens`."""
    logprobs: bool = False
    """Whether to report the log-probability of each token."""
    top_logprobs: Alternatives = 0
    """How many of the most probable tokens to report at each position."""
    tools: tuple[JsonFields, ...] = ()
    """Functions that the model may call."""
    tool_choice: Literal["auto", "none"] = "auto"
    """auto: the model decides whether to call a tool. A request cannot force a call."""
    parallel_tool_calls: Literal[True] = True
    """Must be true, because the server cannot limit the number of calls."""
    response_format: ResponseFormat = ResponseFormat()
    """The format must be text."""
    store: Literal[False] = False
    """Must be false."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.messages, "messages must have at least one message, got none")
        problem = f"top_logprobs must be 0 unless logprobs is true, got {self.top_logprobs}"
        require(self.logprobs or not self.top_logprobs, problem)
        both = self.max_tokens, self.max_completion_tokens
        problem = f"max_tokens must equal max_completion_tokens, got {both[0]} and {both[1]}"
        require(None in both or both[0] == both[1], problem)

    @property
    def limit(self) -> int | None:
        """The maximum number of new tokens."""
        return self.max_completion_tokens or self.max_tokens


async def chat(service: Service, fields: ChatFields) -> Answer:
    """Answers `/v1/chat/completions`."""
    # If the server is busy, refuse early, because tokenizing a long conversation takes time.
    service.engine.check_admission()
    model, worker = service.worker(fields.model, GENERATION)
    form = _form(model.front, fields)
    # Tokenize in a different thread, so that the event loop can serve other requests.
    works = await asyncio.to_thread(_works, model.front, fields, form)
    job = service.engine.submit(worker, works, tokens=num_tokens(works))
    answer = _Answer(model.front.tokenizer, fields, works, form)
    if fields.stream:
        return _stream(service, model, job, answer)
    pieces = await job.results()
    service.metrics.texts(model.name, works)
    written = (piece.num_tokens for piece in pieces)
    choices: list[JsonValue] = [answer.choice(i, piece) for i, piece in enumerate(pieces)]
    return {
        **head(model, "chat.completion", "chatcmpl"),
        "choices": choices,
        "usage": usage(written, len(works[0].ids)),
    }


def _form(generator: TextGenerator, fields: ChatFields) -> CallForm:
    """Returns the format of the model's tool calls."""
    if not fields.tools or fields.tool_choice == "none":
        return CallForm()
    return CallForm.of(generator.tokenizer.chat_template)


def _works(generator: TextGenerator, fields: ChatFields, form: CallForm) -> list[TextWork]:
    """Returns the texts to generate, one for each choice."""
    tokenizer = generator.tokenizer
    template, tools = tokenizer.chat_template, read_tools(fields.tools)
    in_content = template.source == LECTURES
    messages = [
        read_message(message, i, in_content=in_content) for i, message in enumerate(fields.messages)
    ]
    # If the template does not list the tools, the instructions list them.
    listed = form.instructions(tools)
    schemas = list(fields.tools) if listed is None else None
    if listed:
        messages = with_instructions(messages, listed)
    encoded = encode_chat(tokenizer, messages, tools=schemas, add_generation_prompt=True)
    sampling = fields.sampling(generator.stored, alternatives=fields.top_logprobs)
    # Tokens that end a turn also end the answer.
    ends = turn_ends(tokenizer, template, tools=bool(tools))
    works = make_works(
        generator,
        Prompt(encoded.text, stop_strings=(*ends.strings, *fields.stops)),
        encoded.ids,
        fields,
        sampling=dataclasses.replace(sampling, eos_token_id=(*sampling.eos_token_id, *ends.ids)),
        seed=seeds_of(fields, 1)[0],
        param="messages",
        limit=fields.limit,
    )
    for work in works:
        work.ends = form.end_of_call
    return works


@dataclasses.dataclass
class _Answer:
    """Converts generated text to the answer to a request."""

    tokenizer: Tokenizer
    fields: ChatFields
    works: list[TextWork]
    form: CallForm

    def parsed(self, text: str) -> tuple[str, list[JsonObject]]:
        """Returns the content of a complete answer, and the tool calls in it."""
        written = self.form.read(text.strip(), read_tools(self.fields.tools))
        calls: list[JsonObject] = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                },
            }
            for call in written.calls
        ]
        # In the format of the lectures, the content includes the call, so cut the content before
        # the call.
        content = written.content
        if calls and self.form.in_content:
            content = content[: self.form.begins_call(content)].rstrip()
        return content, calls

    def choice(self, index: int, piece: Piece) -> JsonObject:
        """Returns a choice of an answer that is not streamed."""
        content, calls = self.parsed(piece.text)
        message: JsonObject = {"role": "assistant", "content": content}
        reason: str | None = FINISH[piece.reason]
        # As in OpenAI's interface, an answer with calls has null instead of empty content.
        if calls:
            message |= {"content": content or None, "tool_calls": [*calls]}
            reason = "tool_calls"
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(piece),
            "finish_reason": reason,
        }

    def logprobs(self, piece: Piece) -> JsonValue:
        """Returns the log-probabilities of new tokens, if requested."""
        if not self.fields.logprobs:
            return None
        # If no alternatives are requested, each token has an empty list.
        rows = piece.alternatives or [[]] * len(piece.tokens)
        every = zip(piece.tokens, piece.log_probabilities, rows, strict=True)
        return {
            "content": [
                {**self._token(token, score), "top_logprobs": [self._token(*one) for one in row]}
                for token, score, row in every
            ],
            "refusal": None,
        }

    def _token(self, token: int, score: float) -> JsonObject:
        text = self.tokenizer.decode([token], False)
        return {"token": text, "logprob": score, "bytes": list(text.encode())}


class _Shown:
    """Tracks which part of a text a stream has sent, without white space around the answer."""

    def __init__(self, form: CallForm) -> None:
        self._form, self._text, self._shown = form, "", 0

    def take(self, text: str) -> str:
        """Adds new text, and returns the new part of the answer that can be sent."""
        self._text += text
        if self._shown == 0:
            self._text = self._text.lstrip()
        # The text may contain the beginning of a tool call. Do not send this part.
        end = len(self._text[: self._form.begins_call(self._text)].rstrip())
        shown, self._shown = self._text[self._shown : end], max(end, self._shown)
        return shown

    @property
    def whole(self) -> str:
        """The text so far, without leading white space."""
        return self._text

    @property
    def num_sent(self) -> int:
        """The number of characters that have been sent."""
        return self._shown


async def _stream(
    service: Service, model: Served, job: Job[Piece], answer: _Answer
) -> AsyncIterator[bytes]:
    """Yields the parts of a streamed answer."""
    start = head(model, "chat.completion.chunk", "chatcmpl")
    works, written = answer.works, dict[int, int]()
    shown = [_Shown(answer.form) for _ in works]

    def part(index: int, delta: JsonObject, reason: str | None, logprobs: JsonValue) -> bytes:
        choice: JsonObject = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return event_of({**start, "choices": [choice]})

    async with job:
        # The first part of each choice contains the role, as OpenAI's clients expect.
        for i in range(len(works)):
            yield part(i, {"role": "assistant", "content": ""}, None, None)
        async for i, piece in job:
            written[i], last = piece.num_tokens, piece.reason is not None
            before = shown[i].num_sent
            # Send calls only at the end of the text, because an incomplete call cannot be parsed.
            text, calls = shown[i].take(piece.text), []
            if last:
                content, calls = answer.parsed(shown[i].whole)
                text = content[before:]
            logprobs = answer.logprobs(piece)
            if text or logprobs:
                yield part(i, {"content": text}, None, logprobs)
            if calls:
                deltas: list[JsonValue] = [{"index": n, **call} for n, call in enumerate(calls)]
                yield part(i, {"tool_calls": deltas}, None, None)
            if last:
                yield part(i, {}, "tool_calls" if calls else FINISH[piece.reason], None)
    if answer.fields.includes_usage:
        counts = usage(written.values(), len(works[0].ids))
        yield event_of({**start, "choices": [], "usage": counts})
    service.metrics.texts(model.name, works)
    yield DONE


CHAT = (Endpoint("POST", "/v1/chat/completions", chat, "Continue a conversation", ChatFields),)
"""The endpoint of this file."""
