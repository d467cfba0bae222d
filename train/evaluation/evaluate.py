"""Computes a trained model's loss and metrics, on data of the kind that it was trained on."""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from ...data.batching import evaluation_batches
from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.common.progress import LogFn, Progress
from ...data.dataset import DataSplit
from ...data.sources.documents import SourceLike
from ...data.tokenizers.base import Tokenizer
from ...models.finite import check_outputs, load_finite
from ...models.hub import local_folder
from ...models.loading import restore_params
from ...models.model import Model
from ...models.nn.typing import Array, Params
from ...models.run_files import CHECKPOINTS, EMA_AUXILIARY, newest_step, read_fields
from ...models.text.folder import beam_search_defaults
from ...models.text.translate import TextTranslator, note_of_empty
from ..config import TrainConfig, objective_of
from ..losses.eval_step import EvaluatedBatch, evaluate, make_evaluate_fn, rows_at_once
from ..losses.objective import AUXILIARY, Batch, Objective, joined
from ..objectives.online import OnlineConfig
from ..runs.custom import custom_names
from ..runs.load_run import open_run
from ..runs.params_only_run import SAVED_FROM_PYTHON
from ..runs.reference import prepared_data
from .score_policy import score_policy
from .vectors.held_out import vector_scores


def score_run(
    folder: str | Path,
    source: SourceLike | None = None,
    *,
    step: int | None = None,
    num_beams: int | None = None,
    max_length: int | None = None,
    ema: bool = False,
    log: LogFn = print,
) -> dict[str, float | int]:
    """Evaluates a model on all rows of a source, which are truncated as in training.

    Args:
        folder: a run folder.
        source: a source with the kind of data that the run was trained on, or a list of examples.
          Defaults to the run's validation data.
        step: the checkpoint. Defaults to the newest checkpoint.
        num_beams: the number of beams for translation, by default 4. Other kinds of data do not
          support this argument.
        max_length: the maximum number of tokens of a row; longer rows are truncated. It may exceed
          the length in training, unless the model has learned position embeddings. Defaults to the
          length in training.
        ema: whether to evaluate the moving average of the parameters. The run must have set
          `optimizer.ema_decay`.
        log: called with a line that describes the data.

    Returns:
        `loss` (nats) and the metrics of this kind of data: perplexity and bits per byte, accuracy,
        F1, exact match, BLEU …. For an embedding model, these are retrieval scores such as
        nDCG@10; for a policy, the mean reward.

    Raises:
        RunError: `num_beams` is given for a model that does not translate.
        UserError: `num_beams` is below 1, or the model has fewer than `max_length` learned
          position embeddings.
        FileNotFoundError: the folder is not a run folder, or does not have the checkpoint.
        DataError: the data cannot be downloaded or read.
    """
    config, tokenizer = _open_config(folder, max_length)
    objective, generation = config.objective, config.objective.generation.get(config.data.kind)
    problem = f"num_beams {num_beams} requires a translation model: leave it out for {folder}"
    require(num_beams is None or generation is not None, problem, RunError)
    beam_defaults = beam_search_defaults(folder, tokenizer)
    model, params, split = _opened(folder, source, step, log, max_length=max_length, ema=ema)
    # A policy is evaluated by the rewards of completions that it samples, not by a loss.
    if isinstance(objective, OnlineConfig):
        return score_policy(model, params, split, config=config, tokenizer=tokenizer)
    # Translate before the loss is computed, so that an error in the source text is reported first.
    translation_scores = {}
    if generation is not None:
        if missing := generation.missing():
            log(missing)
        translator = TextTranslator(model, params, tokenizer, beam_defaults)
        request = translator.request
        if num_beams is not None:
            request = dataclasses.replace(request, num_beams=num_beams)
        texts = _translations(translator, split, request.num_beams, log)
        scores = generation.scores(split.content.targets, texts)
        translation_scores = {**scores, "num_beams": request.num_beams, "sentences": len(texts)}
    # A loss that compares the examples of a batch needs the same batch size as in training.
    loss, num_rows = objective_of(config), split.examples.num_examples
    parts = config.micro_batches
    size = config.batch_size if loss.whole_batch else _rows_at_once(config, num_rows)
    evaluation = evaluate(
        jax.jit(make_evaluate_fn(model.apply, loss, num_micro_batches=parts)),
        with_auxiliary(loss, params, folder, step, part=EMA_AUXILIARY if ema else AUXILIARY),
        evaluation_batches(split.examples, batch_size=size),
        loss,
        num_rows=num_rows,
    )
    check_outputs({"loss": evaluation.loss, **evaluation.means})
    check_outputs(evaluation.predictions)
    scores = {
        **objective.score(evaluation, split, config.data),
        **vector_scores(evaluation, split, by_dot=objective.compares_by_dot),
        **translation_scores,
    }
    check_outputs(scores)
    return scores


