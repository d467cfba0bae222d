"""The command `flaxzoo rank`."""

import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ....data.common.errors import UserError
from ....data.common.fields import Range, require
from ....data.common.json_text import to_json
from ...compilation_cache import enable_compilation_cache
from ..options import OutputPath, check_one_given, log, parse, read_line
from .arguments import SamplingArguments

if TYPE_CHECKING:
    from ....models.text.completions import Completed, Prompt
    from ....models.text.generate import TextGenerator


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankArguments(SamplingArguments):
    """Shows several answers of a model to each prompt, and collects your rankings of them.

    A line of standard input ranks the answers to one prompt, best first, as in 2 3 1; equally good
    answers are joined, as in 2 1=3. A line may leave out answers; an empty line skips the prompt.
    The rankings are appended to OUTPUT, in the format that flaxzoo train reward (or dpo) reads.
    """

    output: OutputPath
    """The file of JSON lines. If the file exists, the rankings are appended to it."""
    prompt: tuple[str, ...] = ()
    """The prompts."""
    prompt_file: str | None = None
    """A file of prompts instead, as for flaxzoo generate."""
    num_samples: Annotated[int, Range(least=2, most=99)] = 4
    """The number of answers to each prompt."""
    chat: bool = False
    """Format each prompt as the user's turn of a conversation, with the model's chat template."""


def rank_command(arguments: list[str]) -> None:
    """Runs `flaxzoo rank RUN OUTPUT --prompt TEXT`."""
    parsed = parse(RankArguments, arguments, "flaxzoo rank")
    check_one_given(parsed, "prompt", "prompt_file")
    enable_compilation_cache()
    from ....data.common.progress import Progress
    from ....models.text.chat.conversation import answer_options
    from ....models.text.completions import Prompt, read_prompts
    from ....models.text.generate import BATCH_SIZE, TextGenerator

    given = read_prompts(parsed.prompt_file) if parsed.prompt_file else map(Prompt, parsed.prompt)
    prompts = list(given)
    generator = TextGenerator.of_run(
        parsed.run, step=parsed.step, log=log, max_length=parsed.max_length, ema=parsed.ema
    )
    begun = prompts
    options: dict[str, Any] = {"stop_strings": parsed.stop_strings}
    if parsed.chat:
        options = answer_options(generator, parsed.stop_strings)
        begun = [_begun(prompt, generator, options["stop_strings"]) for prompt in prompts]
    options |= parsed.requested() | {"num_return_sequences": parsed.num_samples}
    with Progress().counter("answers", len(prompts) * parsed.num_samples) as advance:
        completed = generator.complete(
            begun,
            seed=parsed.seed,
            batch_size=BATCH_SIZE,
            on_batch=advance,
            log=log,
            **options,
        )
    with parsed.output.open("a", encoding="utf-8") as file:
        for prompt, each in zip(prompts, completed, strict=True):
            if (row := _ranked(prompt, each, chat=parsed.chat)) is not None:
                file.write(f"{to_json(row)}\n")
                file.flush()


def _begun(prompt: "Prompt", generator: "TextGenerator", stops: Sequence[str]) -> "Prompt":
    """Returns the beginning of a conversation, formatted with the model's chat template."""
    from ....data.chat.encoding import encode_chat

    messages = [{"role": "user", "content": prompt.text}]
    encoded = encode_chat(generator.tokenizer, messages, add_generation_prompt=True)
    return dataclasses.replace(
        prompt,
        text=encoded.text,
        ids=tuple(encoded.ids),
        stop_strings=(*(prompt.stop_strings or ()), *stops),
    )


def _ranked(prompt: "Prompt", completed: "Completed", *, chat: bool) -> dict[str, Any] | None:
    """Asks for the ranking of one prompt's answers; returns its record, or None."""
    answers = [one.text for one in completed.completions]
    print(f"\n{prompt.text}")
    for number, answer in enumerate(answers, start=1):
        print(f"[{number}] {answer}", flush=True)
    ranks = None
    while ranks is None:
        try:
            ranks = read_ranking(read_line("best first: "), len(answers))
        except EOFError:
            return None
        except UserError as error:
            # A user may try again; an error in a script's input ends the program.
            if not sys.stdin.isatty():
                raise
            log(str(error))
    if not ranks:
        return None

    def written(role: str, text: str) -> object:
        return [{"role": role, "content": text}] if chat else text

    ranked = [[written("assistant", answers[i]) for i in rank] for rank in ranks]
    # A rank with a single answer is stored as this answer, and a rank with several answers as a
    # list.
    stored = [one if len(one) > 1 else one[0] for one in ranked]
    return {"prompt": written("user", prompt.text), "ranked": stored}


def read_ranking(line: str, number: int) -> list[list[int]]:
    """Returns the indices (from 0) of the answers in each rank, or an empty list for an empty line.

    Raises:
        UserError: the line is not a ranking of at least two answers in two ranks.
    """
    ranks = [rank.split("=") for rank in line.split()]
    # Each number may occur once.
    allowed = Counter(map(str, range(1, number + 1)))
    require(
        Counter(itertools.chain(*ranks)) <= allowed and len(ranks) != 1,
        f"the ranking must be different numbers from 1 to {number} in two or more ranks, the best "
        f"first, as in 2 1 or 2 1=3, or an empty line to skip the prompt, got {line!r}",
    )
    return [[int(word) - 1 for word in rank] for rank in ranks]
