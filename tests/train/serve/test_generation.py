"""Texts over HTTP: equal to those in process, alone or among others, streamed or not."""

import concurrent.futures
import contextlib
import itertools
from typing import Any, cast
from unittest.mock import Mock

import httpx
import numpy as np
import openai
import pytest
from flaxzoo import models
from flaxzoo.models.text.completions import Prompt
from flaxzoo.train.serve import generation
from flaxzoo.train.serve.engine import Task
from flaxzoo.train.serve.generation import GenerationWorker, make_works
from flaxzoo.train.serve.rows.settings import RowSettings
from flaxzoo.train.serve.text_fields import TextFields
from lm_eval.api.instance import Instance

from ...support.server import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PROMPTS = ["the small dog", "größer 日本語 😀", "is it big", "a house " * 9, "no.", "we"]
LONG = {"max_tokens": 24}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def generator(run_folder):
    return models.TextGenerator.of_run(run_folder)


@pytest.fixture(scope="module")
def texts(generator):
    """What is written in process, with the seeds 0, 1 …."""
    return generator.complete(PROMPTS, max_new_tokens=24, top_p=0.9, log=lambda _: None)


def ask(client, i, **options):
    settings = {**LONG, "top_p": 0.9, "seed": i, **options}
    return client.completions.create(model="tiny", prompt=PROMPTS[i], **settings)


def test_texts_among_others_equal_those_in_process(client, texts):
    """Sixteen requests with four settings at once, in four rows."""
    others = [
        {"prompt": "yes or no", "temperature": 0.5, "presence_penalty": 1.0},
        {"prompt": "it", "extra_body": {"top_k": 5}, "logit_bias": {"20": 5}},
        {"prompt": [[5, 6, 7], [8]], "temperature": 0},
    ]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        noise = [
            pool.submit(client.completions.create, model="tiny", max_tokens=9, **others[i % 3])
            for i in range(10)
        ]
        ours = list(pool.map(lambda i: ask(client, i), range(len(PROMPTS))))
        assert all(done.result().choices for done in noise)
    for answer, text in zip(ours, texts, strict=True):
        (choice,), (expected,) = answer.choices, text.completions
        assert choice.text == expected.text
        assert choice.finish_reason == ("length" if expected.finish_reason == "length" else "stop")
        assert answer.usage.prompt_tokens > 0


def test_several_texts_of_a_prompt_and_of_several_prompts(client, generator):
    expected = generator.complete(
        PROMPTS[:2], seed=5, max_new_tokens=8, temperature=1.0, num_return_sequences=2
    )
    answer = client.completions.create(model="tiny", prompt=PROMPTS[:2], seed=5, n=2, max_tokens=8)
    found = [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]
    assert found == [one.text for each in expected for one in each.completions]


def test_a_stream_is_the_whole_text(client, texts):
    for i, text in enumerate(texts):
        stream = ask(client, i, stream=True, stream_options={"include_usage": True})
        *parts, last = list(stream)
        assert "".join(part.choices[0].text for part in parts) == text.completions[0].text
        # An incomplete character is never sent: the pieces are valid text by themselves.
        assert [p.choices[0].finish_reason for p in parts[:-1]] == [None] * (len(parts) - 1)
        assert (last.choices, last.usage.total_tokens > 0) == ([], True)


def task_of(generator, fields, *, limit):
    """A task that continues "we" and records what it sends."""
    (work,) = make_works(
        generator,
        Prompt("we"),
        generator.encode("we"),
        fields,
        sampling=fields.sampling({}),
        seed=0,
        param="prompt",
        limit=limit,
    )
    return Mock(Task, work=work)


def worker_of(generator, rows):
    return GenerationWorker(generator, RowSettings(rows=rows), print)


@pytest.mark.parametrize("interval", [0.0, 1e9])
def test_tokens_that_follow_fast_share_a_piece(generator, monkeypatch, interval):
    monkeypatch.setattr(generation, "STREAM_INTERVAL", interval)
    monkeypatch.setattr(generation, "PIECES_PER_SECOND", 1e9)
    fields, worker = TextFields(temperature=0.0, stream=True), worker_of(generator, 1)
    task = task_of(generator, fields, limit=16)
    work = task.work
    worker.add(task)
    while worker.wait is not None:
        worker.step()
    pieces = [call.args[0] for call in task.send.call_args_list]
    assert "".join(piece.text for piece in pieces) == work.growing.text
    assert [t for piece in pieces for t in piece.tokens] == work.growing.tokens
    assert len(pieces) > 2 if interval == 0 else len(pieces) <= 2


def test_a_stop_string_may_cross_the_borders_of_tokens(client, generator):
    (whole,) = generator.complete(["the small dog"], temperature=0.0, max_new_tokens=24)
    text, pieces = whole.completions[0].text, whole.completions[0].pieces
    middle = len(text) // 2
    stop = text[middle : middle + 4]
    assert len(pieces) > 8
    assert stop not in pieces
    settings = {"model": "tiny", "prompt": "the small dog", "temperature": 0, **LONG}
    (choice,) = client.completions.create(stop=stop, **settings).choices
    assert (choice.text, choice.finish_reason) == (text[: text.find(stop)], "stop")
    parts = list(client.completions.create(stop=[stop, "@@"], stream=True, **settings))
    assert "".join(part.choices[0].text for part in parts) == choice.text