def with_auxiliary(
    objective: Objective, params: Params, folder: str | Path, step: int | None, *, part: str
) -> Params:
    """Returns the parameters of a run's model and of the auxiliary models that the run trained.

    Raises:
        RunError: the folder has no auxiliary models, although the objective needs them.
    """
    shapes = jax.eval_shape(lambda: objective.initial_models(jax.random.key(0))[0])
    if shapes is None:
        return params
    run = local_folder(folder)
    step = newest_step(run) if step is None else step
    require(
        (run / CHECKPOINTS / str(step) / part).is_dir(),
        f"{folder} has no {', '.join(objective.models)}, which the loss needs: evaluate the run "
        "that trained the model",
        error=RunError,
    )
    on_first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_first), shapes
    )
    return joined(params, restore_params(run, step, shapes, part))


def _rows_at_once(config: TrainConfig, num_rows: int) -> int:
    part = config.batch_size // config.micro_batches
    return rows_at_once(config.data.length, part, num_rows)


class Opened(NamedTuple):
    """A trained model and the data to evaluate it on."""

    model: Model
    params: Params
    split: DataSplit


def _open_config(folder: str | Path, max_length: int | None) -> tuple[TrainConfig, Tokenizer]:
    """Opens the configuration of a run; if `max_length` is not None, it replaces the lengths."""
    config, tokenizer = open_run(folder)
    config = dataclasses.replace(config, objective=config.objective.for_evaluation())
    if max_length is None:
        return config, tokenizer
    model = config.model.with_max_length(max_length)
    data = dataclasses.replace(config.data, length=max_length)
    return dataclasses.replace(config, model=model, data=data), tokenizer


def _opened(
    folder: str | Path,
    source: SourceLike | None,
    step: int | None,
    log: LogFn,
    *,
    max_length: int | None = None,
    ema: bool = False,
) -> Opened:
    """Opens a run's model and its data. Raises the same exceptions as `score_run`."""
    config, tokenizer = _open_config(folder, max_length)
    fields = read_fields(local_folder(folder))
    recorded = fields.get("data_fingerprints")
    recorded = recorded if isinstance(recorded, dict) else None
    if source is None:
        # The folder of an imported model does not record any validation data.
        require(
            recorded is not None or fields.get(SAVED_FROM_PYTHON) is True,
            f"{folder} does not name its validation data: name the data (--data SOURCE)",
            error=RunError,
        )
        function = custom_names(fields).get("examples")
        require(
            function is None,
            f"{folder} was trained on examples of the function {function}, which cannot be called "
            f"here: read the scores of its evaluations in {folder}/metrics.jsonl",
            error=RunError,
        )
    heads = config.objective.heads(config.data)
    require(
        config.model.head in heads,
        f"{folder} has the head {config.model.head}, which this command cannot score on "
        f"{config.data.kind} data: evaluate it in Python",
        error=RunError,
    )
    custom = custom_names(fields).get("objective")
    if custom is not None:
        log(
            f"{folder} was trained with the custom objective {custom}, but these are the scores "
            f"of the standard objective {config.objective.kind}"
        )
    data, labels = prepared_data(config, log), config.model.labels
    model, params = load_finite(folder, step=step, max_length=max_length, ema=ema)
    if source is None:
        split = data.validation_split(tokenizer, labels)
        # The scores are comparable with the metrics of the run only if the data are the same.
        if recorded is not None and split.fingerprint != recorded.get("validation"):
            log("the validation data has changed since the run was created")
    else:
        split = data.whole_source(source, tokenizer, labels)
    for line in (split.summary, *split.notes):
        log(f"data: {line}")
    return Opened(model, params, split)


