"""The command `flaxzoo translate`."""

import dataclasses
import sys
from pathlib import Path

from ....data.common.fields import PositiveInt, without_none
from ....models.decoding.request import LengthPenalty, NumBeams
from ...compilation_cache import enable_compilation_cache
from ..options import log, parse
from .arguments import ModelArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslateArguments(ModelArguments):
    """Translates a file line by line. An empty line stays empty."""

    input: str
    """A file with one sentence per line; - reads standard input."""
    output: Path | None = None
    """The file to write, with the translations in the order of the input. By default, standard
    output."""
    num_beams: NumBeams | None = None
    """The number of beams; 1 decodes greedily. Defaults to the setting of an imported model, or
    else to 4."""
    length_penalty: LengthPenalty | None = None
    """The exponent α: a value above 0 favors longer translations. Defaults to the setting of an
    imported model, or else to 0.6."""
    num_return_sequences: PositiveInt = 1
    """The number of translations of each line, best first. If the number is above 1, each
    translation is printed on a separate line: the number of the input line, the score and the text,
    separated by tabs. An empty line has one empty translation with score 0."""
    truncate: bool = False
    """Truncate sentences that exceed the model's length. By default, such sentences are an
    error."""


def translate_command(arguments: list[str]) -> None:
    """Runs `flaxzoo translate RUN --input FILE --output FILE`."""
    parsed = parse(TranslateArguments, arguments, "flaxzoo translate")
    enable_compilation_cache()
    from ....data.common.atomic_io import check_output_path, write_file
    from ....data.common.files import text_lines
    from ....data.common.progress import Progress
    from ....models.text.translate import TextTranslator, note_of_empty, to_lines

    if parsed.output is not None:
        check_output_path(parsed.output, parsed.input)
    translator = TextTranslator.of_run(parsed.run, step=parsed.step, log=log, ema=parsed.ema)
    names = ("num_beams", "length_penalty", "num_return_sequences")
    options = without_none({name: getattr(parsed, name) for name in names})
    # Creating the request checks the options before the input is read.
    dataclasses.replace(translator.request, **options)
    # Read all lines, because batches are formed by length.
    lines = list(text_lines(parsed.input))
    texts = [text for _, _, text in lines]
    # The file and line of each sentence, for error messages.
    locations = [f"{file} line {number}" for file, number, _ in lines]
    with Progress().counter("sentences", len(texts)) as advance:
        translated = translator(
            texts,
            locations=locations,
            truncate=parsed.truncate,
            on_batch=advance,
            log=log,
            **options,
        )
    text = "".join(f"{line}\n" for line in to_lines(translated, parsed.num_return_sequences))
    if parsed.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_file(parsed.output, text.encode())
        log(f"{parsed.output}: {len(texts):,} lines translated")
    note = note_of_empty(texts, translated)
    if note is not None:
        log(note)
