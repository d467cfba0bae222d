"""The subcommands of `flaxzoo`: each turns arguments into one call of the public API."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import tyro

from ..data.tokenizer_training import TokenizerKind
from .config import TrainConfig
from .recipes import RECIPES, describe, recipe

Positional = tyro.conf.Positional


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments(TrainConfig):
    """A recipe's configuration, and where its run is kept."""

    workdir: Path
    """The run folder; an existing run goes on from its newest checkpoint."""
    resume: bool = True
    """Whether a run folder with checkpoints is taken up (otherwise it is refused)."""


def train_command(arguments: list[str]) -> int:
    """The command `flaxzoo train RECIPE [options]`.

    Answers 0, or of a run that a signal stopped what a shell calls it, 128 and its number.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<18} {describe(name)}" for name in RECIPES)
        print(
            "usage: flaxzoo train RECIPE [--workdir RUN] [--steps N] …\n\n"
            f"recipes:\n{listed}\n\nAll options of a recipe: flaxzoo train quickstart --help"
        )
        return 0
    name = arguments[0]
    base = recipe(name)
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    parsed = tyro.cli(
        TrainArguments,
        default=TrainArguments(**fields, workdir=Path("runs") / name),
        args=arguments[1:],
        prog=f"flaxzoo train {name}",
        description=RECIPES[name].__doc__,
    )
    config = TrainConfig(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(base)})
    _enable_compilation_cache()
    from .loop import train
    from .tasks import task_of

    result = train(config, parsed.workdir, resume=parsed.resume)
    if result.sample is not None:
        print(result.sample)
    if result.finished:
        use = task_of(config.data).use.format(run=parsed.workdir)
        _say(f"report: {parsed.workdir / 'report.md'}; go on with: flaxzoo {use}")
    return 0 if result.signal is None else 128 + result.signal


@dataclasses.dataclass(frozen=True)
class EvaluateArguments:
    """Prints loss (nats) and the scores of a run's kind of data as JSON."""

    run: Positional[Path]
    """The run folder."""
    data: str | None = None
    """A source such as the run was trained on; by default what it validates on."""
    step: int | None = None
    """The checkpoint; by default the newest."""
    num_beams: int | None = None
    """Of a model that translates: the width of its search, by default 4; 1 is greedy."""


def evaluate_command(arguments: list[str]) -> None:
    """The command `flaxzoo evaluate RUN [--data SOURCE]`."""
    parsed = tyro.cli(EvaluateArguments, args=arguments, prog="flaxzoo evaluate")
    _enable_compilation_cache()
    from .score import score_run

    scores = score_run(
        parsed.run, parsed.data, step=parsed.step, num_beams=parsed.num_beams, say=_say
    )
    print(json.dumps(scores))


@dataclasses.dataclass(frozen=True)
class GenerateArguments:
    """Continues texts with a trained model."""

    run: Positional[Path]
    """The run folder."""
    prompt: tuple[str, ...] = ("",)
    """What is continued; several prompts go through the model together."""
    max_new_tokens: int = 200
    """The longest continuation, in tokens."""
    temperature: float = 1.0
    """Below 1 more predictable, above 1 more varied; 0 always takes the best token."""
    top_k: int | None = None
    """Only the k best tokens are considered."""
    top_p: float | None = None
    """Only the best tokens that together have probability p are considered."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that were used already less likely."""
    stop: tuple[str, ...] = ()
    """Strings that end a continuation."""
    num_samples: int = 1
    """Continuations of each prompt."""
    seed: int = 0
    """Of the random choices: the same seed, the same text."""
    step: int | None = None
    """The checkpoint; by default the newest."""
    json: bool = False
    """Print one JSON object instead of text."""


