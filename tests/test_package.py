"""`import flaxzoo`, `flaxzoo.models` and `python -m flaxzoo`."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import flaxzoo
import pytest

FOLDERS = ("models", "data", "train", "tests", "colab")


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


@pytest.mark.parametrize("package", ["models", "data", "train"])
def test_every_public_name_has_a_docstring(package):
    module = getattr(flaxzoo, package)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            docstring = inspect.getdoc(value) or ""
            assert len(docstring.split("\n")[0].split()) >= 3, f"{package}.{name}"
            assert not docstring.startswith(f"{name}("), f"{package}.{name}"


def test_every_file_of_the_table_where_is_exists():
    root = Path(__file__).parents[1]
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where is")[2].partition("\n## ")[0]
    files = re.findall(r"`([^`]+\.py)`", table)
    assert len(files) >= 25
    assert [file for file in files if not (root / file).is_file()] == []


def test_the_readme_and_the_install_page_list_every_extra():
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for page in ("README.md", "docs/start/install.md"):
        text = (root / page).read_text(encoding="utf-8")
        assert [x for x in extras["optional-dependencies"] if f"`{x}`" not in text] == [], page


@pytest.mark.parametrize("guide", ["README.md", *(f"{x}/README.md" for x in FOLDERS)])
def test_guides_are_short(guide):
    lines = (Path(__file__).parents[1] / guide).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (60 if "/" in guide else 140)
