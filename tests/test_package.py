"""`import flaxzoo`, `flaxzoo.models` and `python -m flaxzoo`."""

import subprocess
import sys

import flaxzoo
import pytest

from .api_reference import pages


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_importing_it_imports_nothing_heavy():
    code = "import flaxzoo, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    assert not {"jax", "flax", "numpy", "importlib_metadata"} & set(python("-c", code).split())


def test_the_packages_are_attributes():
    code = "import flaxzoo; print(flaxzoo.data.Tokenizer, flaxzoo.models.load, flaxzoo.train.train)"
    assert "load" in python("-c", code)
    assert set(flaxzoo.__all__) == set(dir(flaxzoo))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        flaxzoo.nothing  # noqa: B018


def test_the_module_is_the_command():
    assert python("-m", "flaxzoo", "--version") == f"flaxzoo {flaxzoo.__version__}\n"


@pytest.mark.parametrize("file", list(pages()), ids=lambda file: file.parent.name)
def test_the_reference_is_complete_and_up_to_date(file):
    text = file.read_text(encoding="utf-8")
    assert text == pages()[file], "run python tests/api_reference.py"
    names = getattr(flaxzoo, file.parent.name).__all__
    for name in names:
        _, found, rest = text.partition(f"\n## {name}\n\n```python\n")
        assert found, name
        described = rest.split("```\n\n", 1)[1].split("\n")[0]
        assert len(described.split()) >= 3, f"{name} has no useful docstring: {described!r}"
        assert not described.startswith(f"{name}("), f"{name} has no docstring of its own"
    assert "/opt/" not in text
    assert "/home/" not in text
    assert " at 0x" not in text
