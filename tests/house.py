"""Print the figures of the repository beside the goals for its layout, names and wording.

    python tests/house.py [--root DIR] [--verbose | --json | --rooms]

All figures except the last are read from the source, which is not imported. The last one is
measured: a child process trains a tiny BERT and records the files whose functions are called.
`--rooms` prints counts for each folder, to find where a figure comes from. The tables below also
hold the names of the former flat layout (`tag`, `span`, `pipeline.py`), so that the same script
measures both.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import TypeGuard

PACKAGES = ("models", "data", "train")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A row of the table; `today` is None where there is nothing to measure yet."""

    name: str
    goal: float
    """The largest value allowed."""
    today: float | None
    note: str = ""
    places: tuple[str, ...] = ()
    """The locations of the counted items."""


@dataclasses.dataclass(frozen=True)
class Addition:
    """A representative of something that users add, such as one head, and its names in the code.

    Attributes:
        strings: Pattern of its names in strings without blanks (a key, a parameter path).
        identifiers: Pattern of its identifiers, searched for in those strings too.
        packages: The packages to search.
        own: Files written for the addition and files with its record or recipe, which are not
            counted; `*` also matches slashes.
    """

    strings: str
    identifiers: str
    packages: tuple[str, ...]
    own: tuple[str, ...]


FAMILY = Addition(r"(?i:[\w-]*gemma3[\w-]*)", r"(?i:\w*gemma3\w*)", PACKAGES, ("*/gemma3.py",))
FAMILY_LISTS = ("models/families.py", "models/registry.py", "models/__init__.py")
"""The first of these that names the family is the list of families, and is not counted."""

# In the nested layout a kind of data and its head share a name; `models/` knows only heads.
OBJECTIVE = Addition(
    "tag|token_classification",
    "TAGGING|TokenClassificationData|TOKEN_CLASSIFICATION|TokenClassificationData",
    ("data", "train"),
    ("*/tagging.py", "*/token_*.py", "train/*objectives.py", "train/*recipes*"),
)
HEAD = Addition(
    "span|question_answering",
    "(Span|QuestionAnswering)(Head|Output)",
    ("models", "train"),
    ("train/*question_answering.py", "train/*recipes*"),
)

BATCHING_FILES = ("pipeline.py", "batching.py")
"""The path of a batch begins at the first call of `__next__` in one of these files."""
MODEL_FILE = "models/encoders/bert.py"
STEP_FILE = "train/engine/train_step.py"
COMPILE_FILE = "train/engine/compile.py"
LOOP_FILE = "train/engine/loop.py"
"""The path ends when a function of `COMPILE_FILE` that was given the batch returns to the loop."""
OTHER_THREADS = ("run lock",)
"""Threads that touch no batch; whether they run meanwhile is a matter of time."""
TINY_RUN = (
    "--steps 2 --batch-size 4 --data.length 32 --data.validation-fraction 0.2 "
    "--data.tokenizer.vocab-size 64 --model.max-length 32 --model.num-layers 2 "
    "--model.d-model 16 --model.num-heads 2"
)
"""Flags that make `flaxzoo train bert-quickstart` cheap without changing the path of a batch."""

FRAGMENT = re.compile(r"\s*(Of|What|Those|That|Beside|Without|Whose|So)\b")
COMPOUND = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While),
    *(ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match),
)
FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python file; `path` is relative to the repository."""

    path: str
    text: str
    nodes: list[ast.AST]

    @property
    def room(self) -> str:
        """The folder of the file."""
        return self.path.rpartition("/")[0]

    def names(self) -> Iterator[tuple[str, bool]]:
        """Yield identifiers (with False) and strings without blanks (with True), no docstrings."""
        docstrings = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        for node in self.nodes:
            is_string = isinstance(node, ast.Constant)
            if is_string and id(node) in docstrings:
                continue
            for _, value in ast.iter_fields(node):
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, str) and not re.search(r"\s", item):
                        yield item, is_string

    def has_to_name(self, addition: Addition) -> bool:
        """Return whether another such addition would require an edit of this file."""
        if not self.path.startswith(addition.packages) or self.belongs_to(addition):
            return False
        word = re.compile(rf"(?<![\w-])({addition.strings}|{addition.identifiers})(?![\w-])")
        return any(
            word.search(name) if is_string else re.fullmatch(addition.identifiers, name)
            for name, is_string in self.names()
        )

    def belongs_to(self, addition: Addition) -> bool:
        """Return whether this is one of the addition's own files."""
        return any(fnmatch(self.path, pattern) for pattern in addition.own)


def read_sources(root: Path) -> list[Source]:
    """Parse every file of the packages."""
    sources = []
    for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        sources.append(Source(name, text, list(ast.walk(ast.parse(text)))))
    return sources


