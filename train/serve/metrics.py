"""The metrics that `/metrics` reports in the format of Prometheus."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine import Engine

if TYPE_CHECKING:
    from .generation import TextWork

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counts requests and tokens."""

    def __init__(self, engine: Engine) -> None:
        """Creates the counters.

        Args:
            engine: the engine. Its queue is part of the metrics.
        """
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "flaxzoo_requests",
            "Requests by endpoint and status.",
            ["path", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "flaxzoo_request_seconds",
            "Seconds until the end of the answer.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_token = Histogram(
            "flaxzoo_first_token_seconds",
            "Seconds until the first token of a text.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.tokens = Counter(
            "flaxzoo_tokens",
            "Tokens of prompts and of answers.",
            ["model", "kind"],
            registry=registry,
        )
        self._rows = Gauge(
            "flaxzoo_rows",
            "Texts in generation.",
            ["model"],
            registry=registry,
        )
        # These values are read from the engine whenever a client requests `/metrics`.
        for name, text, read in (
            ("flaxzoo_jobs", "Requests that wait or run.", lambda: len(engine.jobs)),
            (
                "flaxzoo_job_tokens",
                "Tokens of the requests that wait or run.",
                lambda: engine.num_tokens,
            ),
            ("flaxzoo_ready", "1 if the server answers requests.", lambda: int(engine.is_ready)),
        ):
            Gauge(name, text, registry=registry).set_function(read)

    def count(self, path: str, status: int, seconds: float) -> None:
        """Counts a request. The status 499 means that the client has disconnected."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def texts(self, model: str, works: "Sequence[TextWork]") -> None:
        """Counts generated texts."""
        for work in works:
            if work.first_token:  # 0 if nothing was generated
                self._first_token.observe(work.first_token)
            if work.index == 0:  # count the prompt once for all of its texts
                self.tokens.labels(model, "prompt").inc(len(work.ids))
            self.tokens.labels(model, "text").inc(work.growing.num_chosen)

    def watch_rows(self, model: str, read: Callable[[], float]) -> None:
        """Adds a gauge for the number of texts that a model is generating, which `read` returns."""
        self._rows.labels(model).set_function(read)

    def text(self) -> bytes:
        """Returns all metrics."""
        return generate_latest(self._registry)
