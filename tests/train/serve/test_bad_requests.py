"""Bad requests: the right status and OpenAI's form of errors, and the server stays alive."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

pytestmark = pytest.mark.integration

COMPLETE, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

FIELDS = [
    # path, fields, status, the field that the error names (None: it is clear from the message)
    (COMPLETE, {}, 400, "prompt"),
    (COMPLETE, {"prompt": 3}, 400, "prompt"),
    (COMPLETE, {"prompt": []}, 400, None),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETE, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETE, {"prompt": [1.5]}, 400, "prompt"),
    (COMPLETE, {"prompt": [99999]}, 400, None),
    (COMPLETE, {"prompt": [-1]}, 400, None),
    (COMPLETE, {"prompt": ["a"] * 33}, 400, None),
    (COMPLETE, {"prompt": [1] * 129}, 400, "prompt"),
    (COMPLETE, {"prompt": "a", "model": "other"}, 404, "model"),
    (COMPLETE, {"prompt": "a", "model": "../../etc/passwd"}, 404, "model"),
    (COMPLETE, {"prompt": "a", "model": 1}, 400, "model"),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": 1000}, 400, "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": 10**30}, 400, "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    (COMPLETE, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    (COMPLETE, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (COMPLETE, {"prompt": "a", "temperature": 1e300}, 400, "temperature"),
    (COMPLETE, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (COMPLETE, {"prompt": "a", "top_p": 1.1}, 400, "top_p"),
    (COMPLETE, {"prompt": "a", "top_k": -1}, 400, "top_k"),
    (COMPLETE, {"prompt": "a", "min_p": 2}, 400, "min_p"),
    (COMPLETE, {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty"),
    (COMPLETE, {"prompt": "a", "frequency_penalty": -3}, 400, "frequency_penalty"),
    (COMPLETE, {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty"),
    (COMPLETE, {"prompt": "a", "repetition_penalty": 1e300}, 400, "repetition_penalty"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"99999": 1}}, 400, None),
    (COMPLETE, {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": [1]}, 400, "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": {f"{i}": 1 for i in range(1025)}}, 400, "logit_bias"),
    (COMPLETE, {"prompt": "a", "logprobs": 6}, 400, "logprobs"),
    (COMPLETE, {"prompt": "a", "n": 0}, 400, "n"),
    (COMPLETE, {"prompt": "a", "n": 9}, 400, "n"),
    (COMPLETE, {"prompt": "a", "best_of": 2}, 400, "best_of"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETE, {"prompt": "a", "seed": -1}, 400, "seed"),
    (COMPLETE, {"prompt": "a", "stop": ""}, 400, "stop"),
    (COMPLETE, {"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
    (COMPLETE, {"prompt": "a", "stop": 3}, 400, "stop"),
    (COMPLETE, {"prompt": "a", "stream": "yes"}, 400, "stream"),
    (COMPLETE, {"prompt": "a", "stream_options": {}}, 400, "stream_options"),
    (COMPLETE, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, None),
    (COMPLETE, {"prompt": "a", "temperatur": 1}, 400, "temperatur"),
    (COMPLETE, {"prompt": "a", "file": "/etc/passwd"}, 400, "file"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": ["hi"]}, 400, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, None),
    (CHAT, {"messages": [{"role": "pirate", "content": "hi"}]}, 400, None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
    (CHAT, {"messages": [{"role": "user", "content": {"text": "hi"}}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "messages"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
        400,
        "messages",
    ),
    (CHAT, {**HI, "messages": [{"role": "user", "content": "a " * 500}]}, 400, "messages"),
    (CHAT, {**HI, "response_format": {"type": "json_object"}}, 400, "response_format.type"),
    (CHAT, {**HI, "tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {**HI, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {**HI, "tools": [{**TOOL, "type": "web_search"}]}, 400, "tools"),
    (CHAT, {**HI, "tools": [{**TOOL, "function": {"name": "f", "strict": True}}]}, 400, "tools"),
    (CHAT, {**HI, "tools": [{**TOOL, "function": {"name": "f", "parameters": 3}}]}, 400, "tools"),
    (CHAT, {**HI, "parallel_tool_calls": False}, 400, "parallel_tool_calls"),
    (CHAT, {**HI, "max_completion_tokens": 3}, 400, "max_tokens"),
    (CHAT, {**HI, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {**HI, "functions": []}, 400, "functions"),
    (TOKENIZE, {"prompt": None}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
]

BODIES = [
    (b"", 400),
    (b"{", 400),
    (b"[1]", 400),
    (b"null", 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b"[" * 100_000, 400),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
    (b'{"prompt": ' + b"1" * 5000 + b"}", 400),
    (b'{"prompt": "' + b"a" * (2 << 20) + b'"}', 413),
]


def check(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return error


def test_wrong_fields_are_named(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, fields, status, param in FIELDS:
            error = check(client.post(path, json=fields), status)
            assert error["param"] in (param, None) or param is None, (fields, error)
            assert param is None or param.split(".")[0] in error["message"], (fields, error)
        assert client.get("/health").status_code == 200


def test_wrong_bodies_and_paths_are_refused(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        kind = {"Content-Type": "application/json"}
        for body, status in BODIES:
            check(client.post(COMPLETE, content=body, headers=kind), status)
        for form in ("text/plain", "application/x-www-form-urlencoded", ""):
            # A page of another site may send these without a question of its browser.
            headers = {"Content-Type": form}
            check(client.post(COMPLETE, content=b'{"prompt": "a"}', headers=headers), 415)
        for path in (
            "/nothing",
            "/v1/models/../../etc/passwd",
            "/%2e%2e/etc/passwd",
            "/v1//models",
        ):
            check(client.get(path), 404)
        check(client.get(COMPLETE), 405)
        check(client.get("/v1/models", headers={"Host": "evil.example"}), 403)
        answer = client.post(
            COMPLETE, json={"prompt": "a"}, headers={"Origin": "http://evil.example"}
        )
        assert "access-control-allow-origin" not in answer.headers
        assert client.get("/health").status_code == 200


def test_broken_connections_do_not_disturb_others(server):
    address = urlsplit(server.url).hostname, urlsplit(server.url).port
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    opened = []
    for sent in (
        b"",
        b"GET /v1/mod",
        head + b"Content-Length: 50\r\n\r\n{",  # a slow sender
        head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"\x00\xff" * 50 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 70_000,
        head + b"Content-Length: -1\r\n\r\n",
    ):
        connection = socket.create_connection(address)
        connection.sendall(sent)
        opened.append(connection)
    answers = [httpx.get(f"{server.url}/health").status_code for _ in range(3)]
    assert answers == [200] * 3
    for connection in opened:
        connection.close()
    answer = httpx.post(server.url + COMPLETE, json={"prompt": "a", "max_tokens": 2}, timeout=60)
    assert len(answer.json()["choices"]) == 1
    assert json.dumps("a") not in server.log.read_text()
