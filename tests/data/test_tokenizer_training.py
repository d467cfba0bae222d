import os
import subprocess
import sys

import pytest
from flaxzoo.data import DataError, TokenizerConfig, train_tokenizer

TRAIN = """
import sys
from flaxzoo.data import TokenizerConfig, parse_source, read_documents, train_tokenizer
texts = sorted(read_documents(parse_source("builtin:python-docs")), key=len)[:60]
for kind in ("byte-bpe", "sentencepiece-unigram", "sentencepiece-bpe", "characters"):
    size = None if kind == "characters" else 600
    train_tokenizer(texts, TokenizerConfig(kind, size)).save(sys.argv[1] + "/" + kind)
"""


def test_training_is_deterministic_across_processes(tmp_path):
    saved = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        env = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        subprocess.run([sys.executable, "-c", TRAIN, str(folder)], check=True, env=env)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        saved.append({path.relative_to(folder): path.read_bytes() for path in files})
    assert len(saved[0]) == 5
    assert saved[0] == saved[1]


@pytest.mark.parametrize("kind", ["byte-bpe", "sentencepiece-unigram", "sentencepiece-bpe"])
def test_vocabulary_size_that_does_not_fit(kind):
    texts = ["the cat sat on the mat", "a cat\na hat"]
    with pytest.raises(DataError, match=r"vocabulary of 5000 tokens.* it fills \d+;") as caught:
        train_tokenizer(texts, TokenizerConfig(kind, 5000))
    possible = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert train_tokenizer(texts, TokenizerConfig(kind, possible)).vocab_size == possible
    with pytest.raises(DataError, match=r"100 tokens is too small.* at least 2"):
        train_tokenizer(texts, TokenizerConfig(kind, 100))
    with pytest.raises(DataError, match="needs a vocabulary size"):
        train_tokenizer(texts, TokenizerConfig(kind))
    with pytest.raises(DataError, match="no text"):
        train_tokenizer([], TokenizerConfig(kind, 300))


def test_characters_take_no_size():
    with pytest.raises(DataError, match="vocab_size 10 was given"):
        train_tokenizer(["abc"], TokenizerConfig("characters", 10))
    with pytest.raises(DataError, match="no text"):
        train_tokenizer([], TokenizerConfig("characters"))


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
