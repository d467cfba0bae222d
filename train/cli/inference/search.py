"""The commands `flaxzoo index` and `flaxzoo search`."""

import dataclasses
from pathlib import Path
from typing import Annotated

from ....data.common.fields import NonNegativeInt, PositiveInt
from ....data.common.json_text import to_json
from ...compilation_cache import enable_compilation_cache
from ..options import Positional, check_applies, log, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexArguments:
    """Embeds texts with a model, and writes an index for flaxzoo search."""

    input: Annotated[str, Positional("FOLDER_OR_FILE")]
    """A text file with one text per line; JSON lines with text, and optionally _id and title; a
    folder of text files, whose paragraphs are the texts; or a source such as text:book.txt#block or
    builtin:python-docs."""
    output: Annotated[Path, Positional("OUTPUT")]
    """The folder to write, which does not exist or is empty."""
    run: str = "sentence-transformers/all-MiniLM-L6-v2"
    """The model: a run folder, a folder in the Hugging Face format, or a name on the Hugging Face
    hub."""
    step: NonNegativeInt | None = None
    """The checkpoint of a run. Defaults to the newest checkpoint."""
    ema: bool = False
    """Use the moving average of the parameters (--optimizer.ema-decay)."""


def index_command(arguments: list[str]) -> None:
    """Runs `flaxzoo index FOLDER_OR_FILE OUTPUT --run RUN`."""
    parsed = parse(IndexArguments, arguments, "flaxzoo index")
    enable_compilation_cache()
    from ....data.sources.retrieval.documents import read_named_texts
    from ...search.index import SearchIndex

    documents = read_named_texts(parsed.input)
    SearchIndex.build(
        documents, parsed.output, parsed.run, step=parsed.step, ema=parsed.ema, log=log
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchArguments:
    """Prints the texts of an index that are nearest to a query: rank, score, identifier, text."""

    index: Annotated[Path, Positional("INDEX")]
    """The folder that flaxzoo index wrote."""
    query: Annotated[str, Positional("QUERY")]
    """The query."""
    top_k: PositiveInt = 10
    """The number of texts to print."""
    rerank: str | None = None
    """A cross-encoder, or a language model that answers yes or no (Qwen3-Reranker), that scores the
    nearest texts again: a run folder, a folder in the Hugging Face format, or a name on the hub."""
    candidates: PositiveInt | None = None
    """With --rerank: the number of nearest texts to score again, at least --top-k; by default
    50."""
    run: str | None = None
    """The current location of the model that built the index. Defaults to the model's location when
    the index was built."""
    ema: bool | None = None
    """Whether to use the moving average of the parameters. Defaults to the choice that was made
    when the index was built."""
    json: bool = False
    """Print one JSON object for each text, with the whole text."""


def search_command(arguments: list[str]) -> None:
    """Runs `flaxzoo search INDEX QUERY`."""
    parsed = parse(SearchArguments, arguments, "flaxzoo search")
    check_applies(parsed, "candidates", to="rerank")
    enable_compilation_cache()
    from ....models.text.yes_no_scorer import open_pair_scorer
    from ...search.index import CANDIDATES, SearchIndex

    index = SearchIndex.open(parsed.index, run=parsed.run, ema=parsed.ema, log=log)
    reranker = None if parsed.rerank is None else open_pair_scorer(parsed.rerank, log=log)
    (hits,) = index.search(
        [parsed.query],
        parsed.top_k,
        reranker=reranker,
        candidates=parsed.candidates or CANDIDATES,
        log=log,
    )
    for rank, hit in enumerate(hits, start=1):
        if parsed.json:
            print(to_json({"rank": rank, **dataclasses.asdict(hit)}))
            continue
        # Show one line for each text, and the whole text only as JSON.
        text = " ".join(hit.text.split())
        shown = text if len(text) <= 200 else f"{text[:200]}…"
        print(f"{rank:>3}  {hit.score:.4f}  {hit.id}  {shown}")
