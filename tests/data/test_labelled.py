import gzip
import io
import json
import pickle
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from flaxzoo.data import (
    DataError,
    TokenizerConfig,
    published_records,
    train_iterator,
)
from flaxzoo.data.choices import ChoiceData
from flaxzoo.data.classification import ClassificationData
from flaxzoo.data.framing import Frame, FramedTokens, cut_longest_first
from flaxzoo.data.labelled_sources import (
    input_lines,
    parse_labelled,
    read_fields,
    with_known_fields,
)
from flaxzoo.data.spans import SpanData
from flaxzoo.data.tagging import TaggingData
from hypothesis import given
from hypothesis import strategies as st

FORMS = {"tsv": "1,2", "jsonl": "label,text", "tfds": "label,text"}


def read(name):
    return list(read_fields(parse_labelled(name, FORMS)))


def values(name):
    return [record.values for record in read(name)]


def test_names():
    source = parse_labelled("tsv:a#b.tsv#2,4", FORMS)
    assert (source.kind, source.location, source.fields) == ("tsv", "a#b.tsv", ("2", "4"))
    assert parse_labelled("jsonl:a.jsonl", FORMS).fields == ("label", "text")
    assert parse_labelled("conll:a", {"conll": ""}).fields == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tsw:a", r"reads no 'tsw' source .*choose tsv:GLOB#LABEL,TEXT \(nearest\)"),
        ("text:a", "reads no 'text' source"),
        ("a.tsv", "has no kind: write one of tsv:GLOB#LABEL,TEXT, jsonl"),
        ("tsv:a.tsv + tsv:b.tsv", r"are not joined .*: name several files by a glob, as tsv:FOLD"),
        ("tsv:", "incomplete: write tsv:GLOB#LABEL,TEXT"),
        ("tsv:a#", "incomplete"),
        ("tsv:a#1,,2", "empty field"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(DataError, match=message):
        parse_labelled(name, FORMS)


def test_columns(tmp_path):
    (tmp_path / "a.tsv").write_bytes("1\tx\u2028y\r\n\n0\té\n".encode())
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"2\tz\n"))
    assert values(f"tsv:{tmp_path}/*.tsv*") == [("1", "x\u2028y"), ("0", "é"), ("2", "z")]
    assert [r.place for r in read(f"tsv:{tmp_path}/a.tsv")] == [
        f"{tmp_path}/a.tsv line 1", f"{tmp_path}/a.tsv line 3"
    ]  # fmt: skip


def test_columns_by_name(tmp_path):
    (tmp_path / "a.tsv").write_text("id\tlabel\ttext\n7\t1\tx\n8\t\ty\n")
    assert values(f"tsv:{tmp_path}/a.tsv#label,text") == [("1", "x"), ("", "y")]
    assert values(f"tsv:{tmp_path}/a.tsv#3,id") == [("x", "7"), ("y", "8")]
    assert values(f"tsv:{tmp_path}/a.tsv#id,text+2")[0] == ("7", ["x", "1"])


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("", "1\tx\n0\ty\tz\n", "a.tsv line 2 has 3 columns where the first line has 2"),
        ("", "1\tx\n\n0\n", "a.tsv line 3 has 1 columns"),
        ("#1,4", "1\tx\n", "line 1 has 2 columns, so there is no column 4"),
        ("#0,1", "1\tx\n", "no column 0: .* counted from 1"),
        (
            "",
            "a\t1\t\tx\n",
            "a.tsv line 1 has 4 columns: name the label's .* after a #.*as #2,4 or",
        ),
        ("#label,body", "label\ttext\n", "does not name a column 'body': its columns are label, t"),
    ],
)
def test_bad_columns(tmp_path, part, content, message):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read(f"tsv:{tmp_path}/a.tsv{part}")
    assert "\n" not in str(caught.value)


