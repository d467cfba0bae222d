"""Tokenizers as transformers' ``AutoTokenizer`` loads them: the same ids, the same texts."""

import gzip

import numpy as np
import pytest
from flaxzoo.data import DataError, TokenizerConfig, load_tokenizer, train_tokenizer
from flaxzoo.data.tokenizers.sentencepiece import SentencePieceTokenizer
from flaxzoo.data.tokenizers.sentencepiece_model import (
    parse_model,
    sentencepiece_backend,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ...support.marian_tokenizer import train_model, train_sentencepiece, write_folder
from ...support.nasty_texts import NASTY
from .test_marian import theirs_of

CONFIGS = {
    "byte-bpe": TokenizerConfig("byte-bpe", 600),
    "uncased": TokenizerConfig("wordpiece", 1000),
    "cased": TokenizerConfig("wordpiece", 1000, lowercase=False),
    "unigram": TokenizerConfig("sentencepiece-unigram", 900),
    "bpe": TokenizerConfig("sentencepiece-bpe", 900),
    "characters": TokenizerConfig("characters"),
    "words": TokenizerConfig("words", 600),
}
LONG = 16_000
"""Characters of a line up to which sums in float32 make no difference."""


@pytest.fixture(scope="module", params=CONFIGS)
def ours(request, prose):
    return train_tokenizer(prose, CONFIGS[request.param])


@pytest.fixture(scope="module")
def theirs(ours, tmp_path_factory):
    return exported(ours, tmp_path_factory.mktemp("export"))


def exported(tokenizer, folder, **settings):
    tokenizer.export(folder, **settings)
    return AutoTokenizer.from_pretrained(folder)


def equally_probable(ours, a, b):
    """Whether a unigram model gives two splits of one text the same score in float32.

    Sentencepiece adds scores in float32, the exported tokenizer in float64, so they may choose
    different ones of such splits (`data/tokenizers/sentencepiece_model.py`).
    """
    if not isinstance(ours, SentencePieceTokenizer) or ours.kind != "sentencepiece-unigram":
        return False
    pieces = parse_model(ours.model).pieces
    totals = [sum(pieces[id].score for id in ids) for ids in (a, b)]
    rounding = np.finfo(np.float32).eps * max(len(a), len(b)) * abs(totals[0])
    return ours.decode(a) == ours.decode(b) and abs(totals[0] - totals[1]) <= rounding


def differences(ours, theirs, texts):
    """Counts the texts with other ids there, but for ties, and the ids that give another text."""
    # Where there is a mask users mean it by its name.
    options = {"split_special_tokens": True} if ours.special_ids.mask is not None else {}
    found = theirs(texts, add_special_tokens=False, **options).input_ids if texts else []
    ids = ours.encode_batch(texts)
    other_ids = sum(
        a != b and not equally_probable(ours, a, b) for a, b in zip(ids, found, strict=True)
    )
    other_texts = sum(
        ours.decode(row, skip) != theirs.decode(row, skip_special_tokens=skip)
        for row in ids
        for skip in (True, False)
    )
    return other_ids, other_texts


def test_nasty_texts(ours, theirs):
    assert differences(ours, theirs, NASTY) == (0, 0)
    for text in NASTY[:9]:
        assert theirs(text).input_ids == ours.encode(text)


@settings(max_examples=150)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text(ours, theirs, text):
    assert differences(ours, theirs, [text]) == (0, 0)


def test_it_is_read_here_as_before(ours, tmp_path):
    line = ours.export(tmp_path, max_length=77)
    assert line.startswith("tokenizer: ")
    assert "\n" not in line
    named = line.removeprefix("tokenizer: ").split(";")[0].split(", ")
    assert {*named, "tokenizer_config.json"} == {path.name for path in tmp_path.iterdir()}
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == ours.fingerprint
    assert loaded.special_ids == ours.special_ids
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 77


def test_special_tokens_and_batches(ours, theirs):
    special = ours.special_ids
    for role in ("cls", "sep", "mask", "bos", "eos"):
        if getattr(special, role) is not None:
            assert getattr(theirs, f"{role}_token_id") == getattr(special, role)
    texts = ["one", "one two three four"]
    batch = theirs(texts, padding=True, return_tensors="pt")
    if ours.kind in ("wordpiece", "words"):
        assert {*batch} == {"input_ids", "token_type_ids", "attention_mask"}
        assert (theirs.pad_token_id, theirs.padding_side) == (special.pad, "right")
        assert theirs("a [MASK]").input_ids[-2] == special.mask
    else:
        assert {*batch} == {"input_ids", "attention_mask"}
        assert (theirs.pad_token_id, theirs.padding_side) == (special.eos, "left")
    row, seen = batch["input_ids"][0], batch["attention_mask"][0].bool()
    assert row[seen].tolist() == ours.encode(texts[0])
    assert set(row[~seen].tolist()) == {theirs.pad_token_id}
    assert bool(seen[-1]) == (theirs.padding_side == "left")


@pytest.mark.parametrize("kind", ["byte-bpe", "unigram", "bpe", "characters"])
def test_texts_for_a_translator_get_an_end_token(kind, prose, tmp_path):
    ours = train_tokenizer(prose, CONFIGS[kind])
    theirs = exported(ours, tmp_path, closing=True)
    end = ours.special_ids.eos
    for text in NASTY:
        assert theirs(text).input_ids == [*ours.encode(text), end]
    assert theirs("a", "b").input_ids == [*ours.encode("a"), end, *ours.encode("b"), end]
    batch = theirs(["one", "one two"], padding=True)
    assert theirs.padding_side == "right"
    assert {*batch} == {"input_ids", "attention_mask"}
    assert batch.attention_mask[0][-1] == 0
    loaded = load_tokenizer(tmp_path)
    assert loaded.special_ids == ours.special_ids
    assert loaded.encode_batch(NASTY) == ours.encode_batch(NASTY)


def test_wordpieces_get_no_end_token(prose, tmp_path):
    with pytest.raises(DataError, match="wordpiece"):
        train_tokenizer(prose, CONFIGS["cased"]).export(tmp_path, closing=True)


@pytest.mark.parametrize("separate", [False, True])
def test_marian_as_it_was(separate, prose, tmp_path):
    models = [train_model(prose, size) for size in (300, 400)]
    ours = load_tokenizer(write_folder(tmp_path / "m", models, separate))
    line = ours.export(tmp_path / "out", closing=True, max_length=99)
    assert line.endswith("vocab.json; transformers gives the same ids and texts")
    theirs = theirs_of(tmp_path / "out")
    assert theirs.model_max_length == 99
    for text in [*NASTY, *prose[:9]]:
        ids = theirs(text).input_ids
        assert ids == ours.encode(text)
        target = theirs(text_target=text).input_ids
        assert target == ours.target.encode(text)
        assert theirs.decode(target, skip_special_tokens=True) == ours.target.decode(target)
    loaded = load_tokenizer(tmp_path / "out")
    assert loaded.fingerprint == ours.fingerprint


def lines_of(path):
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return content.decode().removesuffix("\n").split("\n")


FILES = [
    "lm/tinyshakespeare.valid.txt", "lm/war_and_peace.valid.txt.gz", "cls/agnews.valid.tsv.gz",
    "instruct/alpaca.valid.jsonl.gz", "mt/multi30k.val.de.gz", "mt/multi30k.val.fr.gz",
    "mt/small_enja.dev.ja.gz", "ner/wnut17.dev.conll.gz",
]  # fmt: skip


@pytest.mark.slow
def test_shared_files(ours, theirs, datasets):
    """Every seventh line, and every file as one text, but for lines that are too long."""
    differing = {}
    for name in FILES:
        lines = [line for line in lines_of(datasets / name) if len(line) <= LONG]
        differing[name] = differences(ours, theirs, [*lines[::7], "\n".join(lines)])
    assert differing == dict.fromkeys(FILES, (0, 0))


@pytest.mark.slow
def test_published_vocabularies(datasets, tmp_path):
    for name in ("bert_base_uncased_vocab.txt", "gpt2_encoder.json"):
        ours = load_tokenizer(datasets / "tok" / name)
        theirs = exported(ours, tmp_path / name)
        lines = [line for file in FILES[:3] for line in lines_of(datasets / file)[:999]]
        assert differences(ours, theirs, [*NASTY, *lines]) == (0, 0)


def foreign(texts, **options):
    """A sentencepiece model of other people's settings."""
    plain = {
        "normalization_rule_name": "identity", "add_dummy_prefix": False, "num_threads": 2,
        "remove_extra_whitespaces": False, "byte_fallback": True, "vocab_size": 600,
    }  # fmt: skip
    lines = (line for text in texts for line in text.split("\n"))
    return train_sentencepiece(lines, **plain | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "nmt_nfkc"},
        {"add_dummy_prefix": True},
        {"treat_whitespace_as_suffix": True},
        {"model_type": "bpe", "byte_fallback": False},
        {"model_type": "char", "byte_fallback": False},
    ],
)
def test_foreign_sentencepiece_models(options, prose, tmp_path):
    ours = SentencePieceTokenizer(foreign(prose, **options))
    line = ours.export(tmp_path)
    assert (tmp_path / "sentencepiece.model").read_bytes() == ours.model
    assert load_tokenizer(tmp_path).fingerprint == ours.fingerprint
    assert "no tokenizer.json" in line
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "text", ["abc cab bca", "< > | 0 x A e n d o f t u k", "a <0x0A b endoftext|> c <unk>"]
)
def test_names_of_special_tokens_in_texts_stay_text(text):
    """The library's unigrams find any piece in text: ours not those that are no text."""
    ours = SentencePieceTokenizer(foreign([text] * 9, control_symbols=["<|endoftext|>"]))
    backend = sentencepiece_backend(parse_model(ours.model))
    backend.encode_special_tokens = True
    for spelled in ("<|endoftext|>", "a<0x0A>b", "<unk>", "<0xFF><|endoftext|><0x00>", "x|>"):
        assert backend.encode(spelled).ids == ours.encode(spelled)
        assert backend.decode(backend.encode(spelled).ids) == spelled


def test_long_texts_are_split_at_line_feeds(prose):
    """What stands before a line changes nothing in it, and offsets are those of the text."""
    ours = train_tokenizer(prose, CONFIGS["unigram"])
    text = "\n\n".join(prose)[:50_000] + "\n"
    ids, offsets = ours.encode_with_offsets(text)
    parts = [f"{line}\n" for line in text.split("\n")[:-1]]
    assert len(text) > 9 * 4096
    assert ids == ours.encode(text) == ours.encode_batch(["a", text])[1]
    assert ids == [id for part in ours.encode_batch(parts) for id in part]
    assert ours.decode(ids) == text
    covered = {i for start, end in offsets for i in range(start, end)}
    assert covered == set(range(len(text)))
    assert all(text[a:b] == "\n" for id, (a, b) in zip(ids, offsets, strict=True)
               if ours.token(id) == r"\n")  # fmt: skip
