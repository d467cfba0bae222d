import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "colab").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def kernel(tmp_path, monkeypatch, flaxzoo_cache):
    """A kernel of this interpreter, whatever else is installed as python3; answers its name."""
    environment = {
        "FLAXZOO_CACHE": str(flaxzoo_cache),
        "JAX_PLATFORMS": "cpu",
        # One device, as readers have; the tests' own process has eight.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "TMPDIR": str(tmp_path),
    }
    arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    folder = tmp_path / "jupyter" / "kernels" / "flaxzoo-tests"
    folder.mkdir(parents=True)
    specification = {"argv": arguments, "display_name": "", "env": environment}
    (folder / "kernel.json").write_text(json.dumps(specification))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    return folder.name


def test_there_is_a_notebook():
    assert NOTEBOOKS


@EACH
def test_form(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert len(notebook.cells) < 25
    assert path.stat().st_size < 300_000
    opening = notebook.cells[0]
    assert opening.cell_type == "markdown"
    assert opening.source.startswith("# ")
    assert f"colab.research.google.com/github/flaxzoo/flaxzoo/blob/main/colab/{path.name}" in (
        opening.source
    )
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert re.search(r"^## Exercises\n\n1\. .+\n2\. .+\n3\. .+\Z", notebook.cells[-1].source, re.M)
    install, *others = code_cells(notebook)
    assert 'FLAXZOO = "flaxzoo"' in install.source
    assert install.source.splitlines()[-1].strip() == "%pip install -q {FLAXZOO}"
    assert not any("pip install" in cell.source for cell in others)
    assert max(len(cell.source.splitlines()) for cell in code_cells(notebook)) <= 25


def run(path, kernel, folder, timeout):
    """Executes all cells of a notebook in a folder; a cell may take `timeout` seconds."""
    notebook = read(path)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name=kernel,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()  # raises the first error of a cell
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert all(cell.execution_count for cell in code_cells(notebook))
    assert not any(output.output_type == "error" for output in outputs)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 5
    assert all(len(picture.data["image/png"]) < 200_000 for picture in pictures)


@EACH
@pytest.mark.slow
def test_runs(path, kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("FLAXZOO_NOTEBOOK_TEST", "1")
    run(path, kernel, tmp_path, timeout=600)


@EACH
@pytest.mark.full_size
def test_runs_at_its_full_size(path, kernel, tmp_path, monkeypatch):
    for name in ("FLAXZOO_NOTEBOOK_TEST", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.delenv(name, raising=False)
    run(path, kernel, tmp_path, timeout=7200)
