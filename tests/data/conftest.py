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
