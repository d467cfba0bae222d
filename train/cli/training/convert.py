"""The commands `flaxzoo import`, `flaxzoo export` and `flaxzoo average`."""

import dataclasses
from pathlib import Path
from typing import Literal

from ....data.common.fields import NonNegativeInt, Positive, PositiveInt, require
from ..options import OutputPath, RunFolder, RunName, SourceName, log, parse


@dataclasses.dataclass(frozen=True)
class ImportArguments:
    """Makes a run folder from a model in the Hugging Face format."""

    source: SourceName
    """A folder with config.json, model.safetensors (or shards and their index) and the tokenizer's
    files; a folder with a PEFT adapter, which is merged; or a name on the Hugging Face hub."""
    output: OutputPath
    """The run folder to create."""
    base: str | None = None
    """For an adapter: the folder or the name of its base model. Defaults to the base model that the
    adapter names."""


def import_command(arguments: list[str]) -> None:
    """Runs `flaxzoo import SOURCE OUTPUT`."""
    parsed = parse(ImportArguments, arguments, "flaxzoo import")
    from ...convert.import_hf import import_model

    summary = import_model(parsed.source, parsed.output, base=parsed.base)
    log(f"{parsed.output}: {summary}")


@dataclasses.dataclass(frozen=True)
class ExportArguments:
    """Writes a model for transformers, as plain arrays, or as a compiled program."""

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub."""
    output: OutputPath
    """The folder to create (for the forms huggingface, stablehlo and peft), or the file to create.
    """
    form: Literal["huggingface", "safetensors", "npz", "stablehlo", "peft"] = "huggingface"
    """huggingface: a folder for transformers. safetensors, npz: the arrays under flaxzoo's own
    parameter paths. stablehlo: the forward pass as a program that needs only jax, with its
    parameters. peft: the adapters of a run with --lora.rank, for the package peft, together with
    the tokenizer, its chat template and a model card."""
    base: str | None = None
    """For the form peft: the name or the folder of the base model, in the Hugging Face format, that
    peft loads. Defaults to the name or the folder that the base model was read or imported from."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the written parameters."""
    file_gb: Positive | None = None
    """Maximum size of a file in the form huggingface, in 10^9 bytes, by default 5. Tensors are
    never split."""
    step: NonNegativeInt | None = None
    """The checkpoint. Defaults to the newest checkpoint."""
    ema: bool = False
    """Write the moving average of the parameters (--optimizer.ema-decay)."""
    generator: bool = False
    """For a run of replaced-token detection (flaxzoo train electra): write the generator, which
    predicts masked tokens, instead of the discriminator."""


def export_command(arguments: list[str]) -> None:
    """Runs `flaxzoo export RUN OUTPUT`."""
    parsed = parse(ExportArguments, arguments, "flaxzoo export")
    problem = f"--file-gb applies to --form huggingface, not to {parsed.form}: leave it out"
    require(parsed.file_gb is None or parsed.form == "huggingface", problem)
    from ...convert.export import export_model

    notes = export_model(
        parsed.run,
        parsed.output,
        form=parsed.form,
        step=parsed.step,
        ema=parsed.ema,
        generator=parsed.generator,
        dtype=parsed.dtype,
        base=parsed.base,
        file_bytes=int((parsed.file_gb or 5.0) * 1e9),
    )
    wrote = f"{parsed.output}: {parsed.run} in the form {parsed.form}, {parsed.dtype}"
    for line in [wrote, *notes]:
        log(line)


@dataclasses.dataclass(frozen=True)
class AverageArguments:
    """Averages the last checkpoints of a run and saves the result as a new run folder."""

    run: RunFolder
    """The run folder. Train with --keep-last N to keep N checkpoints."""
    last: PositiveInt = 5
    """The number of newest checkpoints to average."""
    output: Path | None = None
    """The folder to create. By default RUN-averaged."""


def average_command(arguments: list[str]) -> None:
    """Runs `flaxzoo average RUN --last N`."""
    parsed = parse(AverageArguments, arguments, "flaxzoo average")
    from ...convert.average_checkpoints import average_checkpoints

    # Resolve the path, because the run may be ".".
    run = parsed.run.resolve()
    output = parsed.output or run.with_name(f"{run.name}-averaged")
    averaged = average_checkpoints(parsed.run, output, last=parsed.last)
    log(f"{output}: the mean of the checkpoints {', '.join(map(str, averaged))}")
