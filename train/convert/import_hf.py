"""A model in Hugging Face's form as a run folder: to be used, and to begin other runs with."""

from pathlib import Path
from typing import Any

from ...models.hf.generation_config import GENERATION
from ...models.hub import local_folder
from ...models.load import is_foreign, load, read_fields
from ...models.registry import family_name
from ..config import to_dict
from ..errors import RunError
from ..runs.load_run import asked_of, open_run, search_of
from ..runs.params_only_run import IMPORTED_FROM, check_place_is_free, make_model_folder
from ..state import count_parameters


def import_model(source: str | Path, output: str | Path) -> str:
    """Makes a run folder of a folder in Hugging Face's form.

    Args:
      source: with `config.json`, safetensors and the tokenizer's files; or a name on the hub.
      output: the folder that is made, whole or not at all.

    Returns:
      What it is, in a line.

    Raises:
      FileNotFoundError: `source` has no config.json.
      UserError: it is broken, or holds what there is no model or tokenizer for.
      RunError: `output` exists, `source` is a run folder, or the tokenizer is not the model's.
    """
    output = Path(output)
    check_place_is_free(output)
    folder = local_folder(source)
    if not is_foreign(read_fields(folder)):
        raise RunError(f"{folder} is a run folder already: copy it")
    config, tokenizer = open_run(folder)
    model: Any = config.model
    here = Path(source).exists()
    facts: dict[str, Any] = {IMPORTED_FROM: str(folder.resolve() if here else source)}
    search_of(folder, tokenizer)  # whether it can be searched as it asks
    asked = asked_of(folder)
    if asked is not None:
        facts[GENERATION] = asked
    _, params = load(folder)
    fields = to_dict(config)
    facts = {"model": fields.pop("model"), "train": fields, **facts}
    make_model_folder(output, facts, tokenizer.save, 0, params)
    kind = f"{family_name(model)}, head {model.head}"
    return f"{kind}, {count_parameters(params):,} parameters, from {source}"
