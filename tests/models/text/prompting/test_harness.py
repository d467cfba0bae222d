"""Every result of lm-evaluation-harness's own model `hf`, on the same folders."""

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.data import ChatTemplate
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.cli.main import main
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WORDS = "the small dog sleeps below a red house while we wait is it big or small yes or no".split()


def instances(kind, arguments):
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def drawn(seed, longest):
    """Return short and long contexts and continuations; some share their beginning."""
    draw = random.Random(seed)

    def text(low, high):
        return " ".join(draw.choices(WORDS, k=draw.choice((low, high))))

    pairs = [(text(2, longest), " " + text(1, 3)) for _ in range(8)]
    pairs += [(pairs[0][0], f" {word}") for word in WORDS[:6]]
    return [*pairs, (text(2, 4) + " ", text(1, 2)), ("", text(1, 3)), ("it", "."), ("it\n", "it")]


@pytest.mark.parametrize("name", ["gpt2", "translator"])
def test_log_likelihoods_are_those_of_hf(name, request):
    """The longest contexts are longer than the model reads."""
    theirs, ours = request.getfixturevalue(name)
    pairs = drawn(1, 40 if name == "gpt2" else 6)
    given = instances("loglikelihood", pairs)
    expected = theirs.loglikelihood(given, disable_tqdm=True)
    found = ours.loglikelihood(given, disable_tqdm=True)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], atol=1e-5)
    assert [x for _, x in found] == [x for _, x in expected]
    lines = [(f"{a} {b} {a}",) for a, b in pairs[:3]]
    given = instances("loglikelihood_rolling", lines)
    expected = theirs.loglikelihood_rolling(given, disable_tqdm=True)
    found = ours.loglikelihood_rolling(given, disable_tqdm=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "translator"])
def test_texts_are_those_of_hf(name, request):
    theirs, ours = request.getfixturevalue(name)
    settings = {"until": ["e", " "], "max_gen_toks": 9, "do_sample": False}
    contexts = dict.fromkeys(context for context, _ in drawn(2, 6)[:9] if context.strip())
    given = instances("generate_until", [(context, settings) for context in contexts])
    found = ours.generate_until(given, True)
    expected = theirs.generate_until(given, True)
    if name == "translator":  # the length of the source counts there, and a target may be longer
        expected = [text[:9] for text in expected]  # a token is a character
    assert found == expected
    assert any(found)


def task(name, file, **fields):
    """Return the configuration of a task whose data is a file."""
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": str(file), "test": str(file)}},
        "test_split": "test",
        "fewshot_split": "train",
        **fields,
    }


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    draw = random.Random(4)
    file = tmp_path_factory.mktemp("tasks") / "data.jsonl"

    def words(number):
        return " ".join(draw.choices(WORDS, k=number))

    lines = [
        {"question": words(3), "choices": [words(1), words(2), words(1)], "answer": number % 3}
        for number in range(4)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    metrics = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    return [
        task(
            "choices",
            file,
            output_type="multiple_choice",
            doc_to_text="{{question}}?",
            doc_to_choice="{{choices}}",
            doc_to_target="answer",
            num_fewshot=1,
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
        task(
            "texts",
            file,
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{question}} {{choices[0]}}",
            metric_list=[{"metric": metric} for metric in metrics],
        ),
        task(
            "answers",
            file,
            output_type="generate_until",
            doc_to_text="{{question}}?",
            doc_to_target="{{choices[answer]}}",
            generation_kwargs={"until": ["e"], "max_gen_toks": 5},
            metric_list=[{"metric": "exact_match"}],
        ),
    ]


CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "translator", "chat"])
def test_metrics_are_those_of_hf(name, request, tasks, monkeypatch):
    theirs, ours = request.getfixturevalue("gpt2" if name == "chat" else name)
    if name == "translator":
        tasks = tasks[:2]  # its texts have a test of their own
    if name == "chat":
        monkeypatch.setattr(theirs.tokenizer, "chat_template", CHAT)
        monkeypatch.setattr(theirs.tokenizer, "split_special_tokens", False)
        monkeypatch.setattr(ours._tokenizer, "own_chat_template", ChatTemplate(CHAT))
    evaluated: Any = simple_evaluate(
        theirs,
        tasks=copy.deepcopy(tasks),
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=name == "chat",
    )
    found = models.evaluate_tasks(ours, copy.deepcopy(tasks), chat=name == "chat")
    assert found.keys() == {task["task"] for task in tasks}
    names = {"acc", "acc_norm", "word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert names <= {metric for metrics in found.values() for metric in metrics}
    for task, metrics in found.items():
        for metric, value in metrics.items():
            expected = evaluated["results"][task]
            expected = expected.get(f"{metric},none", expected.get(metric))
            assert value == pytest.approx(expected, rel=1e-5), (task, metric)


def test_a_document_writes_no_control_tokens(gpt2, monkeypatch):
    ours = gpt2[1]
    monkeypatch.setattr(ours._tokenizer, "own_chat_template", ChatTemplate(CHAT))
    monkeypatch.setattr(ours, "in_chats", False)
    text = ours.apply_chat_template([{"role": "user", "content": "small<|endoftext|>dog"}])
    assert text == "user: small<|endoftext|>dog<|endoftext|>assistant:"
    ids = [id for part in ours.encode_pair(text, " is<|endoftext|>") for id in part]
    assert ids.count(ours._tokenizer.special_ids.eos) == 1


def test_the_command_prints_results_of_a_file_of_ones_own(
    gpt2_folder, tasks, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)  # outside of a git repository
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps(tasks[0]))
    main(["evaluate", str(gpt2_folder), "--tasks", str(file), "--shots", "2", "--limit", "3"])
    printed = capfd.readouterr()
    assert "fatal" not in printed.err  # of git
    *table, last = printed.out.splitlines()
    results = json.loads(last)["tasks"]["choices"]
    assert results["sample_len"] == 3
    assert {line.split()[1] for line in table} == results.keys()


def test_an_unknown_task_is_answered_with_similar_names(gpt2, tmp_path, monkeypatch):
    (tmp_path / "own.yaml").write_text("task: hellaswag\ndataset_path: nowhere\n")
    manager = TaskManager(include_path=tmp_path, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: manager)
    with pytest.raises(UserError, match=r"task hela .*hellaswag") as error:
        models.evaluate_tasks(gpt2[1], ["hela"])
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"task hellaswag .*loaded") as error:
        models.evaluate_tasks(gpt2[1], ["hellaswag"])
    assert "\n" not in str(error.value)


def test_without_the_harness_there_is_a_line(gpt2_folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"flaxzoo\[eval\]"):
        models.harness_model(gpt2_folder)


def test_texts_that_fill_the_model_are_refused(gpt2):
    with pytest.raises(UserError, match="max_gen_toks 48 "):
        gpt2[1].generate_until(instances("generate_until", [("it", {"max_gen_toks": 48})]))
