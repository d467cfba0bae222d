"""The command `flaxzoo embed`."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Annotated, Literal

from ....data.common.errors import counted
from ....data.common.fields import Suffix, require
from ...compilation_cache import enable_compilation_cache
from ..options import log, parse
from .arguments import ModelArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedArguments(ModelArguments):
    """Writes one vector for each line of a file.

    The settings of a sentence-transformers folder apply unless options replace them. For any other
    model, the vector is the mean of the last hidden states, not normalized. A sparse encoder gives
    token weights instead of a vector.
    """

    input: str
    """A file with one text per line; - reads standard input."""
    output: Annotated[Path, Suffix((".npy", ".jsonl"))]
    """The file to write: a float32 array [lines, width] in numpy's format (.npy); for a sparse
    encoder, JSON lines (.jsonl) with objects that map tokens to their weights, in descending order
    of weight."""
    pooling: (
        tuple[
            Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"], ...
        ]
        | None
    ) = None
    """How the hidden states of a text become one vector: the first token's, the largest values,
    the mean, the sum over the square root of the length, the mean weighted by position, or the
    last token's. The vectors of several poolings are concatenated. Defaults to the model's setting,
    or to mean if the model has none."""
    normalize: bool | None = None
    """Whether to scale each vector to length 1. Defaults to the model's setting, or to no if the
    model has none."""
    prompt_name: str | None = None
    """The name of a prompt of the model, such as query, to put before each line. By default the
    model's default prompt, if any."""


def embed_command(arguments: list[str]) -> None:
    """Runs `flaxzoo embed RUN --input FILE --output FILE.npy`."""
    parsed = parse(EmbedArguments, arguments, "flaxzoo embed")
    enable_compilation_cache()
    import numpy as np

    from ....data.common.atomic_io import check_output_path, write_file
    from ....data.common.files import read_lines
    from ....models.hf.sentence_modules import kind_of
    from ....models.hub import local_folder
    from ....models.text.embed import TextEmbedder, normalized
    from ....models.text.sparse_embed import SparseEmbedder

    # Check the path before the model is loaded, to fail fast.
    check_output_path(parsed.output, parsed.input)
    texts = read_lines(parsed.input)
    is_sparse = kind_of(local_folder(parsed.run)) == "SparseEncoder"
    wanted = ".jsonl" if is_sparse else ".npy"
    problem = f"--output {parsed.output} must have the ending {wanted} for this model"
    require(parsed.output.suffix == wanted, problem)
    if is_sparse:
        require(
            parsed.pooling is None and parsed.normalize is None,
            f"--pooling and --normalize require dense vectors, but {parsed.run} is a sparse "
            f"encoder: leave them out",
        )
        sparse = SparseEmbedder.of_run(parsed.run, step=parsed.step, log=log, ema=parsed.ema)
        rows = sparse.weights(texts, log, prompt_name=parsed.prompt_name)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_file(parsed.output, "".join(lines).encode())
        log(f"{parsed.output}: {counted(len(rows), 'sparse vector')}")
        return
    embedder = TextEmbedder.of_run(parsed.run, step=parsed.step, log=log, ema=parsed.ema)
    # Options replace the settings of the folder.
    settings = embedder.settings
    if parsed.pooling is not None:
        settings = dataclasses.replace(settings, pooling=parsed.pooling)
    if parsed.normalize is not None:
        settings = settings.normalized(parsed.normalize)
    vectors = embedder.with_settings(settings)(texts, log, prompt_name=parsed.prompt_name)
    # The model may drop dimensions after its settings have normalized the vectors, so normalize
    # them again.
    if parsed.normalize:
        vectors = normalized(vectors)
    # Write the whole file at once, so that a failure leaves no partial file.
    content = io.BytesIO()
    np.save(content, vectors)
    write_file(parsed.output, content.getvalue())
    number, size = vectors.shape
    log(f"{parsed.output}: {counted(number, 'vector')} of {counted(size, 'number')}")
