"""Executes notebooks at their full size and stores their outputs.

`python docs/refresh_notebooks.py` refreshes all notebooks, which takes about an hour on two cores.
`… 05 07` refreshes only notebooks whose names begin with 05 or 07.
"""

import base64
import io
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

COLAB = Path(__file__).parents[1] / "colab"
SECONDS_FOR_A_CELL = 7200
CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
"""Matches terminal control sequences, which set colors or move the cursor."""
BAR = re.compile(r"━|^\s*$|TqdmWarning|from \.autonotebook import")
"""Matches lines of a progress bar, and tqdm's warning that it cannot draw bars in a notebook."""
CACHE = re.compile(r"/\S*/(?=hub/models--)")
"""Matches the path of the hub's download folder, which differs between machines."""


def refresh(path: Path) -> None:
    """Executes a notebook in an empty folder and stores the notebook with its outputs.

    Raises:
      CellExecutionError: A cell failed; the file is unchanged.
    """
    notebook = nbformat.read(path, 4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=SECONDS_FOR_A_CELL, resources=resources).execute()
    store(notebook, path)


def store(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Writes an executed notebook without the parts that differ from one execution to the next."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = list(_without_bars(cell.outputs))
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = _with_palette(output.data["image/png"])
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)


def _with_palette(picture: str) -> str:
    """Returns the PNG, in base64, with at most 256 colors, which needs a third of the bytes."""
    image, small = Image.open(io.BytesIO(base64.b64decode(picture))), io.BytesIO()
    if image.mode == "P":
        return picture
    few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def _without_bars(outputs: list[nbformat.NotebookNode]) -> Iterator[nbformat.NotebookNode]:
    """Yields outputs without progress bars and colors, with the text of each stream joined."""
    for name, group in itertools.groupby(outputs, lambda one: one.get("name")):
        if name is None:
            yield from group
            continue
        text = CACHE.sub("…/", CONTROL.sub("", "".join(one.text for one in group)))
        lines = (line.rpartition("\r")[2] for line in text.split("\n"))
        kept = "\n".join(line for line in lines if not BAR.search(line))
        if kept:
            yield nbformat.v4.new_output("stream", name=name, text=f"{kept}\n")


def main() -> None:
    """Refreshes the notebooks whose names begin with an argument, or all notebooks."""
    prefixes = tuple(sys.argv[1:]) or ("",)
    for path in sorted(COLAB.glob("*.ipynb")):
        if path.name.startswith(prefixes):
            started = time.monotonic()
            refresh(path)
            print(f"{path.name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
