"""The ASGI application, with endpoints from a table and errors in OpenAI's format."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ...data.common.errors import UserError
from ...data.common.fields import Positive, PositiveInt
from ...data.common.json_text import JsonValue
from .engine import AnyWorker, Engine, report_fault
from .fields import ApiError, read_fields, read_json, require_valid
from .metrics import Metrics

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The names of this machine. A server that listens only on these names needs no key."""
_LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
"""Matches the Host header of a request to one of these names."""
Answer: TypeAlias = "JsonValue | Response | AsyncIterator[bytes]"
"""The result of an endpoint: JSON, a response, or the parts of a stream of server-sent events."""
QUICK_BODY = 1 << 16
"""The maximum size, in bytes, of a body that is parsed in the thread of the event loop. A different
thread parses larger bodies, because this takes long."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model and the kinds of work that it supports.

    Attributes:
        name: the name of the model in requests.
        front: an object with the model's tokenizer, such as a `TextGenerator`.
        workers: the worker for each kind of work, such as "generation".
    """

    name: str
    front: Any
    workers: Mapping[str, AnyWorker]
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


@dataclasses.dataclass(frozen=True)
class Access:
    """The API key of clients, and the limits of request bodies."""

    key: str | None = None
    """The key that clients must send (`Authorization: Bearer KEY`). If None, the server answers
    only clients on this machine."""
    body_limit: PositiveInt = 2 * 1024 * 1024
    """The maximum size of a body, in bytes."""
    body_time: Positive = 30.0
    """The number of seconds within which a client must send the body."""
    read_time: Positive = 10.0
    """The number of seconds that a client has to read the answer after the time limit of its
    request."""

    def check(self, request: Request) -> None:
        """Checks the key of a request, or the host name in the request if the server has no key.

        Raises:
            ApiError: the key is missing or wrong.
        """
        if self.key is None:
            # A page of a different site can reach this server by DNS rebinding. A request from such
            # a page has the host name of that site.
            host = request.headers.get("host", "")
            message = f"the host {host[:100]!r} requires a key: give --api-key-file"
            require_valid(_LOOPBACK_HOST.fullmatch(host), message, code=None, status=403)
            return
        # Compare in constant time, so that the response time does not reveal a part of the key.
        authorization = request.headers.get("authorization", "")
        is_right = hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode())
        message = "the API key is missing or wrong: send Authorization: Bearer KEY"
        require_valid(is_right, message, code="invalid_api_key", status=401)


@dataclasses.dataclass
class Service:
    """The objects that all endpoints use."""

    models: Mapping[str, Served]
    engine: Engine
    access: Access
    metrics: Metrics
    endpoints: Sequence["Endpoint"] = ()
    num_open: int = 0
    """The number of requests with a body that are being read or answered."""

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Counts a request as open, because its body takes memory even before it is admitted.

        Raises:
            ApiError: the number of open requests is twice the number that the engine admits.
        """
        if self.num_open >= 2 * self.engine.limits.max_requests:
            raise self.engine.overloaded(f"{self.num_open:,} open requests")
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def model(self, name: str | None) -> Served:
        """Returns the model of this name, or the only model if the name is missing.

        Raises:
            ApiError: the model does not exist.
        """
        if name is not None and name in self.models:
            return self.models[name]
        listed = ", ".join(self.models)
        if name is None:
            message = f"model is missing: choose from {listed}"
            require_valid(len(self.models) == 1, message, "model", "missing")
            return next(iter(self.models.values()))
        message = f"the model {name[:100]!r} does not exist: choose from {listed}"
        raise ApiError(404, message, "model", "model_not_found")

    def worker(self, name: str | None, kind: str) -> tuple[Served, Any]:
        """Returns a model and its worker for a kind of work.

        Raises:
            ApiError: the model does not exist, or does not support this kind of work.
        """
        model = self.model(name)
        does = ", ".join(model.workers)
        message = f"the model {model.name!r} does not support {kind}: it supports {does}"
        require_valid(kind in model.workers, message, "model", "unsupported_model")
        return model, model.workers[kind]


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """An endpoint of the server, which is an entry in the table of routes.

    Attributes:
        method: GET or POST.
        path: its path.
        answer: called as `answer(service, fields)`, or `answer(service, None)` without fields.
        summary: a single line for the documentation.
        fields: the dataclass of the body, or None.
        is_open: whether the endpoint needs no key.
    """

    method: str
    path: str
    answer: Callable[[Service, Any], Awaitable[Answer]]
    summary: str
    fields: type | None = None
    is_open: bool = False


def error_response(error: ApiError) -> JSONResponse:
    """Returns an error in OpenAI's format."""
    return JSONResponse(error.body, error.status, error.headers)


