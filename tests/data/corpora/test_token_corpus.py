from dataclasses import dataclass, field

import numpy as np
import pytest
from flaxzoo.data import (
    DataError,
    TokenizerConfig,
    build_corpus,
    open_corpus,
    train_tokenizer,
)
from flaxzoo.data.corpora import token_corpus


@dataclass
class Texts:
    texts: list[str]
    fingerprint: str = "texts"
    reads: list[int] = field(default_factory=list)

    def __iter__(self):
        self.reads.append(1)
        return iter(self.texts)


@pytest.fixture
def tokenizer():
    return train_tokenizer(["abcdé"], TokenizerConfig("characters"))


def test_documents_become_target_tokens(tokenizer, tmp_path):
    corpus = build_corpus(Texts(["ab", "c", "", "é"]), tokenizer, tmp_path)
    assert corpus.tokens.dtype == np.uint16
    assert isinstance(corpus.tokens.base, np.memmap)  # not read into memory
    assert corpus.tokens.tolist() == [0, 2, 3, 0, 0, 4, 0, 0, 0, 0, 6, 0]
    assert corpus.document_starts.tolist() == [0, 4, 7, 9]
    assert corpus.target_starts.tolist() == [0, 3, 5, 6]
    assert corpus.target_counts.tolist() == [3, 2, 1, 2]
    assert (corpus.num_targets, corpus.num_documents, corpus.num_bytes) == (8, 4, 5)
    assert corpus.vocab_size == 7
    assert corpus.num_unknown == (corpus.tokens == tokenizer.special_ids.unk).sum() == 0
    unknown = build_corpus(Texts(["abx", "yz"], "other texts"), tokenizer, tmp_path)
    assert unknown.num_unknown == 3


def test_documents_without_a_pair_are_dropped(tmp_path, tokenizer):
    from flaxzoo.data import SpecialIds

    tokenizer.special_ids = SpecialIds()  # neither bos nor eos
    corpus = build_corpus(Texts(["a", "bc", "", "abc"]), tokenizer, tmp_path)
    assert corpus.tokens.tolist() == [3, 4, 2, 3, 4]
    assert corpus.target_counts.tolist() == [1, 2]
    with pytest.raises(DataError, match=r"2 documents .*tokens"):
        build_corpus(Texts(["a", ""], "short"), tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [corpus.folder.name]


def test_large_vocabularies_need_32_bits(tmp_path, tokenizer):
    tokenizer.vocab_size = 65_537
    assert build_corpus(Texts(["ab"]), tokenizer, tmp_path).tokens.dtype == np.uint32


def test_corpus_is_cached_by_contents(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("flaxzoo.data.corpora.token_corpus._CHUNK_CHARACTERS", 3)
    texts = Texts(["ab", "cd", "é"])
    first = build_corpus(texts, tokenizer, tmp_path)
    again = build_corpus(texts, tokenizer, tmp_path)
    assert first == again == open_corpus(first.folder)
    assert len(texts.reads) == 1
    assert first.tokens.tolist() == [0, 2, 3, 0, 0, 4, 5, 0, 0, 6, 0], "of two chunks"
    other = build_corpus(Texts(["ab"], "other"), tokenizer, tmp_path)
    assert other.fingerprint != first.fingerprint
    with pytest.raises(DataError, match="no corpus"):
        open_corpus(tmp_path)


def test_a_line_of_progress_while_text_is_tokenized(monkeypatch, capfd):
    monkeypatch.setattr(token_corpus, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(token_corpus, "_CHUNK_CHARACTERS", 4)
    assert list(token_corpus.chunks(["abcd", "ef", "gh", "i"], len)) == [
        ["abcd"],
        ["ef", "gh"],
        ["i"],
    ]
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "3"]
