"""The reference model of DPO, which computes log-probabilities of completions."""

import hashlib
import io
from dataclasses import dataclass
from typing import cast

import jax
import numpy as np

from ...data.chat.preference_pairs import PairExamples
from ...data.common.atomic_io import write_file
from ...data.common.errors import RunError, counted
from ...data.common.fields import require
from ...data.common.files import default_cache_dir
from ...data.common.progress import LogFn
from ...data.dataset import PickledByFields
from ...data.tasks.base import DataConfig
from ...data.tokenizers.base import Tokenizer
from ...models.config import TransformerConfig
from ...models.finite import load_finite
from ...models.hub import local_folder
from ...models.nn.typing import Array, Params
from ..config import TrainConfig
from ..losses.eval_step import rows_at_once
from ..losses.objective import Batch
from ..losses.pairs import pair_inputs
from ..objectives.dpo import answer_log_probs
from .load_run import open_run

FOLDER = "reference"
"""The subfolder of the cache that stores computed log-probabilities."""


@dataclass(frozen=True)
class ReferenceModel(PickledByFields):
    """Computes log-probabilities of completions; see ``data.DPOData.with_reference``.

    The log-probabilities are cached under a checksum of the model and of all tokens. A resumed run,
    or a different run with the same reference and data, therefore does not compute them again.

    Attributes:
        folder: The folder of a run, or of a model in the Hugging Face format, with a causal
          language model.
        step: The checkpoint. Defaults to the newest checkpoint.
        log: Called with a line that states how many pairs will be scored.

    Example::

        reference = train.ReferenceModel("runs/sft")
        pairs = data.DPOData(source="pairs.jsonl", length=256, tokenizer=tokenizer)
        split = pairs.with_reference(reference).validation_split(data.load_tokenizer(path), ())
    """

    folder: str
    step: int | None = None
    log: LogFn = print

    def __call__(self, pairs: PairExamples) -> np.ndarray:
        """Returns the log-probabilities of both completions of each pair, in nats, float32 [n, 2].

        Raises:
            RunError: The model is not a causal language model, or its parameters are not finite.
        """
        model, params = load_finite(local_folder(self.folder), step=self.step)
        require(
            model.config.head == "causal_lm",
            f"{self.folder} has the head {model.config.head}: give a causal language model as the "
            "reference",
            error=RunError,
        )
        # The cache key covers the parameters and all tokens.
        path = default_cache_dir() / FOLDER / f"{_checksum(model.config, params, pairs)}.npy"
        if path.is_file():
            return np.load(path)
        self.log(f"reference {self.folder}: {counted(pairs.num_examples, 'pair')} to score")

        @jax.jit
        def log_probs(params: Params, batch: Batch) -> Array:
            outputs = model.apply({"params": params}, **pair_inputs(batch))
            return answer_log_probs(outputs, batch)

        # Import late, because this module needs grain, which `flaxzoo bench` does not require.
        from ...data.batching import evaluation_batches

        rows = rows_at_once(2 * pairs.length, pairs.num_examples)
        batches = [
            np.asarray(log_probs(params, batch))
            for batch in evaluation_batches(pairs, batch_size=rows)
        ]
        # The last batch is padded with filler rows, so drop the results of these rows.
        result = np.concatenate(batches)[: pairs.num_examples]
        stored = io.BytesIO()
        np.save(stored, result)
        write_file(path, stored.getvalue())
        return result


def _checksum(config: TransformerConfig, params: Params, pairs: PairExamples) -> str:
    """Returns a hash of the model and of all tokens.

    The tokens depend on the tokenizer and the chat template. The hash includes the model's
    configuration, because equal parameters with a different configuration are a different model.
    """
    whole = hashlib.blake2b(f"{pairs.length} {config!r}".encode(), digest_size=16)
    for leaf in jax.tree.leaves(params):
        whole.update(np.ascontiguousarray(leaf).tobytes())
    for side in (pairs.chosen, pairs.rejected):
        for ids, answer in side:
            whole.update(len(ids).to_bytes(8, "big") + ids.tobytes() + answer.tobytes())
    return whole.hexdigest()


def prepared_data(config: TrainConfig, log: LogFn) -> DataConfig:
    """Returns a run's data together with what the objective adds, such as a reference model.

    Raises:
        RunError: The objective needs an initial model, but the run has none, or the run trains
            adapters on a rounded copy of this model.
    """
    source, lora = config.init_from, config.lora
    require(
        source is not None or not config.objective.needs_init_from,
        f"objective {config.objective.kind} requires an initial model: give --init-from, "
        f"such as the run of supervised fine-tuning",
        error=RunError,
    )

    def open_reference() -> ReferenceModel:
        require(
            lora is None or lora.frozen_dtype != "bfloat16",
            "lora.frozen_dtype bfloat16 rounds the model, but objective.reference precomputed does "
            "not: give objective.reference frozen, which is the same model without adapters",
            error=RunError,
        )
        return ReferenceModel(cast(str, source), config.init_step, log)

    return config.objective.prepare(config.data, open_reference)


def check_guide(folder: str | None, tokenizer: Tokenizer) -> None:
    """Checks that an objective's frozen auxiliary model has the same tokenizer as the run.

    Raises:
        RunError: The tokenizers differ.
    """
    if folder is None:
        return
    require(
        open_run(folder)[1].fingerprint == tokenizer.fingerprint,
        f"{folder} has another tokenizer than the run, so it cannot read the same tokens: "
        f"choose a model with the same tokenizer",
        error=RunError,
    )
