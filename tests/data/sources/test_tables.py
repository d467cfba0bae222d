import pytest
from flaxzoo.data import DataError, TokenizerConfig
from flaxzoo.data.sources.labelled_names import parse_labelled
from flaxzoo.data.sources.labelled_records import read_fields
from flaxzoo.data.sources.parallel_corpus import open_parallel
from flaxzoo.data.sources.tables import LABELED_TEXTS, header_notes
from flaxzoo.data.tasks.multiple_choice import MultipleChoiceData
from flaxzoo.data.tasks.sequence_classification import SequenceClassificationData

FORMS = {"tsv": "1,2", "csv": "1,2", "jsonl": "label,text"}
ROWS = [f"{i % 2}\tsome text {i}" for i in range(20)]


@pytest.fixture
def read(tmp_path):
    """`read(kind, content, part)`: the records of a file with this content, and its notes."""

    def records(kind, content, part=""):
        path = tmp_path / f"a.{kind}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        source = parse_labelled(f"{kind}:{path}{part}", FORMS)
        return list(read_fields(source, LABELED_TEXTS)), header_notes(source, LABELED_TEXTS)

    return records


def values(result):
    return [record.values for record in result[0]]


def classify(tmp_path, content, kind="tsv", part="", **fields):
    (tmp_path / f"c.{kind}").write_text(content)
    source = f"{kind}:{tmp_path}/c.{kind}{part}"
    return SequenceClassificationData(source=source, tokenizer=TokenizerConfig(), **fields)


def test_csv_has_quotes_separators_and_line_breaks_in_cells(read):
    content = '\ufeffno,"a, b"\r\nyes,"say ""hi""\r\nand go"\r\n\r\nno,\u2028plain "x"\r\n'
    found = read("csv", content)
    assert values(found) == [
        ("no", "a, b"), ("yes", 'say "hi"\r\nand go'), ("no", '\u2028plain "x"')
    ]  # fmt: skip
    lines = [record.location.rpartition(" ")[2] for record in found[0]]
    assert lines == ["1", "2", "5"]  # a record is at its first line
    assert read("csv", "no," + "x" * 200_000 + "\n")[0][0].values[1] == "x" * 200_000


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("csv", 'no,a\nyes,"b\nno,c\n', "a.csv line 2 .*valid CSV"),
        ("csv", "no,a\ryes,b\r", "a.csv line 1 .*valid CSV"),
        ("csv", 'no,"a"b\n', "a.csv line 1 .*valid CSV"),
        ("csv", "no,a\nyes,b,c\n", r"line 2 .*3 columns"),
        ("csv", "no\ta\n", "a.csv line 1 .* tsv:/.*a.csv"),
        ("csv", "no;a\n", "line 1 .*semicolons"),
        ("tsv", "no,a\n", "a.tsv line 1 .* csv:/.*a.tsv"),
        ("tsv", "id\tmood\tquip\textra\n", r"4 columns \(id, mood, quip, extra\)"),
    ],
)
def test_faults_of_tables_are_named(read, kind, content, message):
    part = "#1,2" if "extra" not in content else ""
    with pytest.raises(DataError, match=message) as caught:
        read(kind, content, part)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["tsv", "csv"])
@pytest.mark.parametrize(
    ("header", "rows", "part", "found", "note"),
    [
        ("label text", "1 a", "", ("1", "a"), "column names: label from 'label', text from 'text'"),
        ("Sentence Label", "a 1", "", ("1", "a"), "label from 'Label', text from 'Sentence'"),
        ("id text label", "7 a 1", "", ("1", "a"), "label from 'label', text from 'text'"),
        ("label text", "1 a", "#1,2", ("1", "a"), "read as column names and skipped: label, text"),
        ("x label y text", "7 1 8 a", "#2,4", ("1", "a"), "and skipped: x, label, y, text"),
        ("label text text_b", "1 a b", "#1,2,3", ("1", "a", "b"), "and skipped: label, text"),
        ("label text", "1 a", "#label,text", ("1", "a"), None),
    ],
)  # fmt: skip
def test_headers_are_recognized_and_logged(read, kind, header, rows, part, found, note):
    mark = {"tsv": "\t", "csv": ","}[kind]
    content = f"{header}\n{rows}\n".replace(" ", mark)
    result = read(kind, content, part)
    assert values(result) == [found]
    if note is None:
        assert result[1] == ()
    else:
        (line,) = result[1]
        assert f"line 1 of {result[0][0].location.rpartition(' line')[0]} " in line
        assert note in line


@pytest.mark.parametrize("first", ["label\tthis is a text", "positive\ttext", "1\ttext", "a\tb"])
def test_examples_are_no_headers(read, first):
    result = read("tsv", f"{first}\n0\tx\n")
    assert len(result[0]) == 2
    assert result[1] == ()


