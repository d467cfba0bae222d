"""Exports a trained model in the Hugging Face format, as plain arrays, or as a program.

Each output is written completely or not at all.
"""

import dataclasses
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict

from ...data.common.atomic_io import build_folder, write_file
from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.tokenizers.base import Tokenizer
from ...models.adapters.peft import is_peft_folder
from ...models.adapters.peft_export import write_adapter
from ...models.finite import check_finite, load_finite
from ...models.heads.specs import CAUSAL_HEADS, HEADS
from ...models.hf.cross_encoder import read_pair_scoring
from ...models.hf.registry import mapping_of
from ...models.hf.save import FolderSettings, ProblemType, write_model, write_tokenizer
from ...models.hf.save_weights import FILE_BYTES, Precision, in_precision
from ...models.hf.sentence_embedding import EmbeddingSettings, read_embedding_settings
from ...models.hf.sparse_encoder import read_sparse_settings
from ...models.hub import local_folder
from ...models.loading import AdapterRun, load_adapters, model_config
from ...models.nn.typing import Params
from ...models.registry import create
from ...models.run_files import (
    CONFIG_FILE,
    EMA_AUXILIARY,
    IMPORTED_FROM,
    chosen_step,
    is_foreign,
    read_fields,
)
from ...models.stablehlo import export_forward, input_names
from ...models.text.folder import generation_defaults
from ..config import TrainConfig, objective_of
from ..evaluation.evaluate import with_auxiliary
from ..losses.objective import AUXILIARY, split
from ..objectives.masked_lm import MaskedLMConfig
from ..objectives.replaced_token_detection import GENERATOR, ReplacedTokenConfig, generator_config
from ..runs.load_run import open_run
from ..runs.params_only_run import check_not_existing
from ..state import count_parameters
from .model_card import FILE, model_card

Form = Literal["huggingface", "safetensors", "npz", "stablehlo", "peft"]
PROBLEM_TYPES: Mapping[str, ProblemType] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "binary": "multi_label_classification",
    "regression": "regression",
}


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model to export, with the settings of the export."""

    folder: Path
    """The folder that the model was loaded from."""
    step: int | None
    """The step of the checkpoint, or None for a folder in the Hugging Face format."""
    config: TrainConfig
    tokenizer: Tokenizer
    model: nn.Module
    params: Params
    dtype: Precision
    """The precision of the written parameters."""
    file_bytes: int
    """The maximum number of bytes of a safetensors file in the Hugging Face format."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the parameters by path, in the requested precision."""
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
    ema: bool = False,
    base: str | None = None,
    generator: bool = False,
) -> list[str]:
    """Writes a model in a format for other programs.

    Args:
        source: A run folder, a folder in the Hugging Face format, or a name on the hub.
        output: The folder to create for the forms "huggingface", "stablehlo" and "peft", else the
            file.
        form: The format. "huggingface" writes `config.json`, safetensors, the tokenizer's files and
            a model card, for transformers. "safetensors" and "npz" write one file with all arrays,
            named by flaxzoo's parameter paths, with stacked layers. "stablehlo" writes the
            parameters, and the forward pass as a program that needs only jax. "peft" writes the
            adapters of a run without their base model, in the format of the package peft, with the
            tokenizer, its chat template and a model card.
        step: The checkpoint. Defaults to the newest checkpoint.
        dtype: The precision of the written parameters.
        file_bytes: The maximum number of bytes of a safetensors file in the Hugging Face format. A
            tensor is never split, so a file with a single large tensor may exceed this size.
        ema: Whether to write the moving average of the parameters. The run must have set
            `optimizer.ema_decay`.
        base: For the form "peft": the name or the folder of the base model that peft must load, in
            the Hugging Face format. Defaults to the folder that the base model was read or
            imported from.
        generator: For a run of replaced-token detection: whether to write the generator, which
            predicts masked tokens, instead of the model.

    Returns:
        Notes about the exported model, one line each.

    Raises:
        FileNotFoundError: `source` does not exist, or does not have the checkpoint.
        RunError: `output` exists, or a parameter is NaN or infinite.
        UserError: The model cannot be written in this form.
    """
    output, folder = Path(output), local_folder(source)
    check_not_existing(output)
    # The form peft does not need the parameters of the base model.
    if form == "peft":
        require(not generator, "generator does not apply to the form peft: leave generator out")
        problem = f"adapters are written in float32, not {dtype}: leave the dtype out"
        require(dtype == "float32", problem, RunError)
        return _write_peft(folder, output, step=step, base=base, ema=ema)
    require(base is None, f"base {base!r} applies to the form peft, not to {form}: leave base out")
    config, tokenizer = open_run(folder)
    step = chosen_step(folder, step)
    model, params = load_finite(folder, step=step, ema=ema)
    if generator:
        params = _generator_params(config, params, folder, step, ema=ema)
        objective = cast(ReplacedTokenConfig, config.objective)  # `_generator_params` checks it
        smaller = generator_config(config.model, objective.generator_size)
        config = dataclasses.replace(config, model=smaller, objective=MaskedLMConfig())
        model = create(smaller)
    exported = Exported(
        folder=folder,
        step=step,
        config=config,
        tokenizer=tokenizer,
        model=model,
        params=params,
        dtype=dtype,
        file_bytes=file_bytes,
    )
    return FORMS[form](exported, output)


