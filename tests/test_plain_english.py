"""Fewer than one sentence in 300 has a phrase that a reader must read twice.

CONTRIBUTING.md has the rules. A marker is a hint: a sentence that reads well may keep it.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = ("families", "notebooks", "api", "commands", "config")
"""Folders of `docs` whose pages repeat the texts of the code."""

MARKERS = re.compile(
    r"""
      ^(?:Of|What|Those|Beside|Whoever|Who|Whose|Without\ it|For\ it)\s+[a-z]  # a fragment
    | \b(?:is|are|was|were)\ no\ (?!longer|need|such|more|way|guarantee|reason)\w+
    | \b(?:those|these)\ of\b | \bbeside\b | \banew\b | \bat\ hand\b | \ba\ person\b
    | \b(?:an\ own|of\ (?:its|their|his|her)\ own)\b
    | \b(?:is|are|was|were|be|been)\ told\b | \bunasked\b | \btells?\ of\b | \b(?:is|are)\ to\ be\b
    | \bcomes?\ to\ (?:the|that|its)\ length\b | \bbecomes?\ whole\b | \bbut\ for\b
    | \b(?:by|in|of|to|for|with|from|over|at|on)\ which\b
    | \b(?:nobody\ (?:has|wants|waits|chose|opened|asked)|whoever)\b
    | \bone\ after\ (?:the\ other|another)\b | \bthe\ (?:least|greatest)\b
    | ,\s+(?:\w+\s+){1,3}included\b | \b(?:goes|go|went)\ on\b | \bas\ far\ as\b | ,\ too[.,;]
    | \b(?:stands|lies|lie)\b\ (?:in|on|at|below|above|for|there|here)\b
    """,
    re.VERBOSE,
)


def strings(node: ast.AST) -> str:
    """The constant parts of the strings below a node."""
    parts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return " ".join(part for part in parts if isinstance(part, str))


def texts_of_code(source: str) -> Iterator[str]:
    """Yields docstrings, comments and the messages of errors."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
            case ast.Raise(exc=ast.AST() as error):
                yield strings(error)
            case ast.Call(func=ast.Name(id=name)) if name.startswith("require"):
                yield strings(node)
    # Consecutive comments are one text.
    for block in re.findall(r"(?:^ *#.*\n)+", source, re.MULTILINE):
        yield re.sub(r"^ *# ?", "", block, flags=re.MULTILINE)


def texts_of_page(source: str) -> Iterator[str]:
    """Yields the paragraphs of a page, without code."""
    source = re.sub(r"```.*?```", "", source, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", source):
        yield re.sub(r"`[^`]*`|\[([^]]*)\]\([^)]*\)", r"\1", block)


def texts_of_notebook(source: str) -> Iterator[str]:
    """Yields the paragraphs of the text cells of a notebook."""
    for cell in json.loads(source)["cells"]:
        if cell["cell_type"] == "markdown":
            yield from texts_of_page("".join(cell["source"]))


TEXTS = {".py": texts_of_code, ".md": texts_of_page, ".ipynb": texts_of_notebook}
"""The ending of a file → the function that yields its texts."""


def sentences() -> Iterator[tuple[str, str]]:
    """Yields the file and the words of each sentence of at least three words."""
    code = (path for room in ("models", "data", "train") for path in (ROOT / room).rglob("*.py"))
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "colab").glob("*.ipynb")]
    for path in [*code, *pages]:
        name = path.relative_to(ROOT)
        if set(GENERATED) & set(name.parts) or name.name == "CHANGELOG.md":
            continue
        for text in TEXTS[path.suffix](path.read_text(encoding="utf-8")):
            for sentence in re.split(r"(?<=[.!?])\s+|\n\s*[-*|]\s+|\n\n", text):
                if len(sentence.split()) >= 3:
                    yield str(name), " ".join(sentence.split())


def test_few_sentences_must_be_read_twice():
    found = list(sentences())
    marked = [f"{name}: {sentence}" for name, sentence in found if MARKERS.search(sentence)]
    assert len(found) > 10_000
    assert len(marked) < len(found) / 300, "\n".join(marked)
