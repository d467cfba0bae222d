"""Which fields of an object are the texts to predict."""

import io
import sys

import pytest
from flaxzoo.data import DataError
from flaxzoo.data.tasks.texts_to_predict import TextReader

IMPORTED = (("text", "text_b?"), True)
PAIRS, SINGLE = (("text", "text_b"), False), (("text",), False)


@pytest.mark.parametrize(
    ("reads", "row", "texts"),
    [
        (IMPORTED, {"query": "a", "text": "b"}, ("a", "b")),
        (IMPORTED, {"question": "a", "passage": "b", "answer": True}, ("a", "b")),
        (IMPORTED, {"text": "a", "source": "b"}, ("a",)),
        (PAIRS, {"text": "a", "text_b": "b", "source": "c", "target": "d"}, ("a", "b")),
        (SINGLE, {"text": "a", "source": "b", "target": "c"}, ("a",)),
    ],
)
def test_texts_are_known_by_their_names(reads, row, texts):
    unread = set()
    assert TextReader(*reads, unread).of_row(row, "here").values == texts
    assert unread == {name for name, value in row.items() if value not in texts}


@pytest.mark.parametrize("pair", [("source", "target"), ("question", "answer")])
@pytest.mark.parametrize("reads", [IMPORTED, PAIRS])
def test_a_text_beside_another_pair_is_refused(reads, pair):
    row = {"text": "a", **dict.fromkeys(pair, "b")}
    with pytest.raises(DataError, match=f"text.*{pair[0]}.*{pair[1]}"):
        TextReader(*reads, set()).of_row(row, "here")


@pytest.mark.parametrize("name", ["-", "lines.txt", "lines.jsonl"])
def test_json_lines_are_known_by_the_first(tmp_path, monkeypatch, name):
    lines = b'{"query": "a", "text": "b"}\n{"query": "c", "text": "d"}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    (tmp_path / name).write_bytes(lines)
    path = name if name == "-" else str(tmp_path / name)
    found = [record.values for record in TextReader(*IMPORTED, set()).of_file(path)]
    assert found == [("a", "b"), ("c", "d")]
