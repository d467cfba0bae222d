"""Lines of text files: other encodings than UTF-8 are refused in every reader."""

import gzip

import pytest
from flaxzoo import data
from flaxzoo.data import DataError
from flaxzoo.data.common.files import file_lines, input_lines, read_lines

TEXT = "the old man\nwent down to the sea\n"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32"])
@pytest.mark.parametrize("text", [TEXT, "\u4e2d\u4e2d\n\u4e2d\n", "a", "\n"])
@pytest.mark.parametrize("suffix", ["txt", "gz"])
def test_other_encodings_are_refused(tmp_path, encoding, text, suffix):
    file = tmp_path / f"in.{suffix}"
    content = text.encode(encoding)
    file.write_bytes(gzip.compress(content) if suffix == "gz" else content)
    with pytest.raises(data.DataError, match=rf"in\.{suffix} line \d"):
        list(file_lines(file))


def test_a_byte_order_mark_is_dropped_and_a_nul_is_named(tmp_path):
    file = tmp_path / "in.txt"
    file.write_text(TEXT, encoding="utf-8-sig")
    assert "\n".join(line for _, _, line in input_lines(str(file))) + "\n" == TEXT
    file.write_text(TEXT + "stray \0\n")
    with pytest.raises(data.DataError, match=r"line 3 .*NUL .*byte 7"):
        list(input_lines(str(file)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines_are_no_texts(name):
    with pytest.raises(DataError, match=name):
        read_lines(name)
