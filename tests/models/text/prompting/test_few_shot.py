"""Accuracy by the number of examples: equal to the harness's on the same prompts, the command."""

import json
import re
import sys

import pytest
from flaxzoo import data, models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.text.prompting.few_shot import FewShotAccuracy, draw_accuracy, table_of
from flaxzoo.train.cli.main import main

from .test_harness import WORDS, task

PATTERN = data.PromptPattern("{word} is {size}\n")
SHOTS = (0, 2, 3)


def examples_of(answers):
    return [
        data.PromptExample({"word": word, "size": answers[len(word) % len(answers)]})
        for word in dict.fromkeys(WORDS)
    ]


def silent(line):
    pass


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_numbers_are_those_of_the_harness_on_the_same_prompts(gpt2, tmp_path):
    _, ours = gpt2
    examples = examples_of(["big", "no", "small or so"])
    found = models.few_shot_accuracy(ours, PATTERN, examples, shots=SHOTS, log=silent)
    labels = sorted({example.fields["size"] for example in examples})
    configs = []
    for shots in SHOTS:
        few_shot = data.FewShot(PATTERN, examples, shots)
        file = tmp_path / f"{shots}.jsonl"
        lines = [
            {"prompt": few_shot.prompt(x), "answer": x.fields["size"], "choices": labels}
            for x in examples
        ]
        file.write_text("\n".join(map(json.dumps, lines)))
        form = {
            "output_type": "multiple_choice",
            "doc_to_text": "{{prompt}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{choices.index(answer)}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
        configs.append(task(f"shots {shots}", file, **form))
    expected = models.evaluate_tasks(ours, configs)
    for shots in SHOTS:
        theirs = expected[f"shots {shots}"]
        assert found[shots].accuracy == pytest.approx(theirs["acc"])
        assert found[shots].accuracy_normalized == pytest.approx(theirs["acc_norm"])
        assert found[shots].questions == len(examples)


class Stub(models.ContinuationScorer):
    """A scorer that knows the probability of each answer; a token is a byte."""

    max_length, is_encoder_decoder = 60, False  # pyright: ignore[reportAssignmentType]

    def __init__(self, known):
        self.known, self.received = known, []

    def encode_pair(self, context, continuation):
        return [*context.encode()], [*continuation.encode()]

    def score(self, requests, **options):
        decoded = [(bytes(a).decode(), bytes(b).decode()) for a, b in requests]
        self.received += decoded
        known = [self.known.get(answer, -9.0) for _, answer in decoded]
        return [models.ContinuationScore((value,), value == 0) for value in known]


ANIMALS = [
    data.PromptExample({"word": word, "size": size})
    for word, size in (("dog", "big"), ("ant", "small"), ("cow", "big"), ("bee", "small"))
]


def test_a_text_is_right_if_greedy_decoding_writes_it_and_its_end():
    scorer = Stub({" small\n": 0.0})
    found = models.few_shot_accuracy(
        scorer, PATTERN, ANIMALS, shots=(1,), answers="texts", log=silent
    )
    few_shot = data.FewShot(PATTERN, ANIMALS, 1)
    assert scorer.received == [(few_shot.prompt(x), f" {x.fields['size']}\n") for x in ANIMALS]
    assert found == {1: FewShotAccuracy(0.5, None, 4)}
    assert found[1].to_json() == {"accuracy": 0.5, "questions": 4}


def test_the_most_probable_label_is_the_answer_also_per_letter():
    scorer = Stub({" big": -3.0, " small": -4.0})
    found = models.few_shot_accuracy(scorer, PATTERN, ANIMALS, shots=(0,), log=silent)
    assert scorer.received[:2] == [("dog is", " big"), ("dog is", " small")]
    assert found == {0: FewShotAccuracy(0.5, 0.5, 4)}
    scorer = Stub({" big": -3.0, " small": -4.0})
    only = ANIMALS[1::2]
    found = models.few_shot_accuracy(scorer, PATTERN, ANIMALS, only, shots=(0,), log=silent)
    assert found == {0: FewShotAccuracy(0.0, 1.0, 2)}  # -3 / 3 < -4 / 5
    assert table_of(found) == [
        "examples  accuracy  per letter  questions",
        "       0      0.0%      100.0%          2",
    ]


def test_answers_that_are_all_different_are_texts_however_few():
    lines = []
    different = [data.PromptExample({"word": f"dog {n}", "size": f"{n}"}) for n in range(9)]
    models.few_shot_accuracy(Stub({}), PATTERN, different, shots=(0,), log=lines.append)
    assert lines == ["an answer is written by greedy decoding"]


def test_the_end_of_a_label_counts_if_it_begins_another():
    numbers = [
        data.PromptExample({"word": f"dog {n}", "size": s})
        for n, s in enumerate("1 11".split() * 2)
    ]
    scorer = Stub({" 1\n": -3.0, " 11\n": -2.0})
    found = models.few_shot_accuracy(scorer, PATTERN, numbers, shots=(0,), log=silent)
    assert {answer for _, answer in scorer.received} == {" 1\n", " 11\n"}
    assert found == {0: FewShotAccuracy(0.5, 0.5, 4)}


def test_prompts_that_are_too_long_lose_their_first_examples():
    lines = []
    scorer = Stub({})
    many = [data.PromptExample({"word": f"dog {n}", "size": "big"}) for n in range(9)]
    models.few_shot_accuracy(scorer, PATTERN, many, shots=(8,), limit=2, log=lines.append)
    assert lines[:2] == [
        "an answer is one of 1 labels",
        "2 of 9 questions are asked, chosen by the seed (--limit)",
    ]
    assert "2 of 2 prompts" in lines[2]
    whole = [data.FewShot(PATTERN, many, 8).prompt(query) for query in many]
    assert all(any(full.endswith(prompt) for full in whole) for prompt, _ in scorer.received)
    assert all(len(prompt) + 3 <= 60 for prompt, _ in scorer.received)


def test_bad_numbers_are_refused():
    for wrong, message in (({"shots": ()}, "shots"), ({"limit": 0}, "limit.* 0")):
        with pytest.raises(UserError, match=message):
            models.few_shot_accuracy(Stub({}), PATTERN, ANIMALS, **wrong)
    with pytest.raises(UserError, match=r"queries must .*at least one query"):
        models.few_shot_accuracy(Stub({}), PATTERN, ANIMALS, [])


def test_an_unwritable_picture_is_an_error(tmp_path):
    found = {0: FewShotAccuracy(0.1, 0.2, 4), 16: FewShotAccuracy(0.5, 0.4, 4)}
    draw_accuracy(found, tmp_path / "curve.svg")
    assert "examples in the prompt" in (tmp_path / "curve.svg").read_text()
    with pytest.raises(UserError, match=r"curve\.xyz .*written"):
        draw_accuracy(found, tmp_path / "curve.xyz")


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "examples.jsonl"
    lines = [{"question": f"is {w} big", "answer": "yes" if len(w) > 3 else "no"} for w in WORDS]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


@pytest.mark.integration
def test_the_command_needs_no_harness(gpt2_folder, file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    plot = str(tmp_path / "curve.png")
    run = ["evaluate", str(gpt2_folder), "--data", file, "--limit", "4"]
    main([*run, "--shots", "0", "1", "--balanced", "--plot", plot])
    *table, last = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["examples", "accuracy", "per", "letter", "questions"]
    found = json.loads(last)
    assert found.keys() == {"shots"}
    assert found["shots"].keys() == {"0", "1"}
    assert found["shots"]["1"]["questions"] == 4
    assert 0 <= found["shots"]["1"]["accuracy"] <= 1
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shots", "0"], "--shots .*examples"),
        (["--limit", "3"], "--limit .*--tasks .*--shots"),
        (["--tasks", "a", "--data", "b.jsonl"], "--data "),
        (["--tasks", "a", "--shots", "0", "1"], "--tasks .*single number .*--shots with 2"),
        (
            ["--shots", "0", "--data", "b.jsonl", "--num-beams", "2"],
            "--num-beams .*loss",
        ),
        (["--shots", "0", "--data", "nothing.jsonl"], "nothing.jsonl"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message, capsys):
    assert main(["evaluate", "run", *options])
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
