"""Demonstrations and preferences by their keys, templates of instructions, and their splits."""

import json

import numpy as np
import pytest
from flaxzoo import data
from flaxzoo.data.chat.rows import read_rows

USER, BOT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOKENIZER = data.TokenizerConfig(kind="characters")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "A."}, data.PromptedText("", "A.")),
        ({"prompt": "A", "completion": " b"}, data.PromptedText("A", " b")),
        ({"prompt": [USER], "completion": [BOT]}, data.Dialogue((USER, BOT), first=1)),
        ({"messages": [USER, BOT]}, data.Dialogue((USER, BOT))),
        ({"messages": [USER, BOT], "tools": '[{"name": "f"}]'},
         data.Dialogue((USER, BOT), ({"name": "f"},))),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
         data.Dialogue((USER, BOT))),
        ({"instruction": "Add.", "input": "1 1", "output": "2", "task": "sums"},
         data.Dialogue(({"role": "user", "content": "Add.\n\n1 1"},
                        {"role": "assistant", "content": "2"}), task="sums")),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, data.Dialogue((USER, BOT))),
    ],
)  # fmt: skip
def test_demonstrations_are_recognized_by_their_keys(row, expected):
    assert data.demonstration(row, "here") == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "fields question: "),
        (
            {"messages": [{"role": "usr", "content": "Hi"}]},
            "role .*'usr'.* user",
        ),
        (
            {"instruction": "Add", "inputs": "1 1", "output": "2"},
            "'inputs': .* input",
        ),
        ({"text": 3}, "text must .*'3'"),
        ({"messages": "Hi"}, "messages must .*'Hi'"),
        ({"messages": [{"content": "Hi"}]}, "object .*role"),
        ({"conversations": [{"from": "alien", "value": "?"}]}, "role .*'alien'"),
        ({"prompt": [USER], "completion": 3}, "answer must .*'3'"),
        ({"messages": [USER], "tools": "{"}, "tools .*JSON"),
    ],
)
def test_errors_of_records_name_their_location(row, message):
    with pytest.raises(data.DataError, match="^file line 3.*" + message):
        data.demonstration(row, "file line 3")


def test_the_prompt_of_a_preference_may_be_implicit():
    [pair] = data.preferences({"chosen": "I am fine", "rejected": "I am bad"}, "here")
    assert pair.chosen == data.PromptedText("I am", " fine")
    assert pair.rejected == data.PromptedText("I am", " bad")
    hh = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Who?\n\nAssistant:"
    [pair] = data.preferences({"chosen": f"{hh} I.", "rejected": f"{hh} You."}, "here")
    assert pair.chosen.first == 3
    assert [m["role"] for m in pair.chosen.messages] == ["user", "assistant", "user", "assistant"]
    assert (pair.chosen.messages[-1]["content"], pair.rejected.messages[-1]["content"]) == (
        "I.", "You.",
    )  # fmt: skip
    [pair] = data.preferences({"chosen": [USER, BOT], "rejected": [USER, USER]}, "here")
    assert pair.rejected == data.Dialogue((USER, USER), first=1)


def test_a_ranking_gives_all_pairs_of_different_rank_which_weigh_one_together():
    found = list(data.preferences({"prompt": "P", "ranked": ["a", ["b", "c"], "d"]}, "here"))
    pairs = [(pair.chosen.completion, pair.rejected.completion) for pair in found]
    assert pairs == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")]
    assert sum(pair.weight for pair in found) == pytest.approx(1)
    for row, message in (
        ({"prompt": "P", "ranked": "a"}, "ranked must .*'a'"),
        ({"prompt": "P", "ranked": [["a", "b"], []]}, "different rank"),
        ({"chosen": "a", "rejected": "b", "margin": float("nan")}, "margin must .*nan"),
        ({"promt": "P", "chosen": "a", "rejected": "b"}, "field 'promt'"),
    ):
        with pytest.raises(data.DataError, match=message):
            list(data.preferences(row, "here"))


def test_rows_come_from_files_memory_and_documents(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "n": 1}\n\n{"text": "b", "n": 2}\n')
    assert [row["text"] for _, row in read_rows(f"jsonl:{path}")] == ["a", "b"]
    assert [row["text"] for _, row in read_rows(str(path))] == ["a", "b"]
    assert [row["text"] for _, row in read_rows(f"jsonl:{path}#text?n>=2")] == ["b"]
    assert [row["text"] for _, row in read_rows(["a", "b"])] == ["a", "b"]
    plain = tmp_path / "x.txt"
    plain.write_text("one\n\ntwo\n")
    assert [row for _, row in read_rows(f"text:{plain}#block")] == [
        {"text": "one"},
        {"text": "two"},
    ]
    path.write_text("[1]\n")
    with pytest.raises(data.DataError, match=r"x.jsonl line 1.*object"):
        list(read_rows(f"jsonl:{path}"))


