"""The subcommands of `flaxzoo` that let a trained model work on texts."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from ...data.errors import UserError
from ..compilation_cache import enable_compilation_cache
from .commands import Positional, RunName, named, say


@dataclasses.dataclass(frozen=True)
class GenerateArguments:
    """Continues texts with a trained model."""

    run: RunName
    """The run folder; or a folder in Hugging Face's form, or a name on its hub."""
    prompt: tuple[str, ...] = ("",)
    """What is continued; several prompts go through the model together."""
    max_new_tokens: int | None = None
    """The longest continuation, in tokens. By default 200. (Here and below a folder in Hugging
    Face's form, or a run imported from one, may have defaults of its own, in its
    generation_config.json.)"""
    temperature: float | None = None
    """Below 1 more predictable, above 1 more varied; 0 always takes the best token. By default
    1."""
    top_k: int | None = None
    """Only the k best tokens are considered. By default, or with 0, all are."""
    top_p: float | None = None
    """Only the best tokens that together have probability p are considered."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens that were used already less likely."""
    num_beams: int | None = None
    """Above 1 nothing is drawn: the continuations of highest probability are searched for, keeping
    so many beginnings at a time."""
    length_penalty: float | None = None
    """With beams: above 0 favours longer continuations. By default 1."""
    stop: tuple[str, ...] = ()
    """Strings that end a continuation."""
    num_samples: int | None = None
    """Continuations of each prompt. By default 1."""
    seed: int = 0
    """Of the random choices: the same seed, the same text."""
    step: int | None = None
    """The checkpoint; by default the newest."""
    json: bool = False
    """Print one JSON object instead of text."""


def generate_command(arguments: list[str]) -> None:
    """The command `flaxzoo generate RUN --prompt TEXT`."""
    parsed = tyro.cli(GenerateArguments, args=arguments, prog="flaxzoo generate")
    enable_compilation_cache()
    from ..inference.generate import TextGenerator, merged_request, samples_to_json

    asked = _asked(parsed)
    # Whether it can be done, before anything is read; beams may be the folder's.
    known = asked if parsed.num_beams else {**asked, "length_penalty": None}
    merged_request({}, {name: value for name, value in known.items() if value is not None})
    generator = TextGenerator.of_run(parsed.run, step=parsed.step)
    request = generator.request(parsed.prompt, **asked)
    alone = len(parsed.prompt) * request.num_return == 1
    streaming = alone and not parsed.json
    if streaming:
        _write(parsed.prompt[0])
    samples = generator.write(
        parsed.prompt,
        request,
        stop=parsed.stop,
        seed=parsed.seed,
        on_text=_write if streaming else None,
    )
    if parsed.json:
        print(samples_to_json(samples))
    elif streaming:
        print()
    else:
        print("\n----\n".join(sample.prompt + sample.text for sample in samples))


