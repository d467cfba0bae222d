"""Draws the terminal output of `flaxzoo train quickstart` as `docs/static/quickstart.svg`.

`python docs/draw_terminal.py` trains for about three minutes on two cores.
"""

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ("train", "quickstart")
PICTURE = Path(__file__).parent / "static" / "quickstart.svg"
COLUMNS = 100
REDRAWN = re.compile(r".*(?:\r|\x1b\[2K)")
"""Matches the part of a line that later output overwrites in a terminal."""
CURSOR = re.compile(r"\x1b\[(?:\?25[lh]|\d*A)")
# The default template of Rich loads a font from the web, but pictures in a page cannot load fonts.
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<!-- python docs/draw_terminal.py -->
<style>
.{unique_id}-matrix {{ font: {char_height}px Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def record(arguments: tuple[str, ...], folder: str) -> str:
    """Returns the terminal output of a command, including control sequences.

    Raises:
      RuntimeError: The command failed.
    """
    printed = bytearray()

    def read(descriptor: int) -> bytes:
        part = os.read(descriptor, 4096)
        printed.extend(part)
        return part

    os.chdir(folder)
    os.environ.update(COLUMNS=str(COLUMNS), LINES="40", TERM="xterm-256color")
    if status := pty.spawn([sys.executable, "-m", "flaxzoo", *arguments], read):
        raise RuntimeError(f"{arguments} must succeed, got status {status}")
    return printed.decode()


def draw(printed: str, title: str) -> str:
    """Returns the printed lines as SVG, with each progress bar in its last state."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    console.print(f"$ {title}", style="bold", highlight=False)
    for line in printed.split("\n"):
        if kept := REDRAWN.sub("", CURSOR.sub("", line.rstrip("\r"))):
            console.print(Text.from_ansi(kept), highlight=False)
    return console.export_svg(title=title, code_format=SVG, unique_id="terminal")


def main() -> None:
    """Trains a model in an empty folder and writes the picture."""
    with tempfile.TemporaryDirectory() as folder:
        printed = record((*COMMAND, *sys.argv[1:]), folder)
    PICTURE.write_text(draw(printed, " ".join(("flaxzoo", *COMMAND))), encoding="utf-8")


if __name__ == "__main__":
    main()