def _generator_params(
    config: TrainConfig, params: Params, folder: Path, step: int | None, *, ema: bool
) -> Params:
    """Returns the generator's parameters, including the embedding tables that both models share."""
    require(
        isinstance(config.objective, ReplacedTokenConfig),
        f"{folder} has no generator, because it is not a run of replaced-token detection: leave "
        "--generator out",
        error=RunError,
    )
    loss = objective_of(config)
    part = EMA_AUXILIARY if ema else AUXILIARY
    _, auxiliary = split(with_auxiliary(loss, params, folder, step, part=part))
    shared = {name: params[name] for name in loss.models[GENERATOR].shared}
    return {**shared, **auxiliary[GENERATOR]}


def _write_huggingface(exported: Exported, output: Path) -> list[str]:
    data, notes = exported.config.data, list[str]()
    head = exported.config.model.head
    embedding = read_embedding_settings(exported.folder)
    is_embedder = head == "none" or (embedding is not None and not HEADS[head].needs_labels)
    # Write the pooling settings explicitly. Without them, sentence-transformers would use the last
    # token's vector of a causal model.
    if embedding is None and head in ("none", *CAUSAL_HEADS):
        embedding = EmbeddingSettings()
    classifies = head == "sequence_classification"
    scoring = read_pair_scoring(exported.folder) if classifies else None
    settings = FolderSettings(
        dtype=exported.dtype,
        file_bytes=exported.file_bytes,
        # Export the generation settings that were imported with the model.
        generation=generation_defaults(exported.folder),
        problem_type=PROBLEM_TYPES.get(data.label_target or "") if classifies else None,
        embedding=embedding,
        scoring=scoring,
        sparse=read_sparse_settings(exported.folder),
    )
    # Choose the sentence-transformers class that loads the export, if any.
    if settings.sparse is not None:
        library = "SparseEncoder"
    elif scoring is not None:
        library = "CrossEncoder"
    else:
        library = "SentenceTransformer" if is_embedder else None

    def fill(folder: Path) -> None:
        # The card repeats the notes, so write it last.
        config, params = exported.config.model, exported.params
        notes.extend(write_model(folder, config, params, exported.tokenizer, settings=settings))
        card = model_card(
            output.name,
            exported.config,
            stored_fields=read_fields(exported.folder),
            folder=exported.folder,
            step=exported.step,
            num_parameters=count_parameters(params),
            sentence_class=library,
            notes=notes,
        )
        (folder / FILE).write_text(card, encoding="utf-8")

    build_folder(output, fill)
    return notes


def _write_safetensors(exported: Exported, output: Path) -> list[str]:
    from safetensors.numpy import save

    write_file(output, save(exported.arrays()))
    return []


def _write_npz(exported: Exported, output: Path) -> list[str]:
    problem = "npz has no bfloat16: choose float16 or float32, or the form safetensors"
    require(exported.dtype != "bfloat16", problem, RunError)
    content = io.BytesIO()
    # `Any`, because a type checker cannot know that no array has the name of a keyword of `savez`.
    arrays: dict[str, Any] = exported.arrays()
    np.savez(content, **arrays)
    write_file(output, content.getvalue())
    return []


