"""The command `flaxzoo serve`."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Annotated

from ....data.common.fields import Positive, PositiveInt, Range, require
from ...compilation_cache import enable_compilation_cache
from ...serve.rows.settings import RowSettings
from ..options import Positional, log, parse

Port = Annotated[int, Range(least=0, most=65_535)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments(RowSettings):
    """Serves models over HTTP, with OpenAI's interface."""

    models: Annotated[tuple[str, ...], Positional("RUN_OR_FOLDER")]
    """Run folders, folders in the Hugging Face format, or names on the Hugging Face hub. Requests
    name a model by the last part of its path, or by NAME if the argument is NAME=FOLDER."""
    ema: bool = False
    """Use the moving averages of the parameters of all models (--optimizer.ema-decay)."""
    host: str = "127.0.0.1"
    """The address to listen on. Any other address than localhost requires a key."""
    port: Port = 8000
    """The port; 0 chooses a free port."""
    api_key_file: Path | None = None
    """A file with the key that clients must send. Defaults to the key in the environment variable
    FLAXZOO_API_KEY."""
    max_requests: PositiveInt = 512
    """Maximum number of requests that wait or run; any other request gets status 429."""
    max_tokens: PositiveInt = 1_000_000
    """Maximum number of tokens of the requests that wait or run, including the new tokens that
    these requests may generate; a request that exceeds the limit gets status 429."""
    time_limit: Positive = 600.0
    """The number of seconds after which a request is canceled."""


def serve_command(arguments: list[str]) -> None:
    """Runs `flaxzoo serve RUN_OR_FOLDER`."""
    parsed = parse(ServeArguments, arguments, "flaxzoo serve")
    problem = "serve needs the packages of the extra serve: pip install 'flaxzoo[serve]'"
    require(importlib.util.find_spec("uvicorn") is not None, problem)
    # Also cache quick compilations, because a server compiles many programs when it starts.
    enable_compilation_cache(least_seconds=0.0)
    from ...serve.engine import Limits
    from ...serve.server import Address, serve

    # Copy the options to the dataclasses of the server's settings.
    limits = Limits(parsed.max_requests, parsed.max_tokens, parsed.time_limit)
    address = Address(parsed.host, parsed.port, parsed.api_key_file)
    rows = RowSettings(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(RowSettings)})
    serve(parsed.models, address, limits, rows=rows, ema=parsed.ema, log=log)
