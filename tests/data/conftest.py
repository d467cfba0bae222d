import os
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine makes no test wrong.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


@pytest.fixture(scope="session")
def datasets() -> Path:
    """The shared real data sets; a test that needs them is skipped without."""
    folder = os.environ.get("FLAXZOO_DATASETS")
    if not folder:
        pytest.skip("FLAXZOO_DATASETS does not name the folder of the shared data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def prose() -> list[str]:
    """Some 60 kB of English: every CPython has it."""
    from flaxzoo.data import parse_source, read_documents

    documents = list(read_documents(parse_source("builtin:python-docs")))
    return sorted(documents, key=len)[:60]


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.?-'"
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """WordPiece of letters, of which a word's first is one piece and each other another."""
    from flaxzoo.data import load_tokenizer

    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join([*MARKS, *LETTERS, *(f"##{c}" for c in LETTERS)]) + "\n")
    return load_tokenizer(path)


@pytest.fixture
def data_of_file(tmp_path):
    """`data_of_file(kind, source, text, **fields)`: data of a file of this text.

    The source is as on the command line, `tsv:a.tsv#1,2`; the file is in the test's folder.
    """
    from flaxzoo.data import TokenizerConfig

    def make(kind, source, text, **fields):
        form, name = source.split(":")
        (tmp_path / name.partition("#")[0]).write_text(text)
        fields = {"validation_fraction": 0.0, **fields}
        return kind(source=f"{form}:{tmp_path}/{name}", tokenizer=TokenizerConfig(), **fields)

    return make


@pytest.fixture(scope="session")
def train():
    """`train(data, tokenizer)`: the split to train on."""
    return lambda data, tokenizer: data.train_split(tokenizer, data.labels(), 0)
