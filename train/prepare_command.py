"""The command `flaxzoo prepare`."""

import dataclasses
from pathlib import Path

import tyro

from ..data.causal import Packing
from .commands import Positional, say


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareArguments:
    """Tokenises and packs texts into rows to train on, a shard for each input file.

    Runs on Apache Beam (the `prepare` extra): in this process, or as its own options say, which
    follow two dashes: -- --runner DataflowRunner … All workers must see SOURCE and OUT under the
    same names (a shared file system). Run again it keeps what is whole, and makes what is not.
    """

    source: Positional[str]
    """text:GLOB[#line|#block], jsonl:GLOB#field, builtin:python-docs; or several, with " + "."""
    output: Positional[Path]
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
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = tyro.cli(PrepareArguments, args=arguments[:cut], prog="flaxzoo prepare")
    from ..data.beam_pipeline import beam_workers
    from ..data.preparing import prepare

    shards = prepare(
        parsed.source,
        parsed.output,
        parsed.tokenizer,
        length=parsed.length,
        packing=parsed.packing,
        validation_fraction=parsed.validation_fraction,
        workers=beam_workers(arguments[cut + 1 :]),
    )
    train, held_out = (
        sum(shard.splits[split].rows for shard in shards if split in shard.splits)
        for split in ("train", "validation")
    )
    say(
        f"{parsed.output}: {len(shards):,} shards, {train:,} rows of {parsed.length} tokens to "
        f"train on, {held_out:,} to validate on; go on with: flaxzoo train RECIPE "
        f"--data.source prepared:{parsed.output} --data.length {parsed.length}"
    )