def losses_without_heads(
    folder: str | Path,
    source: SourceLike | None = None,
    *,
    step: int | None = None,
    log: LogFn = print,
) -> dict[str, np.ndarray]:
    """Computes the loss of a trained model after removing each attention head in turn.

    If the loss without a head equals the loss of the whole model, the model does not need the head.

    Args:
        folder: a run folder.
        source: a source with the kind of data that the run was trained on. Defaults to the run's
          validation data.
        step: the checkpoint. Defaults to the newest checkpoint.
        log: called with a line that describes the data.

    Returns:
        The loss of the whole model as `loss`, and tables, float32 [L, N], of the loss without head
        n of layer l. The key of a table is the model's argument that masks the heads: `head_mask`,
        and for an encoder-decoder also `decoder_head_mask` and `cross_attn_head_mask`.

    Raises:
        UserError: The data cannot be downloaded or read, or the loss is not finite.
    """
    config, _ = open_run(folder)
    model, params, split = _opened(folder, source, step, log)
    objective, num_rows = objective_of(config), split.examples.num_examples
    sizes, decoder = config.model, config.model.decoder
    shapes = {"head_mask": (sizes.num_layers, sizes.num_heads)}
    if sizes.head == "seq2seq_lm":
        shape = decoder.num_layers, decoder.num_heads
        shapes |= {"decoder_head_mask": shape, "cross_attn_head_mask": shape}
    # Pass the masks as arguments, so that the same compiled program can remove any head.
    masks = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}

    @jax.jit
    def evaluate_fn(state: tuple[Params, dict[str, Array]], batch: Batch) -> EvaluatedBatch:
        params, masks = state
        return make_evaluate_fn(functools.partial(model.apply, **masks), objective)(params, batch)

    def loss(**changed: np.ndarray) -> float:
        batches = evaluation_batches(split.examples, batch_size=_rows_at_once(config, num_rows))
        state = params, {**masks, **changed}
        evaluation = evaluate(evaluate_fn, state, batches, objective, num_rows=num_rows)
        check_outputs({"loss": evaluation.loss})
        return evaluation.loss

    losses: dict[str, np.ndarray] = {"loss": np.asarray(loss(), np.float32)}
    with Progress().counter("heads", sum(mask.size for mask in masks.values())) as advance:
        for name, mask in masks.items():
            losses[name] = table = np.zeros_like(mask)
            # Remove one head of one layer at a time.
            for head in np.ndindex(mask.shape):
                without = mask.copy()
                without[head] = 0
                table[head] = loss(**{name: without})
                advance(1, 0)
    return losses


def _translations(
    translator: TextTranslator, split: DataSplit, num_beams: int, log: LogFn
) -> list[str]:
    """Returns the best translation of the source text of each pair."""
    sources = split.content.sources
    log(f"translated and scored: all {len(sources):,} pairs")
    with Progress().counter("sentences", len(sources)) as advance:
        translated = translator(
            sources,
            num_beams=num_beams,
            num_return_sequences=1,
            locations=[pair.location for pair in split.content],
            on_batch=advance,
        )
    note = note_of_empty(sources, translated)
    if note is not None:
        log(note)
    return [translations[0].text for translations in translated]