def test_json_lines(tmp_path):
    rows = [{"label": 1, "text": "a\nb", "more": ["x"]}, {"label": 0, "text": "c", "more": ["y"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert values(f"jsonl:{tmp_path}/a.jsonl") == [(1, "a\nb"), (0, "c")]
    assert values(f"jsonl:{tmp_path}/a.jsonl#more,text+label")[0] == (["x"], ["a\nb", 1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"label": ', "a.jsonl line 2 is not valid JSON"),
        ("[1]", "line 2 is a JSON list: write one object a line"),
        ('{"label": 1}', "line 2 has no field 'text': its fields are label"),
        (
            r'{"label": 1, "text": "a\ud800"}',
            "line 2 field 'text' holds a lone surrogate at character 1",
        ),
        ("\xff", None),
    ],
)
def test_bad_json_lines(tmp_path, line, message):
    raw = b"\xff" if message is None else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"label": 0, "text": "fine"}\n' + raw + b"\n")
    with pytest.raises(DataError, match=message or "not UTF-8: byte 0xff at byte offset 29"):
        read(f"jsonl:{tmp_path}/a.jsonl")


def test_input(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    wanted = [(f"{tmp_path}/a.txt", 1, "one"), (f"{tmp_path}/a.txt", 2, "two")]
    assert list(input_lines(f"{tmp_path}/a.txt")) == wanted
    stdin = io.TextIOWrapper(io.BytesIO(b"one\ntwo \xc3\xa9\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert list(input_lines("-"))[1] == ("standard input", 2, "two é")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\n")))
    with pytest.raises(DataError, match="standard input is not UTF-8: byte 0xff at byte offset 4"):
        list(input_lines("-"))
    with pytest.raises(DataError, match="no such file"):
        list(input_lines(f"{tmp_path}/b.txt"))
    with pytest.raises(DataError, match="is a folder: name a file in it, or several by a glob"):
        list(input_lines(f"{tmp_path}"))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_longest_first_is_one_token_at_a_time(one, other, room):
    kept = cut_longest_first(one, other, room)
    while one + other > room:
        one, other = (one - 1, other) if one > other else (one, other - 1)
    assert kept == (one, other)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(5, 9), max_size=4),
            st.none() | st.lists(st.integers(5, 9), max_size=4),
        ),
        min_size=1,
    )
)
def test_framed_tokens(pairs):
    tokens = FramedTokens.of(Frame(2, 3, 0, 12), pairs)
    assert len(tokens) == len(pairs)
    for i, (one, other) in enumerate(pairs):
        row = tokens.row(i)
        second = [] if other is None else [*other, 3]
        ids = [2, *one, 3, *second]
        padding = [0] * (12 - len(ids))
        assert row["input_ids"].tolist() == ids + padding
        assert row["attention_mask"].tolist() == [1] * len(ids) + padding
        types = [0] * (len(one) + 2) + [1] * len(second)
        assert row["token_type_ids"].tolist() == types + padding
        assert all(array.dtype == np.int32 for array in row.values())


def test_a_frame_needs_marks(tokenizer, tmp_path):
    assert Frame.of(tokenizer, 8) == Frame(2, 3, 0, 8)
    from flaxzoo.data.characters import CharacterTokenizer
    from flaxzoo.data.tokenizer import SpecialIds

    plain = CharacterTokenizer("abc")
    plain.special_ids = SpecialIds()
    with pytest.raises(DataError, match=r"characters tokenizer has no \[CLS\] and \[SEP\]"):
        Frame.of(plain, 8)


def data(source, **fields):
    return ClassificationData(source=source, tokenizer=TokenizerConfig(), length=12, **fields)


def write(path, rows):
    path.write_text("".join(f"{label}\t{text}\n" for label, text in rows))
    return f"tsv:{path}"


ROWS = [(i % 2, f"text {i}") for i in range(60)]


def test_division(tmp_path, tokenizer):
    def parts(rows, name):
        config = data(write(tmp_path / name, rows), validation_fraction=0.2)
        labels = config.labels()
        return config.train_split(tokenizer, labels, 0), config.validation_split(tokenizer, labels)

    train, validation = parts(ROWS, "a.tsv")
    texts = [{example.text for example in part.content} for part in (train, validation)]
    assert not texts[0] & texts[1]
    assert texts[0] | texts[1] == {text for _, text in ROWS}
    assert 4 <= len(texts[1]) <= 20
    again = parts(ROWS + ROWS[:7], "b.tsv")  # the same texts stay where they were, and together
    assert [{example.text for example in part.content} for part in again] == texts
    moved = parts(ROWS, "c.tsv")
    assert [part.fingerprint for part in moved] == [train.fingerprint, validation.fingerprint]
    assert len({train.fingerprint, validation.fingerprint, again[0].fingerprint}) == 3
    assert pickle.loads(pickle.dumps(train.rows)).row(3, 1).keys() == train.rows.row(0, 1).keys()


