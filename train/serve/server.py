"""Runs the application: binds the address, reads the key, and ends the server after a signal."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...data.common.errors import UserError
from ...data.common.fields import require
from ...data.common.progress import LogFn
from .app import LOOPBACK, Access, Service, make_app
from .engine import Engine, Limits
from .fields import ApiError
from .generation import GENERATION, GenerationWorker
from .metrics import Metrics
from .rows.settings import RowSettings
from .served import ENDPOINTS, open_models

GRACE = 7.0
"""The number of seconds that requests have to finish after a signal. The process then ends within
10 s."""
HEAD_TIME = 30.0
"""The number of seconds within which a client must send the head of a request."""
SWITCH_INTERVAL = 0.0005
"""The number of seconds after which a Python thread yields. Python's default is ten times as long,
and the engine might wait this long after each call for the thread that serves the connections."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The signals that end the server."""
KEY_VARIABLE = "FLAXZOO_API_KEY"
_KEY = re.compile("[ -~]+")
"""Matches printable ASCII characters."""


@dataclasses.dataclass(frozen=True)
class Address:
    """The address of the server and its key."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None

    def key(self) -> str | None:
        """Returns the key from the environment or the file.

        Raises:
            UserError: the host is not this machine and the key is missing, or the key is not valid.
        """
        key, origin = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        # A file that is given as an option takes precedence over the environment.
        if self.api_key_file is not None:
            origin = self.api_key_file
            key = origin.read_text(encoding="utf-8", errors="replace").strip()
        if key is None:
            require(
                self.host in LOOPBACK,
                f"host {self.host!r} is reachable from other machines, so it requires a key: set "
                f"{KEY_VARIABLE} or give --api-key-file",
            )
            return None
        problem = f"the key in {origin} must be printable ASCII and not empty: correct it"
        require(_KEY.fullmatch(key), problem)
        return key

    def bind(self) -> socket.socket:
        """Returns a socket that is bound to the address but does not listen yet.

        Raises:
            UserError: another server listens on the port, the port is not allowed, or this machine
                does not have the address.
        """
        try:
            addresses = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            # Prefer an IPv4 address, because clients try both if a host has IPv4 and IPv6
            # addresses.
            family, kind, _, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
            with contextlib.ExitStack() as closed:
                bound = closed.enter_context(socket.socket(family, kind))
                # This option is needed because a server that has just ended leaves connections that
                # block the port.
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(address)
                closed.pop_all()  # the caller closes it
        except OSError as error:
            raise self.unusable(error) from None
        return bound

    def unusable(self, error: OSError) -> UserError:
        """Returns the error for an address that the server cannot use."""
        reason = (error.strerror or str(error)).lower()
        return UserError(
            f"the server cannot listen on {self.host} port {self.port} ({reason}): give "
            "another --port or --host"
        )


class _Protocol(H11Protocol):
    """Closes connections that do not send the head of the next request in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # uvicorn's timer for idle connections stops at the first byte of the next request.
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _time_head(self) -> None:
        """Starts the timer for the next request's head, or stops it if the head has been sent."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIME, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """Ends with status 0 after SIGTERM or SIGINT."""

    def __init__(self, config: uvicorn.Config, engine: Engine, log: LogFn) -> None:
        super().__init__(config)
        self._engine, self._log = engine, log

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        loop = asyncio.get_running_loop()
        for signum in SIGNALS:
            loop.add_signal_handler(signum, self._drain, loop)
        yield

    def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stops accepting requests, and ends the remaining requests after the grace period."""
        if not self._engine.closing:
            self._engine.closing = True
            self._log("shutting down: no further requests are accepted")
            # The remaining requests end with this error after the grace period.
            error = ApiError(503, "the server shuts down: try again later", code="unavailable")
            loop.call_later(GRACE, self._engine.cancel_all, error)
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        # End a server that cannot answer any more, so that its supervisor starts a new server.
        return await super().on_tick(counter) or self._engine.failed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # If the user gives port 0, the system chooses the port, so read it from the socket.
        address = self.servers[0].sockets[0].getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self._log(f"listening on http://{host}:{address[1]}")


def _leave(signum: int, frame: FrameType | None) -> None:
    """Ends the process if a signal arrives before the server listens."""
    del signum, frame
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Makes signals end the process until the server handles signals itself."""
    earlier = {signum: signal.signal(signum, _leave) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)


def _open(
    names: tuple[str, ...],
    access: Access,
    limits: Limits,
    *,
    rows: RowSettings,
    ema: bool,
    log: LogFn,
) -> Service:
    """Opens the models, and returns the objects that the endpoints use."""
    models = open_models(names, rows, log, ema=ema)
    engine = Engine(limits, [w for model in models.values() for w in model.workers.values()])
    metrics = Metrics(engine)
    for model in models.values():
        worker = model.workers.get(GENERATION)
        if isinstance(worker, GenerationWorker):
            metrics.watch_rows(model.name, lambda batch=worker.batch: batch.num_growing)
    return Service(models, engine, access, metrics, ENDPOINTS)


def serve(
    names: tuple[str, ...],
    address: Address,
    limits: Limits,
    *,
    rows: RowSettings = RowSettings(),
    ema: bool = False,
    log: LogFn,
) -> None:
    """Serves models until SIGTERM or SIGINT.

    Args:
        names: the models; see `open_models`.
        address: the address to listen on.
        limits: the limits of the queue and of each request.
        rows: the settings for batching texts.
        ema: whether to use the moving averages of all models' parameters.
        log: called with lines about the start and the end.

    Raises:
        UserError: a model cannot be served, the address needs a key, or the engine has failed.
    """
    access = Access(address.key())
    # Bind the port and open the models before the server listens, so that errors end the command
    # early.
    with address.bind() as bound, _leaving_at_once():
        service = _open(names, access, limits, rows=rows, ema=ema, log=log)
        engine = service.engine
        config = uvicorn.Config(
            make_app(service),
            http=_Protocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            # This is one second more than the grace period, so that canceled requests can send
            # their errors.
            timeout_graceful_shutdown=int(GRACE) + 1,
            timeout_keep_alive=30,
        )
        sys.setswitchinterval(SWITCH_INTERVAL)
        # The server listens while the engine compiles programs. /health answers 503 until then.
        engine.start()
        try:
            _Server(config, engine, log).run([bound])
        except OSError as error:
            # Another server has begun to listen while the models were loaded.
            engine.stop()
            raise address.unusable(error) from None
    has_ended = engine.stop()
    require(not engine.failed, "the engine has failed, as printed above: start the server again")
    if not has_ended:
        # Do not end the interpreter normally, because it may crash while another thread compiles.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
