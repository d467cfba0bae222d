"""A trained model for the rest of the world: in Hugging Face's form, as plain arrays, as a program.

Whatever is made appears whole or not at all.
"""

import dataclasses
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flax.traverse_util import flatten_dict

from ...data.io.atomic_io import build_folder, write_file
from ...data.tasks.translation import start_and_end
from ...data.tokenizers.base import Tokenizer
from ...data.tokenizers.export import export_tokenizer
from ...models.hf.save_weights import (
    FILE_BYTES,
    Precision,
    in_precision,
    search_fields,
    write_json,
    write_weights,
)
from ...models.hub import local_folder
from ...models.load import chosen_step, load, read_fields
from ...models.nn.heads import HEADS
from ...models.stablehlo import export_forward, input_names
from ..config import TrainConfig
from ..errors import RunError
from ..inference.translate import published_request
from ..runs.load_run import TARGETS, asked_of, open_run
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
    """What is exported, and how."""

    folder: Path
    step: int | None
    config: TrainConfig
    tokenizer: Tokenizer
    model: Any
    params: Any
    dtype: Precision
    file_bytes: int


def export_model(
    source: str | Path,
    output: str | Path,
    *,
    form: Form = "huggingface",
    step: int | None = None,
    dtype: Precision = "float32",
    file_bytes: int = FILE_BYTES,
) -> list[str]:
    """Writes a model in a form that others read.

    Args:
      source: a run folder; also one in Hugging Face's form, or a name on its hub.
      output: what is made: of the forms "huggingface" and "stablehlo" a folder, else a file.
      form: huggingface: `config.json`, safetensors, the tokenizer's files and a model card, for
        transformers. safetensors, npz: the arrays by our own paths, layers stacked. stablehlo:
        the forward pass as a program that needs jax alone, and its parameters.
      step: which checkpoint; by default the newest.
      dtype: in which precision parameters are written.
      file_bytes: how large a file of Hugging Face's form may be; a tensor is never cut.

    Returns:
      What there is to know of it, a line each.

    Raises:
      FileNotFoundError: `source` is not there, or has no such checkpoint.
      RunError: `output` exists.
      UserError: the model cannot be said in that form.
    """
    output, folder = Path(output), local_folder(source)
    check_not_existing(output)
    config, tokenizer = open_run(folder)
    model, params = load(folder, step=step)
    exported = Exported(
        folder, chosen_step(folder, step), config, tokenizer, model, params, dtype, file_bytes
    )
    return FORMS[form](exported, output)


def _hugging_face(exported: Exported, output: Path) -> list[str]:
    config, tokenizer = exported.model.config, exported.tokenizer
    translates = config.head == "seq2seq_lm"
    fields, notes = _stated(exported), []
    asked = asked_of(exported.folder)
    if config.labels and not HEADS[config.head].needs_labels:
        notes.append("that there may be no answer has no place in config.json: it is left out")
    if config.head == "none" and config.num_token_types and not config.has_pooler:
        notes.append("without a pooler: load it with add_pooling_layer=False")
    if translates and asked is None:
        notes.append(NOTE_ON_SEARCH)

    def fill(place: Path) -> None:
        write_weights(
            place,
            config,
            exported.params,
            dtype=exported.dtype,
            file_bytes=exported.file_bytes,
            fields=fields,
        )
        length = config.max_length
        notes.append(export_tokenizer(tokenizer, place, closing=translates, max_length=length))
        if HEADS[config.head].generates:
            write_json(place / "generation_config.json", _generation(exported, fields, asked))
        (place / FILE).write_text(_card(exported, output.name, notes), encoding="utf-8")

    build_folder(output, fill)
    return notes


def _stated(exported: Exported) -> dict[str, Any]:
    """Fields of `config.json` that a model does not say by itself."""
    special, head = exported.tokenizer.special_ids, exported.model.config.head
    ids = {"bos": special.bos, "eos": special.eos, "pad": special.pad}
    if head == "seq2seq_lm":
        ids["decoder_start"], ids["eos"] = start_and_end(exported.tokenizer)
    if HEADS[head].generates and ids["pad"] is None:
        ids["pad"] = ids["eos"]  # what is padded is masked
    fields: dict[str, Any] = {f"{role}_token_id": id for role, id in ids.items()}
    if head == "sequence_classification":
        data: Any = exported.config.data
        fields["problem_type"] = PROBLEM_TYPES[data.target]
    return fields


def _generation(
    exported: Exported, fields: dict[str, Any], asked: dict[str, Any] | None
) -> dict[str, Any]:
    """What the folder is to ask for: what an imported one did, else ids of special tokens."""
    if asked is None:
        asked = {name: id for name, id in fields.items() if name.endswith("_token_id")}
        if exported.model.config.head == "seq2seq_lm":
            asked |= _published_search(exported)
    return {name: value for name, value in asked.items() if value is not None}


def _published_search(exported: Exported) -> dict[str, Any]:
    """What a run that was trained here would ask for."""
    config = exported.model.config
    request = published_request(exported.tokenizer, config.vocab_size)
    return search_fields(request, config.max_length)


def _card(exported: Exported, name: str, notes: list[str]) -> str:
    folder, step = exported.folder, exported.step
    number = count_parameters(exported.params)
    return model_card(name, exported.config, read_fields(folder), folder, step, number, notes)


def _flat(exported: Exported) -> dict[str, np.ndarray]:
    flat: Mapping[str, Any] = flatten_dict(exported.params, sep="/")
    return {path: in_precision(path, np.asarray(x), exported.dtype) for path, x in flat.items()}


def _safetensors(exported: Exported, output: Path) -> list[str]:
    from safetensors.numpy import save

    write_file(output, save(_flat(exported)))
    return []


def _npz(exported: Exported, output: Path) -> list[str]:
    if exported.dtype == "bfloat16":
        raise RunError("npz has no bfloat16: choose float16 or float32, or the form safetensors")
    content = io.BytesIO()
    arrays: Any = _flat(exported)
    np.savez(content, **arrays)
    write_file(output, content.getvalue())
    return []


def _stablehlo(exported: Exported, output: Path) -> list[str]:
    if exported.dtype != "float32":
        raise RunError(
            f"a program takes parameters of float32, not {exported.dtype}: leave the dtype out"
        )
    program = export_forward(exported.model)
    names = ", ".join(f"{name}=…" for name in input_names(exported.model.config))
    note = (
        "run it with jax.export.deserialize(bytearray(open('forward.stablehlo', 'rb').read()))"
        f".call(params, {names}): params as safetensors.numpy.load_file reads them, all others "
        f"int32, of at most {exported.model.config.max_length} tokens"
    )

    def fill(place: Path) -> None:
        (place / "forward.stablehlo").write_bytes(program)
        _safetensors(exported, place / "params.safetensors")
        (place / FILE).write_text(f"# {output.name}\n\n{note}\n", encoding="utf-8")

    build_folder(output, fill)
    return [note]


FORMS: Mapping[Form, Callable[[Exported, Path], list[str]]] = {
    "huggingface": _hugging_face,
    "safetensors": _safetensors,
    "npz": _npz,
    "stablehlo": _stablehlo,
}
