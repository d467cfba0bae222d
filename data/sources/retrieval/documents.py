"""Reads the documents of a search index, with identifiers that say where each document is from."""

from pathlib import Path

from ...common.errors import DataError
from ...common.fields import require
from ...common.files import read_lines
from ..labelled_records import are_json_lines
from ..read_documents import documents_in
from ..source_names import input_files
from .collection import CORPUS, files_of, read_texts


def read_named_texts(name: str) -> dict[str, str]:
    """Reads the documents that a search index will contain.

    Args:
      name: One of the following: a text file with one document per line; a file of JSON lines with
        ``text``, and optionally ``_id`` and ``title``; a folder with ``corpus.jsonl``; any other
        folder of text files with one document per paragraph (blank lines separate paragraphs); or a
        text source such as ``text:book.txt#block`` or ``builtin:python-docs``.

    Returns:
      The text of each document, by its identifier, without blank documents. The identifier is
      ``_id``. If there is none, it is the index of the document in its file, from 1. In a folder or
      a source, the name of the file precedes the index.

    Raises:
      DataError: A file is missing or malformed, or all texts are blank.
    """
    path = Path(name).expanduser()
    corpora = list(filter(Path.is_file, files_of(path, CORPUS)))
    if corpora:
        texts = read_texts(corpora[0])
    elif path.is_file() and are_json_lines(name):
        texts = read_texts(path, numbered=True)
    elif path.is_file():
        texts = {str(i): line for i, line in enumerate(read_lines(name), start=1)}
    else:
        texts = _of_source(f"text:{path}/**/*#block" if path.is_dir() else name, path)
    found = {id: text for id, text in texts.items() if text.strip()}
    require(found, f"{name!r} has no text: give a file or a folder of texts", DataError)
    return found


def _of_source(name: str, folder: Path) -> dict[str, str]:
    """Reads a source of documents. Identifiers contain paths relative to the folder."""
    return {
        f"{source.location.removeprefix(f'{folder.resolve()}/')}:{i}": text
        for source in input_files(name)
        for i, text in enumerate(documents_in(source), start=1)
    }
