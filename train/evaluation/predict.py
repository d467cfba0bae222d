"""Predicts labels for unlabeled inputs with a fine-tuned model."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...data.batching import Batch
from ...data.common.errors import DataError, RunError
from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...data.dataset import DataSplit
from ...data.features.bert_inputs import token_specs
from ...data.sources.documents import SourceLike
from ...data.tasks.base import DataConfig
from ...data.tasks.sequence_classification import SequenceClassificationData
from ...data.tokenizers.base import Tokenizer
from ...data.tokenizers.training import TokenizerConfig
from ...models.finite import check_outputs, load_finite
from ...models.hf.cross_encoder import PairScoring, read_pair_scoring
from ...models.hub import local_folder
from ...models.nn.typing import PyTree
from ...models.text.bucketing import by_length
from ...models.text.folder import vocabulary_note
from ...models.text.text_model import Loaded
from ...models.text.yes_no_scorer import YesNoPrompt, YesNoScorer
from ..config import TrainConfig, objective_of
from ..runs.load_run import config_of_model, open_run


@dataclasses.dataclass(frozen=True, eq=False)
class Predictor:
    """A fine-tuned model that predicts labels, tags, spans, choices or scores.

    Attributes:
        config: the configuration of the run. For an imported model, this is the configuration of a
          run that could have trained the model.
        tokenizer: the tokenizer.
    """

    config: TrainConfig
    tokenizer: Tokenizer
    _compute: Callable[[Batch], dict[str, jax.Array]]

    @classmethod
    def of_run(cls, folder: str | Path, *, loaded: Loaded | None = None) -> "Predictor":
        """Opens the model of a run folder.

        Args:
            folder: see `predict`.
            loaded: the model in the folder and its parameters. If None, the newest checkpoint is
              loaded.

        Raises:
            FileNotFoundError, RunError, DataError: see `predict`.
        """
        config, tokenizer, scoring = _opened(folder)
        return cls._of(config, tokenizer, scoring, loaded or load_finite(folder))

    @classmethod
    def _of(
        cls,
        config: TrainConfig,
        tokenizer: Tokenizer,
        scoring: PairScoring | None,
        loaded: Loaded,
    ) -> "Predictor":
        model, params = loaded
        objective = objective_of(config)

        @jax.jit
        def predictions(params: PyTree, batch: PyTree) -> PyTree:
            outputs = objective.predictions(objective.outputs(model.apply, params, batch))
            # Apply the activation of a cross-encoder only to a single score. Several logits are
            # converted to probabilities later.
            if scoring is not None and config.data.label_target == "regression":
                return {"logits": scoring(outputs["logits"])}
            return outputs

        return cls(config, tokenizer, functools.partial(predictions, params))

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of an example, including special tokens."""
        return self.config.data.length

    def encode(self, path: SourceLike) -> DataSplit:
        """Reads and encodes examples; see `predict`."""
        return self.config.data.input_split(path, self.tokenizer, self.config.model.labels)

    def filler(self, length: int) -> Batch:
        """Returns a dummy example with `length` tokens, which is used to compile programs."""
        spec = self.config.data.batch_spec(len(self.config.model.labels), 2)
        row = {name: np.zeros(spec[name].shape, np.int32) for name in token_specs()}
        # Only the mask matters, because it determines the length. The predictions for this example
        # are not used.
        row["attention_mask"][..., :length] = 1
        return row

    def outputs(
        self, example: Callable[[int], Batch], lengths: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Computes the outputs for encoded examples, in batches of examples with similar lengths.

        Args:
            example: a function from the index of an example to its arrays.
            lengths: the number of tokens of each example; see `token_length`.

        Returns:
            The arrays that `split.examples.decode` converts to predictions.

        Raises:
            RunError: an output is NaN or infinite.
        """
        outputs = by_length(self._compute, example, lengths)
        check_outputs(outputs)
        return outputs


def token_length(row: Batch) -> int:
    """Returns the number of tokens of an example before its trailing padding, at least 1."""
    return 1 + int(np.nonzero(row["attention_mask"])[-1].max(initial=0))


def predict(
    folder: str | Path,
    path: SourceLike,
    *,
    step: int | None = None,
    ema: bool = False,
    log: LogFn = print,
) -> list[Any]:
    """Returns a prediction for each example of a file.

    Args:
        folder: the run folder of a model with a classification, tagging, span or choice head.
        path: a file in the format of this kind of data, "-" for standard input, or a list of
          examples.
        step: the checkpoint. Defaults to the newest checkpoint.
        ema: whether to use the moving average of the parameters. The run must have set
            `optimizer.ema_decay`.
        log: called with a line that describes the file.

    Returns:
        One JSON-ready prediction per example, in the order of the file. If the folder is a
        CrossEncoder of sentence-transformers, the activation of the CrossEncoder is applied to the
        score. For any other model, the score is the unchanged output.

    Raises:
        FileNotFoundError: the folder is not a run folder, or does not have the checkpoint.
        RunError: the model has no head, or its parameters or outputs are NaN or infinite.
        DataError: the file cannot be read, or the run's kind of data has no labels.
    """
    config, tokenizer, scoring = _opened(folder)
    note = vocabulary_note(folder, config.model, tokenizer)
    if note is not None:
        log(note)
    split = config.data.input_split(path, tokenizer, config.model.labels)
    log(f"input: {split.summary}")
    predictor = Predictor._of(config, tokenizer, scoring, load_finite(folder, step=step, ema=ema))
    examples: Any = split.examples
    rows = [examples.example(0, i) for i in range(examples.num_examples)]
    return examples.decode(predictor.outputs(rows.__getitem__, [*map(token_length, rows)]))


def _opened(folder: str | Path) -> tuple[TrainConfig, Tokenizer, PairScoring | None]:
    """Returns the configuration, the tokenizer, and the scoring of a cross-encoder, if any.

    Raises:
        RunError, DataError: the model does not predict labels.
    """
    config, tokenizer = open_run(folder)
    scoring = None
    if config.model.head == "sequence_classification":
        scoring = read_pair_scoring(local_folder(folder))
    if scoring is not None:
        config = _of_pairs(config, scoring)
    problem = f"{folder} has no head to predict with: fine-tune it, or use `flaxzoo embed`"
    require(config.model.head != "none", problem, RunError)
    # Only labeled data define an input format. For other data, the error names the command to use
    # instead.
    command = config.objective.next_command.format(run=folder)
    problem = f"{config.data.kind} data has no labels to predict: use flaxzoo {command}"
    require(type(config.data).input_split is not DataConfig.input_split, problem, RunError)
    return config, tokenizer, scoring


def predict_yes_no(
    folder: str | Path,
    path: SourceLike,
    *,
    instruction: str | None = None,
    step: int | None = None,
    ema: bool = False,
    log: LogFn = print,
) -> list[Any]:
    """Scores the pairs of a file with a language model that answers yes or no.

    Args:
        folder: a run folder of a language model, a folder in the Hugging Face format, or a name on
          the hub.
        path: a file of text pairs in a format of `predict`, "-" for standard input, or a list of
          pairs.
        instruction: the instruction of the prompt. Defaults to the instruction of
          `models.YesNoPrompt`.
        step: the checkpoint. Defaults to the newest checkpoint.
        ema: whether to use the moving average of the parameters. The run must have set
            `optimizer.ema_decay`.
        log: called with a line that describes the file.

    Returns:
        A dict for each pair, in the order of the file: `{"text": …, "text_b": …, "score": number}`.

    Raises:
        FileNotFoundError: the folder is not a run folder, or does not have the checkpoint.
        UserError: the model is not a language model, or its parameters are NaN or infinite.
        DataError: the file cannot be read, or a line does not have two texts.
    """
    scorer = YesNoScorer.of_run(folder, step=step, log=log, ema=ema)
    if instruction is not None:
        scorer = scorer.with_prompt(YesNoPrompt(instruction=instruction))
    # Read the file like the input of a text-pair classifier with a single score.
    data = SequenceClassificationData(
        source="jsonl:-#label,text,text_b",
        length=scorer.max_length,
        tokenizer=TokenizerConfig(),
        target="regression",
    )
    split = data.input_split(path, scorer.tokenizer, ("score",))
    log(f"input: {split.summary}")
    for example in split.content:
        problem = f"{example.location} must have a query and a document, got one text: give both"
        require(len(example.texts) == 2, problem, DataError)
    scores = scorer.score([example.texts for example in split.content], log)
    rows: Any = split.examples
    return rows.decode({"logits": scores[:, None]})


def _of_pairs(config: TrainConfig, scoring: PairScoring) -> TrainConfig:
    """Returns the configuration that a cross-encoder uses to score text pairs."""
    if not isinstance(config.data, SequenceClassificationData):
        config = config_of_model(config.model)
    longest = config.model.max_length
    length = min(longest, scoring.max_length or longest)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, length=length))
