"""Imports a model in the Hugging Face format as a run folder, for use with `--init-from`."""

import dataclasses
from pathlib import Path

from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.common.json_text import JsonObject
from ...data.tokenizers.base import Tokenizer
from ...data.tokenizers.load import load_tokenizer
from ...models.adapters.peft import PeftAdapter, is_peft_folder
from ...models.finite import check_finite
from ...models.heads.specs import HEADS
from ...models.hf.cross_encoder import read_pair_scoring, write_pair_scoring
from ...models.hf.generation_config import GENERATION
from ...models.hf.save import check_vocabulary
from ...models.hf.sentence_embedding import (
    keep_embedding_settings,
    read_embedding_settings,
)
from ...models.hf.sentence_modules import IN_RUN
from ...models.hf.sparse_encoder import read_sparse_settings, write_sparse_settings
from ...models.hub import local_folder
from ...models.loading import load
from ...models.registry import family_name
from ...models.run_files import IMPORTED_FROM, is_foreign, read_fields
from ...models.text.folder import beam_search_defaults, generation_defaults, vocabulary_note
from ..config import TrainConfig, to_dict
from ..runs.load_run import config_of_model, open_run
from ..runs.params_only_run import check_not_existing, make_params_only_run
from ..state import count_parameters

TOKENIZER_FILE = "tokenizer.json"


def import_model(source: str | Path, output: str | Path, *, base: str | Path | None = None) -> str:
    """Creates a run folder from a folder in the Hugging Face format.

    Args:
        source: A folder with `config.json`, safetensors and the tokenizer's files; a folder with a
          PEFT adapter, which is merged into its base model; or a name on the hub.
        output: The folder to create. It is written completely or not at all.
        base: For an adapter, the folder or the name of its base model. Defaults to the base model
          that the adapter's own configuration names.

    Returns:
        A description of the model, in one line.

    Raises:
        FileNotFoundError: `source` has no `config.json`.
        UserError: The folder is invalid, or its model or tokenizer is not supported.
        RunError: `output` exists, `source` is a run folder, the tokenizer does not match the
          model, or a parameter is NaN or infinite.
    """
    output = Path(output)
    check_not_existing(output)
    adapted = local_folder(source)
    folder, config, tokenizer = _opened(adapted, base)
    # This is the order of the fields in `config.json`: model, train, origin, generation settings.
    train = to_dict(config)
    origin = str(adapted.resolve() if Path(source).exists() else source)
    fields: JsonObject = {"model": train.pop("model"), "train": train, IMPORTED_FROM: origin}
    # Read these settings now, so that unsupported ones raise an error before the parameters are
    # loaded.
    beam_search_defaults(folder, tokenizer)
    settings = generation_defaults(folder)
    if settings is not None and HEADS[config.model.head].generates:
        fields[GENERATION] = settings
    read_embedding_settings(folder)
    model = config.model
    sparse = read_sparse_settings(folder)
    scoring = read_pair_scoring(folder) if model.head == "sequence_classification" else None
    # Load and check the parameters before the folder is made, so that an error leaves no folder.
    _, params = load(adapted, base=None if adapted == folder else folder)
    check_finite(params, adapted)

    def save_more(run: Path) -> None:
        keep_embedding_settings(folder, run, d_model=model.d_model, max_length=model.max_length)
        if scoring is not None:
            write_pair_scoring(run / IN_RUN, scoring, max_length=model.max_length)
        if sparse is not None:
            write_sparse_settings(run / IN_RUN, sparse, max_length=model.max_length)

    make_params_only_run(
        output,
        fields,
        save_tokenizer=tokenizer.save,
        save_more=save_more,
        step=0,
        params=params,
    )
    kind = f"{family_name(model)}, head {model.head}"
    note = vocabulary_note(folder, model, tokenizer)
    described = f"{kind}, {count_parameters(params):,} parameters, from {source}"
    return described if note is None else f"{described}; {note}"


def _opened(source: Path, base: str | Path | None) -> tuple[Path, TrainConfig, Tokenizer]:
    """Returns the folder (for an adapter, of its base model), configuration and tokenizer."""
    if not is_peft_folder(source):
        problem = f"{source} is not an adapter of peft: leave base {base} out"
        require(base is None, problem, RunError)
        problem = f"{source} is already a run folder: copy it"
        require(is_foreign(read_fields(source)), problem, RunError)
        return source, *open_run(source)
    adapter = PeftAdapter.read(source)
    folder = local_folder(adapter.base(base))
    config, tokenizer = open_run(folder)
    tuned = adapter.model_config(config.model)
    # The adapter may have its own tokenizer, with additional tokens or another chat template.
    if (source / TOKENIZER_FILE).is_file():
        tokenizer = load_tokenizer(source)
        check_vocabulary(tokenizer, tuned, f"the tokenizer of {source}")
    # If the base model is a run with adapters, its adapters are also merged.
    config = dataclasses.replace(config, lora=None)
    return folder, config if tuned == config.model else config_of_model(tuned), tokenizer
