import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.util import run_sync

NOTEBOOKS = sorted((Path(__file__).parents[2] / "colab").glob("*.ipynb"))
INSTALL = """\
import importlib.util

# Before a release: "git+https://github.com/flaxzoo/flaxzoo"; for a GPU: "flaxzoo[cuda]".
FLAXZOO = "flaxzoo"
if importlib.util.find_spec("flaxzoo") is None:
    %pip install -q {FLAXZOO}"""
"""The first code cell of every notebook."""
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the kernels and of what they write."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def specification(folder, flaxzoo_cache):
    """The name of a kernel of this interpreter, whatever else is installed as python3."""
    environment = {
        "FLAXZOO_CACHE": str(flaxzoo_cache),
        "JAX_PLATFORMS": "cpu",
        # One device, as readers have; the tests' own process has eight.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "IPYTHONDIR": str(folder / "ipython"),
        "TMPDIR": str(folder),
    }
    arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernels = folder / "jupyter" / "kernels" / "flaxzoo-tests"
    kernels.mkdir(parents=True)
    specification = {"argv": arguments, "display_name": "", "env": environment}
    (kernels / "kernel.json").write_text(json.dumps(specification))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        yield kernels.name


@pytest.fixture(scope="module")
def shared(specification):
    """A kernel for several notebooks: to import everything takes a third of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAXZOO_NOTEBOOK_TEST", "1")
        manager = AsyncKernelManager(kernel_name=specification)
        run_sync(manager.start_kernel)()
    yield manager
    run_sync(manager.shutdown_kernel)(now=True)


FRESH = """
%reset -f
import gc, os, sys
gc.set_threshold(100_000, 50, 100)  # as in conftest.py
if "jax" in sys.modules:
    sys.modules["jax"].config.update("jax_default_matmul_precision", None)
if "matplotlib" in sys.modules:
    sys.modules["matplotlib"].rcdefaults()
    sys.modules["matplotlib.pyplot"].close("all")
os.chdir({folder!r})
del gc, os, sys
"""
"""Undoes in a kernel what earlier notebooks set."""


def test_numbers_are_consecutive():
    assert NOTEBOOKS
    assert [int(path.name[:2]) for path in NOTEBOOKS] == [*range(1, len(NOTEBOOKS) + 1)]


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
    assert re.search(r"^## Exercises\n\n1\. .+\n2\. .+\n3\. .+\Z", notebook.cells[-1].source, re.M)
    install, *others = code_cells(notebook)
    assert install.source == INSTALL
    assert not any("pip install" in cell.source for cell in others)
    assert max(len(cell.source.splitlines()) for cell in code_cells(notebook)) <= 25


@EACH
def test_stored_outputs(path):
    """All cells were executed once, in order; each picture has a text for who cannot see it."""
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    drawn = [
        cell for cell in cells if any("image/png" in one.get("data", {}) for one in cell.outputs)
    ]
    assert len(drawn) >= 5
    for cell in drawn:
        assert cell.metadata.mystnb.image.alt.endswith(".")


def run(path, folder, timeout, **kernel):
    """Executes all cells of a notebook in a folder; a cell may take `timeout` seconds."""
    notebook = read(path)
    if "km" in kernel:
        fresh = FRESH.format(folder=str(folder))
        notebook.cells.insert(0, nbformat.v4.new_code_cell(fresh))
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=timeout, resources=resources, **kernel)
    client.execute()  # raises the first error of a cell
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert all(cell.execution_count for cell in code_cells(notebook))
    assert not any(output.output_type == "error" for output in outputs)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 5
    assert all(len(picture.data["image/png"]) < 200_000 for picture in pictures)
    if client.kc is not None:  # the client of a shared kernel
        client.kc.stop_channels()


@EACH
@pytest.mark.slow
def test_runs(path, request, tmp_path, monkeypatch):
    monkeypatch.setenv("FLAXZOO_NOTEBOOK_TEST", "1")
    # Devices are chosen before jax is imported. Results of torch vary with earlier notebooks.
    if re.search("device_count|import torch", path.read_text(encoding="utf-8")):
        kernel = {"kernel_name": request.getfixturevalue("specification")}
    else:
        kernel = {"km": request.getfixturevalue("shared")}
    run(path, tmp_path, timeout=600, **kernel)


@EACH
@pytest.mark.full_size
def test_runs_at_its_full_size(path, specification, tmp_path, monkeypatch):
    for name in ("FLAXZOO_NOTEBOOK_TEST", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.delenv(name, raising=False)
    run(path, tmp_path, timeout=7200, kernel_name=specification)
