"""The application with workers that need no model: errors, limits, keys and the end of clients."""

import asyncio
import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.common.fields import FieldError
from flaxzoo.train.serve import engine as engine_module
from flaxzoo.train.serve import served, server
from flaxzoo.train.serve.app import Access, Endpoint, Served, Service, event_of, make_app
from flaxzoo.train.serve.engine import Engine, Limits
from flaxzoo.train.serve.fields import ApiError
from flaxzoo.train.serve.metrics import Metrics
from flaxzoo.train.serve.rows.rerank import RerankFields
from flaxzoo.train.serve.rows.settings import RowSettings
from flaxzoo.train.serve.server import Address, _Server
from flaxzoo.train.serve.status import STATUS, TokenizeFields
from starlette.responses import JSONResponse

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
        return ()

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


async def broken(service, fields):
    raise RuntimeError(2 * fields.prompt)


async def broken_stream(service, fields):
    async def parts():
        yield event_of({"begins": True})
        raise RuntimeError(2 * fields.prompt)

    return parts()


ENDPOINTS = (
    *STATUS,
    Endpoint("POST", "/broken", broken, "Fail", TokenizeFields),
    Endpoint("POST", "/broken_stream", broken_stream, "Fail in a stream", TokenizeFields),
    Endpoint("POST", "/echo", echo, "Echo", TokenizeFields),
    Endpoint("POST", "/stream", stream, "Echo in a stream", TokenizeFields),
)


@contextlib.asynccontextmanager
async def running(key=None, access=None, **limits):
    """A client of an application, its worker and its engine."""
    worker = Worker()
    engine = Engine(Limits(**limits), [worker])
    models = {"echo": Served("echo", None, {"echo": worker})}
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


def test_requests_that_are_read_are_limited_too():
    """Their bodies take memory before the engine admits them."""

    async def slow():
        yield b'{"prompt": '
        await asyncio.sleep(60)

    async def run():
        async with running(max_requests=1) as (client, worker, _):
            worker.may.set()
            headers = {"Content-Type": "application/json"}
            sent = [
                asyncio.ensure_future(client.post("/echo", content=slow(), headers=headers))
                for _ in range(3)
            ]
            (refused,), others = await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
            answer = refused.result()
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "2 open requests" in answer.json()["error"]["message"]
            for one in others:
                one.cancel()
            await asyncio.wait(others)
            assert (await client.post("/echo", json={"prompt": "a"})).status_code == 200

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

    await call(client, request, receive, send)


async def call(client, request, receive, send):
    scope = {
        "type": "http",
        "method": "POST",
        "path": request.url.path,
        "headers": [(k.lower(), v) for k, v in request.headers.raw],
        "query_string": b"",
    }
    await client._transport.app(scope, receive, send)


def test_a_client_that_does_not_read_loses_its_place():
    async def run():
        access = Access(read_time=0.05)
        async with running(access=access, time_limit=0.05) as (client, worker, engine):
            request = client.build_request("POST", "/stream", json={"prompt": "a"})
            messages = [{"type": "http.request", "body": request.content}]

            async def receive():
                return messages.pop() if messages else await asyncio.Event().wait()

            async def send(message):
                await asyncio.Event().wait()

            await call(client, request, receive, send)
            while worker.canceled != ["a"]:
                await asyncio.sleep(0.001)
            assert not engine.jobs

    asyncio.run(run())


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


