import subprocess
import sys

import flaxzoo.data
import pytest


def test_import_is_light_and_every_name_is_there():
    code = (
        "import sys, flaxzoo.data as d, flaxzoo.data.tokenizers.training;"
        "heavy = {'jax', 'grain', 'tensorflow_datasets', 'tokenizers', 'sentencepiece', 'numpy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "assert all(getattr(d, name) is not None for name in d.__all__);"
        "assert 'load_tokenizer' in dir(d)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    with pytest.raises(AttributeError, match="'nothing'"):
        flaxzoo.data.nothing  # noqa: B018
