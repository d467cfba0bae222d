import json
import pickle

import numpy as np
import pytest
from flaxzoo.data import DataError, TokenizerConfig, load_tokenizer
from flaxzoo.data.features.sliding_windows import most_context
from flaxzoo.data.tasks.question_answering import NO_ANSWER, QuestionAnsweringData, token_span
from hypothesis import given
from hypothesis import strategies as st


def article(*paragraphs, title="t"):
    return {"title": title, "paragraphs": list(paragraphs)}


def paragraph(context, **questions):
    """Each question: a list of (answer, start), or of (answer, start, unique)."""
    qas = [
        {
            "id": id,
            "question": f"what {id}?",
            "answers": [
                {"text": a[0], "answer_start": a[1], **({"unique": a[2]} if a[2:] else {})}
                for a in answers
            ],
        }
        for id, answers in questions.items()
    ]
    return {"context": context, "qas": qas}


@pytest.fixture
def config(data_of_file):
    """`config(articles, **fields)`: data of a SQuAD file of these."""

    def make(*articles, **fields):
        text = json.dumps({"data": articles}, indent=1)
        fields = {"length": 24, "stride": 4, **fields}
        return data_of_file(QuestionAnsweringData, "squad:a.json", text, **fields)

    return make


PASSAGE = "a b c d e f g h i j k l m n o"


def test_windows_of_a_passage(config, train, tokenizer):
    data = config(article(paragraph(PASSAGE, q=[("k l", 20), ("a", 0)])), max_question_length=2)
    split = train(data, tokenizer)
    assert split.summary == (
        "1 question, 1 window of 24 tokens, 1 of 1 question truncated: longer than 2 tokens "
        "(data.max_question_length, at most half a sequence)"
    )
    row = split.examples.example(0, 0)
    text = "[CLS] wh [SEP] a b c d e f g h i j k l m n o [SEP]"
    assert tokenizer.decode(row["input_ids"][:20], False) == text
    assert row["token_type_ids"].tolist() == [0] * 4 + [1] * 16 + [0] * 4
    assert (row["start_positions"], row["end_positions"]) == (14, 15)
    assert row["start_positions"].dtype == np.int32
    assert row["start_positions"].shape == ()


def test_an_answer_is_where_its_window_has_it(config, train, tokenizer):
    data = config(article(paragraph(PASSAGE, q=[("k l", 20)])), length=16, max_question_length=4)
    rows = train(data, tokenizer).examples
    windows = [rows.example(0, i) for i in range(rows.num_examples)]
    texts = [tokenizer.decode(row["input_ids"]) for row in windows]
    assert texts == ["what a b c d e f g h i", "what e f g h i j k l m", "what i j k l m n o"]
    answers = [(int(row["start_positions"]), int(row["end_positions"])) for row in windows]
    assert answers == [(0, 0), (12, 13), (8, 9)]


def logits_at(rows, positions, height=10.0):
    """Logits of every row, 0 but at some (row, start, end)."""
    shape = (rows.num_examples, len(rows.example(0, 0)["input_ids"]))
    start, end = np.zeros(shape), np.zeros(shape)
    for row, first, last in positions:
        start[row, first] += height
        end[row, last] += height
    return {"start_logits": start, "end_logits": end}


def test_decode(config, train, tokenizer):
    passage = "The  Red (cat) sat."
    split = train(config(article(paragraph(passage, q=[("Red (cat", 5)])), length=48), tokenizer)
    row = split.examples.example(0, 0)
    found = logits_at(split.examples, [(0, row["start_positions"], row["end_positions"])])
    (decoded,) = split.examples.decode(found, n_best=3)
    assert {k: decoded[k] for k in ("id", "answer", "start", "end", "score")} == {
        "id": "q", "answer": "Red (cat", "start": 5, "end": 13, "score": 20.0,
    }  # fmt: skip
    assert len(decoded["n_best"]) == 3
    assert decoded["n_best"][0] == {k: v for k, v in decoded.items() if k not in ("id", "n_best")}
    assert len({answer["answer"] for answer in decoded["n_best"]}) == 3
    assert all(passage[a["start"] : a["end"]] == a["answer"] for a in decoded["n_best"])
    json.dumps(decoded)


