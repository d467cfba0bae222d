"""Saves a model and its tokenizer as a folder that transformers loads."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from ...data.common.atomic_io import new_folder
from ...data.common.fields import require, without_none
from ...data.common.json_text import JsonObject, JsonValue
from ..config import TransformerConfig
from ..decoding.request import published_request
from ..heads.specs import CAUSAL_HEADS, HEADS
from ..init import fitting_params
from ..model import Model
from ..nn.typing import Params
from ..tokenizer import Vocabulary
from .cross_encoder import PairScoring, write_pair_scoring
from .registry import mapping_of
from .save_weights import FILE_BYTES, Precision, search_fields, write_json, write_weights
from .sentence_embedding import EmbeddingSettings, write_embedding_settings
from .sparse_encoder import SparseSettings, write_sparse_settings

NOTE_ON_PADDING = (
    "the tokenizer has no padding token other than its end token: in transformers, classify one "
    "text at a time, or set pad_token_id and pad_token to a token that no text ends with"
)
NOTE_ON_SEARCH = (
    "beam search in transformers may choose another translation: flaxzoo divides the score by "
    "((5 + n) / 6)^α and limits a translation to 50 tokens more than its source, but transformers "
    "divides the score by n^α; greedy search gives the same translation"
)


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderSettings:
    """Settings of a saved folder in the Hugging Face format."""

    dtype: Precision = "float32"
    """The precision of the written parameters."""
    file_bytes: int = FILE_BYTES
    """The largest size of a file; no tensor is split."""
    generation: Mapping[str, JsonValue] | None = None
    """The content of `generation_config.json`, as `generation_arguments` returns it. Defaults to
    the ids of special tokens and, for translation, the beam search of Vaswani et al. 2017."""
    problem_type: ProblemType | None = None
    """The problem type of a classifier (its kind of labels), as transformers names it."""
    embedding: EmbeddingSettings | None = None
    """How sentence-transformers embeds texts with the model. If None, no files are written."""
    scoring: PairScoring | None = None
    """How sentence-transformers scores pairs with the model. If None, no files are written."""
    sparse: SparseSettings | None = None
    """How sentence-transformers weighs tokens with the model. If None, no files are written."""


def save(
    folder: str | Path,
    model: Model,
    params: Params,
    tokenizer: Vocabulary | None = None,
    *,
    dtype: Precision = "float32",
    file_bytes: int = FILE_BYTES,
    generation: Mapping[str, JsonValue] | None = None,
    embedding: EmbeddingSettings | None = None,
    scoring: PairScoring | None = None,
    problem_type: ProblemType | None = None,
) -> list[str]:
    """Saves a model in the Hugging Face format: `config.json`, safetensors, the tokenizer's files.

    `from_pretrained` of transformers and `models.load` read the folder; all commands read it if the
    tokenizer is given. `flaxzoo export` writes the same files and a model card.

    Example::

        model, params = models.load("gpt2")
        models.save("copy", model, params, data.load_tokenizer("gpt2"))

    Args:
      folder: The folder to create, atomically; it may exist if it is empty.
      model: The model, from `create` or `load`.
      params: Its parameters, a nested dict of arrays, with stacked layers.
      tokenizer: Its tokenizer, from `data.load_tokenizer` or `data.train_tokenizer`. If given, its
        files and the ids of special tokens are written.
      dtype: The precision of the written parameters: float32, float16 or bfloat16.
      file_bytes: The largest size of a file; no tensor is split.
      generation: Settings for `generation_config.json`, for example the `generation_arguments` of
        the folder that the model was loaded from.
      embedding: How the package sentence-transformers embeds a text. For a model with a tokenizer
        and with a causal head or no head, defaults to the mean of the hidden states.
      scoring: How the package scores pairs of texts with a sequence classifier. If None, the files
        of a cross-encoder are omitted.
      problem_type: The kind of labels of a classifier, which determines the activation of
        transformers' pipelines. Pass the `problem_type` of the `config.json` that the model was
        loaded from. If None, transformers uses a softmax for more than one label.

    Returns:
      Notes on the saved model, one line each, such as differences from transformers.

    Raises:
      UserError: The folder is not empty, a parameter does not fit the model (the message names its
        path), the tokenizer has more tokens than the model, or transformers has no such model.
    """
    params = fitting_params(model, params)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.config)
    # Without these files sentence-transformers would pool the last token of a causal model.
    if embedding is None and tokenizer is not None and model.config.head in ("none", *CAUSAL_HEADS):
        embedding = EmbeddingSettings()
    settings = FolderSettings(
        dtype=dtype,
        file_bytes=file_bytes,
        generation=generation,
        embedding=embedding,
        scoring=scoring,
        problem_type=problem_type,
    )
    notes: list[str] = []

    def fill(path: Path) -> None:
        notes.extend(write_model(path, model.config, params, tokenizer, settings=settings))

    new_folder(Path(folder), fill)
    return notes


def check_vocabulary(
    tokenizer: Vocabulary, config: TransformerConfig, name: str = "the tokenizer"
) -> None:
    """Checks that a model has an embedding for each token of a tokenizer.

    Args:
      tokenizer: The tokenizer.
      config: The configuration of the model.
      name: The grammatical subject of the error message.

    Raises:
      UserError: The tokenizer has more tokens than the model.
    """
    for what, size, known in (
        ("", tokenizer.target.vocab_size, config.vocab_size),
        (" for sources", tokenizer.vocab_size, config.input_vocab_size),
    ):
        require(
            size <= known,
            f"{name} has {size:,} tokens{what}, more than the {known:,} of its model: "
            "give the tokenizer of the model",
        )


def write_tokenizer(folder: Path, config: TransformerConfig, tokenizer: Vocabulary) -> str:
    """Writes the files of a model's tokenizer, with its chat template; returns a note."""
    # the default padding side of the tokenizer
    side = "left" if config.head in CAUSAL_HEADS else "right"
    return tokenizer.export(
        folder,
        closing=config.head == "seq2seq_lm",
        padding_side=side,
        max_length=config.max_length,
    )