@pytest.fixture
def instructions(tmp_path):
    for name, labels in (("mood", "01"), ("topic", "ab")):
        lines = [f"{labels[i % 2]}\tThis is text {name} {i}." for i in range(20)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    file = tmp_path / "tasks.toml"
    file.write_text(
        f"""
        [[tasks]]
        name = "mood"
        source = "tsv:{tmp_path}/mood.tsv#1,2"
        labels = {{ 0 = "sad", 1 = "glad" }}
        forms = ["{{text}} Is that sad or glad? {{label}}", "Mood?\\n{{text}}\\n{{label}}"]

        [[tasks]]
        name = "topic"
        source = "tsv:{tmp_path}/topic.tsv#1,2"
        forms = ["Topic of {{text}}: {{label}}"]
        """
    )
    return file


def test_templates_make_instructions_of_labeled_data_in_several_forms(instructions):
    rows = [row for _, row in read_rows(f"instructions:{instructions}")]
    moods = [row["messages"] for row in rows if row["task"] == "mood"]
    assert len(moods) == 20
    assert {m[1]["content"] for m in moods} == {"sad", "glad"}
    endings = {m[0]["content"].endswith("glad?") for m in moods}
    assert endings == {True, False}  # each form is drawn
    assert rows == [row for _, row in read_rows(f"instructions:{instructions}")]
    instructions.write_text("seed = 1\n" + instructions.read_text())
    assert rows != [row for _, row in read_rows(f"instructions:{instructions}")]


def test_a_task_that_is_held_out_is_validated_on_and_never_trained_on(instructions):
    config = data.SupervisedData(
        source=f"instructions:{instructions}", length=80, tokenizer=TOKENIZER, hold_out=("topic",)
    )
    tokenizer = config.with_chat_template(config.make_tokenizer())
    train = config.train_split(tokenizer, (), seed=0).content
    validation = config.validation_split(tokenizer, ()).content
    assert {example.task for example in train} == {"mood"}
    assert {example.task for example in validation} == {"topic"}
    with pytest.raises(data.DataError, match=r"'topics'.*did you mean topic\b"):
        data.SupervisedData(
            source=f"instructions:{instructions}", length=80, tokenizer=TOKENIZER,
            hold_out=("topics",),
        ).train_split(tokenizer, (), 0)  # fmt: skip


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("tasks = 1", "tasks must .*1"),
        ("tasks = [1]", r"tasks must .*\(1,\)"),
        ("[[tasks]]\nname = 'a'", "tasks.source is missing"),
        ("[[tasks]]\nname = 'a'\nsource = 's'\nforms = []", "forms of the task a must"),
        ("[[tasks]]\nname = 'a'\nsource = 's'\nforms = ['{x}']\nform = 1", "tasks.form"),
        ("[[tasks", "end of an array"),
    ],
)
def test_a_faulty_file_of_instructions_is_named(tmp_path, content, named):
    (tmp_path / "tasks.toml").write_text(content)
    with pytest.raises(data.DataError, match=f"tasks.toml.*{named}"):
        list(read_rows(f"instructions:{tmp_path}/tasks.toml"))


GOOD = [{"messages": [{"role": "user", "content": f"Say {i}."}, BOT]} for i in range(3)]
UNUSABLE = [
    {"prompt": "a"},
    {"messages": [USER]},
    {"messages": [USER, {"role": "assistant", "content": ""}]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "image", "url": "x"}]}]},
    {"messages": [USER, 5]},
    {"messages": "x"},
    {"instruction": "Go", "output": ""},
    {"instruction": "Go", "output": 5},
    {"instruction": None, "output": "Gone"},
    {"prompt": "a", "completion": ""},
    {"prompt": 1, "completion": "b"},
    {"conversations": [{"from": "human"}]},
    {"messages": [USER, BOT], "tools": "{"},
    {"messages": [USER, {**BOT, "tool_calls": [{"type": "function", "function": {}}]}]},
]


def split_of(kind, rows, **settings):
    config = kind(source=rows, length=99, tokenizer=TOKENIZER, **settings)
    tokenizer = config.with_chat_template(data.train_tokenizer(["abc"], TOKENIZER))
    return config.whole_source(rows, tokenizer, ())