def _chances(row, start, end):
    """P(start) · P(end) for all pairs of positions, of two softmaxes over [CLS] and the passage."""
    seen = row["token_type_ids"] == 1
    seen[seen.nonzero()[0][-1]] = False  # the last [SEP]
    seen[0] = True
    start, end = (np.where(seen, np.exp(logits), 0) for logits in (start, end))
    return np.outer(start / start.sum(), end / end.sum())


@pytest.mark.parametrize("seed", range(20))
def test_decode_is_the_original_search(config, train, tokenizer, seed):
    """Of all spans of all windows, as run_squad.py would with unlimited n_best_size."""
    random = np.random.default_rng(seed)
    words = [str(i) for i in range(int(random.integers(1, 30)))]
    paragraph_questions = {"q": [(words[0], 0)], "r": []}
    data = config(
        article(paragraph(" ".join(words), **paragraph_questions)), length=16, max_answer_length=3
    )
    rows = train(data, tokenizer).examples
    logits = {
        name: random.normal(size=(rows.num_examples, 16)) for name in ("start_logits", "end_logits")
    }
    start, end = logits["start_logits"], logits["end_logits"]
    ranges, offsets = rows.decoding.ranges, next(iter(rows.decoding.offsets.values()))
    for number, decoded in enumerate(rows.decode(logits)):
        mine = range(rows.decoding.first_rows[number], rows.decoding.first_rows[number + 1])
        speaks = most_context(ranges[mine.start : mine.stop])
        chances = {row: _chances(rows.example(0, row), start[row], end[row]) for row in mine}
        candidates = {"": min((start[row, 0] + end[row, 0], chances[row][0, 0]) for row in mine)}
        for row in mine:
            before = int(np.flatnonzero(rows.example(0, row)["token_type_ids"])[0]) - ranges[row, 0]
            for first in range(*ranges[row]):
                for last in range(first, min(first + 3, ranges[row, 1])):
                    if speaks[first] == row - mine.start:
                        text = " ".join(words)[offsets[first, 0] : offsets[last, 1]]
                        i, j = first + before, last + before
                        span = (start[row, i] + end[row, j], chances[row][i, j])
                        candidates[text] = max(span, candidates.get(text, (-np.inf, 0)))
        best = sorted(candidates.items(), key=lambda item: -item[1][0])[:5]
        assert [answer["answer"] for answer in decoded["n_best"]] == [text for text, _ in best]
        found = [(answer["score"], answer["probability"]) for answer in decoded["n_best"]]
        assert np.allclose(found, [values for _, values in best], rtol=1e-9)


def test_answers_are_not_longer_than_allowed(config, train, tokenizer):
    data = config(article(paragraph(PASSAGE, q=[("a", 0)])), length=32, max_answer_length=3)
    rows = train(data, tokenizer).examples
    first = int(rows.example(0, 0)["start_positions"])
    start = logits_at(rows, [(0, first, first + 3)])
    (decoded,) = rows.decode(start)
    assert all(len(answer["answer"].split()) <= 3 for answer in decoded["n_best"])
    (decoded,) = rows.decode(logits_at(rows, [(0, first, first + 2)]))
    assert decoded["answer"] == "a b c"
    (decoded,) = rows.decode(logits_at(rows, [(0, 0, 0), (0, 1, 2)]))  # not of the question
    assert decoded["answer"]
    assert decoded["start"] is not None


def test_no_answer(config, train, tokenizer):
    passages = [paragraph(PASSAGE, q=[("k", 20)], r=[])]
    data = config(article(*passages), length=16)
    assert data.labels() == (NO_ANSWER,)
    rows = train(data, tokenizer).examples
    positions = [rows.example(0, i)["start_positions"] for i in range(rows.num_examples)]
    half = rows.num_examples // 2
    assert any(positions[:half])
    assert not any(positions[half:])
    everywhere = [(row, 0, 0) for row in range(rows.num_examples)]
    first, second = rows.decode(logits_at(rows, everywhere[1:]))
    assert first["start"] is not None  # one window is for an answer
    assert (second["answer"], second["start"], second["score"]) == ("", None, 20.0)
    assert rows.gold() == [{"id": "q", "answers": ["k"]}, {"id": "r", "answers": []}]
    # A model that has not seen questions without an answer always gives one.
    rows = data.whole_source(data.source, tokenizer, ()).examples
    assert all(one["answer"] for one in rows.decode(logits_at(rows, everywhere)))


