import json
import shutil

import numpy as np
import pytest
from flaxzoo.data import (
    DataError,
    SpecialIds,
    TokenizerConfig,
    load_tokenizer,
    train_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

KINDS = ["byte-bpe", "sentencepiece-unigram", "sentencepiece-bpe", "characters"]
SAMPLE = "Hello  world,\n\n the cat's\tnaïve 漢字 <|endoftext|> [MASK]\r\n  end "


@pytest.fixture(scope="module", params=KINDS)
def trained(request, prose):
    size = None if request.param == "characters" else 512
    return train_tokenizer([*prose, SAMPLE], TokenizerConfig(request.param, size))


@pytest.fixture(scope="module")
def gpt2(datasets):
    return load_tokenizer(datasets / "tok" / "gpt2_encoder.json")


def check_round_trip(tokenizer, text):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) == tokenizer.encode(text, False)
    assert [ids] == tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    assert not set(ids) & {tokenizer.special_ids.bos, tokenizer.special_ids.mask}
    covered = sorted({i for start, end in offsets for i in range(start, end)})
    assert covered == list(range(len(text)))
    assert offsets == sorted(offsets)


def test_trained_vocabularies_round_trip(trained):
    check_round_trip(trained, SAMPLE)
    check_round_trip(trained, "")
    check_round_trip(trained, "\n")
    check_round_trip(trained, "  two  spaces  ")


def test_trained_vocabularies_share_one_special_token(trained):
    special = trained.special_ids
    assert (special.bos, special.eos, special.pad, special.mask) == (0, 0, None, None)
    ids = [0, *trained.encode("the"), 0]
    assert trained.decode(ids) == "the"
    assert trained.decode(ids, skip_special_tokens=False) == "<|endoftext|>the<|endoftext|>"
    assert trained.token(0) == "<|endoftext|>"
    assert all(trained.token(id).isprintable() for id in range(trained.vocab_size))


def test_save_and_load(trained, tmp_path):
    trained.save(tmp_path / "t")
    loaded = load_tokenizer(tmp_path / "t")
    for name in ("kind", "vocab_size", "special_ids", "fingerprint"):
        assert getattr(loaded, name) == getattr(trained, name)
    assert loaded.encode_with_offsets(SAMPLE) == trained.encode_with_offsets(SAMPLE)
    assert not [path for path in (tmp_path / "t").iterdir() if path.name.startswith(".")]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_subwords_round_trip_any_text(text, subwords):
    for tokenizer in subwords:
        check_round_trip(tokenizer, text)


@pytest.fixture(scope="module")
def subwords(prose):
    return [train_tokenizer(prose, TokenizerConfig(kind, 400)) for kind in KINDS[:3]]


def test_text_that_is_not_unicode(subwords):
    for tokenizer in subwords:
        with pytest.raises(DataError, match=r"'\\udcff' .*character 1"):
            tokenizer.encode("a\udcff")


def test_numpy_ids_decode(subwords):
    for tokenizer in subwords:
        ids = np.asarray(tokenizer.encode("the code"), np.int32)
        assert tokenizer.decode(ids) == tokenizer.decode(list(ids)) == "the code"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "the code"


def test_unknown_characters_stay_visible(prose):
    tokenizer = train_tokenizer(["abc"], TokenizerConfig("characters"))
    assert tokenizer.encode("aé") == [2, 1]
    assert tokenizer.decode([2, 1]) == "a�"