def static_figures(root: Path) -> list[Figure]:
    """Compute the figures that are read from the source."""
    sources = read_sources(root)

    def naming(addition: Addition) -> list[str]:
        return [source.path for source in sources if source.has_to_name(addition)]

    def places(count: Callable[[ast.AST], int]) -> list[str]:
        return [
            f"{source.path}:{getattr(node, 'lineno', 1)}"
            for source in sources
            for node in source.nodes
            for _ in range(count(node))
        ]

    def counted(name: str, goal: float, found: list[str]) -> Figure:
        return Figure(name, goal, len(found), places=tuple(found))

    modules = Counter(source.room for source in sources)
    ((largest, num_modules),) = modules.most_common(1)
    total = Counts.of(sources)
    readme = (root / "README.md").read_text(encoding="utf-8").splitlines()
    python = next((n for n, line in enumerate(readme, 1) if line.startswith("```python")), None)
    family = Figure("files to edit for a new family", 0, None, note="no Llama yet")
    if any(source.belongs_to(FAMILY) for source in sources):
        found = naming(FAMILY)
        listed = next((path for path in FAMILY_LISTS if path in found), None)
        found = tuple(path for path in found if path != listed)
        family = Figure(family.name, 0, len(found), f"not counting the list in {listed}", found)
    beside = f"in {largest}/"
    uses = f"{total.num_any} uses in {total.num_lines} lines, imports not counted"
    return [
        Figure("files side by side in one folder", 16, num_modules, beside),
        family,
        counted("files to edit for a new objective", 1, naming(OBJECTIVE)),
        counted("files to edit for a new head", 2, naming(HEAD)),
        Figure("`Any` per 1,000 lines", 6, total.any_rate, uses),
        Figure("% of functions with two statements or fewer", 35, total.short_share),
        counted("tuple literals unpacked into a call", 0, places(num_unpacked)),
        counted("functions with over four positional parameters", 0, places(is_positional)),
        counted("docstrings that open with a fragment", 0, places(is_fragment)),
        Figure("README: lines", 160, len(readme)),
        Figure("README: line of the first Python block", 60, python),
    ]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts over some files: how loosely they are typed, how finely they are split."""

    num_any: int
    num_lines: int
    num_short: int
    num_functions: int
    num_positional: int
    num_fragments: int

    @classmethod
    def of(cls, sources: Sequence[Source]) -> "Counts":
        """Count in the given files."""
        nodes = [node for source in sources for node in source.nodes]
        functions = [node for node in nodes if is_function(node)]
        return cls(
            num_any=sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
            num_lines=sum(source.text.count("\n") for source in sources),
            num_short=sum(num_statements(function) <= 2 for function in functions),
            num_functions=len(functions),
            num_positional=sum(is_positional(function) for function in functions),
            num_fragments=sum(is_fragment(node) for node in nodes),
        )

    @property
    def any_rate(self) -> float:
        """The uses of `Any` per 1,000 lines."""
        return round(1000 * self.num_any / max(1, self.num_lines), 1)

    @property
    def short_share(self) -> float:
        """The percentage of functions with two statements or fewer."""
        return round(100 * self.num_short / max(1, self.num_functions), 1)


def print_rooms(root: Path) -> None:
    """Print the counts of every room: uses of `Any`, short functions, and what must be 0."""
    sources = read_sources(root)
    rooms = {room: [s for s in sources if s.room == room] for room in {s.room for s in sources}}
    print(f"{'':<22}  Any  /1,000  short    of     %  >4 args  fragments")
    for room, files in [*sorted(rooms.items()), ("total", sources)]:
        counts = Counts.of(files)
        print(
            f"{room:<22}{counts.num_any:>5}{counts.any_rate:>8}{counts.num_short:>7}"
            f"{counts.num_functions:>6}{counts.short_share:>6.0f}"
            f"{counts.num_positional:>9}{counts.num_fragments:>11}"
        )


def is_function(node: ast.AST) -> TypeGuard[FunctionDef]:
    """Return whether a node defines a function."""
    return isinstance(node, FunctionDef)


def num_statements(function: FunctionDef) -> int:
    """Count the statements of a function at any depth.

    Neither a docstring nor the header of a compound statement counts: `if x: return y` is one
    statement. A nested function counts as one statement plus those of its body. This definition
    reproduces the share for which the goal was set: 46 % at commit 3b1442f.
    """
    body = function.body[ast.get_docstring(function) is not None :]
    nodes = [node for statement in body for node in ast.walk(statement)]
    return sum(isinstance(node, ast.stmt) and not isinstance(node, COMPOUND) for node in nodes)


def num_unpacked(node: ast.AST) -> int:
    """Count the arguments of a call that are `*(a, b)` or `*[a, b]`."""
    arguments = node.args if isinstance(node, ast.Call) else []
    starred = [x.value for x in arguments if isinstance(x, ast.Starred)]
    return sum(isinstance(value, ast.Tuple | ast.List) for value in starred)


def is_positional(node: ast.AST) -> bool:
    """Return whether a function takes more than four arguments by position, not counting self."""
    if not is_function(node):
        return False
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"])) > 4


def is_fragment(node: ast.AST) -> bool:
    """Return whether a docstring (of an attribute too) opens with one of the `FRAGMENT` words."""
    value = node.value if isinstance(node, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else None
    return isinstance(text, str) and FRAGMENT.match(text) is not None


def path_figure(root: Path) -> Figure:
    """Count the files that a batch passes through in a child process that trains.

    Raises:
        RuntimeError: The child process ended before it updated a parameter.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        (folder / "flaxzoo").mkdir()
        for package in PACKAGES:
            (folder / "flaxzoo" / package).symlink_to(root / package)
        settings = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",  # one device, whatever the caller has
            "FLAXZOO_CACHE": scratch,
            "PYTHONPATH": scratch,
        }
        child = subprocess.run(
            [sys.executable, __file__, "--root", str(root), "--record", str(folder)],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
        )
        result = folder / "files.json"
        if not result.is_file():
            raise RuntimeError(
                f"no train step was recorded (exit {child.returncode}): adapt BATCHING_FILES, "
                f"MODEL_FILE, COMPILE_FILE or TINY_RUN\n{child.stdout}{child.stderr}"
            )
        files = tuple(json.loads(result.read_text()))
    name = "files from a batch to an updated parameter"
    return Figure(name, 14, len(files), places=files)


