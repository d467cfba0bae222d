"""Vectors through HTTP: texts per second, compared with the same model in process.

    python tests/benchmarks/serving_vectors.py [--model FOLDER] [--texts 1024] [--clients 8]

Prints one JSON object per case:

- in process: `TextEmbedder` on requests of `--inputs` texts, one after the other;
- served: `flaxzoo serve` with concurrent clients that send the same requests in base64;
- sentence-transformers: the package behind Starlette and uvicorn, with the same clients.

Each case is run twice, and the second time counts. Without --model, the model has the size of
all-MiniLM-L6-v2 and random parameters. Measure on an idle machine: clients and server share its
cores.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORDS = "the small dog sleeps below a red house while we wait is it big or small yes or no".split()

PEER = """
import base64, sys
import uvicorn
from sentence_transformers import SentenceTransformer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

model = SentenceTransformer(sys.argv[1], device="cpu")
lock = __import__("threading").Lock()

def vectors(texts):
    with lock:
        return model.encode(texts, batch_size=32, show_progress_bar=False)

async def embed(request):
    texts = (await request.json())["input"]
    found = await run_in_threadpool(vectors, texts)
    return JSONResponse({"data": [
        {"index": i, "embedding": base64.b64encode(x.astype("<f4").tobytes()).decode()}
        for i, x in enumerate(found)
    ]})

app = Starlette(routes=[Route("/v1/embeddings", embed, methods=["POST"])])
uvicorn.run(app, port=int(sys.argv[2]), log_level="info", access_log=False)
"""
"""sentence-transformers behind the same HTTP stack; its arguments are a folder and a port."""


def main() -> None:
    """Prints one line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder of sentence-transformers")
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--inputs", type=int, default=32, help="texts of a request")
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    texts = [text(i) for i in range(arguments.texts)]
    size = arguments.inputs
    requests = [texts[i : i + size] for i in range(0, len(texts), size)]
    with tempfile.TemporaryDirectory() as folder:
        work_folder = Path(folder)
        model = arguments.model or make_model(work_folder / "model")
        expected, rate = in_process(model, requests)
        show("in process", texts_per_s=rate)
        ours = [sys.executable, "-m", "flaxzoo", "serve", f"model={model}", "--port", "0"]
        # Every program is compiled before the first request, as in process in the first round.
        ours += ["--warm-up-length", "128"]
        theirs = [sys.executable, "-c", PEER, str(model), "0"]
        for case, command in (("served", ours), ("sentence-transformers", theirs)):
            with serving(command, work_folder / "server.log") as port:
                found, other = asyncio.run(twice(port, requests, arguments.clients))
                error = float(np.abs(found - expected).max())
                show(case, texts_per_s=other, ratio=other / rate, largest_difference=error)


def show(case: str, **figures: float) -> None:
    """Prints the figures of a case."""
    rounded = {name: float(f"{value:.3g}") for name, value in figures.items()}
    print(json.dumps({"case": case, **rounded}), flush=True)


def text(number: int) -> str:
    """Returns a text of 4 to 51 words."""
    draw = np.random.default_rng(number)
    return " ".join(draw.choice(WORDS, 4 + number % 48))


def make_model(folder: Path) -> Path:
    """Makes a folder of sentence-transformers of the size of MiniLM, with random parameters."""
    import jax
    from flaxzoo import models
    from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer

    tokenizer = train_tokenizer([" ".join(WORDS) * 9], TokenizerConfig("wordpiece", 60))
    config = models.BertConfig(
        vocab_size=tokenizer.vocab_size,
        max_length=512,
        d_model=384,
        num_layers=6,
        num_heads=12,
        head="none",
    )
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    models.save(folder, model, params, tokenizer, embedding=models.EmbeddingSettings())
    return folder


def in_process(model: Path, requests: Sequence[list[str]]) -> tuple[np.ndarray, float]:
    """Returns the vectors, and texts per second once compiled."""
    from flaxzoo import models

    embedder = models.TextEmbedder.of_run(model)
    begun, found = 0.0, []
    for _ in range(2):
        begun = time.monotonic()
        found = [embedder(texts) for texts in requests]
    vectors = np.concatenate(found)
    return vectors, len(vectors) / (time.monotonic() - begun)


@contextlib.contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[int]:
    """Starts a server on a free port, and yields the port when it is ready."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        # Both servers print their address; ours then still compiles, and the first run waits.
        pattern = r"(?:listening|running) on http://[\d.]+:(\d+)"
        while (found := re.search(pattern, log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield int(found[1])
    finally:
        process.kill()
        process.wait()


async def twice(port: int, requests: Sequence[list[str]], clients: int) -> tuple[np.ndarray, float]:
    """Sends all requests twice; returns the vectors, and texts per second of the second time."""
    import httpx

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        begun, found = 0.0, []
        for _ in range(2):
            begun, found = time.monotonic(), await ask(client, requests, clients)
        vectors = np.concatenate(found)
        return vectors, len(vectors) / (time.monotonic() - begun)


async def ask(client: Any, requests: Sequence[list[str]], clients: int) -> list[np.ndarray]:
    """Sends requests from a number of clients at a time; returns the vectors of each."""
    found: list[Any] = [None] * len(requests)
    left = iter(enumerate(requests))

    async def one() -> None:
        for i, texts in left:
            body = {"model": "model", "input": texts, "encoding_format": "base64"}
            answer = (await client.post("/v1/embeddings", json=body)).json()
            encoded = (base64.b64decode(x["embedding"]) for x in answer["data"])
            found[i] = np.stack([np.frombuffer(x, "<f4") for x in encoded])

    await asyncio.gather(*(one() for _ in range(clients)))
    return found


if __name__ == "__main__":
    main()