def api_error(error: Exception) -> ApiError:
    """Converts an exception to the error for the client, and reports unexpected exceptions."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    report_fault(error)
    return ApiError(500, f"internal error ({type(error).__name__})")


@dataclasses.dataclass(frozen=True)
class _Handler:
    """Answers the requests to an endpoint. If a client disconnects, its work is canceled."""

    service: Service
    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        status = 499  # the client disconnected before the answer
        request = Request(scope, receive)

        # Remember the status of the answer, to count it.
        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            with contextlib.ExitStack() as exits:
                await self._answer(request, sending, exits)
        except ClientDisconnect:
            pass  # the client does not read an answer; the request is counted below
        finally:
            self.service.metrics.count(self.endpoint.path, status, time.monotonic() - started)

    async def _answer(self, request: Request, send: Send, exits: contextlib.ExitStack) -> None:
        fields = None
        try:
            if not self.endpoint.is_open:
                self.service.access.check(request)
            if self.endpoint.fields is not None:
                exits.enter_context(self.service.place())
                fields = await self._fields(request)
        except ClientDisconnect:
            raise
        except Exception as error:
            # Close the connection, because the client may still be sending the body.
            shown = api_error(error)
            shown.headers.setdefault("Connection", "close")
            await error_response(shown)(request.scope, request.receive, send)
            return
        # Wait for the end of the answer or of the connection, whichever comes first.
        working = asyncio.ensure_future(self._respond(request, fields, send))
        disconnected = asyncio.ensure_future(_disconnected(request))
        # A client that does not read the answer must not block other clients.
        limit = self.service.engine.limits.time_limit + self.service.access.read_time
        try:
            await asyncio.wait(
                (working, disconnected), timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            # Wait until both tasks have ended, so that their work does not outlive this call.
            for task in (working, disconnected):
                task.cancel()
            await asyncio.wait((working, disconnected))
        # If the answer failed, raise its error.
        if not working.cancelled():
            working.result()

    async def _fields(self, request: Request) -> Any:
        """Returns the fields in the body.

        Raises:
            ApiError: the body is too long or too slow, or a field is wrong.
        """
        access, endpoint = self.service.access, self.endpoint
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        message = f"Content-Type must be application/json, got {kind[:100]!r}"
        is_json = kind == "application/json"
        require_valid(is_json, message, code="unsupported_media_type", status=415)
        # If the Content-Length header is too large, refuse the body. Count the bytes in any case.
        size = request.headers.get("content-length", "0")
        too_long = ApiError(413, f"the body has more than {access.body_limit:,} bytes: shorten it")
        if size.isdigit() and int(size) > access.body_limit:
            raise too_long
        parts, total = [], 0
        try:
            async with asyncio.timeout(access.body_time):
                async for part in request.stream():
                    total += len(part)
                    if total > access.body_limit:
                        raise too_long
                    parts.append(part)
        except TimeoutError:
            message = f"the body took longer than {access.body_time:g} s: send it faster"
            raise ApiError(408, message, code="timeout") from None
        cls, body = cast(type, endpoint.fields), b"".join(parts)
        if total <= QUICK_BODY:
            return read_fields(cls, read_json(body))
        return await asyncio.to_thread(lambda: read_fields(cls, read_json(body)))

    async def _respond(self, request: Request, fields: Any, send: Send) -> None:
        try:
            answer = await self.endpoint.answer(self.service, fields)
            if isinstance(answer, AsyncIterator):
                await _stream(answer, send)
                return
            response = answer if isinstance(answer, Response) else JSONResponse(answer)
        except Exception as error:
            response = error_response(api_error(error))
        await response(request.scope, request.receive, send)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(parts: AsyncIterator[bytes], send: Send) -> None:
    """Sends a stream of server-sent events.

    If an error is raised before the first event, it determines the status of the response.
    """

    async def part(body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async with contextlib.aclosing(parts):  # pyright: ignore[reportArgumentType]
        first = await anext(parts, b"")
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await part(first)
        try:
            async for body in parts:
                await part(body)
        # The status has already been sent, so send the error in an event.
        except Exception as error:
            await part(event_of(api_error(error).body))
    await part(b"", more=False)


def event_of(value: JsonValue) -> bytes:
    """Returns a server-sent event with JSON.

    The event is ASCII, because some clients also split lines at Unicode line separators.
    """
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _on_http_error(request: Request, error: Exception) -> Response:
    del request
    fault = cast(HTTPException, error)  # `make_app` registers this function for this type
    messages = {404: "the path does not exist", 405: "the path does not support this method"}
    message = messages.get(fault.status_code, str(fault.detail))
    return JSONResponse(
        ApiError(fault.status_code, f"{message}: see GET /openapi.json").body,
        fault.status_code,
        fault.headers,
    )


async def _on_fault(request: Request, error: Exception) -> Response:
    del request
    return error_response(api_error(error))


def make_app(service: Service) -> Starlette:
    """Returns the application with the endpoints of a service."""
    routes = [
        Route(each.path, _Handler(service, each), methods=[each.method])
        for each in service.endpoints
    ]
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: _on_http_error, Exception: _on_fault},
    )
