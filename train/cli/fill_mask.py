"""The command `flaxzoo fill-mask`."""

import dataclasses
import json
from typing import Annotated

import tyro

from ..compilation_cache import enable_compilation_cache
from .arguments import Positional, RunName, named


@dataclasses.dataclass(frozen=True)
class FillMaskArguments:
    """Prints the most probable tokens for each [MASK] in a text."""

    run: RunName
    """A run folder of a masked language model, a folder in the Hugging Face format, or a name on
    the Hugging Face hub."""
    text: Positional[Annotated[str, named("TEXT")]]
    """A text with [MASK] in place of each missing token."""
    top_k: int = 5
    """The number of tokens to print for each [MASK]."""
    step: int | None = None
    """The checkpoint. By default the newest."""
    json: bool = False
    """Print one JSON object instead of a table."""


def fill_mask_command(arguments: list[str]) -> None:
    """Runs `flaxzoo fill-mask RUN TEXT`."""
    parsed = tyro.cli(FillMaskArguments, args=arguments, prog="flaxzoo fill-mask")
    enable_compilation_cache()
    from ..inference.fill_mask import MaskFiller

    masks = MaskFiller.of_run(parsed.run, step=parsed.step)(parsed.text, top_k=parsed.top_k)
    if parsed.json:
        listed = [[dataclasses.asdict(candidate) for candidate in mask] for mask in masks]
        print(json.dumps({"masks": listed}, ensure_ascii=False))
        return
    for mask in masks:
        for candidate in mask:
            print(f"{candidate.probability:.4f}  {candidate.token:<16}  {candidate.text}")
