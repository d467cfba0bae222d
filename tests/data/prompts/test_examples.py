"""Examples for prompts from files, labeled sources, pairs and memory."""

import json

import pytest
from flaxzoo import data

ROWS = [
    {"input": "I eated.", "output": "I ate.", "score": 3},
    {"input": "He go.", "output": "He goes.", "score": 1},
]


def fields_of(examples):
    return [dict(example.fields) for example in examples]


def test_files_have_the_fields_that_are_there(tmp_path):
    lines, table, tabs = (tmp_path / name for name in ("a.jsonl", "a.csv", "a.tsv"))
    lines.write_text(
        '{"input": "I eated.", "output": "I ate.", "score": 3, "more": ["x"]}\n\n'
        '{"input": "He go.", "output": "He goes.", "score": 1}\n'
    )
    table.write_text('input,output,score\nI eated.,I ate.,3\n"He go.",He goes.,1\n')
    tabs.write_text("input\toutput\tscore\nI eated.\tI ate.\t3\nHe go.\tHe goes.\t1\n")
    expected = [{**row, "score": str(row["score"])} for row in ROWS]
    for name in (lines, f"jsonl:{lines}", table, f"csv:{table}", tabs, f"tsv:{tabs}"):
        assert fields_of(data.prompt_examples(str(name))) == expected
    assert fields_of(data.prompt_examples(ROWS)) == expected
    for name in (f"jsonl:{lines}#output,input", f"csv:{table}#output,input"):
        two = fields_of(data.prompt_examples(name))
        assert two[0] == {"output": "I ate.", "input": "I eated."}
    filtered = data.prompt_examples(f"jsonl:{lines}#input,output?score>=2")
    assert [example.fields["input"] for example in filtered] == ["I eated."]


def test_a_field_names_the_task(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"task": "upper", "input": "a", "output": "A"}\n')
    [example] = data.prompt_examples(f"{tmp_path}/a.jsonl")
    assert example.task == "upper"


def test_sums_are_questions_with_exact_answers():
    examples = data.prompt_examples("builtin:sums")
    assert len({example.fields["question"] for example in examples}) == 100
    for example in examples:
        _, _, first, _, second = example.fields["question"].removesuffix("?").split()
        assert int(example.fields["answer"]) == int(first) + int(second)
    prompt = data.FewShot(data.PATTERNS["arithmetic"], examples, 2).prompt(examples[50])
    assert prompt.count("Q: What is ") == 3
    assert prompt.endswith("A:")
    assert fields_of(data.prompt_examples("builtin:sums", "validation")) == fields_of(examples)


def test_labeled_sources_and_pairs(tmp_path):
    reviews = data.prompt_examples("builtin:reviews")
    assert set(reviews[0].fields) == {"text", "label"}
    assert {example.fields["label"] for example in reviews} == {"positive", "negative"}
    held_out = data.prompt_examples("builtin:reviews", "validation")
    texts = {example.fields["text"] for example in reviews}
    assert not texts & {example.fields["text"] for example in held_out}
    (tmp_path / "a.tsv").write_text("yes\ta good one\nno\ta bad one\n")
    numbered = data.prompt_examples(f"tsv:{tmp_path}/a.tsv#1,2")
    assert fields_of(numbered)[0] == {"text": "a good one", "label": "yes"}
    numbers = data.prompt_examples("builtin:numbers-en-fr", "validation")
    assert set(numbers[0].fields) == {"source", "target"}
    for name in ("en", "fr"):
        (tmp_path / name).write_text(f"one {name}\ntwo {name}\n")
    pairs = data.prompt_examples(f"pairs:{tmp_path}/en,{tmp_path}/fr")
    assert fields_of(pairs)[1] == {"source": "two en", "target": "two fr"}


def test_questions_about_passages(tmp_path):
    answers = [{"text": "the box", "answer_start": 0}, {"text": "box", "answer_start": 4}]
    questions = [
        {"id": "1", "question": "What?", "answers": answers},
        {"id": "2", "question": "Who?", "answers": [], "is_impossible": True},
    ]
    paragraph = {"context": "the box is red", "qas": questions}
    content = {"version": "2", "data": [{"title": "t", "paragraphs": [paragraph]}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    found = data.prompt_examples(f"squad:{tmp_path}/a.json")
    assert [example.fields["answer"] for example in found] == ["the box", "no answer"]
    assert data.PATTERNS["passage"].query(found[0].fields) == "the box is red\nQ: What?\nA:"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "[1, 2]\n", r"a.jsonl line 1 .*object"),
        ("a.jsonl", "\n", "no examples .*a.jsonl"),
        ("a.csv", "1,2\n3,4\n", "a.csv line 1 .*columns"),
        ("a.csv", "", "no examples .*a.csv"),
        ("a.txt", "text\n", ".jsonl, .csv or .tsv.*got"),
        ("b.jsonl", None, r"b.jsonl"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl line 2"),
    ],
)
def test_sources_without_examples_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(data.DataError, match=message) as caught:
        data.prompt_examples(f"{tmp_path}/{name}")
    assert "\n" not in str(caught.value)


def test_an_unknown_source_is_named():
    with pytest.raises(data.DataError, match="revews"):
        data.prompt_examples("builtin:revews")
    with pytest.raises(data.DataError, match=r"examples\[0\]"):
        data.prompt_examples(["a text"])


def test_random_tasks_are_held_out_and_explain_each_other():
    examples = data.prompt_examples("builtin:patterns")
    assert len({example.task for example in examples}) > 100
    pattern = data.pattern_for(list(examples[0].fields))
    assert pattern is data.PATTERNS["patterns"]
    episode = data.Patterns.parse("builtin:patterns").held_out[0]
    assert "".join(pattern.example(example.fields) for example in examples).startswith(episode.text)
    prompt = data.FewShot(pattern, examples, 16).prompt(examples[3])
    *lines, query = prompt.split("\n")
    assert len(lines) == 16
    assert {f"{line}\n" for line in lines} < set(episode.lines)
    assert query == f"{examples[3].fields['query']} >"