def test_version_2_marks_what_is_impossible(config, train, tokenizer, tmp_path):
    data = config(article(paragraph(PASSAGE, q=[("k", 20)], r=[("a", 0)])))
    content = json.loads((tmp_path / "a.json").read_text())
    content["data"][0]["paragraphs"][0]["qas"][1]["is_impossible"] = True
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert train(data, tokenizer).examples.gold()[1] == {"id": "r", "answers": []}


def test_answers_without_a_certain_location(config, train, tokenizer):
    passage = "red cat red"
    paragraph_questions = paragraph(
        passage,
        wrong=[("red", 1), ("dog", 4)],
        unsure=[("red", 0, False)],
        second=[("dog", 0), ("cat", 4)],
        blank=[(" cat ", 3)],
    )
    data = config(article(paragraph_questions), length=32)
    split = train(data, tokenizer)
    assert [example.id for example in split.content] == ["wrong", "unsure", "second", "blank"]
    assert [gold["id"] for gold in split.examples.gold()] == ["second", "blank"]
    positions = [split.examples.example(0, i) for i in range(2)]
    for row in positions:
        tokens = row["input_ids"][row["start_positions"] : row["end_positions"] + 1]
        assert tokenizer.decode(tokens) == "cat"
    unsure = "left out: no answer whose location is certain (wrong, unsure)"
    assert unsure in split.summary
    misplaced = "3 answers are not at the stated locations (wrong, second)"
    assert misplaced in split.summary
    everything = data.whole_source(data.source, tokenizer, ())  # all are scored
    assert misplaced in everything.summary
    assert "trained" not in everything.summary
    assert [len(gold["answers"]) for gold in everything.examples.gold()] == [2, 1, 2, 1]
    assert everything.examples.example(0, 1)["start_positions"] > 0  # for the loss: where it may be
    with pytest.raises(DataError, match="location"):
        train(config(article(paragraph(passage, unsure=[("red", 0, False)]))), tokenizer)


def test_an_unknown_location_is_in_no_loss(config, tokenizer):
    data = config(article(paragraph(PASSAGE, q=[("z", 3)], r=[("c", 4)])))
    rows = data.whole_source(data.source, tokenizer, ()).examples
    starts = [int(rows.example(0, i)["start_positions"]) for i in range(rows.num_examples)]
    assert starts[0] == -1
    assert max(starts) > 0
    assert rows.gold()[0]["answers"] == ["z"]


def test_no_passage_is_in_both_splits(config, train, tokenizer):
    articles = [
        article(
            paragraph(f"shared {i // 2}", **{f"s{i}": [("shared", 0)]}),
            paragraph(f"own {i}", **{f"o{i}": [("own", 0)]}),
            title=f"title {i}",
        )
        for i in range(30)
    ]
    data = config(*articles, validation_fraction=0.3)
    parts = train(data, tokenizer).content, data.validation_split(tokenizer, ()).content
    assert len(parts[0]) + len(parts[1]) == 60
    passages = [{example.passage for example in part} for part in parts]
    assert not passages[0] & passages[1]
    owned = [{e.title for e in part if e.passage.startswith("own")} for part in parts]
    assert not owned[0] & owned[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "a.json .*SQuAD: 'data' .*list"),
        ('{"data": 3}', "'data' .*list"),
        ('{"data": [{}]}', "a.json article 1 .*'paragraphs'"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "article 1 paragraph 1 .*'conte"),
        ('{"data"', "a.json .*JSON"),
        ('{"data": [\n1,\n]}', r"a.json line 3 .*JSON"),
        (
            '{"data": [{"paragraphs": [{"context": "", "qas": [{"question": "q"}]}]}]}',
            "no field 'id'",
        ),
    ],
)
def test_bad_files(config, train, tokenizer, tmp_path, content, message):
    data = config()
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=message):
        train(data, tokenizer)


def test_bad_questions(config, train, tokenizer):
    twice = article(paragraph("a", q=[("a", 0)]), paragraph("b", q=[("b", 0)]))
    with pytest.raises(DataError, match=r"question q .* id 'q'"):
        train(config(twice), tokenizer)
    with pytest.raises(DataError, match=r"no question .*answer"):
        train(config(article(paragraph("a", q=[]))), tokenizer)
    with pytest.raises(ValueError, match=r"stride must .*0"):
        config(stride=0)


