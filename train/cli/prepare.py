"""The command `flaxzoo prepare`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from ...data.packing.packing import Packing
from ...data.prepared.shard_format import FACTS, SHARDS
from .commands import Positional, at_dashes, named, say


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareArguments:
    """Tokenises and packs texts into rows to train on, a shard for each input file.

    Runs on Apache Beam (the `prepare` extra): in this process, or as its own options say, which
    follow two dashes: -- --runner DataflowRunner … All workers must see SOURCE and OUT under the
    same names (a shared file system). Run again it keeps what is whole, and makes what is not.
    """

    source: Positional[Annotated[str, named("SOURCE")]]
    """text:GLOB[#line|#block], jsonl:GLOB#field, builtin:python-docs; or several, with " + "."""
    output: Positional[Annotated[Path, named("OUT")]]
    """The folder that is made, to train on as --data.source prepared:FOLDER."""
    tokenizer: Path
    """A folder or file: RUN/tokenizer, or what `flaxzoo tokenizer train` made, for example."""
    length: int
    """Tokens in a row, T."""
    packing: Packing = "concat"
    """concat: fill every row, cutting documents; first-fit: keep documents whole."""
    validation_fraction: float = 0.05
    """The part of the documents that is held out to validate on."""


def prepare_command(arguments: list[str]) -> None:
    """The command `flaxzoo prepare SOURCE OUT --tokenizer PATH --length T [-- BEAM'S OPTIONS]`."""
    own, for_beam = at_dashes(arguments)
    parsed = tyro.cli(PrepareArguments, args=own, prog="flaxzoo prepare")
    from ...data.prepared.apache_beam import beam_workers
    from ...data.prepared.write_shards import prepare

    before = _written(parsed.output)
    shards = prepare(
        parsed.source,
        parsed.output,
        parsed.tokenizer,
        length=parsed.length,
        packing=parsed.packing,
        validation_fraction=parsed.validation_fraction,
        workers=beam_workers(for_beam),
    )
    train, held_out = (
        sum(shard.splits[split].rows for shard in shards if split in shard.splits)
        for split in ("train", "validation")
    )
    kept = len(before & _written(parsed.output))
    made = len({shard.name for shard in shards}) - kept
    say(
        f"{parsed.output}: {made:,} shards made, {kept:,} found whole; {train:,} rows of "
        f"{parsed.length} tokens to train on, {held_out:,} to validate on; go on with: "
        f"flaxzoo train RECIPE --data.source prepared:{parsed.output} --data.length {parsed.length}"
    )


def _written(folder: Path) -> set[tuple[Path, int]]:
    """The shards of a folder, each with the time at which it was finished."""
    return {(path, path.stat().st_mtime_ns) for path in folder.glob(f"{SHARDS}/*/{FACTS}")}
