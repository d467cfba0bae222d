"""T5's vocabularies with their sentinels, against transformers' own tokenizer of the same files."""

import json
import re

import pytest
from flaxzoo.data import TokenizerConfig, load_tokenizer, train_tokenizer
from flaxzoo.data.common.errors import DataError
from flaxzoo.data.tasks.translation import start_and_end
from flaxzoo.data.tokenizers.sentencepiece import SentencePieceTokenizer
from flaxzoo.data.tokenizers.sentinels import SentinelTokenizer
from transformers import AutoTokenizer, T5Tokenizer

from ...support.marian_tokenizer import WORDS, train_sentencepiece
from ...support.nasty_texts import NASTY

# Here a name of another special token is ordinary text.
NAMES = re.compile(r"<unk>|</s>|<pad>")
TEXTS = [
    " ".join(WORDS),
    f"{WORDS[0]} <extra_id_0> {WORDS[1]}<extra_id_1>{WORDS[2]}<extra_id_2><extra_id_99>",
    "<extra_id_0>",
    " two  spaces   and <extra_id_10> ",
    "no sentinels: <extra_id_100> <extra_id_> <extra_id_01> < extra_id_1>",
    "ﬁne  naïve café ＡＢＣ ½ 日本語",
    "",
    *(text for text in NASTY if not NAMES.search(text)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as T5's were once published: a sentencepiece model, and the class of its reader."""
    work_folder = tmp_path_factory.mktemp("t5")
    texts = [" ".join(WORDS[i % 5 :]) for i in range(60)] + TEXTS[:1]
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    model = train_sentencepiece(texts, vocab_size=27, hard_vocab_limit=True, **ids)
    (work_folder / "spiece.model").write_bytes(model)
    (work_folder / "config.json").write_text('{"model_type": "t5"}')
    return work_folder


@pytest.fixture(scope="module", params=["spiece.model", "tokenizer.json"])
def pair(request, folder, tmp_path_factory):
    """transformers' tokenizer of a folder, and ours."""
    theirs = T5Tokenizer.from_pretrained(folder, extra_ids=100)
    if request.param == "tokenizer.json":
        folder = tmp_path_factory.mktemp("json")
        theirs.save_pretrained(folder)
        assert not (folder / "spiece.model").exists()
    return theirs, load_tokenizer(folder)


def test_ids_and_texts_are_those_of_transformers(pair):
    theirs, ours = pair
    batch = ours.encode_batch(TEXTS)
    for text, bare in zip(TEXTS, batch, strict=True):
        ids = ours.encode(text)
        assert (ids, bare) == (theirs(text).input_ids, ids[:-1])
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_of_a_t5(pair):
    _, ours = pair
    assert ours.vocab_size == 127
    assert ours.sentinels == tuple(range(126, 26, -1))
    assert ours.token(126) == "<extra_id_0>"
    assert start_and_end(ours) == (0, 1)  # targets start with padding
    ids, offsets = ours.encode_with_offsets(TEXTS[1], add_special_tokens=False)
    assert [TEXTS[1][slice(*offsets[ids.index(id)])] for id in (126, 125, 27)] == [
        "<extra_id_0>",
        "<extra_id_1>",
        "<extra_id_99>",
    ]


def test_saved_and_exported_vocabularies_load_again(pair, tmp_path):
    theirs, ours = pair
    ours.save(tmp_path / "own")
    assert load_tokenizer(tmp_path / "own").fingerprint == ours.fingerprint
    ours.export(tmp_path / "out", closing=True)
    assert load_tokenizer(tmp_path / "out").encode(TEXTS[1]) == ours.encode(TEXTS[1])
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again(TEXTS[1]).input_ids == theirs(TEXTS[1]).input_ids


def test_a_vocabulary_trained_here(tmp_path):
    base = train_tokenizer([TEXTS[0]] * 9, TokenizerConfig("sentencepiece-bpe", 300))
    ours = SentinelTokenizer(base, 3)
    text = "a<extra_id_2>  b<extra_id_3>\n"
    ids = ours.encode(text)
    # The blank before a word is in its tokens, and these are in the gap.
    assert ours.encode(f"a {text[1:]}") == ours.encode_batch([f"a {text[1:]}"])[0] == ids
    assert ids == [*base.encode("a"), base.vocab_size, *base.encode("  b<extra_id_3>\n")]
    assert ours.decode(ids, skip_special_tokens=False) == text
    ours.export(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text).input_ids == theirs(f"a {text[1:]}").input_ids == ids
    assert load_tokenizer(tmp_path).fingerprint == ours.fingerprint


def test_a_sentencepiece_model_keeps_the_space_after_a_sentinel(folder):
    model = (folder / "spiece.model").read_bytes()
    ours = SentinelTokenizer(SentencePieceTokenizer(model))
    theirs = T5Tokenizer.from_pretrained(folder, extra_ids=100)
    text = f"{WORDS[0]}<extra_id_0> {WORDS[1]}<extra_id_1>"
    ids = ours.encode(text)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("options", [{"add_dummy_prefix": False}, {"model_type": "bpe"}])
def test_other_sentencepiece_models_with_sentinels_are_refused(options, tmp_path):
    """The class of transformers for T5 would give other ids."""
    model = train_sentencepiece([" ".join(WORDS)] * 9, vocab_size=60, **options)
    with pytest.raises(DataError, match=r"sentencepiece .*transformers"):
        SentinelTokenizer(SentencePieceTokenizer(model)).export(tmp_path)


@pytest.mark.parametrize("extra", [-1, "many"])
def test_damaged_numbers_of_sentinels_are_named(folder, tmp_path, extra):
    (tmp_path / "spiece.model").write_bytes((folder / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": extra})
    )
    with pytest.raises(DataError, match=rf"extra_ids .*{extra}"):
        load_tokenizer(tmp_path)