def test_input(config, tokenizer, tmp_path):
    data = config(article(paragraph("red cat", q=[("cat", 4)])))
    lines = [{"question": "what?", "context": "a b"}, {"id": "x", "question": "", "context": ""}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    split = data.input_split(f"{tmp_path}/in.jsonl", tokenizer, ())
    assert set(split.examples.example(0, 0)) == {"input_ids", "attention_mask", "token_type_ids"}
    decoded = split.examples.decode(logits_at(split.examples, []))
    assert [one["id"] for one in decoded] == ["1", "x"]
    assert decoded[1]["answer"] == ""  # of an empty passage
    for path in (f"{tmp_path}/a.json", f"squad:{tmp_path}/a.json"):
        split = data.input_split(path, tokenizer, ())
        assert [example.id for example in split.content] == ["q"]
        assert "start_positions" not in split.examples.example(0, 0)
    for name in ("in.jsonl", "in.txt"):
        (tmp_path / name).write_text('{"question": "what?", "context": }\n')
        with pytest.raises(DataError, match=rf"{name} line 1 .*JSON"):
            data.input_split(f"{tmp_path}/{name}", tokenizer, ())
    (tmp_path / "in.jsonl").write_text('{"question": "what?"}\n')
    with pytest.raises(DataError, match=r"line 1 .*'context'"):
        data.input_split(f"{tmp_path}/in.jsonl", tokenizer, ())


@given(st.lists(st.integers(0, 3), min_size=1), st.data())
def test_token_span(gaps, data):
    """Tokens of one to four characters, some apart: a span is held by those that overlap it."""
    offsets, offset = [], 0
    for gap in gaps:
        start = offset + gap // 2
        offset = start + 1 + gap
        offsets.append((start, offset))
    start = data.draw(st.integers(0, offset - 1))
    end = data.draw(st.integers(start + 1, offset))
    overlapping = [
        i
        for i, (first, last) in enumerate(offsets)
        if set(range(start, end)) & {*range(first, last)}
    ]
    found = token_span(offsets, start, end)
    assert found == ((overlapping[0], overlapping[-1]) if overlapping else None)


@pytest.mark.slow
def test_real_files(datasets, train):
    tokenizer = load_tokenizer(datasets / "tok/bert_base_uncased_vocab.txt")

    def data(name):
        return QuestionAnsweringData(
            source=f"squad:{datasets}/qa/{name}",
            tokenizer=TokenizerConfig(),
            length=128,
            stride=64,
            validation_fraction=0.2,
            max_answer_length=100,
        )

    squad = data("squad11.dev_a.json.gz")
    everything = squad.whole_source(squad.source, tokenizer, ())
    assert len(everything.content) == 4805
    assert sum(len(gold["answers"]) for gold in everything.examples.gold()) == 16780
    places = [a for e in everything.content for a in e.answers if a.sure and a.start is not None]
    assert len(places) == 14810
    split = train(squad, tokenizer)
    validation = squad.validation_split(tokenizer, ())
    assert len(split.content) + len(validation.content) == 4805
    assert not {e.title for e in split.content} & {e.title for e in validation.content}
    assert pickle.loads(pickle.dumps(split.examples)).num_examples == split.examples.num_examples
    policies = data("policyqa.dev.json.gz")
    everything = policies.whole_source(policies.source, tokenizer, ())
    assert len(everything.content) == 3809
    assert "not at the stated locations" not in everything.summary


@pytest.mark.slow
def test_answers_come_back_exactly(datasets):
    """From characters to tokens and back, for every answer whose location is certain."""
    tokenizer = load_tokenizer(datasets / "tok/bert_base_uncased_vocab.txt")
    source = f"squad:{datasets}/qa/squad11.dev_a.json.gz"
    config = QuestionAnsweringData(source=source, tokenizer=TokenizerConfig())
    content = config.whole_source(source, tokenizer, ()).content
    offsets = {}
    exact = inside = 0
    for example in content:
        if example.passage not in offsets:
            offsets[example.passage] = tokenizer.encode_with_offsets(example.passage, False)[1]
        places = offsets[example.passage]
        for answer in example.answers:
            if answer.sure and answer.start is not None:
                end = answer.start + len(answer.text)
                span = token_span(places, answer.start, end)
                first, last = places[span[0]][0], places[span[1]][1]
                assert answer.text in example.passage[first:last]
                begins = any(start == answer.start for start, _ in places)
                ends = any(stop == end for _, stop in places)
                assert ((first, last) == (answer.start, end)) == (begins and ends)
                exact += (first, last) == (answer.start, end)
                inside += 1
    assert inside == 14810
    assert exact > 14700
