"""The server under load: throughput, time to first token, overload, clients that leave, memory.

    python tests/benchmarks/serving.py [--run RUN] [--streams 200] [--requests 10000]

Prints one JSON object per case:

- start: seconds until the first answer, without and with the compilation cache;
- streams: tokens per second of concurrent streams, and of `flaxzoo generate --prompt-file` in
  process on the same prompts and seeds. Every text is compared with the one in process;
- overload: milliseconds until a request beyond the queue is refused;
- killed clients: seconds until their rows are free;
- memory: the resident set of the server after a tenth of the requests, and after all.

Without --run, the model is a small GPT with random parameters. Measure on an idle machine: clients
and server share its cores.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WORDS = "the small dog sleeps below a red house while we wait is it big or small yes or no".split()


def main() -> None:
    """Prints one line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="a run folder of a causal language model")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each stream")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of the memory case")
    parser.add_argument("--rows", type=int, default=16, help="rows of the server and in process")
    parser.add_argument("--width", type=int, default=256, help="width of the random model")
    parser.add_argument("--layers", type=int, default=6, help="layers of the random model")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        work_folder = Path(folder)
        run = arguments.run or make_run(work_folder / "run", arguments)
        prompts = [prompt(i) for i in range(arguments.streams)]
        expected, in_process = complete(run, prompts, arguments)
        cache = {"FLAXZOO_CACHE": str(work_folder / "cache")}
        with serving(run, work_folder, "--rows", arguments.rows, **cache) as server:
            cold = server.seconds
        with serving(run, work_folder, "--rows", arguments.rows, **cache) as server:
            show("start", cold_s=cold, cached_s=server.seconds)
            # Programs of several rows and of longer caches compile in the first two rounds.
            for _ in range(2):
                asyncio.run(streams(server.port, prompts, arguments.tokens))
            found = asyncio.run(streams(server.port, prompts, arguments.tokens))
            streamed(found, expected, in_process)
            asyncio.run(killed(server))
            asyncio.run(memory(server, arguments.requests))
        limit = ("--rows", arguments.rows, "--max-requests", 32)
        with serving(run, work_folder, *limit, **cache) as server:
            asyncio.run(overload(server.port))


def show(case: str, **figures: Any) -> None:
    """Prints the figures of a case."""
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps({"case": case, **rounded}), flush=True)


def prompt(number: int) -> str:
    """Returns a prompt of 4 to 27 words."""
    draw = np.random.default_rng(number)
    return " ".join(draw.choice(WORDS, 4 + number % 24))


def make_run(folder: Path, arguments: Any) -> Path:
    """Makes a run of a small GPT with random parameters."""
    import jax
    from flaxzoo import models, train
    from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer

    tokenizer = train_tokenizer([" ".join(WORDS) * 9], TokenizerConfig("byte-bpe", 300))
    config = models.GPTConfig(
        vocab_size=tokenizer.vocab_size,
        max_length=512,
        d_model=arguments.width,
        num_layers=arguments.layers,
        num_heads=8,
        dropout_rate=0.0,
    )
    model = models.create(config)
    train.save_run(folder, model, models.init_params(model, jax.random.key(0)), tokenizer)
    return folder


def complete(run: Path, prompts: list[str], arguments: Any) -> tuple[list[str], float]:
    """Returns the texts that are written in process, and tokens per second once compiled."""
    from flaxzoo import models

    generator = models.TextGenerator.of_run(run)
    settings = {"max_new_tokens": arguments.tokens, "temperature": 1.0}

    def run_all() -> Any:
        return generator.complete(
            prompts, batch_size=arguments.rows, log=lambda _: None, **settings
        )

    run_all()
    begun = time.monotonic()
    done = run_all()
    seconds = time.monotonic() - begun
    texts = [one.completions[0] for one in done]
    return [text.text for text in texts], sum(len(text.tokens) for text in texts) / seconds


class Server:
    """A server process."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, seconds: float) -> None:
        self.process, self.port, self.seconds = process, port, seconds

    @property
    def resident(self) -> float:
        """Its resident set, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        return int(found[1]) / 1024


