import ast
import subprocess
import sys
from pathlib import Path

import flaxzoo.data
import pytest

FOLDER = Path(flaxzoo.data.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
FORBIDDEN = {"jax", "flax", "optax", "orbax", "flaxzoo", "tensorflow", "torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_data_stands_on_its_own(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 or node.level == 0, "imports from outside data/"
            assert node.level == 1 or (node.module or "").split(".")[0] not in FORBIDDEN


def test_import_is_light_and_every_name_is_there():
    code = (
        "import sys, flaxzoo.data as d, flaxzoo.data.tokenizer_training;"
        "heavy = {'jax', 'grain', 'tensorflow_datasets', 'tokenizers', 'sentencepiece', 'numpy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "assert all(getattr(d, name) is not None for name in d.__all__);"
        "assert d.packing.first_fit and 'load_tokenizer' in dir(d)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        flaxzoo.data.nothing  # noqa: B018
