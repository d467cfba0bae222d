"""WordPiece with BERT's published vocabulary, against published ids and the original."""

import gzip
import itertools
import json
import shutil
import unicodedata

import pytest
from flaxzoo.data import SpecialIds, load_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st


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


class Original:
    """Tokenisation as in google-research/bert ``tokenization.py``, for the comparison.

    A word has at most 100 characters here, as ours; the original's limit is 200.
    """

    def __init__(self, pieces, lowercase=True):
        self.ids = {piece: id for id, piece in enumerate(pieces)}
        self.lowercase = lowercase

    def encode(self, text):
        return [id for word in self.words(text) for id in self.pieces(word)]

    def words(self, text):
        text = "".join(map(self.clean, text))
        for word in text.split():
            if self.lowercase:
                letters = unicodedata.normalize("NFD", word.lower())
                word = "".join(c for c in letters if unicodedata.category(c) != "Mn")
            yield from "".join(f" {c} " if self.is_punctuation(c) else c for c in word).split()

    def pieces(self, word):
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = word[start:end] if start == 0 else f"##{word[start:end]}"
                if piece in self.ids:
                    break
            else:
                return [self.ids["[UNK]"]]
            found.append(self.ids[piece])
            start = end
        return found

    @staticmethod
    def clean(character):
        category = unicodedata.category(character)
        if character in " \t\n\r" or category == "Zs":
            return " "
        if character in "\0\ufffd" or category in ("Cc", "Cf"):
            return ""
        point = ord(character)
        return f" {character} " if any(a <= point <= b for a, b in CHINESE) else character

    @staticmethod
    def is_punctuation(character):
        ascii = any(a <= character <= b for a, b in ("!/", ":@", "[`", "{~"))
        return ascii or unicodedata.category(character).startswith("P")


CHINESE = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)]
CHINESE += [(0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)]


def gather_tokens(datasets):
    text = (datasets / "tok/bert_base_uncased_vocab.txt").read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n")


@pytest.fixture(scope="module")
def original(datasets):
    return Original(gather_tokens(datasets))


# Scripts old enough to be the same in every version of Unicode that a library was built with:
# Latin, Greek, Cyrillic, punctuation, symbols, kana, CJK, Hangul, compatibility forms.
BLOCKS = [(0, 0x600), (0x1E00, 0x2100), (0x3000, 0x3130), (0x4E00, 0x9FA6), (0xAC00, 0xD7A4)]
BLOCKS += [(0xF900, 0xFA6E), (0xFE20, 0xFE30), (0xFF01, 0xFF5F), (0x20000, 0x20100)]
# Without Σ: Python makes it ς at the end of a word, the library σ everywhere.
ASSIGNED = [
    chr(c)
    for block in BLOCKS
    for c in range(*block)
    if unicodedata.category(chr(c)) != "Cn" and c != 0x3A3
]


@pytest.mark.slow
@pytest.mark.parametrize("lowercase", [True, False])
def test_bert_equals_the_original_on_every_script(datasets, tmp_path, lowercase):
    shutil.copy(datasets / "tok/bert_base_uncased_vocab.txt", tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    tokenizer = load_tokenizer(tmp_path)
    texts = [f"a{one}b {one}{two}" for one, two in itertools.pairwise(ASSIGNED)]
    original = Original(gather_tokens(datasets), lowercase)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids == original.encode(text), text


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["[MASK]", "[UNK]", "naïve", "don't", "##ing", "unaffable", "ÅNGSTRÖM", "漢字"]
        )
        | st.text(st.sampled_from(ASSIGNED), max_size=6)
    ).map("".join)
)
def test_bert_equals_the_original_on_any_text(text, bert, original):
    assert bert.encode(text, add_special_tokens=False) == original.encode(text)


def test_masks_in_a_text(bert):
    mask = bert.special_ids.mask
    text = "The [MASK] pulled into[MASK]the station."
    ids = bert.encode_with_mask(text)
    assert ids == [
        101, *bert.encode("The", False), mask, *bert.encode("pulled into", False), mask,
        *bert.encode("the station.", False), 102,
    ]  # fmt: skip
    assert bert.encode_with_mask(text, add_special_tokens=False) == ids[1:-1]
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
