"""The command `flaxzoo embed`."""

import dataclasses
import io
from pathlib import Path

from ...data.errors import UserError
from ..compilation_cache import enable_compilation_cache
from .options import RunName, log, parse


@dataclasses.dataclass(frozen=True)
class EmbedArguments:
    """Writes one vector for each line of a file: the mean of the model's hidden states."""

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub."""
    input: str
    """A file with one text per line; - reads standard input."""
    output: Path
    """The file to write: a float32 array [lines, width] in numpy's format (.npy)."""
    step: int | None = None
    """The checkpoint. By default the newest."""


def embed_command(arguments: list[str]) -> None:
    """Runs `flaxzoo embed RUN --input FILE --output FILE.npy`."""
    parsed = parse(EmbedArguments, arguments, "flaxzoo embed")
    if parsed.output.suffix != ".npy":
        raise UserError(f"--output {parsed.output} must end in .npy, the format it is written in")
    enable_compilation_cache()
    import numpy as np

    from ...data.io.atomic_io import check_output_path, write_file
    from ...data.io.files import read_lines
    from ..inference.embed import TextEmbedder

    check_output_path(parsed.output, parsed.input)
    texts = read_lines(parsed.input)
    vectors = TextEmbedder.of_run(parsed.run, step=parsed.step)(texts, log)
    content = io.BytesIO()
    np.save(content, vectors)
    write_file(parsed.output, content.getvalue())
    log(f"{parsed.output}: {vectors.shape[0]:,} vectors of {vectors.shape[1]}")