@pytest.mark.parametrize("row", UNUSABLE)
def test_a_record_that_cannot_be_used_is_left_out_and_named(row, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, [GOOD[0], row, *GOOD[1:]])))
    split = split_of(data.SupervisedData, f"jsonl:{path}", packing="none")
    assert split.examples.num_examples == 3
    [note] = split.notes
    assert note.startswith("1 ")
    assert "left out" in note
    assert f"{path} line 2" in note
    with pytest.raises(data.DataError, match=r"x\.jsonl line 2"):
        split_of(data.SupervisedData, f"jsonl:{path}", strict=True)
    with pytest.raises(data.DataError, match=r"2 .*examples\[0\]"):
        split_of(data.SupervisedData, [row, row])


def test_pairs_and_prompts_that_cannot_be_used_are_left_out():
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    bad = [{**pair, "chosen": ""}, {**pair, "rejected": [USER]}, {**pair, "prompt": 5}]
    bad.append({"prompt": "a", "chosen": "b"})
    for kind in (data.RewardData, data.DPOData):
        split = split_of(kind, [pair, *bad, pair])
        assert split.examples.num_examples == 2
        assert "3 records left out" in split.notes[-1]  # of another type, or without a field
        assert "1 of 3 pairs left out" in split.notes[0]
        assert "examples[1]" in split.notes[0]
        with pytest.raises(data.DataError, match=r"examples\[2\]"):
            split_of(kind, [pair, *bad], strict=True)
    prompts = [{"prompt": "a"}, {"prompt": " "}, {"prompt": [{"role": "user", "content": "b"}]}]
    image = {"role": "user", "content": ["Look", {"type": "image"}]}
    split = split_of(data.PolicyData, [*prompts, {"prompt": [image]}])
    assert split.examples.num_examples == 2
    assert "'image'" in split.notes[0]


