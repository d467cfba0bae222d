"""WordPiece with BERT's published vocabulary, against published ids."""

import gzip
import json

import pytest
from flaxzoo.data import SpecialIds, load_tokenizer


@pytest.fixture(scope="module")
def bert(datasets):
    return load_tokenizer(datasets / "tok" / "bert_base_uncased_vocab.txt")


def test_bert_equals_the_golden_rows(bert, datasets):
    with gzip.open(datasets / "tok/bert_golden_questions_a.jsonl.gz", "rt", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f.read().removesuffix("\n").split("\n")]
    assert len(rows) == 4805
    ids = bert.encode_batch([row["text"] for row in rows])
    assert ids == [row["ids"] for row in rows]
    assert [bert.token(id) for id in ids[0]] == rows[0]["pieces"]


def test_masks_in_a_text(bert):
    mask = bert.special_ids.mask
    text = "The [MASK] pulled into[MASK]the station."
    ids = bert.encode_with_mask(text)
    assert ids == [
        101, *bert.encode("The", False), mask, *bert.encode("pulled into", False), mask,
        *bert.encode("the station.", False), 102,
    ]  # fmt: skip
    assert mask not in bert.encode(text)
    assert bert.encode_with_mask("no blank") == bert.encode("no blank")
    assert bert.encode_with_mask("[MASK]") == [101, mask, 102]
    assert bert.encode_with_mask("") == [101, 102]


def test_bert_template_offsets_and_specials(bert, tmp_path):
    assert bert.special_ids == SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)
    assert bert.encode_with_offsets("Hello wörld") == (
        [101, 7592, 2088, 102],
        [(0, 0), (0, 5), (6, 11), (0, 0)],
    )
    assert bert.encode("Hello", add_special_tokens=False) == [7592]
    assert 103 not in bert.encode("a [MASK]")
    assert bert.decode([101, 7592, 2088, 102]) == "hello world"
    bert.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.special_ids == bert.special_ids
    assert loaded.fingerprint == bert.fingerprint


def test_cased_vocabulary_keeps_case(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "Hello", "hello"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    assert load_tokenizer(tmp_path).encode("Hello hello", False) == [4, 5]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert load_tokenizer(tmp_path).encode("Hello hello", False) == [5, 5]
