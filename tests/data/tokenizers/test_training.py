import os
import subprocess
import sys

import pytest
from flaxzoo.data import (
    DataError,
    SpecialIds,
    TokenizerConfig,
    load_tokenizer,
    train_tokenizer,
)

TRAIN = """
import sys
from flaxzoo.data import TokenizerConfig, parse_source, read_documents, train_tokenizer
texts = sorted(read_documents(parse_source("builtin:python-docs")), key=len)[:60]
for kind in ("byte-bpe", "wordpiece", "sentencepiece-unigram", "sentencepiece-bpe", "characters"):
    size = None if kind == "characters" else 600
    train_tokenizer(texts, TokenizerConfig(kind, size)).save(sys.argv[1] + "/" + kind)
"""


@pytest.mark.slow
def test_training_is_deterministic_across_processes(tmp_path):
    saved = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        env = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        subprocess.run([sys.executable, "-c", TRAIN, str(folder)], check=True, env=env)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        saved.append({path.relative_to(folder): path.read_bytes() for path in files})
    assert len(saved[0]) == 8
    assert saved[0] == saved[1]


KINDS = ["byte-bpe", "wordpiece", "sentencepiece-unigram", "sentencepiece-bpe", "words"]


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_do_not_fit_are_refused_with_a_size_that_does(kind):
    texts = ["the cat sat on the mat", "a cat\na hat"]
    with pytest.raises(DataError, match=r"5000 tokens.* \d+;") as caught:
        train_tokenizer(texts, TokenizerConfig(kind, 5000))
    possible = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert train_tokenizer(texts, TokenizerConfig(kind, possible)).vocab_size == possible
    with pytest.raises(DataError, match=rf"{kind} .* 5 tokens.* \d+$"):
        train_tokenizer(texts, TokenizerConfig(kind, 5))


@pytest.mark.parametrize("kind", [*KINDS, "characters"])
@pytest.mark.parametrize("texts", [[], ["  "]])
def test_texts_that_are_empty_are_refused(kind, texts):
    size = None if kind == "characters" else 300
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(texts, TokenizerConfig(kind, size))


@pytest.mark.parametrize(
    ("kind", "size"),
    [*((kind, None) for kind in KINDS if kind != "words"), ("characters", 10)],
)
def test_a_size_is_given_for_the_kinds_that_have_one(kind, size):
    with pytest.raises(DataError, match="vocab_size"):
        train_tokenizer(["abc"], TokenizerConfig(kind, size))


def test_wordpiece_vocabulary(prose):
    tokenizer = train_tokenizer(prose, TokenizerConfig("wordpiece", 500))
    assert tokenizer.kind == "wordpiece"
    assert tokenizer.vocab_size == 500
    assert tokenizer.special_ids == SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    pieces = [tokenizer.token(id) for id in range(500)]
    assert pieces[:6] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "!"]
    assert len(set(pieces)) == 500
    ids = tokenizer.encode("The Parsing [MASK]")
    assert (ids[0], ids[-1]) == (2, 3)
    assert 4 not in ids
    assert 1 not in [id for text in prose for id in tokenizer.encode(text)]
    assert tokenizer.decode(ids) == "the parsing [ mask ]"
    assert tokenizer.encode("THÉ") == tokenizer.encode("the")
    assert train_tokenizer(prose[::-1], TokenizerConfig("wordpiece", 500)).fingerprint == (
        tokenizer.fingerprint
    )


def test_cased_wordpiece_keeps_case_and_accents(tmp_path):
    config = TokenizerConfig("wordpiece", 20, lowercase=False)
    tokenizer = train_tokenizer(iter(["Émile Émile Émile emile"]), config)
    assert tokenizer.decode(tokenizer.encode("Émile emile")) == "Émile emile"
    assert len(tokenizer.encode("Émile", add_special_tokens=False)) == 1
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_rare_characters_are_left_out(monkeypatch):
    monkeypatch.setattr("flaxzoo.data.tokenizers.training._MAX_ALPHABET", 3)
    tokenizer = train_tokenizer(["aab abc abd caz"], TokenizerConfig("wordpiece", 12))
    assert [tokenizer.token(id) for id in range(5, 11)] == ["a", "b", "c", "##a", "##b", "##c"]
    assert tokenizer.encode("abz", add_special_tokens=False) == [1]


def test_existing_tokenizer_instead_of_training(tmp_path):
    tokenizer = train_tokenizer(["abc"], TokenizerConfig("characters"))
    tokenizer.save(tmp_path)
    loaded = train_tokenizer([], TokenizerConfig(path=str(tmp_path)))
    assert loaded.fingerprint == tokenizer.fingerprint


def test_long_lines_are_learnt(tmp_path):
    # Sentencepiece leaves out long lines: 150,000 characters without a line feed.
    text = "sailor went " * 12_500
    tokenizer = train_tokenizer([text], TokenizerConfig("sentencepiece-bpe", 285))
    assert len(tokenizer.encode("sailor went ")) < 4


def test_words():
    """Whole words by frequency; a form of a word that was not seen is unknown."""
    texts = ["Walk, walks and walking.", "They walk: walk!"]
    tokenizer = train_tokenizer(texts, TokenizerConfig("words"))
    assert tokenizer.kind == "words"
    pieces = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    assert pieces[:6] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "walk"]
    assert pieces[6:] == ["!", ",", ".", ":", "and", "they", "walking", "walks"]
    assert tokenizer.encode("WALK, walks, walked, walking", add_special_tokens=False) == [
        *(5, 7, 13, 7, 1, 7, 12)
    ]
    assert tokenizer.encode("walk [MASK]")[:2] == [2, 5]
    assert 4 not in tokenizer.encode("walk [MASK]")
    assert tokenizer.decode(tokenizer.encode("They walk, walking.")) == "they walk, walking."
    ids, offsets = tokenizer.encode_with_offsets("They walk", add_special_tokens=False)
    assert (ids, offsets) == ([11, 5], [(0, 4), (5, 9)])


def test_words_of_a_size_and_with_case(tmp_path):
    texts = ["b a C b", "c"]
    cased = train_tokenizer(texts, TokenizerConfig("words", lowercase=False))
    assert [cased.token(i) for i in range(5, cased.vocab_size)] == ["b", "C", "a", "c"]
    small = train_tokenizer(texts, TokenizerConfig("words", 7))
    assert [small.token(i) for i in range(5, 7)] == ["b", "c"]
    small.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.kind, loaded.fingerprint) == ("words", small.fingerprint)
    assert loaded.special_ids == SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