def generate_command(arguments: list[str]) -> None:
    """The command `flaxzoo generate RUN --prompt TEXT`."""
    parsed = tyro.cli(GenerateArguments, args=arguments, prog="flaxzoo generate")
    from ..models.generation import Sampling

    sampling = Sampling(parsed.temperature, parsed.top_k, parsed.top_p, parsed.repetition_penalty)
    _enable_compilation_cache()
    from .sampling import TextGenerator, samples_to_json

    generator = TextGenerator.of_run(parsed.run, step=parsed.step)
    alone = len(parsed.prompt) * parsed.num_samples == 1
    streaming = alone and not parsed.json
    if streaming:
        _write(parsed.prompt[0])
    samples = generator(
        parsed.prompt,
        max_new_tokens=parsed.max_new_tokens,
        sampling=sampling,
        num_samples=parsed.num_samples,
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


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclasses.dataclass(frozen=True)
class PredictArguments:
    """Prints a fine-tuned model's prediction for each example, a line of JSON each."""

    run: Positional[Path]
    """The run folder."""
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
    _enable_compilation_cache()
    from .prediction import predict

    for prediction in predict(parsed.run, parsed.input, step=parsed.step, say=_say):
        print(json.dumps(prediction, ensure_ascii=False))


@dataclasses.dataclass(frozen=True)
class FillMaskArguments:
    """Prints the most probable words for each [MASK] of a text."""

    run: Positional[Path]
    """The run folder of a masked language model."""
    text: Positional[str]
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
    _enable_compilation_cache()
    from .filling import MaskFiller

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

    run: Positional[Path]
    """The run folder of a model that translates."""
    input: str
    """A file with a sentence on each line; - is standard input."""
    output: Path | None = None
    """The file to write, in the order of the input; by default standard output."""
    num_beams: int = 4
    """How many beginnings of a translation are kept at a time; 1 is greedy."""
    length_penalty: float = 0.6
    """α: above 0 favours longer translations."""
    num_best: int = 1
    """Translations of each line, the best first. Above 1 each stands on a line of its own, behind
    its line's number and its score, parted by tabs; an empty line has one, empty, scored 0."""
    step: int | None = None
    """The checkpoint; by default the newest."""


def translate_command(arguments: list[str]) -> None:
    """The command `flaxzoo translate RUN --input FILE --output FILE`."""
    parsed = tyro.cli(TranslateArguments, args=arguments, prog="flaxzoo translate")
    _enable_compilation_cache()
    from ..data.atomic import check_place, write_file
    from ..data.text_lines import input_lines
    from ..models.beam import BeamSearch
    from .progress import Progress
    from .translating import TextTranslator, note_of_empty, to_lines

    search = BeamSearch(num_beams=parsed.num_beams, length_penalty=parsed.length_penalty)
    if not 1 <= parsed.num_best <= parsed.num_beams:
        raise ValueError(
            f"num-best {parsed.num_best} must be at least 1 and at most num-beams "
            f"{parsed.num_beams}"
        )
    if parsed.output is not None:
        check_place(parsed.output, parsed.input)
    search = dataclasses.replace(search, num_return=parsed.num_best)
    translator = TextTranslator.of_run(parsed.run, step=parsed.step)
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
        _say(note)


@dataclasses.dataclass(frozen=True)
class AverageArguments:
    """Averages the last checkpoints of a run into a run folder of its own."""

    run: Positional[Path]
    """The run folder; train with --keep-last N to have N checkpoints."""
    last: int = 5
    """How many checkpoints, the newest."""
    output: Path | None = None
    """The folder that is made; by default RUN-averaged."""


def average_command(arguments: list[str]) -> None:
    """The command `flaxzoo average RUN --last N`."""
    parsed = tyro.cli(AverageArguments, args=arguments, prog="flaxzoo average")
    from .averaging import average_checkpoints

    run = parsed.run.resolve()  # a run may be named "."
    output = parsed.output or run.with_name(f"{run.name}-averaged")
    taken = average_checkpoints(parsed.run, output, last=parsed.last)
    _say(f"{output}: the mean of the checkpoints {', '.join(map(str, taken))}")


@dataclasses.dataclass(frozen=True)
class ImportArguments:
    """Makes a run folder of a model in Hugging Face's form: to be used, and to begin runs with."""

    source: Positional[Path]
    """A folder with config.json, model.safetensors (or several and their index) and the
    tokenizer's files."""
    output: Positional[Path]
    """The run folder that is made."""


def import_command(arguments: list[str]) -> None:
    """The command `flaxzoo import HF_DIR RUN`."""
    parsed = tyro.cli(ImportArguments, args=arguments, prog="flaxzoo import")
    from .importing import import_model

    _say(f"{parsed.output}: {import_model(parsed.source, parsed.output)}")


@dataclasses.dataclass(frozen=True)
class EmbedArguments:
    """Writes a vector for each line of a file, the mean of the model's hidden states."""

    run: Positional[Path]
    """The run folder."""
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
        raise ValueError(f"output {parsed.output} must end in .npy, the format it is written in")
    _enable_compilation_cache()
    from ..data.atomic import check_place
    from ..data.text_lines import read_lines
    from .embedding import TextEmbedder

    check_place(parsed.output, parsed.input)
    texts = read_lines(parsed.input)
    vectors = TextEmbedder.of_run(parsed.run, step=parsed.step)(texts, _say)
    _write_array(parsed.output, vectors)
    _say(f"{parsed.output}: {vectors.shape[0]:,} vectors of {vectors.shape[1]}")


def _write_array(path: Path, array: Any) -> None:
    import io

    import numpy as np

    from ..data.atomic import write_file

    content = io.BytesIO()
    np.save(content, array)
    write_file(path, content.getvalue())


def list_command(arguments: list[str]) -> None:
    """The command `flaxzoo list`."""
    tyro.cli(_NoArguments, args=arguments, prog="flaxzoo list")
    from .catalogue import print_catalogue

    print_catalogue()


@dataclasses.dataclass(frozen=True)
class _NoArguments:
    """Prints the published model sizes and the recipes."""


@dataclasses.dataclass(frozen=True)
class TokenizerArguments:
    """Trains a tokenizer on a source of text and saves it in a folder."""

    source: Positional[str]
    """builtin:python-docs, text:GLOB[#line|#block], jsonl:GLOB#field or tfds:NAME/CONFIG#field."""
    output: Positional[Path]
    """The folder that is made."""
    kind: TokenizerKind = "byte-bpe"
    """Which kind of tokenizer."""
    vocab_size: int | None = None
    """Tokens in the vocabulary, special ones included; not for characters."""


def tokenizer_command(arguments: list[str]) -> None:
    """The command `flaxzoo tokenizer train SOURCE OUTPUT`."""
    if not arguments or arguments[0] != "train":
        print("usage: flaxzoo tokenizer train SOURCE OUTPUT [--kind KIND] [--vocab-size N]")
        if not arguments or arguments[0] not in ("-h", "--help"):
            raise ValueError("flaxzoo tokenizer knows one action: train")
        return
    parsed = tyro.cli(TokenizerArguments, args=arguments[1:], prog="flaxzoo tokenizer train")
    if parsed.output.exists():
        raise ValueError(f"{parsed.output} exists: give a folder that does not")
    from ..data.documents import load_documents
    from ..data.tokenizer_training import TokenizerConfig, train_tokenizer

    documents = load_documents(parsed.source, "train", validation_fraction=0.0)
    tokenizer = train_tokenizer(documents, TokenizerConfig(parsed.kind, parsed.vocab_size))
    tokenizer.save(parsed.output)
    _say(f"{parsed.output}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens")


def _enable_compilation_cache() -> None:
    """Compiled programs are kept between commands, unless jax was told where already."""
    import jax

    from ..data.documents import default_cache_dir

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", os.fspath(default_cache_dir() / "xla"))
