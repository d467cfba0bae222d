"""A table of a guide that tests measure again: each test checks, or writes, its own row."""

import math
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITE = "FLAXZOO_WRITE_TABLES"
"""The environment variable under which rows are written rather than checked."""


def rows_of(page, heading):
    """The cells of each row of the table with this first heading, by the first cell."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[name] = cells
    return found


def check_row(page, heading, name, measured):
    """Checks that each difference is at most the stated power of ten; None where there is none.

    With the environment variable `FLAXZOO_WRITE_TABLES` the row is written instead, with room for
    the rounding of other machines: equal results of one machine may differ on another.
    """
    cells = ["" if x is None else f"1e{math.ceil(math.log10(max(4 * x, 1e-6)))}" for x in measured]
    if WRITE in os.environ:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        row = f"| {name} | {' | '.join(cells)} |"
        new, found = re.subn(rf"^\| {re.escape(name)} \|.*$", row, text, flags=re.MULTILINE)
        assert found == 1, f"{page} needs a row for {name}"
        path.write_text(new, encoding="utf-8")
        return
    stated = rows_of(page, heading)[name]
    assert len(stated) == len(measured)
    for cell, x in zip(stated, measured, strict=True):
        assert (cell == "") == (x is None)
        assert x is None or x <= float(cell)