def test_other_sources(tmp_path, tokenizer):
    validation = write(tmp_path / "v.tsv", ROWS[:5])
    config = data(write(tmp_path / "a.tsv", ROWS), validation=validation)
    labels = config.labels()
    assert labels == ("0", "1")
    assert len(config.train_split(tokenizer, labels, 0).content) == 60
    assert len(config.validation_split(tokenizer, labels).content) == 5
    assert config.whole_source(validation, tokenizer, labels).facts == "5 examples"
    texts = config.texts()
    assert list(texts) == [text for _, text in ROWS]
    assert texts.fingerprint == config.texts().fingerprint


def test_other_sources_have_the_same_fields(tmp_path, tokenizer):
    (tmp_path / "a.tsv").write_text("a\tno\tx\nb\tyes\ty\n")
    (tmp_path / "a.jsonl").write_text('{"label": "no", "text": "x"}\n')
    source = f"tsv:{tmp_path}/a.tsv"
    config = data(f"{source}#2,3", validation=source)
    labels = config.labels()
    wanted = [("x", "no"), ("y", "yes")]
    for split in (
        config.validation_split(tokenizer, labels),
        config.whole_source(source, tokenizer, labels),
        config.whole_source(f"jsonl:{tmp_path}/a.jsonl", tokenizer, labels),  # its own
    ):
        found = [(example.text, example.label) for example in split.content]
        assert found == wanted[: len(found)]
    with pytest.raises(DataError, match=r"line 1 has the label 'a', .* or name the labels' column"):
        config.whole_source(f"{source}#1,3", tokenizer, labels)
    (tmp_path / "a.conll").write_text("a B-X NN\nb O DT\n")
    tags = TaggingData(source=f"conll:{tmp_path}/a.conll#2", tokenizer=TokenizerConfig(), length=12)
    split = tags.whole_source(f"conll:{tmp_path}/a.conll", tokenizer, tags.labels())
    assert split.rows.gold() == [["B-X", "O"]]


def test_fields_of_another_published_data_set():
    named = parse_labelled("tfds:glue/mnli#label,premise", FORMS)
    custom = parse_labelled("tfds:glue/mnli", FORMS)
    known = {"glue/mrpc": "label,one,two"}
    for name, like, fields in (
        ("tfds:glue/mnli", named, ("label", "premise")),
        ("tfds:glue/mrpc", named, ("label", "one", "two")),
        ("tfds:glue/new", named, ("label", "premise")),
        ("tfds:glue/mrpc", custom, ("label", "one", "two")),
    ):
        assert with_known_fields(parse_labelled(name, FORMS, like), known).fields == fields


@pytest.mark.parametrize("kind", [ClassificationData, TaggingData, SpanData, ChoiceData])
def test_nothing_there(tmp_path, tokenizer, kind):
    (tmp_path / "a").write_text("")
    form = next(iter(kind.forms))
    config = kind(source=f"{form}:{tmp_path}/a", tokenizer=TokenizerConfig(), length=16)
    for use in (config.labels, config.texts, lambda: config.train_split(tokenizer, (), 0)):
        if not (use == config.labels and kind is ChoiceData):
            with pytest.raises(DataError, match=rf"no {kind.noun} in '{form}:.*a': give a source"):
                use()
    with pytest.raises(DataError, match=r"nothing to predict in .*a: it is empty"):
        config.input_split(f"{tmp_path}/a", tokenizer, ())


def test_nothing_to_validate_on(tmp_path, tokenizer):
    one = write(tmp_path / "a.tsv", [(0, "same"), (1, "same")])
    with pytest.raises(DataError, match="one and the same text, so nothing is left"):
        data(one).validation_split(tokenizer, ("0", "1"))
    assert len(data(one, validation_fraction=0).train_split(tokenizer, ("0", "1"), 0).content) == 2
    with pytest.raises(DataError, match="no validation split: set validation_fraction above 0"):
        data(one, validation_fraction=0).validation_split(tokenizer, ("0", "1"))
    with pytest.raises(ValueError, match=r"validation_fraction 1.5 must be"):
        data(one, validation_fraction=1.5)
    with pytest.raises(ValueError, match=r"length 7 must be at least 8"):
        ClassificationData(source=one, tokenizer=TokenizerConfig(), length=7)