def _notes(config: TransformerConfig) -> Iterator[str]:
    """Yields notes that a reader of the folder should know about the model."""
    if config.labels and not HEADS[config.head].needs_labels:
        yield (
            "config.json cannot state that questions may have no answer: this setting is not saved"
        )
    yield from mapping_of(config).notes(config)


def write_model(
    folder: Path,
    config: TransformerConfig,
    params: Params,
    tokenizer: Vocabulary | None,
    *,
    settings: FolderSettings,
) -> list[str]:
    """Writes all files of a model except a model card; returns notes, one line each.

    Args:
      folder: The folder to write to; it exists.
      config: The configuration of the model.
      params: Its parameters, with stacked layers.
      tokenizer: The tokenizer to write, or None.
      settings: Other settings of the folder.

    Raises:
      WeightsError: The model has no counterpart in transformers.
      UserError: A translation model's tokenizer has no token that starts or ends a text.
    """
    notes: list[str] = []
    # transformers has no value head, so save the language model without it.
    if config.head == "causal_lm_with_value":
        config = config.with_head("causal_lm", ())
        params = {name: x for name, x in params.items() if name != "head"}
        notes.append("the value head is only used in training: it is not saved")
    head = HEADS[config.head]
    translates = head.name == "seq2seq_lm"
    notes += _notes(config)
    ids = {} if tokenizer is None else _special_tokens(tokenizer, head.generates, translates)
    # transformers uses the padding to find the last token of a text.
    if head.name == "sequence_classification" and ids.get("pad_token_id", 0) is None:
        notes.append(NOTE_ON_PADDING)
    # Ids in the generation settings override the tokenizer's ids, because a model may end its texts
    # with a different token.
    stated = settings.generation or {}
    ids |= {name: stated[name] for name in ids if stated.get(name) is not None}
    problem: JsonObject = without_none({"problem_type": settings.problem_type})
    write_weights(
        folder,
        config,
        params,
        dtype=settings.dtype,
        file_bytes=settings.file_bytes,
        fields={**ids, **problem},
    )
    generation = settings.generation
    # Write the tokenizer. Translation models also store the published search, unless settings are
    # given.
    if tokenizer is not None:
        if generation is None and translates:
            notes.append(NOTE_ON_SEARCH)
            request = published_request(tokenizer, config.vocab_size)
            generation = ids | search_fields(request, config.max_length)
        notes.append(write_tokenizer(folder, config, tokenizer))
    _write_sentence_files(folder, config, settings)
    # Write the generation settings, which contain at least the ids of special tokens.
    generation = ids if generation is None else generation
    given: JsonObject = without_none(generation)
    if head.generates and given:
        write_json(folder / "generation_config.json", given)
    return notes


def _write_sentence_files(
    folder: Path, config: TransformerConfig, settings: FolderSettings
) -> None:
    """Writes the files of sentence-transformers that the settings describe."""
    length = config.max_length
    if settings.embedding is not None:
        write_embedding_settings(
            folder, settings.embedding, d_model=config.d_model, max_length=length
        )
    if settings.scoring is not None:
        write_pair_scoring(folder, settings.scoring, max_length=length)
    if settings.sparse is not None:
        write_sparse_settings(folder, settings.sparse, max_length=length)


def _special_tokens(tokenizer: Vocabulary, generates: bool, translates: bool) -> JsonObject:
    """Returns the fields of `config.json` that state the ids of special tokens."""
    special = tokenizer.special_ids
    ids: JsonObject = {
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
        "pad_token_id": special.pad,
    }
    if translates:
        # A decoder starts and ends with tokens of the target's vocabulary.
        target = tokenizer.target.special_ids
        ids |= {"decoder_start_token_id": target.bos, "eos_token_id": target.eos}
    if generates and ids["pad_token_id"] is None:
        # padding is masked, so any token can serve as the padding token
        ids["pad_token_id"] = ids["eos_token_id"]
    return ids