def test_gpt2_ids_are_the_published_ones(gpt2, datasets):
    assert gpt2.kind == "byte-bpe"
    assert gpt2.vocab_size == 50257
    assert gpt2.special_ids == SpecialIds(bos=50256, eos=50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.decode([15496, 50256, 995]) == "Hello world"
    assert 50256 not in gpt2.encode("<|endoftext|>")


def test_gpt2_equals_transformers(gpt2, datasets):
    from transformers import GPT2Tokenizer

    theirs = GPT2Tokenizer(
        vocab=str(datasets / "tok/gpt2_encoder.json"), merges=str(datasets / "tok/gpt2_vocab.bpe")
    )
    assert len(theirs) == gpt2.vocab_size
    text = (datasets / "lm/tinyshakespeare.valid.txt").read_text(encoding="utf-8")
    texts = [text, SAMPLE.replace("<|endoftext|>", ""), "  ’’ 12345 x\u00a0y\u3000 don't I'LL"]
    for text in texts:
        assert gpt2.encode(text) == theirs.encode(text)


def test_tokenizer_json_alone_is_a_tokenizer(prose, tmp_path):
    trained = train_tokenizer(prose, TokenizerConfig("byte-bpe", 300))
    trained.save(tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    file = shutil.copy(tmp_path / "whole" / "tokenizer.json", tmp_path / "alone")
    for path in (tmp_path / "alone", file):
        loaded = load_tokenizer(path)
        assert loaded.encode("the cat") == trained.encode("the cat")
        assert loaded.special_ids == trained.special_ids


@pytest.mark.slow
def test_gpt2_files_under_every_name(gpt2, datasets, tmp_path):
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        folder = tmp_path / merges
        folder.mkdir()
        shutil.copy(datasets / "tok/gpt2_encoder.json", folder / vocabulary)
        with pytest.raises(DataError, match=merges):
            load_tokenizer(folder / vocabulary)
        shutil.copy(datasets / "tok/gpt2_vocab.bpe", folder / merges)
        for path in (folder, folder / vocabulary, folder / merges):
            assert load_tokenizer(path).fingerprint == gpt2.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", b"a\nb\n", r"\[UNK\]"),
        ("vocab.txt", b"[UNK]\n[CLS]\n[SEP]\na\na\n", "line 5.*'a'"),
        ("vocab.txt", b"[UNK]\n\n[CLS]\n[SEP]\n\na\na\n", "line 7.*'a'.*line 6"),
        ("vocab.txt", b"[UNK]\n\xff\n", "line 2.*0xff"),
        ("tokenizer.json", b"{", "JSON"),
        ("tokenizer.json", b'{"model": {}}', "tokenizers library"),
        ("x.json", b'{"a": "b"}', "supported.*tokenizer.json"),
        ("x.model", b"nonsense", "sentencepiece"),
        ("x.model", b"", "sentencepiece"),
        ("x.bin", b"", "supported"),
        ("merges.txt", b"a b\n", "vocab.json"),
        ("characters.json", b"[1]", "JSON"),
        ("characters.json", b'{"kind": "characters", "characters": "aa"}', "characters"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pieces", "merges", "message"),
    [
        (
            [],
            "#version: 0.2\na b\n",
            "merges.txt line 2 .*'a b', .*vocabulary",
        ),
        (["ab"], "a b\na b c\n", "merges.txt line 2 .*two pieces"),
        (None, "a b\n", "vocab.json .*BPE: 256 of .*256 bytes"),
    ],
)
def test_vocabulary_and_merges_that_do_not_fit(tmp_path, pieces, merges, message):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    known = ["<unk>"] if pieces is None else sorted(alphabet) + pieces
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(known)}))
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer .*nothing"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(DataError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_foreign_tokenizer_json_names_its_specials_beside_it(tmp_path, prose):
    ours = train_tokenizer(prose, TokenizerConfig("byte-bpe", 400))
    ours.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    pad = {"content": ours.token(5), "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.special_ids == SpecialIds(pad=5, bos=0, eos=0)
    assert loaded.fingerprint != ours.fingerprint
    assert loaded.encode(prose[0]) == ours.encode(prose[0])


def test_masks_of_vocabularies_that_write_spaces(prose, tmp_path):
    ours = train_tokenizer(prose, TokenizerConfig("byte-bpe", 400))
    with pytest.raises(DataError, match=r"byte-bpe .*mask"):
        ours.encode_with_mask("a [MASK]")
    ours.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": ours.token(0)}))
    loaded = load_tokenizer(tmp_path)
    found = loaded.encode_with_mask(f"the {loaded.token(0)} is here")
    assert found == [*ours.encode("the"), 0, *ours.encode(" is here")]


def test_one_string_is_not_a_list_of_texts():
    with pytest.raises(DataError, match=r"texts .*list"):
        train_tokenizer("the cat sat", TokenizerConfig("byte-bpe", 300))