def train_and_record(root: Path, folder: Path) -> None:
    """Train until a parameter is updated, write `folder/files.json` and exit the process.

    A file is recorded if one of its functions is called, in any thread, while the step is traced
    (the call from the loop that reaches `STEP_FILE` and `MODEL_FILE`, maybe before the first
    batch), while the first batch is made, and from there until its step returns to the loop.
    Module and class bodies do not count, since they run at import. Generated methods of
    dataclasses belong to no file.
    """
    prefix = f"{folder}/flaxzoo/"
    files: set[str] = set()
    current: set[str] = set()
    traced: set[str] = set()
    outermost: FrameType | None = None  # a function of `COMPILE_FILE`

    def file_of(frame: FrameType | None) -> str | None:
        name = frame.f_code.co_filename if frame is not None else ""
        return name.removeprefix(prefix) if name.startswith(prefix) else None

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal outermost
        if (file := file_of(frame)) is None or threading.current_thread().name in OTHER_THREADS:
            return
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
            if outermost is None and file == COMPILE_FILE:
                outermost = frame
                current.clear()
            if outermost is not None:
                current.add(file)
            if files or (code.co_name == "__next__" and file.endswith(BATCHING_FILES)):
                files.add(file)
        elif event == "return" and frame is outermost:
            outermost = None
            if {MODEL_FILE, STEP_FILE} <= current:  # the last such call traces the step
                traced.clear()
                traced.update(current)
            if files and traced:
                found = sorted({*files, *traced, LOOP_FILE})
                (folder / "files.json").write_text(json.dumps(found))
                os._exit(0)

    text = folder / "text.txt"
    documents = ("\n".join(f"cat {i} saw dog {j} run" for j in range(8)) for i in range(20))
    text.write_text("\n\n".join(documents) + "\n")
    arguments = f"train bert-quickstart --workdir {folder}/run {TINY_RUN} --data.source"
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["flaxzoo"].partition(":")
    command = getattr(importlib.import_module(module), function)
    threading.setprofile(profile)
    sys.setprofile(profile)
    command([*arguments.split(), f"text:{text}#sentences"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--verbose", action="store_true", help="list what was counted")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # in the child process
    parser.add_argument("--rooms", action="store_true", help="print the counts of every folder")
    options = parser.parse_args()
    root = options.root.resolve()
    if options.record is not None:
        train_and_record(root, options.record)
        return
    if options.rooms:
        print_rooms(root)
        return
    figures = [*static_figures(root), path_figure(root)]
    if options.json:
        print(json.dumps([dataclasses.asdict(figure) for figure in figures], indent=2))
        return
    print(f"{'':<48}{'today':>8}{'goal':>8}")
    for figure in figures:
        today = "–" if figure.today is None else f"{figure.today:g}"
        print(f"{figure.name:<48}{today:>8}{figure.goal:>8g}  {figure.note}".rstrip())
        if options.verbose:
            print("".join(f"    {place}\n" for place in figure.places), end="")


if __name__ == "__main__":
    main()