def _asked(parsed: GenerateArguments) -> dict[str, Any]:
    """What the options ask for, in the words of `models.generate`."""
    asked = {
        "max_new_tokens": parsed.max_new_tokens,
        "temperature": parsed.temperature,
        "top_k": parsed.top_k,
        "top_p": parsed.top_p,
        "repetition_penalty": parsed.repetition_penalty,
        "num_beams": parsed.num_beams,
        "length_penalty": parsed.length_penalty,
        "num_return_sequences": parsed.num_samples,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclasses.dataclass(frozen=True)
class PredictArguments:
    """Prints a fine-tuned model's prediction for each example, a line of JSON each."""

    run: RunName
    """The run folder; or a folder in Hugging Face's form, or a name on its hub."""
    input: str
    """The file of examples; - is standard input. On each line a text, or two with a tab between
    (for a pretraining run: does the second continue the first?); words in the first of CoNLL's
    columns; SQuAD's JSON, or lines of JSON with "context" and "question"; for choices lines of
    JSON with "context" and "choices"."""
    step: int | None = None
    """The checkpoint; by default the newest."""


def predict_command(arguments: list[str]) -> None:
    """The command `flaxzoo predict RUN --input FILE`."""
    parsed = tyro.cli(PredictArguments, args=arguments, prog="flaxzoo predict")
    enable_compilation_cache()
    from ..inference.predict import predict

    for prediction in predict(parsed.run, parsed.input, step=parsed.step, say=say):
        print(json.dumps(prediction, ensure_ascii=False))


@dataclasses.dataclass(frozen=True)
class FillMaskArguments:
    """Prints the most probable words for each [MASK] of a text."""

    run: RunName
    """The run folder of a masked language model; or a folder in Hugging Face's form, or a name on
    its hub."""
    text: Positional[Annotated[str, named("TEXT")]]
    """A text with [MASK] where a word is missing."""
    top_k: int = 5
    """How many words for each gap."""
    step: int | None = None
    """The checkpoint; by default the newest."""
    json: bool = False
    """Print one JSON object instead of a table."""


def fill_mask_command(arguments: list[str]) -> None:
    """The command `flaxzoo fill-mask RUN TEXT`."""
    parsed = tyro.cli(FillMaskArguments, args=arguments, prog="flaxzoo fill-mask")
    enable_compilation_cache()
    from ..inference.fill_mask import MaskFiller

    gaps = MaskFiller.of_run(parsed.run, step=parsed.step)(parsed.text, top_k=parsed.top_k)
    if parsed.json:
        listed = [[dataclasses.asdict(candidate) for candidate in gap] for gap in gaps]
        print(json.dumps({"masks": listed}, ensure_ascii=False))
        return
    for gap in gaps:
        for candidate in gap:
            print(f"{candidate.probability:.4f}  {candidate.token:<16}  {candidate.text}")


@dataclasses.dataclass(frozen=True)
class TranslateArguments:
    """Translates a file line by line; an empty line stays one."""

    run: RunName
    """The run folder of a model that translates; or a folder in Hugging Face's form, or a name on
    its hub."""
    input: str
    """A file with a sentence on each line; - is standard input."""
    output: Path | None = None
    """The file to write, in the order of the input; by default standard output."""
    num_beams: int | None = None
    """How many beginnings of a translation are kept at a time; 1 is greedy. By default 4, or what
    an imported model asks for."""
    length_penalty: float | None = None
    """α: above 0 favours longer translations. By default 0.6, or what an imported model asks
    for."""
    num_best: int = 1
    """Translations of each line, the best first. Above 1 each stands on a line of its own, behind
    its line's number and its score, parted by tabs; an empty line has one, empty, scored 0."""
    step: int | None = None
    """The checkpoint; by default the newest."""


def translate_command(arguments: list[str]) -> None:
    """The command `flaxzoo translate RUN --input FILE --output FILE`."""
    parsed = tyro.cli(TranslateArguments, args=arguments, prog="flaxzoo translate")
    enable_compilation_cache()
    from ...data.io.atomic_io import check_output_path, write_file
    from ...data.io.files import input_lines
    from ..inference.translate import TextTranslator, note_of_empty, to_lines
    from ..progress import Progress

    if parsed.output is not None:
        check_output_path(parsed.output, parsed.input)
    translator = TextTranslator.of_run(parsed.run, step=parsed.step)
    search = _search(parsed, translator.search)
    lines = list(input_lines(parsed.input))
    texts = [text for _, _, text in lines]
    places = [f"{file} line {number}" for file, number, _ in lines]
    with Progress().counter("sentences", len(texts)) as advance:
        translated = translator(texts, search=search, places=places, on_batch=advance)
    text = "".join(f"{line}\n" for line in to_lines(translated, parsed.num_best))
    if parsed.output is None:
        _write(text)
    else:
        write_file(parsed.output, text.encode())
    note = note_of_empty(texts, translated)
    if note is not None:
        say(note)


def _search(parsed: TranslateArguments, search: Any) -> Any:
    """A model's search, but for what is asked for."""
    asked = {"num_beams": parsed.num_beams, "length_penalty": parsed.length_penalty}
    asked = {name: x for name, x in asked.items() if x is not None}
    search = dataclasses.replace(search, **asked, num_return=1)
    if not 1 <= parsed.num_best <= search.num_beams:
        raise UserError(
            f"num-best {parsed.num_best} must be at least 1 and at most num-beams "
            f"{search.num_beams}"
        )
    return dataclasses.replace(search, num_return=parsed.num_best)


@dataclasses.dataclass(frozen=True)
class EmbedArguments:
    """Writes a vector for each line of a file, the mean of the model's hidden states."""

    run: RunName
    """The run folder; or a folder in Hugging Face's form, or a name on its hub."""
    input: str
    """A file with a text on each line; - is standard input."""
    output: Path
    """The file to write: a float32 array [lines, width] in numpy's format (.npy)."""
    step: int | None = None
    """The checkpoint; by default the newest."""


def embed_command(arguments: list[str]) -> None:
    """The command `flaxzoo embed RUN --input FILE --output FILE.npy`."""
    parsed = tyro.cli(EmbedArguments, args=arguments, prog="flaxzoo embed")
    if parsed.output.suffix != ".npy":
        raise UserError(f"output {parsed.output} must end in .npy, the format it is written in")
    enable_compilation_cache()
    from ...data.io.atomic_io import check_output_path
    from ...data.io.files import read_lines
    from ..inference.embed import TextEmbedder

    check_output_path(parsed.output, parsed.input)
    texts = read_lines(parsed.input)
    vectors = TextEmbedder.of_run(parsed.run, step=parsed.step)(texts, say)
    _write_array(parsed.output, vectors)
    say(f"{parsed.output}: {vectors.shape[0]:,} vectors of {vectors.shape[1]}")


def _write_array(path: Path, array: Any) -> None:
    import io

    import numpy as np

    from ...data.io.atomic_io import write_file

    content = io.BytesIO()
    np.save(content, array)
    write_file(path, content.getvalue())
