"""Exports a trained model: in Hugging Face's form, as plain arrays, or as a program.

Each output appears completely or not at all.
"""

import dataclasses
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flax.traverse_util import flatten_dict

from ...data.io.atomic_io import build_folder, write_file
from ...data.io.json_text import JsonObject
from ...data.tasks.sequence_classification import SequenceClassificationData
from ...data.tasks.translation import start_and_end
from ...data.tokenizers.base import Tokenizer
from ...data.tokenizers.export import export_tokenizer
from ...models.bert import BertConfig
from ...models.hf.save_weights import (
    FILE_BYTES,
    Precision,
    in_precision,
    search_fields,
    write_json,
    write_weights,
)
from ...models.hf.sentence_embedding import (
    EmbeddingSettings,
    read_embedding_settings,
    write_embedding_settings,
)
from ...models.hub import local_folder
from ...models.load import chosen_step, read_fields
from ...models.model import Model
from ...models.nn.heads import HEADS
from ...models.nn.typing import Params
from ...models.stablehlo import export_forward, input_names
from ..config import TrainConfig
from ..errors import RunError
from ..inference.translate import published_request
from ..runs.finite import load_finite
from ..runs.load_run import TARGETS, generation_defaults, open_run
from ..runs.params_only_run import check_not_existing
from ..state import count_parameters
from .model_card import FILE, model_card

Form = Literal["huggingface", "safetensors", "npz", "stablehlo"]
PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    **{target: problem for problem, target in TARGETS.items()},
}
NOTE_ON_SEARCH = (
    "flaxzoo divides the score of a translation by ((5 + n) / 6)^α, transformers by n^α, and "
    "flaxzoo's translations are at most 50 tokens longer than their sources: so the best of a beam "
    "are not always the same. Greedy search is."
)


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model to export, and how to write it."""

    folder: Path
    """The folder that the model was loaded from."""
    step: int | None
    """Its checkpoint; None for a folder in Hugging Face's form."""
    config: TrainConfig
    tokenizer: Tokenizer
    model: Model
    params: Params
    dtype: Precision
    """The precision of the written parameters."""
    file_bytes: int
    """The largest size of a file in Hugging Face's form."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the parameters by their paths, in the precision to write."""
        flat: Params = flatten_dict(self.params, sep="/")
        return {path: in_precision(path, np.asarray(x), self.dtype) for path, x in flat.items()}


def export_model(
    source: str | Path,
    output: str | Path,
    *,
    form: Form = "huggingface",
    step: int | None = None,
    dtype: Precision = "float32",
    file_bytes: int = FILE_BYTES,
) -> list[str]:
    """Writes a model in a form that other programs read.

    Args:
        source: A run folder, a folder in Hugging Face's form, or a name on the hub.
        output: The folder to make for the forms "huggingface" and "stablehlo", else the file.
        form: huggingface: `config.json`, safetensors, the tokenizer's files and a model card, for
            transformers. safetensors, npz: the arrays by flaxzoo's own paths, layers stacked.
            stablehlo: the forward pass as a program that needs jax alone, and its parameters.
        step: The checkpoint; by default the newest.
        dtype: The precision of the written parameters.
        file_bytes: The largest size of a file in Hugging Face's form; no tensor is split.

    Returns:
        Notes on the exported model, a line each.

    Raises:
        FileNotFoundError: `source` does not exist, or has no such checkpoint.
        RunError: `output` exists, or a parameter is NaN or infinite.
        UserError: The form cannot express the model.
    """
    output, folder = Path(output), local_folder(source)
    check_not_existing(output)
    config, tokenizer = open_run(folder)
    model, params = load_finite(folder, step=step)
    exported = Exported(
        folder=folder,
        step=chosen_step(folder, step),
        config=config,
        tokenizer=tokenizer,
        model=model,
        params=params,
        dtype=dtype,
        file_bytes=file_bytes,
    )
    return FORMS[form](exported, output)


