"""The command `flaxzoo prepare`."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Annotated

from ....data.common.fields import Fraction, PositiveInt, Rate
from ....data.packing.packing import Packing
from ....data.prepared.shard_format import SHARDS, SUMMARY
from ..options import Positional, SourceName, check_applies, log, parse, split_at_dashes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareArguments:
    """Tokenizes and packs text into sequences for training, one shard for each input file.

    Runs on Apache Beam (the `prepare` extra), by default in this process. Beam's own options follow
    two dashes: -- --runner DataflowRunner … All workers must see SOURCE and OUT under the same
    names (a shared file system). Running the command again keeps complete shards and writes the
    missing shards.
    """

    source: SourceName
    """text:GLOB[#line|#block], jsonl:GLOB#field, parquet:GLOB#field, arrow:GLOB#field,
    builtin:python-docs; several sources are joined with " + "."""
    output: Annotated[Path, Positional("OUT")]
    """The folder to create; train on it with --data.source prepared:FOLDER."""
    tokenizer: Path
    """A folder or file, for example RUN/tokenizer or the output of `flaxzoo tokenizer train`."""
    length: PositiveInt
    """The number of tokens in a sequence, T."""
    packing: Packing = "concat"
    """concat: fill every sequence and split documents; first-fit: keep documents whole."""
    validation_fraction: Rate = 0.05
    """The fraction of documents that are held out for validation."""
    keep: str | None = None
    """The run of a text classifier. A document is kept if the classifier gives the label `good` (or
    the second of two labels) a probability of at least --threshold."""
    threshold: Fraction | None = None
    """With --keep: the minimum probability of a document that is kept. By default 0.5."""


def prepare_command(arguments: list[str]) -> None:
    """Runs `flaxzoo prepare SOURCE OUT --tokenizer PATH --length T [-- BEAM OPTIONS]`."""
    options, for_beam = split_at_dashes(arguments)
    parsed = parse(PrepareArguments, options, "flaxzoo prepare")
    check_applies(parsed, "threshold", to="keep")
    from ....data.filters.conditions import LeftOut, left_out_note
    from ....data.prepared.apache_beam import beam_workers
    from ....data.prepared.write_shards import prepare, total_left_out

    selector = None
    if parsed.keep is not None:
        from ...runs.quality import THRESHOLD, QualityClassifier

        threshold = THRESHOLD if parsed.threshold is None else parsed.threshold
        selector = QualityClassifier(parsed.keep, threshold)
    # Remember the complete shards, to report which of them were kept.
    before = _written(parsed.output)
    shards = prepare(
        parsed.source,
        parsed.output,
        parsed.tokenizer,
        length=parsed.length,
        packing=parsed.packing,
        validation_fraction=parsed.validation_fraction,
        selector=selector,
        workers=beam_workers(for_beam),
    )
    rows = Counter[str]()
    for shard in shards:
        rows.update({split: part.rows for split, part in shard.splits.items()})
    if note := left_out_note(LeftOut(total_left_out(shards))):
        log(f"{parsed.output}: {note}")
    kept = len(before & _written(parsed.output))
    made = len({shard.name for shard in shards}) - kept
    log(
        f"{parsed.output}: {made:,} shards made, {kept:,} kept; {rows['train']:,} sequences "
        f"of {parsed.length} tokens for training, {rows['validation']:,} for validation; next: "
        f"flaxzoo train RECIPE --data.source prepared:{parsed.output} --data.length {parsed.length}"
    )


def _written(folder: Path) -> set[tuple[Path, int]]:
    """Returns the summary file of each shard in a folder, with the file's modification time."""
    return {(path, path.stat().st_mtime_ns) for path in folder.glob(f"{SHARDS}/*/{SUMMARY}")}
