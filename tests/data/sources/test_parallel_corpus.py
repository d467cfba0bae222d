import gzip
import io
import sys

import pytest
import tensorflow_datasets as tfds
from flaxzoo.data import DataError, ParallelText, open_parallel, read_lines
from hypothesis import given
from hypothesis import strategies as st

EN = ["a man", "", "two dogs", "a\u2028b", "rain\x0b\x85 "]
DE = ["ein Mann", "nichts", "  ", "a\u2028b", "Regen"]
LINE = st.text(st.characters(exclude_characters="\n\0", codec="utf-8"), max_size=8)


def write(path, lines, end="\n"):
    raw = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def texts(text: ParallelText):
    return list(zip(text.sources, text.targets, strict=True))


@pytest.fixture
def files(tmp_path):
    return write(tmp_path / "a.en.gz", EN), write(tmp_path / "b.de", DE, end="\r\n")


def test_two_files_are_read_line_by_line(files):
    en, de = files
    text = open_parallel(f"pairs:{en},{de}", "whole")
    assert texts(text) == list(zip(EN, DE, strict=True))
    assert [pair.location for pair in text][2] == f"line 3 of {en} and {de}"
    swapped = open_parallel(f"pairs:{de},{en}", "whole")
    assert texts(swapped) == list(zip(DE, EN, strict=True))
    assert swapped.fingerprint != text.fingerprint
    assert len(text) == 5


@given(pairs=st.lists(st.tuples(LINE, LINE), min_size=1, max_size=20))
def test_blank_lines_do_not_shift_the_sides(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("pairs")
    sources, targets = zip(*pairs, strict=True)
    name = f"pairs:{write(folder / 'a', sources)},{write(folder / 'b', targets)}"
    read = texts(open_parallel(name, "whole"))
    dropped = [tuple(side.removesuffix("\r") for side in pair) for pair in pairs]
    dropped[0] = tuple(side.removeprefix("\ufeff") for side in dropped[0])  # a byte order mark
    assert read == dropped


@pytest.mark.parametrize("swap", [False, True])
def test_files_of_different_lengths(tmp_path, swap):
    sides = [write(tmp_path / "long", EN), write(tmp_path / "short", DE[:3])]
    name = "pairs:" + ",".join(map(str, reversed(sides) if swap else sides))
    with pytest.raises(DataError, match=r"long .*5 lines, .*short .*3"):
        list(open_parallel(name, "whole"))


def test_line_that_is_not_utf8(tmp_path, files):
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"one\ntwo \xff\nthree\nfour\nfive\n")
    with pytest.raises(DataError, match=r"wrong line 2 .*UTF-8.* 0xff .*byte 5"):
        list(open_parallel(f"pairs:{files[0]},{wrong}", "whole"))


def test_half_a_packed_file(tmp_path, files):
    half = tmp_path / "half.gz"
    half.write_bytes(files[0].read_bytes()[:-9])
    with pytest.raises(DataError, match=r"half.gz .*complete gzip"):
        list(open_parallel(f"pairs:{half},{files[1]}", "whole"))


def test_columns(tmp_path):
    path = write(tmp_path / "x.tsv", [f"{a}\tno\t{b}" for a, b in zip("abc", "ABC", strict=True)])
    assert texts(open_parallel(f"tsv:{path}#1,3", "whole")) == [("a", "A"), ("b", "B"), ("c", "C")]
    assert open_parallel(f"tsv:{path}#3,1", "whole").sources == ("A", "B", "C")
    like = open_parallel(f"tsv:{path}", "whole", like="pairs:a,b + tsv:other#3,2")
    assert texts(like)[0] == ("A", "no")
    with pytest.raises(DataError, match=r"x.tsv line 1 .*3 columns"):
        list(open_parallel(f"tsv:{path}", "whole"))
    with pytest.raises(DataError, match=r"column .* '4'"):
        list(open_parallel(f"tsv:{path}#1,4", "whole"))
    two = write(tmp_path / "two.tsv", ["en\tfr", "one\tun"])
    assert texts(open_parallel(f"tsv:{two}#fr,en", "whole")) == [("un", "one")]
    assert texts(open_parallel(f"tsv:{two}", "whole")) == [("one", "un")]
    empty = write(tmp_path / "empty.tsv", [])
    assert len(open_parallel(f"tsv:{empty}", "whole")) == 0