def _write_huggingface(exported: Exported, output: Path) -> list[str]:
    config, tokenizer = exported.config.model, exported.tokenizer
    head = HEADS[config.head]
    translates = head.name == "seq2seq_lm"
    fields = _fields_besides_model(exported)
    stored = generation_defaults(exported.folder)
    notes: list[str] = []
    if config.labels and not head.needs_labels:
        notes.append("that there may be no answer has no place in config.json: it is left out")
    is_body = head.name == "none" and config.num_token_types > 0
    if is_body and isinstance(config, BertConfig) and not config.has_pooler:
        notes.append("without a pooler: load it with add_pooling_layer=False")
    if translates and stored is None:
        notes.append(NOTE_ON_SEARCH)
    embedding = read_embedding_settings(exported.folder)
    if embedding is None and head.name == "none":
        embedding = EmbeddingSettings()
    # Generation settings: those that were imported with the model, else the ids of special tokens
    # and the search that evaluates a translation model trained here.
    settings = stored
    if settings is None:
        settings = {name: id for name, id in fields.items() if name.endswith("_token_id")}
        if translates:
            request = published_request(tokenizer, config.vocab_size)
            settings |= search_fields(request, config.max_length)

    def fill(folder: Path) -> None:
        write_weights(
            folder,
            config,
            exported.params,
            dtype=exported.dtype,
            file_bytes=exported.file_bytes,
            fields=fields,
        )
        length = config.max_length
        # sentence-transformers counts positions from the first token of a batch, padding or not.
        side = None if embedding is None else "right"
        notes.append(
            export_tokenizer(
                tokenizer, folder, closing=translates, padding_side=side, max_length=length
            )
        )
        if embedding is not None:
            write_embedding_settings(folder, embedding, d_model=config.d_model, max_length=length)
        if head.generates:
            given: JsonObject = {
                name: value for name, value in settings.items() if value is not None
            }
            write_json(folder / "generation_config.json", given)
        card = model_card(
            output.name,
            exported.config,
            stored_fields=read_fields(exported.folder),
            folder=exported.folder,
            step=exported.step,
            num_parameters=count_parameters(exported.params),
            embeds=embedding is not None,
            notes=notes,
        )
        (folder / FILE).write_text(card, encoding="utf-8")

    build_folder(output, fill)
    return notes


def _fields_besides_model(exported: Exported) -> JsonObject:
    """Returns fields of `config.json` that do not follow from the model's configuration."""
    special, head = exported.tokenizer.special_ids, exported.config.model.head
    ids = {"bos": special.bos, "eos": special.eos, "pad": special.pad}
    if head == "seq2seq_lm":
        ids["decoder_start"], ids["eos"] = start_and_end(exported.tokenizer)
    if HEADS[head].generates and ids["pad"] is None:
        ids["pad"] = ids["eos"]  # padding is masked, so that any token serves
    fields: JsonObject = {f"{role}_token_id": id for role, id in ids.items()}
    data = exported.config.data
    if head == "sequence_classification" and isinstance(data, SequenceClassificationData):
        fields["problem_type"] = PROBLEM_TYPES[data.target]
    return fields


def _write_safetensors(exported: Exported, output: Path) -> list[str]:
    from safetensors.numpy import save

    write_file(output, save(exported.arrays()))
    return []


def _write_npz(exported: Exported, output: Path) -> list[str]:
    if exported.dtype == "bfloat16":
        raise RunError("npz has no bfloat16: choose float16 or float32, or the form safetensors")
    content = io.BytesIO()
    arrays: dict[str, Any] = exported.arrays()  # a checker cannot know that none is a keyword
    np.savez(content, **arrays)
    write_file(output, content.getvalue())
    return []


def _write_stablehlo(exported: Exported, output: Path) -> list[str]:
    if exported.dtype != "float32":
        raise RunError(
            f"a program takes parameters of float32, not {exported.dtype}: leave the dtype out"
        )
    config = exported.config.model
    program = export_forward(exported.model)
    names = ", ".join(f"{name}=…" for name in input_names(config))
    note = (
        "run it with jax.export.deserialize(bytearray(open('forward.stablehlo', 'rb').read()))"
        f".call(params, {names}): params as safetensors.numpy.load_file reads them, all others "
        f"int32, of at most {config.max_length} tokens"
    )

    def fill(folder: Path) -> None:
        (folder / "forward.stablehlo").write_bytes(program)
        _write_safetensors(exported, folder / "params.safetensors")
        (folder / FILE).write_text(f"# {output.name}\n\n{note}\n", encoding="utf-8")

    build_folder(output, fill)
    return [note]


FORMS: Mapping[Form, Callable[[Exported, Path], list[str]]] = {
    "huggingface": _write_huggingface,
    "safetensors": _write_safetensors,
    "npz": _write_npz,
    "stablehlo": _write_stablehlo,
}