def _write_stablehlo(exported: Exported, output: Path) -> list[str]:
    problem = f"a program takes parameters of float32, not {exported.dtype}: leave the dtype out"
    require(exported.dtype == "float32", problem, RunError)
    config = exported.config.model
    program = export_forward(exported.model)
    names = ", ".join(f"{name}=…" for name in input_names(config))
    note = (
        "run it with jax.export.deserialize(bytearray(open('forward.stablehlo', 'rb').read()))"
        f".call(params, {names}): params are the arrays that safetensors.numpy.load_file reads; "
        f"all other inputs are int32 arrays of at most {config.max_length} tokens"
    )

    def fill(folder: Path) -> None:
        # The program takes the parameters as an argument, so write them to a separate file.
        (folder / "forward.stablehlo").write_bytes(program)
        _write_safetensors(exported, folder / "params.safetensors")
        (folder / FILE).write_text(f"# {output.name}\n\n{note}\n", encoding="utf-8")

    build_folder(output, fill)
    return [note]


def _write_peft(
    folder: Path, output: Path, *, step: int | None, base: str | None, ema: bool
) -> list[str]:
    """Writes the adapters of a run, without reading the base model's parameters."""
    run = load_adapters(folder, step, ema=ema)
    check_finite(run.trained, folder)
    # Raise an error before any file is written if transformers does not have the model.
    mapping_of(run.model.config).config_to_hf(run.model.config)
    name = _base_name(run) if base is None else _checked_base(base, run)
    remedy = (
        f"flaxzoo export {run.base.folder} FOLDER creates this base, and --base FOLDER names it"
    )
    num_parameters = count_parameters(run.trained)
    notes = [
        f"{num_parameters:,} parameters; peft loads them onto their base in the Hugging Face "
        f"format: {name or remedy}"
    ]
    config, tokenizer = open_run(folder)

    def fill(path: Path) -> None:
        write_adapter(path, run.model, run.lora, run.trained, base=name)
        notes.append(_write_run_tokenizer(path, run, tokenizer))
        card = model_card(
            output.name,
            config,
            stored_fields=read_fields(folder),
            folder=folder,
            step=chosen_step(folder, step),
            num_parameters=num_parameters,
            sentence_class=None,
            notes=notes,
            adapter_base=name or "BASE",
        )
        (path / FILE).write_text(card, encoding="utf-8")

    build_folder(output, fill)
    return notes


def _base_name(run: AdapterRun) -> str | None:
    """Returns the name or folder of the base model in the Hugging Face format; None if unknown."""
    base = Path(run.base.folder)
    if not (base / CONFIG_FILE).is_file() or is_foreign(read_fields(base)):
        return run.base.folder
    # If the base model is a run, return the folder that it was imported from.
    origin = read_fields(base).get(IMPORTED_FROM)
    return origin if isinstance(origin, str) and not is_peft_folder(Path(origin)) else None


def _checked_base(base: str, run: AdapterRun) -> str:
    """Returns `base`; raises RunError if the adapters do not fit the model in this folder."""
    file = Path(base).expanduser() / CONFIG_FILE
    if not file.is_file():  # a name on the hub, or a folder that does not exist yet
        return base
    require(
        is_foreign(read_fields(file.parent)),
        f"base {base} is a run folder, which peft does not load: flaxzoo export {base} FOLDER "
        "makes a folder that peft loads",
        error=RunError,
    )
    base_config, config = model_config(file.parent), run.model.config
    for size in ("num_layers", "d_model", "vocab_size"):
        require(
            getattr(base_config, size) == getattr(config, size),
            f"base {base} has {size} {getattr(base_config, size)}, but the adapters need "
            f"{getattr(config, size)}: name the base of the adapters",
            error=RunError,
        )
    return base


def _write_run_tokenizer(folder: Path, run: AdapterRun, tokenizer: Tokenizer) -> str:
    """Writes the run's tokenizer next to its adapters; returns a note about it."""
    config, size = run.model.config, tokenizer.target.vocab_size
    paths = (*run.lora.whole, *(x.path for x in run.lora.maps))
    resized = [path for path in paths if path.startswith(("token_embedding", "head/"))]
    # AutoPeftModel resizes the base model's embeddings to the number of tokens in the tokenizer.
    if size != config.vocab_size and resized:
        return (
            f"exported without a tokenizer, because peft would cut the {config.vocab_size:,} "
            f"embeddings of the base to {size:,} tokens, but {resized[0]} is trained: use the "
            "tokenizer of the base"
        )
    return write_tokenizer(folder, config, tokenizer)


FORMS: Mapping[str, Callable[[Exported, Path], list[str]]] = {
    "huggingface": _write_huggingface,
    "safetensors": _write_safetensors,
    "npz": _write_npz,
    "stablehlo": _write_stablehlo,
}
