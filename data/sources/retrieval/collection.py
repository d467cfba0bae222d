"""Reads collections for retrieval, and stores them in folders in the BEIR format.

=======================  ==========================================================
``beir:FOLDER``          ``corpus.jsonl`` (``_id``, ``title``, ``text``), ``queries.jsonl``
                         (``_id``, ``text``), ``qrels/test.tsv`` (query, document, relevance)
``beir:FOLDER#dev``      the same with ``qrels/dev.tsv``
``squad:GLOB``           the passages and questions of files in the SQuAD format; the passage of a
                         question is its relevant document
=======================  ==========================================================

Thakur et al. 2021, "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of Information
Retrieval Models".
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...common.atomic_io import new_folder
from ...common.errors import DataError, counted
from ...common.fields import require
from ...common.files import file_lines
from ...common.json_lines import parse_lines, pick, picked
from ...common.json_text import to_json
from ..labelled_names import LabelledSource
from ..source_names import parse_name
from ..squad import read_questions

CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"
FORMS = {"beir": "beir:FOLDER", "squad": "squad:GLOB"}


@dataclass(frozen=True)
class RetrievalData:
    """Documents, queries, and the relevant documents of each query.

    Attributes:
      documents: The text of each document, by its identifier.
      queries: The text of each query that has a relevant document, by its identifier.
      relevant: For the identifier of each query, a dict from the identifiers of its relevant
        documents to their relevance, which is above 0. A relevant document that is not in
        ``documents`` is never found.
      notes: Lines that describe what was left out.

    Raises:
      DataError: ``documents`` or ``queries`` is empty, or a query has no relevant document.
    """

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    relevant: Mapping[str, Mapping[str, float | int]]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks that the collection has documents, and that every query can be evaluated."""
        sizes = len(self.documents), len(self.queries)
        problem = "a collection must have documents and queries, got {} and {}: give both"
        require(all(sizes), problem.format(*sizes), DataError)
        for id in self.queries:
            positive = any(x > 0 for x in self.relevant.get(id, {}).values())
            problem = (
                f"query {id!r} has no relevant document: leave the query out, or add a document"
            )
            require(positive, problem, DataError)

    @property
    def summary(self) -> str:
        """A line with the numbers of documents, queries and relevant pairs."""
        pairs = sum(len(self.relevant[id]) for id in self.queries)
        sizes = counted(len(self.documents), "document"), f"{len(self.queries):,} queries"
        return f"{', '.join(sizes)}, {counted(pairs, 'relevant pair')}"

    def save(self, folder: str | Path) -> None:
        """Writes the collection to a folder in the BEIR format.

        Args:
          folder: The folder, which must be empty or not exist.

        Raises:
          DataError: The folder is not empty, or cannot be written.
        """
        texts = {CORPUS: self.documents, QUERIES: self.queries}
        judged = [
            f"{query}\t{document}\t{relevance:g}"
            for query in self.queries
            for document, relevance in self.relevant[query].items()
        ]

        def fill(made: Path) -> None:
            for name, rows in texts.items():
                lines = (to_json({"_id": id, "text": text}) for id, text in rows.items())
                (made / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
            (made / "qrels").mkdir()
            content = "\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n"
            (made / "qrels" / "test.tsv").write_text(content, encoding="utf-8")

        new_folder(Path(folder), fill)


def read_retrieval(name: str) -> RetrievalData:
    """Reads a collection.

    Args:
      name: A name such as ``beir:scifact``, ``beir:msmarco#dev`` or ``squad:dev.json.gz``.

    Raises:
      DataError: A file is missing or malformed (the message names file and line), or an
        identifier occurs twice.
    """
    kind, location, part, _ = parse_name(name, FORMS)
    if kind == "squad":
        require(not part, f"source {name!r} has a part: write {FORMS['squad']}", DataError)
        return _from_questions(LabelledSource(name, kind, location, ()))
    folder = Path(location).expanduser()
    documents = read_texts(_file(folder, CORPUS))
    queries = read_texts(_file(folder, QUERIES))
    judged = _judgements(_file(folder, f"qrels/{part or 'test'}.tsv"))
    # The `qrels` file may have queries of other splits, and documents that are not in the corpus.
    known = {id: judged[id] for id in queries if id in judged}
    left_out = len(judged) - len(known)
    lost = sum(len(relevant.keys() - documents.keys()) for relevant in known.values())
    notes = {
        f"{left_out:,} judged queries are not in queries.jsonl: left out": left_out,
        f"{lost:,} relevant documents are not in corpus.jsonl: they are never found": lost,
    }
    problem = f"{name!r} has no query with a relevant document: check the identifiers in qrels"
    require(known, problem, DataError)
    # Drop queries without a relevant document, because they cannot be evaluated.
    judged_queries = {id: queries[id] for id in known}
    return RetrievalData(documents, judged_queries, known, tuple(filter(notes.get, notes)))


def files_of(folder: Path, name: str) -> list[Path]:
    """Returns the possible paths of a collection's file, with and without compression."""
    return [folder / name, folder / f"{name}.gz"]


def _file(folder: Path, name: str) -> Path:
    """Returns the path of the folder's file with this name, which may be compressed."""
    paths = files_of(folder, name)
    existing = list(filter(Path.is_file, paths))
    problem = f"no file {paths[0]}: beir:FOLDER names a folder with corpus.jsonl, queries.jsonl"
    require(existing, f"{problem} and qrels/test.tsv", DataError)
    return existing[0]


def read_texts(file: Path, *, numbered: bool = False) -> dict[str, str]:
    """Reads identifiers and texts from JSON lines. The text of a document begins with its title.

    Args:
      file: The file.
      numbered: Whether objects may lack ``_id``. The identifier of such an object is its index in
        the file, from 1.

    Raises:
      DataError: A line is not a JSON object, lacks a field, or repeats the identifier of another
        line.
    """
    texts: dict[str, str] = {}
    for number, (location, row) in enumerate(parse_lines(file_lines(file)), start=1):
        row = {"_id": number, **row} if numbered else row
        id = str(pick(row, "_id", location))
        require(
            id not in texts,
            f"{location}: _id {id!r} occurs twice: rename one of the two",
            DataError,
        )
        # Queries have no titles, nor do the documents of some collections.
        values = list(picked({"title": "", **row}, ("title", "text"), location))
        are_texts = all(isinstance(value, str) for value in values)
        problem = f"{location}: title and text must be strings, got {values!r:.100}: correct them"
        require(are_texts, problem, DataError)
        texts[id] = " ".join(values).strip()
    return texts


def _judgements(file: Path) -> dict[str, dict[str, float | int]]:
    """Reads the relevant documents of each query; omits documents with relevance 0 or below."""
    judged: dict[str, dict[str, float | int]] = {}
    for query, document, relevance in _rows(file):
        if relevance > 0:
            judged.setdefault(query, {})[document] = relevance
    return judged


def _rows(file: Path) -> Iterator[tuple[str, str, float]]:
    for name, number, line in file_lines(file):
        columns = line.split("\t")
        # In BEIR's files, the first line contains the names of the columns.
        if not line.strip() or (number == 1 and columns[-1] == "score"):
            continue
        # A relevance that is not a number becomes NaN, which the check below rejects.
        try:
            relevance = float(columns[-1])
        except ValueError:
            relevance = math.nan
        require(
            len(columns) == 3 and math.isfinite(relevance),
            f"{name} line {number} must be QUERY, DOCUMENT and RELEVANCE with tabs between, got "
            f"{line[:80]!r}: correct the line",
            DataError,
        )
        yield columns[0], columns[1], relevance


def _from_questions(source: LabelledSource) -> RetrievalData:
    """Makes a collection from passages and questions. Equal passages become one document."""
    ids: dict[str, str] = {}
    queries: dict[str, str] = {}
    relevant: dict[str, dict[str, float | int]] = {}
    for example in read_questions(source, labelled=False):
        id = ids.setdefault(example.passage, f"{example.title or 'passage'}-{len(ids)}")
        problem = f"{example.location} occurs twice: give each question its own id"
        require(example.id not in queries, problem, DataError)
        queries[example.id], relevant[example.id] = example.question, {id: 1}
    return RetrievalData({id: passage for passage, id in ids.items()}, queries, relevant)
