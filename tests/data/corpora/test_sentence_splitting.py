import itertools
import re

import numpy as np
import pytest
from flaxzoo.data import DataError, TokenizerConfig, load_documents, train_tokenizer
from flaxzoo.data.corpora.sentence_corpus import SentenceCorpus, build_sentence_corpus
from flaxzoo.data.corpora.sentence_splitting import lines_as_sentences, split_sentences
from hypothesis import given
from hypothesis import strategies as st

PROSE = """CHAPTER I

“Well, Prince, so Genoa and Lucca are now
family estates. But I warn you!” He left
at 5 p.m. with Mr. Smith.\r
\r
 It cost $3.5 million.  Why? \t
"""


def test_prose_is_split():
    assert split_sentences(PROSE) == [
        "CHAPTER I",
        "“Well, Prince, so Genoa and Lucca are now family estates. But I warn you!”",
        "He left at 5 p.m. with Mr. Smith.",
        "It cost $3.5 million.",
        "Why?",
    ]
    assert split_sentences("Ich sah z.B. dich. Und ihn.", "de") == [
        "Ich sah z.B. dich.",
        "Und ihn.",
    ]
    assert split_sentences(" \n\n") == []


def test_lines():
    text = "First one. Still first.\n  second\u2028still second \r\n\n\nthird"
    assert lines_as_sentences(text) == [
        "First one. Still first.",
        "second\u2028still second",
        "third",
    ]
    assert lines_as_sentences(" \n\n") == []


words = st.sampled_from(["Mr.", "I", "saw", "it.", "“No!”", "\n", "\n\n", " ", "漢字。", "…", "?"])


@pytest.mark.slow
@given(text=st.lists(words | st.text(max_size=5), max_size=40).map(" ".join))
def test_no_text_is_lost_and_blank_lines_end_sentences(text):
    for split in (lines_as_sentences, split_sentences):
        sentences = split(text)
        assert "".join("".join(sentences).split()) == "".join(text.split())
        assert all(sentence == sentence.strip() != "" for sentence in sentences)
    paragraphs = re.split(r"\n\s*\n", text)
    assert split_sentences(text) == [s for part in paragraphs for s in split_sentences(part)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four. five"], TokenizerConfig("wordpiece", 40))


@pytest.fixture
def load(tmp_path):
    def load(name, **files):
        for file, text in files.items():
            (tmp_path / file).write_text(text, encoding="utf-8")
        name = name.replace(":", f":{tmp_path}/")
        return load_documents(name, "train", validation_fraction=0, cache_dir=tmp_path / "cache")

    return load


def sentences_of(corpus, tokenizer):
    tokens = np.split(corpus.tokens, corpus.sentence_starts[1:-1])
    texts = [tokenizer.decode(ids.tolist()) for ids in tokens]
    starts = corpus.document_starts.tolist()
    return [texts[begin:end] for begin, end in itertools.pairwise(starts)]


def test_each_source_has_its_own_sentence_splitting(load, tokenizer, tmp_path):
    lines = "one. two\nthree\n\n\nfour\n \nfive"
    prose = "one two\nthree. Four\n\nfive"
    documents = load("text:lines#sentences + text:prose", lines=lines, prose=prose)
    corpus = build_sentence_corpus(documents, tokenizer, tmp_path / "cache")
    found = sentences_of(corpus, tokenizer)
    assert sorted(found[:3]) == [["five"], ["four"], ["one. two", "three"]]
    assert found[3:] == [["one two three.", "four", "five"]]
    assert (corpus.num_documents, corpus.num_sentences, corpus.num_single) == (4, 7, 2)
    assert len(corpus.tokens) == corpus.sentence_starts[-1]
    assert corpus.summary.startswith("4 documents (2 of one sentence), 7 sentences, ")


def test_empty_sentences_and_documents_vanish(load, tokenizer, tmp_path):
    nothing = "\u200b\u200e"  # format characters, which BERT's normalisation drops
    documents = load("text:a#sentences", a=f"one\n{nothing}\ntwo\n\n{nothing}\n\n{nothing}\nfive")
    corpus = build_sentence_corpus(documents, tokenizer, tmp_path / "cache")
    assert sorted(sentences_of(corpus, tokenizer)) == [["five"], ["one", "two"]]
    empty = load("text:b#sentences", b=f"{nothing}\n\n{nothing}\n")
    with pytest.raises(DataError, match=r"2 documents .*token"):
        build_sentence_corpus(empty, tokenizer, tmp_path / "cache")


def test_corpus_is_cached_by_contents(load, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("flaxzoo.data.corpora.token_corpus._CHUNK_CHARACTERS", 3)
    documents = load("text:a#sentences", a="one\ntwo\n\nthree\n\nfour")
    first = build_sentence_corpus(documents, tokenizer, tmp_path / "cache")
    again = build_sentence_corpus(documents, tokenizer, tmp_path / "cache")
    assert first == again == SentenceCorpus.open(first.folder)
    assert sorted(sentences_of(first, tokenizer)) == [["four"], ["one", "two"], ["three"]]
    other = build_sentence_corpus(documents, tokenizer, tmp_path / "cache", "de")
    assert other.fingerprint != first.fingerprint
    text = load("text:b", b="One. Two.")
    before = build_sentence_corpus(text, tokenizer, tmp_path / "cache").fingerprint
    monkeypatch.setattr("flaxzoo.data.corpora.sentence_splitting.version", lambda package: "99")
    assert build_sentence_corpus(text, tokenizer, tmp_path / "cache").fingerprint != before
    again = build_sentence_corpus(documents, tokenizer, tmp_path / "cache")
    assert again.fingerprint == first.fingerprint  # which no rule has split
    with pytest.raises(DataError, match="no corpus"):
        SentenceCorpus.open(tmp_path)


def test_vocabularies_with_spaces_in_tokens_get_spaces(load, tmp_path):
    tokenizer = train_tokenizer(["one two."], TokenizerConfig("byte-bpe", 258))
    documents = load("text:a#sentences", a="one\ntwo.\n\nthree")
    corpus = build_sentence_corpus(documents, tokenizer, tmp_path / "cache")
    assert sorted(sentences_of(corpus, tokenizer)) == [["one", " two."], ["three"]]


def test_real_prose(datasets, tmp_path):
    name = f"text:{datasets}/lm/war_and_peace.valid.txt.gz"
    documents = load_documents(name, "train", validation_fraction=0, cache_dir=tmp_path)
    sentences = split_sentences(documents[0])
    assert 1000 < len(sentences) < 1700
    assert all("\n" not in sentence for sentence in sentences)
    assert 60 < np.median([len(sentence) for sentence in sentences]) < 110