@pytest.mark.parametrize("role", ["Assistant", "asistant", "martian", "human", "", " user"])
def test_other_roles_are_refused_by_name(role):
    turn = {"role": role, "content": "Hi"}
    for row in (
        {"messages": [USER, turn, BOT]},
        {"prompt": [turn], "completion": [BOT]},
        {"prompt": [USER], "chosen": [turn], "rejected": [BOT]},
        {"chosen": [USER, turn], "rejected": [USER, BOT]},
    ):
        kind = data.RewardData if "chosen" in row else data.SupervisedData
        with pytest.raises(data.DataError, match=rf"role must .*'{role}'"):
            split_of(kind, [*([] if "chosen" in row else GOOD), row])
    with pytest.raises(data.DataError, match=rf"role must .*'{role}'"):
        split_of(data.PolicyData, [{"prompt": [turn]}])
    if role != "human":
        turns = [{"from": role, "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
        with pytest.raises(data.DataError, match=rf"role must .*'{role}'"):
            split_of(data.SupervisedData, [{"conversations": turns}])
    tokenizer = data.train_tokenizer(["abc"], TOKENIZER)
    with pytest.raises(data.DataError, match=rf"role must .*'{role}'"):
        data.encode_chat(tokenizer, [USER, turn], add_generation_prompt=True)
    with pytest.raises(data.DataError, match=rf"role must .*'{role}'"):
        tokenizer.chat_template.render([turn])


def test_an_endless_template_stops_a_data_set(tmp_path):
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "x.jinja").write_text(source)
    with pytest.raises(data.DataError, match=r"chat template .*steps"):
        split_of(data.SupervisedData, GOOD, template=str(tmp_path / "x.jinja"))


def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each_answer(tmp_path):
    source = (
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content if loop.last or m.role == 'user' else m.content[:1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (tmp_path / "x.jinja").write_text(source)
    template = str(tmp_path / "x.jinja")
    turns = [("user", "Two?"), ("assistant", "Three."), ("user", "Four?"), ("assistant", "Five.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [{"messages": messages}, {"messages": messages[:2]}]
    split = split_of(data.SupervisedData, rows, template=template, packing="none")
    assert split.examples.num_examples == 3
    assert split.examples.num_learned == len("Three.\n") * 2 + len("Five.\n")
    assert split.summary.startswith("2 demonstrations in 3 sequences")
    assert any("1 demonstration of 2 in several rows (3 in all)" in x for x in split.notes)
    # A preference learns only its last answer, which has one text.
    pair = {"prompt": messages[:3], "chosen": messages[3:], "rejected": messages[1:2]}
    assert split_of(data.DPOData, [pair], template=template).examples.num_examples == 1
    with pytest.raises(data.DataError, match=r"data\.learn all"):
        split_of(data.SupervisedData, rows[:1], template=template, learn="all")


@pytest.mark.parametrize("packing", ["first-fit", "none"])
def test_sequences_have_each_answer_once_and_no_prompt(packing):
    rows = [{"prompt": f"Say {i}:", "completion": f" {i}{i}."} for i in range(30)]
    config = data.SupervisedData(source=rows, length=40, tokenizer=TOKENIZER, packing=packing)
    tokenizer = config.with_chat_template(config.make_tokenizer())
    examples = config.whole_source(rows, tokenizer, ()).examples
    texts = []
    for index in range(examples.num_examples):
        arrays = examples.example(0, index)
        for segment in range(1, arrays["segment_ids"].max() + 1):
            mine = arrays["segment_ids"] == segment
            learned = arrays["labels"][mine & (arrays["loss_mask"] == 1)].tolist()
            assert learned[-1] == tokenizer.special_ids.eos
            texts.append(tokenizer.decode(learned))
            assert arrays["position_ids"][mine].tolist() == list(range(mine.sum()))
        assert not arrays["loss_mask"][arrays["segment_ids"] == 0].any()
    assert sorted(texts) == sorted(row["completion"] for row in rows)
    assert (examples.num_examples < 30) == (packing == "first-fit")
    assert examples.num_learned == sum(len(row["completion"]) + 1 for row in rows)


def test_pairs_are_padded_apart_and_too_long_ones_are_left_out_of_rewards():
    rows = [
        {"prompt": "a", "chosen": "bc", "rejected": "d", "margin": 2},
        {"prompt": "a" * 9, "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "ranked": ["b", "c", "d"]},
    ]
    config = data.RewardData(source=rows, length=8, tokenizer=TOKENIZER)
    tokenizer = config.make_tokenizer()
    split = config.whole_source(rows, tokenizer, ())
    assert split.examples.num_examples == 4
    assert len(split.notes) == 2
    first = split.examples.example(0, 0)
    assert first["attention_mask"].sum(-1).tolist() == [4, 3]
    assert float(first["margin"]) == 2
    weights = [float(split.examples.example(0, i)["pair_weights"]) for i in range(4)]
    assert weights == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    pairs = data.DPOData(source=rows, length=8, tokenizer=TOKENIZER)
    dpo = pairs.whole_source(rows, tokenizer, ()).examples.example(0, 0)
    labels = dpo["labels"][0][dpo["loss_mask"][0] == 1].tolist()
    assert tokenizer.decode(labels) == "bc"
    assert labels[-1] == tokenizer.special_ids.eos
    reference = np.ones((4, 2), np.float32)
    bound = data.DPOData(source=rows, length=8, tokenizer=TOKENIZER).with_reference(
        lambda pairs: reference[: pairs.num_examples]
    )
    assert bound.whole_source(rows[:1], tokenizer, ()).examples.example(0, 0)[
        "reference_log_probs"
    ].tolist() == [1, 1]


def test_records_that_begin_alike_are_in_one_split():
    rows = [{"instruction": f"Q{i // 4}", "output": f"A{i}"} for i in range(80)]
    config = data.SupervisedData(
        source=rows, length=40, tokenizer=TOKENIZER, validation_fraction=0.3
    )
    tokenizer = config.make_tokenizer()
    openings = [
        {json.dumps(example.opening) for example in split.content}
        for split in (config.train_split(tokenizer, (), 0), config.validation_split(tokenizer, ()))
    ]
    assert openings[0]
    assert openings[1]
    assert not openings[0] & openings[1]


def test_records_that_a_condition_leaves_out_are_counted_in_the_log(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(
        "".join(f'{{"prompt": "P{n}", "completion": "c", "n": {n}}}\n' for n in range(9))
    )
    config = data.SupervisedData(
        source=f"jsonl:{path}#?n>=3", length=20, tokenizer=TOKENIZER, packing="none"
    )
    split = config.whole_source(config.source, config.make_tokenizer(), ())
    assert split.examples.num_examples == 6
    assert split.notes == ("3 records left out by the filter n>=3",)


def test_answers_of_a_pair_begin_at_the_same_token():
    tokenizer = data.train_tokenizer(
        ["abab abab cd"] * 9, data.TokenizerConfig(kind="byte-bpe", vocab_size=260)
    )
    assert len(tokenizer.encode("ab")) == 1
    config = data.DPOData(
        source=[{"prompt": "xa", "chosen": "b", "rejected": "d"}], length=9, tokenizer=TOKENIZER
    )
    arrays = config.whole_source(config.source, tokenizer, ()).examples.example(0, 0)
    first = arrays["loss_mask"].argmax(-1)
    assert first.tolist() == [0, 0]  # "ab" is a token, so the other answer begins at "a" too