@pytest.fixture
def published(monkeypatch, tmp_path):
    """Prepares a tiny "published" data set of any features."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))

    def prepare(name_, features, **splits):
        class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            name = name_
            VERSION = tfds.core.Version("1.0.0")
            url_infos = None
            code_path = None

            def _info(self):
                return tfds.core.DatasetInfo(
                    builder=self, features=tfds.features.FeaturesDict(features)
                )

            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(rows) for split, rows in splits.items()}

            def _generate_examples(self, rows):
                yield from enumerate(rows)

        Tiny(data_dir=tmp_path / "tfds", file_format="array_record").download_and_prepare()

    return prepare


Text = tfds.features.Text
SENTIMENT = {
    "label": tfds.features.ClassLabel(names=["negative", "positive"]),
    "text": Text(),
    "idx": np.int32,
}


def sentiment(n, first=0):
    return [{"label": i % 2, "text": f"text {i}", "idx": i} for i in range(first, first + n)]


def test_published_labels_and_splits(published, tokenizer):
    published("tiny_sentiment", SENTIMENT, train=sentiment(9), validation=sentiment(3, 9))
    config = data("tfds:tiny_sentiment")
    labels = config.labels()
    assert labels == ("negative", "positive")
    train = config.train_split(tokenizer, labels, 0)
    validation = config.validation_split(tokenizer, labels)
    assert {example.text for example in train.content} == {f"text {i}" for i in range(9)}
    assert {example.text for example in validation.content} == {"text 9", "text 10", "text 11"}
    assert {(e.text, e.label) for e in validation.content} >= {("text 9", "positive")}
    other = config.whole_source("tfds:tiny_sentiment#label,text", tokenizer, labels)
    assert other.fingerprint == validation.fingerprint


def test_published_without_validation(published, tokenizer):
    published("tiny_sentiment", SENTIMENT, train=sentiment(40), test=sentiment(3, 90))
    config = data("tfds:tiny_sentiment", validation_fraction=0.2)
    train = config.train_split(tokenizer, config.labels(), 0)
    validation = config.validation_split(tokenizer, config.labels())
    assert len(train.content) + len(validation.content) == 40
    with pytest.raises(DataError, match="has no validation split: it has train, test"):
        config.whole_source("tfds:tiny_sentiment", tokenizer, config.labels())


def test_published_faults(published, tokenizer):
    published("tiny_sentiment", SENTIMENT, train=[{"label": -1, "text": "x", "idx": 0}])
    with pytest.raises(DataError, match=r"has no field 'body': its fields are .*label"):
        data("tfds:tiny_sentiment#label,body").train_split(tokenizer, (), 0)
    with pytest.raises(DataError, match=r"train example 1 has no label \(-1\)"):
        data("tfds:tiny_sentiment").train_split(tokenizer, ("a", "b"), 0)
    with pytest.raises(DataError, match="TFDS has no data set 'tiny_sentimen'"):
        data("tfds:tiny_sentimen").labels()


def test_published_tags(published, tokenizer):
    tags = ["O", "B-PER", "I-PER"]
    features = {
        "tokens": tfds.features.Sequence(Text()),
        "ner": tfds.features.Sequence(tfds.features.ClassLabel(names=tags)),
    }
    rows = [{"tokens": ["mr", "x", "ran"], "ner": [1, 2, 0]}, {"tokens": ["i", "y"], "ner": [0, 1]}]
    published("tiny_entities", features, train=rows, dev=rows[:1], test=rows)
    config = TaggingData(source="tfds:tiny_entities", tokenizer=TokenizerConfig(), length=12)
    assert config.labels() == ("O", "B-PER", "I-PER")
    assert len(config.train_split(tokenizer, config.labels(), 0).content) == 2
    validation = config.validation_split(tokenizer, config.labels())
    assert validation.rows.gold() == [["B-PER", "I-PER", "O"]]
    tags = tfds.features.Sequence(tfds.features.ClassLabel(names=[*tags, "B-LOC", "I-LOC"]))
    published("tiny_places", {**features, "ner": tags}, train=rows, dev=rows)
    config = TaggingData(source="tfds:tiny_places", tokenizer=TokenizerConfig(), length=12)
    assert config.labels() == ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")  # no example has LOC
    published("tiny_unknown", features, train=[{"tokens": ["a"], "ner": [-1]}])
    config = TaggingData(source="tfds:tiny_unknown", tokenizer=TokenizerConfig(), length=12)
    with pytest.raises(DataError, match=r"train example 1 has -1 among its tags"):
        config.labels()


def test_published_labels_of_several(published):
    published("tiny_sentiment", SENTIMENT, train=sentiment(4), validation=sentiment(4))
    assert data("tfds:tiny_sentiment", target="several").labels() == ("negative", "positive")


def test_a_float_is_no_label(published):
    features = {"label": np.float32, "text": Text()}
    published("tiny_scores", features, train=[{"label": 3.5, "text": "a"}])
    with pytest.raises(DataError, match=r"has the label 3.5: .* choose target score"):
        data("tfds:tiny_scores").labels()


def test_workers_change_nothing(tmp_path, tokenizer):
    config = data(write(tmp_path / "a.tsv", ROWS))
    rows = config.train_split(tokenizer, config.labels(), 0).rows
    runs = []
    for workers in (0, 1):
        iterator = train_iterator(rows, batch_size=4, seed=0, num_steps=3, num_workers=workers)
        runs.append(list(iterator))
        iterator.close()
    for one, other in zip(*runs, strict=True):
        assert all((one[name] == other[name]).all() for name in (*one, *other))


def test_a_source_is_read_once(tmp_path, tokenizer, monkeypatch):
    config = data(write(tmp_path / "a.tsv", ROWS))
    read, times = ClassificationData.read, []
    monkeypatch.setattr(
        ClassificationData, "read", lambda *args: times.append(args[1].name) or read(*args)
    )
    labels = config.labels()
    assert len(list(config.texts())) > 40
    before = config.train_split(tokenizer, labels, 0).fingerprint
    config.validation_split(tokenizer, labels)
    assert len(times) == 1
    assert config == data(config.source)
    assert data(config.source).train_split(tokenizer, labels, 0).fingerprint == before


def test_published_answers(published, tokenizer):
    answers = tfds.features.Sequence({"text": Text(), "answer_start": np.int32})
    texts = {name: Text() for name in ("id", "title", "context", "question")}
    answer = {"text": ["red"], "answer_start": [6]}
    rows = [
        {"id": "a", "title": "t", "context": "it is red", "question": "what", "answers": answer},
        {"id": "b", "title": "t", "context": "it is red", "question": "who",
         "answers": {"text": [], "answer_start": []}},
    ]  # fmt: skip
    published("tiny_squad", {**texts, "answers": answers}, train=rows, validation=rows)
    config = SpanData(source="tfds:tiny_squad", tokenizer=TokenizerConfig(), length=32)
    assert config.labels() == ("no answer",)
    split = config.train_split(tokenizer, config.labels(), 0)
    assert split.rows.gold() == [{"id": "a", "answers": ["red"]}, {"id": "b", "answers": []}]


KINDS = (ClassificationData, TaggingData, SpanData, ChoiceData)
KNOWN = [(kind, name) for kind in KINDS for name in kind.published_fields] + [
    (ClassificationData, "imdb_reviews"),
    (TaggingData, "conll2003"),
    (TaggingData, "wikiann/en"),
    (SpanData, "squad/v1.1"),
    (SpanData, "squad/v2.0"),
]


@pytest.mark.parametrize(("kind", "name"), KNOWN)
def test_well_known_data_sets_have_the_fields(monkeypatch, tmp_path, kind, name):
    """What TFDS itself says of them; nothing is downloaded."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(published_records, "download", lambda builder, source: None)
    source = parse_labelled(f"tfds:{name}", kind.forms)
    records = published_records.open_published(source, kind.published_fields)
    features = records.builder.info.features
    assert all(part in features for field in records.source.fields for part in field.split("+"))
    names = records.class_names(records.source.fields[0])
    assert (name == "glue/sst2") == (names == ("negative", "positive"))


def test_published_choices(published, tokenizer):
    names = ["goal", "sol1", "sol2"]
    features = {
        **{name: Text() for name in names},
        "label": tfds.features.ClassLabel(num_classes=2),
    }
    rows = [{"goal": "cut", "sol1": "knife", "sol2": "spoon", "label": 1}]
    published("tiny_piqa", features, train=rows, validation=rows)
    source = "tfds:tiny_piqa#label,goal,sol1+sol2"
    config = ChoiceData(source=source, tokenizer=TokenizerConfig(), length=32)
    split = config.validation_split(tokenizer, ())
    assert split.content[0].choices == ("knife", "spoon")
    assert split.rows.gold() == [1]
