"""A search index that finds the texts whose vectors are nearest to the vector of a query."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...data.common.atomic_io import new_folder
from ...data.common.errors import RunError, counted
from ...data.common.fields import require
from ...data.common.json_text import JsonObject, parse_object, read_object, to_json
from ...data.common.progress import LogFn, ignore
from ...models.hub import local_folder
from ...models.run_files import steps
from ...models.text.embed import TextEmbedder, normalized
from ...models.text.pair_scorer import PairScorer
from ..evaluation.vectors.nearest import nearest
from ..evaluation.vectors.retrieval import embedded

CONFIG, VECTORS, TEXTS, STARTS = "config.json", "vectors.npy", "texts.jsonl", "starts.npy"
FORM = "flaxzoo search index"
PROBE = "The quick brown fox jumps over the lazy dog."
"""The vector of this text is the fingerprint of a model, its tokenizer, pooling and prompts."""
SAME = 0.999
"""Two fingerprints with at least this cosine are considered to come from the same model. The
fingerprints of a model on different devices are not exactly equal."""
CANDIDATES = 50
"""The default number of documents that a reranker scores again for each query."""


@dataclasses.dataclass(frozen=True)
class Hit:
    """A document that a search has found."""

    id: str
    """The identifier of the document."""
    score: float
    """The cosine with the query, or the score of the reranker if there is one. Larger is better."""
    text: str
    """The text of the document."""


class SearchIndex:
    """Documents, their vectors in a memory-mapped file, and the model that embeds queries.

    Example::

        index = train.SearchIndex.build({"a": "A cat sat."}, "pets", "all-MiniLM-L6-v2")
        index = train.SearchIndex.open("pets")
        (hits,) = index.search(["Where is the cat?"], top_k=3)

    Every search compares the query with all vectors, in blocks on the device, so its results are
    exact.

    Attributes:
        vectors: the vectors in the order of the documents, float32 `[N, D]`, each of length 1.
    """

    def __init__(self, folder: Path, config: JsonObject, embedder: TextEmbedder) -> None:
        """Opens the files of an index; see `open`."""
        self._texts, self._embedder = folder / TEXTS, embedder
        try:
            self.vectors: np.ndarray = np.load(folder / VECTORS, mmap_mode="r")
            # [N + 1]: the offset of the first byte of each line of the texts, and the end of the
            # last line.
            self._starts: np.ndarray = np.load(folder / STARTS, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise RunError(f"{folder} is damaged ({error}): build the index again") from None
        num_texts, size = len(self.vectors), self._texts.stat().st_size
        is_complete = len(self._starts) == num_texts + 1 and self._starts[-1] == size
        problem = f"{folder} is damaged ({TEXTS} does not have {num_texts:,} texts)"
        require(is_complete, f"{problem}: build the index again", RunError)
        self._check_model(folder, config)

    def _check_model(self, folder: Path, config: JsonObject) -> None:
        stored = np.array(config["fingerprint"], np.float32)
        fingerprint = _fingerprint(self._embedder)
        # Both vectors have length 1, so their dot product is the cosine.
        is_same = stored.shape == fingerprint.shape and float(stored @ fingerprint) >= SAME
        require(
            is_same,
            f"{folder} was built with another model, {config['model']}: name its "
            "folder with --run, or build the index again",
            RunError,
        )

    @classmethod
    def build(
        cls,
        documents: Mapping[str, str] | Sequence[str],
        folder: str | Path,
        run: str | Path,
        *,
        step: int | None = None,
        ema: bool = False,
        log: LogFn = print,
    ) -> "SearchIndex":
        """Embeds documents and writes an index.

        Args:
            documents: a dict from identifiers to texts, or a list of texts. The identifiers of a
              list are its indices. Texts longer than the model's maximum length are truncated.
            folder: the folder of the index. It must be empty or not exist yet.
            run: a run folder, a folder of sentence-transformers, or a name on the hub.
            step: the checkpoint. Defaults to the newest checkpoint.
            ema: whether to use the moving average of the parameters. A run has this average if
              `optimizer.ema_decay` is set.
            log: called with a line that states how many texts were truncated.

        Raises:
            FileNotFoundError: `run` is not a model, or does not have the checkpoint.
            UserError: `documents` is empty, the model does not embed texts, the run has no moving
              average, or `folder` is not empty.
        """
        named = documents if isinstance(documents, Mapping) else _numbered(documents)
        require(named, "documents must not be empty: give at least one text")
        folder, ids, texts = Path(folder), [*named.keys()], [*named.values()]
        # Store the step of the checkpoint, because a search must use this checkpoint even if the
        # run later gets a newer checkpoint.
        stored = steps(local_folder(run))
        step = stored[-1] if step is None and stored else step
        embedder = TextEmbedder.of_run(run, step=step, log=log, ema=ema)
        # Store the absolute path of a local folder, because searches may start in another folder.
        name = str(Path(run).expanduser().resolve()) if Path(run).expanduser().exists() else run
        config: JsonObject = {
            "form": FORM,
            "model": str(name),
            "step": step,
            "ema": ema,
            "fingerprint": _fingerprint(embedder).tolist(),
        }
        rows = (to_json({"_id": id, "text": text}).encode() + b"\n" for id, text in named.items())

        def fill(path: Path) -> None:
            blocks = embedded(embedder, texts, log)
            _write_blocks(path / VECTORS, blocks, len(ids))
            # The offset of a document is the total size of all documents before it.
            sizes = [0]
            with (path / TEXTS).open("wb") as file:
                sizes += map(file.write, rows)
            np.save(path / STARTS, np.cumsum(sizes, dtype=np.int64))
            (path / CONFIG).write_text(to_json(config), encoding="utf-8")

        new_folder(folder, fill)
        index = cls(folder, config, embedder)
        size = counted(index.vectors.shape[1], "number")
        log(f"{folder}: {counted(len(ids), 'vector')} of {size}")
        return index

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        run: str | Path | None = None,
        step: int | None = None,
        ema: bool | None = None,
        log: LogFn = print,
    ) -> "SearchIndex":
        """Opens an index and its model.

        Args:
            folder: the folder of the index.
            run: the current location of the model, if it was moved. Defaults to the location that
                is stored in the index.
            step: the checkpoint. Defaults to the checkpoint that the index was built with.
            ema: whether to use the moving average of the parameters. Defaults to the setting that
                the index was built with.
            log: called with a line if the tokenizer may belong to another model.

        Raises:
            FileNotFoundError: the folder or the model does not exist.
            RunError: the folder is not an index, a file is damaged, or the index was built with
              another model.
        """
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(f"{folder} is not an index: build it with flaxzoo index")
        config = read_object(folder / CONFIG, RunError)
        is_index = config.get("form") == FORM and {"model", "step", "fingerprint"} <= config.keys()
        problem = f"{folder} is not an index ({CONFIG} is not the configuration of an index)"
        require(is_index, f"{problem}: build it with flaxzoo index", RunError)
        # The stored step applies only to the stored model. For another model, use the newest
        # checkpoint.
        stored = config["step"] if run is None and step is None else step
        step = stored if isinstance(stored, int) else None
        # A model that was moved still has its moving average, so the stored setting applies.
        ema = bool(config.get("ema")) if ema is None else ema
        name = config["model"] if run is None else run
        try:
            embedder = TextEmbedder.of_run(str(name), step=step, log=log, ema=ema)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"the model of {folder} is missing ({error}): name its folder with --run, or build "
                "the index again"
            ) from None
        return cls(folder, config, embedder)

    @property
    def ids(self) -> list[str]:
        """The identifiers of all documents, in order."""
        with self._texts.open("rb") as file:
            return [self._parsed(line)["id"] for line in file]

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.vectors)

    def search(
        self,
        queries: Sequence[str],
        top_k: int = 10,
        *,
        reranker: PairScorer | None = None,
        candidates: int = CANDIDATES,
        log: LogFn = print,
    ) -> list[list[Hit]]:
        """Finds the documents whose vectors have the largest cosines with each query.

        Args:
            queries: the queries. If the model has a prompt for queries, it precedes each query.
            top_k: the number of documents to find.
            reranker: a cross-encoder that scores the first `candidates` documents again. If None,
              documents are ordered by cosine.
            candidates: the number of documents to score again, at least `top_k`.
            log: called with a line that states how many queries were truncated.

        Returns:
            A list of the best documents for each query, best first. Documents with equal scores
            are in the order of their indices.

        Raises:
            UserError: `queries` is empty, `top_k` is below 1, or the reranker has several labels.
        """
        query_vectors = self._embedder(
            queries, log, prompt_name=self._embedder.settings.query_prompt
        )
        num_hits = top_k if reranker is None else max(top_k, candidates)
        ranked_documents = nearest(self._embedder.comparable(query_vectors), self.vectors, num_hits)
        hits = [
            [Hit(score=score, **self._row(i)) for score, i in zip(*lists, strict=True)]
            for lists in zip(*map(np.ndarray.tolist, ranked_documents), strict=True)
        ]
        if reranker is None:
            return hits
        # Sort the candidates of each query by the scores of the reranker.
        return [
            [
                dataclasses.replace(of_one[ranked.index], score=ranked.score)
                for ranked in reranker.rank(query, [x.text for x in of_one], top_k=top_k, log=log)
            ]
            for query, of_one in zip(queries, hits, strict=True)
        ]

    def _row(self, index: int) -> dict[str, str]:
        """Returns the identifier and the text of a document."""
        start, end = self._starts[index : index + 2].tolist()
        with self._texts.open("rb") as file:
            file.seek(start)
            return self._parsed(file.read(end - start))

    def _parsed(self, line: bytes) -> dict[str, str]:
        row = parse_object(line.decode(), str(self._texts), "build the index again", RunError)
        return {"id": str(row["_id"]), "text": str(row["text"])}


def _numbered(texts: Sequence[str]) -> dict[str, str]:
    return {str(i): text for i, text in enumerate(texts)}


def _fingerprint(embedder: TextEmbedder) -> np.ndarray:
    """Returns the vector of `PROBE` as a document, scaled to length 1: float32 `[D]`."""
    # Discard the log line, which appears if the model truncates the probe.
    vector = embedder([PROBE], ignore, prompt_name=embedder.settings.document_prompt)
    return normalized(vector)[0]


def _write_blocks(file: Path, blocks: Iterator[np.ndarray], num_rows: int) -> None:
    """Writes arrays `[n, D]`, which have `num_rows` rows in total, to a file in NumPy's format."""
    first = next(blocks)
    shape = num_rows, first.shape[1]
    array = np.lib.format.open_memmap(file, "w+", first.dtype, shape)
    end = len(first)
    array[:end] = first
    for block in blocks:
        array[end : end + len(block)] = block
        end += len(block)
    array.flush()
