"""The application with workers that need no model: errors, limits, keys and the end of clients."""

import asyncio
import contextlib
import threading

import httpx
import pytest
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.serve.app import Access, Endpoint, Served, Service, event_of, make_app
from flaxzoo.train.serve.engine import Engine, Limits
from flaxzoo.train.serve.fields import ApiError
from flaxzoo.train.serve.metrics import Metrics
from flaxzoo.train.serve.server import Address
from flaxzoo.train.serve.status import STATUS, TokenizeFields

URL = "http://127.0.0.1"


class Worker:
    """Answers with what was asked, when it may."""

    def __init__(self):
        self.tasks, self.canceled, self.may = [], [], threading.Event()

    @property
    def wait(self):
        return None if not self.tasks else 0.0 if self.may.is_set() else 0.01

    def add(self, task):
        self.tasks.append(task)

    def cancel(self, task):
        self.tasks.remove(task)
        self.canceled.append(task.work)

    def reset(self):
        self.tasks.clear()

    def warm_up(self):
        pass

    def step(self):
        task = self.tasks.pop(0)
        if task.work == "fault":
            raise RuntimeError(2 * task.work)
        if task.work == "user":
            raise UserError("the logits are NaN: give another model")
        task.send(task.work, last=True)


async def echo(service, fields):
    _, worker = service.worker(fields.model, "echo")
    async with service.engine.submit(worker, [fields.prompt], tokens=len(fields.prompt)) as job:
        return {"text": [event async for _, event in job]}


async def stream(service, fields):
    async def parts():
        _, worker = service.worker(fields.model, "echo")
        async with service.engine.submit(worker, [fields.prompt], tokens=1) as job:
            yield event_of({"begins": True})
            async for _, event in job:
                yield event_of({"text": event})

    return parts()


ENDPOINTS = (
    *STATUS,
    Endpoint("POST", "/echo", echo, "Echo", TokenizeFields),
    Endpoint("POST", "/stream", stream, "Echo in a stream", TokenizeFields),
)


@contextlib.asynccontextmanager
async def running(key=None, access=None, **limits):
    """A client of an application, its worker and its engine."""
    worker = Worker()
    engine = Engine(Limits(**limits), [worker])
    models = {"echo": Served("echo", "folder", None, {"echo": worker})}
    access = Access(key) if access is None else access
    app = make_app(Service(models, engine, access, Metrics(engine), ENDPOINTS))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    engine.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            yield client, worker, engine
    finally:
        engine.stop()


def test_a_full_queue_refuses_further_requests():
    async def run():
        async with running(max_requests=2, max_tokens=10) as (client, worker, engine):

            def post(text):
                return asyncio.ensure_future(client.post("/echo", json={"prompt": text}))

            first = post("a" * 20)  # more than the limit, but alone
            await asyncio.sleep(0)
            while not engine.jobs:
                await asyncio.sleep(0.001)
            refused = await post("b")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            worker.may.set()
            assert (await first).json() == {"text": ["a" * 20]}
            assert (await post("b")).status_code == 200
            worker.may.clear()
            both = [post("c"), post("d")]
            while len(engine.jobs) < 2:
                await asyncio.sleep(0.001)
            assert (await post("e")).status_code == 429
            worker.may.set()
            assert [(await one).status_code for one in both] == [200, 200]
            assert (engine.num_tokens, engine.jobs) == (0, set())

    asyncio.run(run())


def test_a_request_that_takes_too_long_is_canceled():
    async def run():
        async with running(time_limit=0.05) as (client, worker, _):
            answer = await client.post("/echo", json={"prompt": "slow"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            assert answer.headers["x-should-retry"] == "false"
            # In a stream it is an event.
            text = (await client.post("/stream", json={"prompt": "slow"})).text
            assert text.startswith('data: {"begins": true}\n\ndata: {"error":')
            while len(worker.canceled) < 2:
                await asyncio.sleep(0.001)

    asyncio.run(run())


def test_a_client_that_leaves_cancels_its_task():
    async def run():
        async with running() as (client, worker, engine):
            for path in ("/echo", "/stream"):
                body = {"prompt": path}
                scope = client.build_request("POST", path, json=body)
                await leave(client, scope, engine)
            while worker.canceled != ["/echo", "/stream"]:
                await asyncio.sleep(0.001)
            assert not engine.jobs

    asyncio.run(run())


async def leave(client, request, engine):
    """Sends a request, and disconnects when its job is admitted."""
    messages = [{"type": "http.request", "body": request.content}]

    async def receive():
        if messages:
            return messages.pop()
        while not engine.jobs:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message):
        del message

    scope = {
        "type": "http",
        "method": "POST",
        "path": request.url.path,
        "headers": [(k.lower(), v) for k, v in request.headers.raw],
        "query_string": b"",
    }
    await client._transport.app(scope, receive, send)


def test_faults_do_not_end_the_server_or_show_prompts(capsys):
    async def run():
        async with running() as (client, worker, _):
            worker.may.set()
            answers = [
                (await client.post("/echo", json={"prompt": text}))
                for text in ("fault", "user", "a")
            ]
            assert [answer.status_code for answer in answers] == [500, 500, 200]
            assert answers[0].json()["error"]["type"] == "server_error"
            assert "NaN" in answers[1].json()["error"]["message"]

    asyncio.run(run())
    assert "faultfault" not in capsys.readouterr().err


def test_a_server_that_ends_refuses_requests():
    async def run():
        async with running() as (client, _, engine):
            waiting = asyncio.ensure_future(client.post("/echo", json={"prompt": "a"}))
            while not engine.jobs:
                await asyncio.sleep(0.001)
            engine.closing = True
            assert (await client.post("/echo", json={"prompt": "a"})).status_code == 503
            assert (await client.get("/health")).status_code == 503
            engine.cancel_all(ApiError(503, "the server shuts down"))
            assert (await waiting).status_code == 503

    asyncio.run(run())


def test_a_key_is_required():
    async def run():
        async with running("secret") as (client, worker, _):
            worker.may.set()
            for header, status in ((None, 401), ("Bearer wrong", 401), ("Bearer secret", 200)):
                headers = {} if header is None else {"Authorization": header}
                answer = await client.post("/echo", json={"prompt": "a"}, headers=headers)
                assert answer.status_code == status
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401

    asyncio.run(run())


def test_an_address_of_other_machines_needs_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("FLAXZOO_API_KEY", raising=False)
    assert Address().key() is None
    with pytest.raises(UserError, match=r"host '0\.0\.0\.0' .*key"):
        Address("0.0.0.0").key()
    (tmp_path / "key").write_text("secret\n")
    assert Address("0.0.0.0", api_key_file=tmp_path / "key").key() == "secret"
    monkeypatch.setenv("FLAXZOO_API_KEY", "")
    with pytest.raises(UserError, match="printable ASCII"):
        Address().key()


def test_slow_and_long_bodies_are_refused():
    async def slow():
        yield b'{"prompt": '
        await asyncio.sleep(5)
        yield b'"a"}'

    async def long():
        for _ in range(3):
            yield b" " * 50

    async def run():
        access = Access(body_limit=100, body_time=0.05)
        headers = {"Content-Type": "application/json"}
        async with running(access=access) as (client, *_):
            for body, status in ((slow(), 408), (long(), 413), (b" " * 101, 413)):
                answer = await client.post("/echo", content=body, headers=headers)
                assert answer.status_code == status

    asyncio.run(run())