def test_log_probabilities_are_those_in_process(client, generator, run_folder):
    ids = generator.encode("the small dog sleeps")
    answer = client.completions.create(
        model="tiny", prompt=[ids], max_tokens=4, logprobs=3, echo=True, temperature=0.0, seed=1234
    )
    (choice,) = answer.choices
    scores, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert (scores[0], top[0]) == (None, None)
    prompt = Prompt("", ids=tuple(ids))
    (done,) = generator.complete([prompt], temperature=0.0, max_new_tokens=4, log=lambda _: None)
    assert choice.text == "the small dog sleeps" + done.completions[0].text
    np.testing.assert_allclose(scores[len(ids) :], done.completions[0].log_probabilities, atol=1e-5)
    expected = generator.token_scores(ids, 3)
    np.testing.assert_allclose(
        scores[1 : len(ids)], [one.log_probability for one in expected], atol=1e-6
    )
    assert all(max(row.values()) >= x for x, row in zip(scores[1:], top[1:], strict=True))
    assert {len(row) for row in top[1:]} <= {2, 3, 4}  # some bytes have the same text
    # Only the prompt, and nothing new.
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=0, logprobs=1, echo=True
    )
    assert answer.choices[0].logprobs.token_logprobs[1:] == scores[1 : len(ids)]


def test_a_text_that_cannot_be_written_does_not_end_others(generator, capsys):
    fields, worker = TextFields(temperature=0.0), worker_of(generator, 2)
    tasks = []
    for _ in range(2):
        tasks.append(task_of(generator, fields, limit=4))
        worker.add(tasks[-1])
    good, bad = tasks
    bad.work.ends = Mock(side_effect=ValueError("secret"))
    while worker.wait is not None:
        worker.step()
    assert bad.fail.call_args.args[0].status == 500
    assert not good.fail.called
    assert good.send.call_args.kwargs == {"last": True}
    shown = capsys.readouterr().err
    assert "ValueError" in shown
    assert "secret" not in shown.splitlines()[-1]


MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "is it <|endoftext|> big?"},
]


def test_a_chat_is_a_conversation(client, generator):
    conversation = models.Conversation(
        generator, instructions=MESSAGES[0]["content"], max_new_tokens=16, seed=3, temperature=0.8
    )
    expected = conversation.reply(MESSAGES[1]["content"]).content
    settings = {"model": "tiny", "messages": MESSAGES, "seed": 3, "temperature": 0.8}
    answer = client.chat.completions.create(max_tokens=16, **settings)
    assert (answer.choices[0].message.content, answer.choices[0].message.role) == (
        expected,
        "assistant",
    )
    parts = list(client.chat.completions.create(max_completion_tokens=16, stream=True, **settings))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert parts[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    answer = client.chat.completions.create(
        max_tokens=4, n=2, logprobs=True, top_logprobs=2, **settings
    )
    assert [len(choice.logprobs.content) for choice in answer.choices] == [4, 4]
    assert {len(one.top_logprobs) for one in answer.choices[0].logprobs.content} == {2}


def instances(kind, arguments):
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


@pytest.mark.usefixtures("closed_sessions")
def test_the_harness_over_http_is_the_harness_in_process(server, run_folder, monkeypatch):
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    completions, chats = cast(Any, LocalCompletionsAPI), cast(Any, LocalChatCompletion)

    shared = {"model": "tiny", "tokenizer_backend": "remote", "max_length": 128}
    theirs = completions(base_url=f"{server.url}/v1/completions", batch_size=2, **shared)
    ours: Any = models.harness_model(run_folder)
    pairs = [(a, f" {b}") for a, b in itertools.product(PROMPTS[:3], ("big", "red house"))]
    given = instances("loglikelihood", pairs)
    found = theirs.loglikelihood(given, disable_tqdm=True)
    expected = ours.loglikelihood(given, disable_tqdm=True)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], atol=1e-5)
    assert [x for _, x in found] == [x for _, x in expected]
    settings = {"until": ["e", "\n"], "max_gen_toks": 9, "do_sample": False}
    given = instances("generate_until", [(prompt, settings) for prompt in PROMPTS[:3]])
    assert theirs.generate_until(given, disable_tqdm=True) == ours.generate_until(
        given, disable_tqdm=True
    )
    chat = chats(base_url=f"{server.url}/v1/chat/completions", model="tiny", max_length=128)
    turns = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:2]]
    given = instances(
        "generate_until", [(chat.apply_chat_template(turn), settings) for turn in turns]
    )
    written = chat.generate_until(given, disable_tqdm=True)
    for turn, text in zip(turns, written, strict=True):
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": turn, "temperature": 0, "max_tokens": 9, "stop": ["e", "\n"]},
        )
        assert answer.json()["choices"][0]["message"]["content"] == text


def jobs(server):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return [float(figures[name]) for name in ("flaxzoo_jobs", 'flaxzoo_rows{model="tiny"}')]


def test_clients_that_leave_free_their_rows(server):
    """Half of them stream, and half of them wait for the whole text."""
    body = {"prompt": "a", "max_tokens": 120}
    for i in range(8):
        with httpx.Client(timeout=60) as client, contextlib.suppress(httpx.ReadTimeout):
            timeout = httpx.Timeout(60, read=60 if i % 2 else 0.01)
            url, fields = f"{server.url}/v1/completions", {**body, "stream": bool(i % 2)}
            with client.stream("POST", url, json=fields, timeout=timeout) as response:
                next(response.iter_bytes(), None)
    wait_for(lambda: jobs(server) == [0, 0], seconds=30)
    assert jobs(server) == [0, 0]