def test_each_file_of_a_glob_may_have_a_header(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.tsv").write_text("label\ttext\n0\tx y\n")
    source = parse_labelled(f"tsv:{tmp_path}/*.tsv", FORMS)
    assert len(list(read_fields(source, LABELED_TEXTS))) == 2
    assert header_notes(source, LABELED_TEXTS)[0].endswith("; likewise in 1 more files")


def test_a_header_is_no_label(tmp_path, tokenizer):
    data = classify(tmp_path, "\n".join(["label\ttext", *ROWS]))
    assert data.labels() == ("0", "1")
    train = data.train_split(tokenizer, data.labels(), 0)
    validation = data.validation_split(tokenizer, data.labels())
    assert len(train.content) + len(validation.content) == 20
    assert train.notes[0].startswith("line 1 of ")
    assert train.notes[1].startswith("labels: 0 (")
    assert validation.notes[0].startswith("labels: ")  # the header is said once


def test_an_unknown_header_is_refused(tmp_path, tokenizer):
    rows = [f"{('good', 'bad')[i % 2]}\ttext{i}" for i in range(8)]
    with pytest.raises(DataError, match=r"c.tsv line 1 .* #mood,quip"):
        classify(tmp_path, "\n".join(["mood\tquip", *rows])).labels()
    assert classify(tmp_path, "\n".join([*rows, "mood\tquip"])).labels() == ("bad", "good", "mood")
    with pytest.raises(DataError, match=r"line 1 .*score 'mood'.* #"):
        classify(tmp_path, "mood\tquip\n1\ta\n", target="regression").train_split(tokenizer, (), 0)


def test_a_label_that_occurs_once_is_named(tmp_path, tokenizer):
    data = classify(tmp_path, "\n".join([*ROWS, "O\tmisspelled zero"]), validation_fraction=0.0)
    split = data.train_split(tokenizer, data.labels(), 0)
    assert split.notes == (
        "labels: 0 (10), 1 (10), O (1)",
        f"warning: 1 label in only one example, 'O' at {tmp_path}/c.tsv line 21: check that this "
        "is neither misspelled nor a column name",
    )
    assert split.summary == "21 examples"


def test_tables_to_predict_need_no_label(tmp_path, tokenizer):
    data = classify(tmp_path, "\n".join(ROWS))
    for content in ('text,label\n"a, b",\nc,\n', 'text\n"a, b"\nc\n', ',"a, b"\n,c\n'):
        (tmp_path / "p.csv").write_text(content)
        split = data.input_split(f"csv:{tmp_path}/p.csv", tokenizer, ("0", "1"))
        assert [example.text for example in split.content] == ["a, b", "c"]
        assert split.notes == ()


def test_sentence_pairs_and_choices_have_headers_too(tmp_path):
    for header, row in (("en,de", 'a,"b, c"'), ("target,source", '"b, c",a')):
        (tmp_path / "p.csv").write_text(f"{header}\n{row}\n")
        text = open_parallel(f"csv:{tmp_path}/p.csv", "whole")
        assert [(pair.source, pair.target) for pair in text] == [("a", "b, c")]
        assert "line 1 of" in text.notes()[0]
    (tmp_path / "c.csv").write_text("label,context,first,second\n1,it is,cold,hot\n0,is it,a,b\n")
    source = f"csv:{tmp_path}/c.csv"
    data = MultipleChoiceData(source=source, tokenizer=TokenizerConfig())
    assert [example.label for example in data.texts().examples] in ([1, 0], [1], [0])


def test_no_pairs_and_no_questions(tmp_path):
    from flaxzoo.data.tasks.question_answering import QuestionAnsweringData

    (tmp_path / "a").write_text("\n \n")
    for name in (f"tsv:{tmp_path}/a", f"csv:{tmp_path}/a", f"jsonl:{tmp_path}/a"):
        with pytest.raises(DataError, match=r"a' .*0 different texts"):
            open_parallel(name, "train", validation_fraction=0.5)
    data = QuestionAnsweringData(source=f"squad:{tmp_path}/a", tokenizer=TokenizerConfig())
    with pytest.raises(DataError, match=r"no questions .*'squad:"):
        data.labels()


@pytest.mark.parametrize("kind", ["tsv", "csv"])
@pytest.mark.parametrize("content", ["", "\n\n", " \n\n", "label\ttext\n"])
def test_a_file_without_examples_is_named(tmp_path, content, kind):
    with pytest.raises(DataError, match=r"no examples .*c.[tc]sv' .*empty"):
        classify(tmp_path, content.replace("\t", {"tsv": "\t", "csv": ","}[kind]), kind).labels()