@contextlib.contextmanager
def serving(run: Path, work_folder: Path, *options: Any, **environment: str) -> Iterator[Server]:
    """Starts a server and waits for its first answer."""
    log, begun = work_folder / "server.log", time.monotonic()
    command = [sys.executable, "-m", "flaxzoo", "serve", f"model={run}", "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *map(str, options)],
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
        )
    try:
        while (found := re.search(r"listening on http://.*:(\d+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        port = int(found[1])
        asyncio.run(ask(port, {"prompt": "a", "max_tokens": 1}))
        yield Server(process, port, time.monotonic() - begun)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()


async def ask(
    port: int, fields: dict[str, Any], *, parts: int | None = None
) -> tuple[int, bytes, float, float]:
    """Sends a request to /v1/completions, or reads a path if the fields are empty.

    Returns:
        The status, the body, and the seconds until its first part and until its end. If `parts`
        are given, the connection is closed after as many parts.
    """
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(fields).encode()
    head = "POST /v1/completions" if fields else "GET /metrics"
    writer.write(
        f"{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    # Read all that has arrived: a client that reads line by line costs as much as the server.
    found, first = [], 0.0
    while part := await reader.read(1 << 16):
        first = first or time.monotonic() - begun
        found.append(part)
        if len(found) == parts:
            break
    writer.close()
    return status, b"".join(found), first, time.monotonic() - begun


async def streams(
    port: int, prompts: list[str], tokens: int
) -> tuple[list[str], list[float], float, int]:
    """Returns the texts of concurrent streams, the seconds until their first tokens, and all."""
    begun = time.monotonic()
    answers = await asyncio.gather(
        *(
            ask(
                port,
                {
                    "prompt": prompt,
                    "seed": i,
                    "max_tokens": tokens,
                    "temperature": 1.0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            )
            for i, prompt in enumerate(prompts)
        )
    )
    seconds = time.monotonic() - begun
    texts, total = [], 0
    for status, body, *_ in answers:
        found = re.findall(rb"^data: (\{.*\})", body, re.MULTILINE) if status == 200 else []
        parts = [json.loads(part) for part in found]
        texts.append("".join(x["text"] for part in parts for x in part.get("choices", [])))
        total += sum(part["usage"]["completion_tokens"] for part in parts if part.get("usage"))
    return texts, [first for *_, first, _ in answers], seconds, total


def streamed(
    found: tuple[list[str], list[float], float, int], expected: list[str], in_process: float
) -> None:
    """Prints the figures of streams."""
    texts, first, seconds, total = found
    show(
        "streams",
        streams=len(texts),
        different=sum(a != b for a, b in zip(texts, expected, strict=True)),
        tokens_per_s=total / seconds,
        in_process_tokens_per_s=in_process,
        ratio=total / seconds / in_process,
        first_token_p50_s=float(np.percentile(first, 50)),
        first_token_p99_s=float(np.percentile(first, 99)),
    )


async def overload(port: int) -> None:
    """Prints how fast requests beyond the queue are refused."""
    fields = {"prompt": "a", "max_tokens": 400, "temperature": 1.0}
    running = [asyncio.ensure_future(ask(port, fields)) for _ in range(32)]
    await asyncio.sleep(1)
    times, statuses = [], set()
    for _ in range(10):
        for status, _, _, seconds in await asyncio.gather(*(ask(port, fields) for _ in range(10))):
            statuses.add(status)
            # A text may end early and leave its place to one of these requests.
            if status == 429:
                times.append(1000 * seconds)
    for each in running:
        each.cancel()
    show(
        "overload",
        refused=len(times),
        statuses=sorted(statuses),
        p50_ms=float(np.percentile(times, 50)),
        p99_ms=float(np.percentile(times, 99)),
    )


async def killed(server: Server, number: int = 100) -> None:
    """Prints how soon clients that leave after their first token have no more rows."""
    fields = {"prompt": "a", "max_tokens": 400, "temperature": 1.0, "stream": True}
    await asyncio.gather(*(ask(server.port, fields, parts=1) for _ in range(number)))
    begun = time.monotonic()
    while True:
        text = (await ask(server.port, {}))[1].decode()
        if re.search(r"^flaxzoo_rows.* 0\.0$", text, re.M) and "flaxzoo_jobs 0.0" in text:
            break
        await asyncio.sleep(0.005)
    show("killed clients", clients=number, rows_free_after_s=time.monotonic() - begun)


async def memory(server: Server, number: int) -> None:
    """Prints the resident set of the server during many requests."""
    begun, places, left = time.monotonic(), [], iter(range(number))
    failed = 0

    async def client() -> None:
        nonlocal failed
        for i in left:
            status, *_ = await ask(server.port, {"prompt": prompt(i), "max_tokens": 4, "seed": i})
            failed += status != 200
            if i == number // 10:
                places.append(server.resident)

    await asyncio.gather(*(client() for _ in range(32)))
    show(
        "memory",
        requests=number,
        failed=failed,
        requests_per_s=number / (time.monotonic() - begun),
        after_a_tenth_mb=places[0],
        after_all_mb=server.resident,
    )


if __name__ == "__main__":
    main()