def test_json_lines(tmp_path):
    path = write(tmp_path / "x.jsonl", ['{"en": "one", "fr": "un", "n": 1}'])
    assert texts(open_parallel(f"jsonl:{path}#fr,en", "whole")) == [("un", "one")]
    with pytest.raises(DataError, match=r"x.jsonl line 1 field 'n' .* int"):
        list(open_parallel(f"jsonl:{path}#fr,n", "whole"))


def test_local_pairs_are_divided_by_their_source_text(tmp_path):
    lines = [f"sentence {i % 50}" for i in range(100)]
    targets = [f"Satz {i}" for i in range(100)]
    name = f"pairs:{write(tmp_path / 'a', lines)},{write(tmp_path / 'b', targets)}"
    train = open_parallel(name, "train", validation_fraction=0.2)
    held = open_parallel(name, "validation", validation_fraction=0.2)
    assert sorted(texts(train) + texts(held)) == sorted(zip(lines, targets, strict=True))
    assert not set(train.sources) & set(held.sources)
    assert 2 <= len(held) <= 40
    columns = write(tmp_path / "c", ["one\tun", "two\tdeux"])
    joined = f"{name} + tsv:{columns}"
    assert len(open_parallel(joined, "train")) == 102
    with pytest.raises(DataError, match="validation split"):
        open_parallel(name, "validation")
    same = f"pairs:{write(tmp_path / 'd', ['x', 'x'])},{write(tmp_path / 'e', ['y', 'z'])}"
    with pytest.raises(DataError, match="1 different text"):
        open_parallel(same, "train", validation_fraction=0.5)


@pytest.fixture
def published(publish):
    """Publishes a data set of translations from German."""

    def write(**splits):
        rows = {name: [{"de": de, "en": en} for de, en in split] for name, split in splits.items()}
        features = {"de": tfds.features.Text(), "en": tfds.features.Text()}
        publish("tiny_translate", features, supervised_keys=("de", "en"), **rows)

    return write


def numbered(n, first=0):
    return [(f"Satz {i}", f"sentence {i}") for i in range(first, first + n)]


def test_published_pairs(published, tmp_path):
    published(train=numbered(9), validation=numbered(3, 9), test=numbered(2, 50))
    name = "tfds:tiny_translate"
    train = open_parallel(f"{name}#en,de", "train", validation_fraction=0.5)
    assert sorted(texts(train)) == sorted((en, de) for de, en in numbered(9))
    held = open_parallel(f"{name}#en,de", "validation")
    assert sorted(texts(held)) == sorted((en, de) for de, en in numbered(3, 9))
    assert sorted(texts(open_parallel(name, "whole"))) == sorted(numbered(3, 9))
    like = open_parallel(name, "whole", like=f"{name}#en,de")
    assert like.fingerprint == held.fingerprint != train.fingerprint
    assert (len(train), len(held)) == (9, 3)
    assert next(iter(train)).location == f"{name}#en,de train example 1"
    local = f"pairs:{write(tmp_path / 'a', ['x', 'y', 'z'])},{write(tmp_path / 'b', 'xyz')}"
    joined = [
        open_parallel(f"{local} + {name}#en,de", split, validation_fraction=0.4)
        for split in ("train", "validation")
    ]
    assert sum(map(len, joined)) == 9 + 3 + 3
    with pytest.raises(DataError, match="no field 'fr'"):
        open_parallel(f"{name}#en,fr", "train")


def test_published_pairs_without_validation(published):
    published(train=numbered(40), test=numbered(2, 50))
    name = "tfds:tiny_translate#en,de"
    splits = [
        open_parallel(name, split, validation_fraction=0.2) for split in ("train", "validation")
    ]
    found = sorted(pair for split in splits for pair in texts(split))
    assert found == sorted((en, de) for de, en in numbered(40))
    with pytest.raises(DataError, match=r"validation split.* train, test"):
        open_parallel(name, "whole")


def test_lines_to_translate(tmp_path, monkeypatch):
    path = write(tmp_path / "in.gz", ["one", "", " two\x0b"], end="\r\n")
    assert read_lines(str(path)) == ["one", "", " two\x0b"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\n\ntwo")))
    assert read_lines("-") == ["one", "", "two"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xe9")))
    with pytest.raises(DataError, match=r"standard input line 2 .*UTF-8.* 0xe9"):
        read_lines("-")
    with pytest.raises(DataError, match="file: 'gone'"):
        read_lines("gone")
    with pytest.raises(DataError, match="is a folder"):
        read_lines(str(tmp_path))