def test_faults_of_endpoints_are_answered_and_do_not_show_prompts(capsys):
    async def run():
        async with running() as (client, *_):
            answer = await client.post("/broken", json={"prompt": "fault"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
            text = (await client.post("/broken_stream", json={"prompt": "fault"})).text
            assert text.startswith('data: {"begins": true}\n\ndata: {"error":')
            figures = (await client.get("/metrics")).text
            assert 'flaxzoo_requests_total{path="/broken",status="500"} 1.0' in figures

    asyncio.run(run())
    shown = capsys.readouterr().err
    assert "RuntimeError" in shown
    assert "faultfault" not in shown


def test_an_error_does_not_replace_a_complete_answer():
    async def run():
        async with running() as (_, worker, engine):
            worker.may.set()
            async with engine.submit(worker, ["a"], tokens=1) as job:
                while not job._events:
                    await asyncio.sleep(0.001)
                engine.cancel_all(ApiError(503, "the server shuts down"))
                assert [event async for _, event in job] == ["a"]

    asyncio.run(run())


def test_an_engine_that_fails_ends_its_jobs_and_the_server(capsys, monkeypatch):
    async def run():
        worker = Worker()
        monkeypatch.setattr(worker, "warm_up", lambda: 1 / 0)
        engine = Engine(Limits(), [worker])
        jobs = [engine.submit(worker, ["a"], tokens=1) for _ in range(2)]
        engine.start()
        for job in jobs:
            async with job:
                with pytest.raises(ApiError, match="failed"):
                    await anext(job)
        assert not engine.is_ready
        with pytest.raises(ApiError, match="failed"):
            engine.check_admission()
        ending = _Server(uvicorn.Config("", log_config=None), engine, print)
        assert await ending.on_tick(1)
        assert engine.stop()

    asyncio.run(run())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_end_does_not_wait_for_a_long_step(monkeypatch):
    monkeypatch.setattr(engine_module, "STOP_TIME", 0.05)
    worker = Worker()
    monkeypatch.setattr(worker, "warm_up", lambda: [worker.may.wait()])
    engine = Engine(Limits(), [worker])
    engine.start()
    assert not engine.stop()
    worker.may.set()
    while not engine.stop():
        pass


def test_further_programs_are_compiled_while_the_engine_is_idle(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_TIME", 0.01)
    compiled, done = [], threading.Event()

    async def run():
        worker = Worker()
        further = [lambda: compiled.append(worker.wait), done.set]
        monkeypatch.setattr(worker, "warm_up", lambda: further)
        engine = Engine(Limits(), [worker])
        # The engine is not idle while a task waits.
        async with engine.submit(worker, ["a"], tokens=1) as job:
            engine.start()
            assert not await asyncio.to_thread(done.wait, 0.1)
            assert compiled == []
            worker.may.set()
            assert [event async for _, event in job] == ["a"]
        assert await asyncio.to_thread(done.wait, 5)
        assert engine.stop()

    asyncio.run(run())
    assert compiled == [None]


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


def test_without_a_key_only_this_machine_is_answered():
    async def run():
        async with running() as (client, worker, _):
            worker.may.set()
            local = ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]", "[::1]:8000")
            other = ("evil.com", "evil.com:80", "evil.com::80", "localhost.evil.com", "[::2]:80")
            for hosts, status in ((local, 200), (other, 403)):
                for host in hosts:
                    headers = {"Host": host}
                    answer = await client.post("/echo", json={"prompt": "a"}, headers=headers)
                    assert (host, answer.status_code) == (host, status)

    asyncio.run(run())


def test_an_address_of_other_machines_needs_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("FLAXZOO_API_KEY", raising=False)
    assert Address().key() is None
    with pytest.raises(UserError, match=r"host '0\.0\.0\.0' .*key"):
        Address("0.0.0.0").key()
    (tmp_path / "key").write_text("secret\n")
    assert Address("0.0.0.0", api_key_file=tmp_path / "key").key() == "secret"
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="must be printable ASCII"):
        Address(api_key_file=tmp_path / "key").key()
    monkeypatch.setenv("FLAXZOO_API_KEY", "")
    with pytest.raises(UserError, match="printable ASCII"):
        Address().key()


def test_a_port_in_use_is_refused_before_models_are_opened():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1 port {port} .*in use.*--port"):
            Address(port=port).bind()
    with Address(port=port).bind() as free:
        assert free.getsockname()[1] == port
    with pytest.raises(UserError, match=r"192\.0\.2\.1 .*--host"):
        Address("192.0.2.1").bind()


@pytest.mark.parametrize("earlier", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_slow_head_is_ended(earlier, monkeypatch):
    """Also of a later request of a connection."""
    monkeypatch.setattr(server, "HEAD_TIME", 0.2)

    async def health(scope, receive, send):
        await JSONResponse({})(scope, receive, send)

    async def run():
        config = uvicorn.Config(health, http=server._Protocol, lifespan="off", log_config=None)
        running = uvicorn.Server(config)
        with Address(port=0).bind() as bound:
            ended = asyncio.ensure_future(running.serve([bound]))
            while not running.started:
                await asyncio.sleep(0.001)
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            for part in (earlier, b"GET /health"):
                writer.write(part)
                if part == earlier != b"":
                    assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            running.should_exit = True
            await ended

    asyncio.run(run())


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


def test_a_long_body_is_read_like_a_short_one():
    async def run():
        async with running() as (client, worker, _):
            worker.may.set()
            text = "a" * 100_000
            assert (await client.post("/echo", json={"prompt": text})).json() == {"text": [text]}
            answer = await client.post("/echo", json={"prompt": text, 70_000 * "b": 1})
            assert answer.status_code == 400
            assert len(answer.text) < 400

    asyncio.run(run())


def test_an_event_has_no_separators_of_lines():
    assert event_of({"text": "ß\u2028\x85"}) == b'data: {"text": "\\u00df\\u2028\\u0085"}\n\n'


def test_models_are_named_by_their_folders(monkeypatch, tmp_path):
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    monkeypatch.setattr(served, "local_folder", lambda folder: folder)
    monkeypatch.setattr(served, "model_config", lambda folder: SimpleNamespace(head="none"))
    monkeypatch.setattr(
        served.opening, "open_rows", lambda name, folder, *_, ema: Served(name, folder, {})
    )
    found = served.open_models([f"{folder}", f"b={folder}"], RowSettings(), print)
    assert {name: (one.name, one.front) for name, one in found.items()} == {
        "lr=0.1": ("lr=0.1", f"{folder}"),
        "b": ("b", f"{folder}"),
    }


def test_a_setting_of_the_other_form_of_documents_is_refused():
    with pytest.raises(FieldError, match="return_documents"):
        RerankFields(query="a", texts=("b",), return_documents=True)
    with pytest.raises(FieldError, match="return_text"):
        RerankFields(query="a", documents=("b",), return_text=True)


def test_the_prompt_of_several_texts_is_counted_once():
    metrics, growing = Metrics(Engine(Limits(), [])), SimpleNamespace(num_chosen=2)
    works: Any = [
        SimpleNamespace(index=i, ids=[1, 2, 3], first_token=0.0, growing=growing) for i in range(2)
    ]
    metrics.texts("m", works)
    figures = metrics.text().decode()
    assert 'flaxzoo_tokens_total{kind="prompt",model="m"} 3.0' in figures
    assert 'flaxzoo_tokens_total{kind="text",model="m"} 4.0' in figures
    assert "flaxzoo_first_token_seconds_count 0.0" in figures
