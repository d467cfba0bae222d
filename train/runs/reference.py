"""The reference of DPO: log-probabilities of answers under a model that does not change."""

import hashlib
import io
from dataclasses import dataclass

import jax
import numpy as np

from ...data.chat.preference_pairs import PairExamples
from ...data.common.atomic_io import write_file
from ...data.common.errors import RunError
from ...data.common.files import default_cache_dir
from ...data.common.progress import LogFn
from ...data.dataset import PickledByFields, counted
from ...data.tasks.base import DataConfig
from ...models.config import TransformerConfig
from ...models.finite import load_finite
from ...models.hub import local_folder
from ...models.nn.typing import Array, Params
from ..config import TrainConfig
from ..losses.eval_step import rows_at_once
from ..losses.objective import Batch
from ..losses.pairs import pair_inputs
from ..objectives.dpo import answer_log_probs

FOLDER = "reference"
"""The folder, in that of the cache, of log-probabilities that were computed before."""


@dataclass(frozen=True)
class ReferenceModel(PickledByFields):
    """Computes log-probabilities of answers; see ``data.DPOData.with_reference``.

    They are kept in the cache under a checksum of the model and of all tokens, so that a run
    that is resumed, or another one with the same reference and data, does not compute them again.

    Attributes:
        folder: A run folder, or a folder in the Hugging Face format, with a causal language model.
        step: The checkpoint; None: the newest.
        log: Told how many there are to compute.

    Example::

        reference = train.ReferenceModel("runs/sft")
        pairs = data.DPOData(source="pairs.jsonl", length=256, tokenizer=tokenizer)
        split = pairs.with_reference(reference).validation_split(data.load_tokenizer(path), ())
    """

    folder: str
    step: int | None = None
    log: LogFn = print

    def __call__(self, pairs: PairExamples) -> np.ndarray:
        """Returns the log-probability of both answers of each pair, in nats, float32 [n, 2].

        Raises:
            RunError: The model is no causal language model, or its parameters are not finite.
        """
        model, params = load_finite(local_folder(self.folder), step=self.step)
        if model.config.head != "causal_lm":
            raise RunError(
                f"{self.folder} has the head {model.config.head}: a reference writes text; name a "
                "causal language model"
            )
        path = default_cache_dir() / FOLDER / f"{_checksum(model.config, params, pairs)}.npy"
        if path.is_file():
            return np.load(path)
        self.log(f"reference {self.folder}: {counted(pairs.num_examples, 'pair')} to score")

        @jax.jit
        def log_probs(params: Params, batch: Batch) -> Array:
            outputs = model.apply({"params": params}, **pair_inputs(batch))
            return answer_log_probs(outputs, batch)

        # Imported late: it needs grain, which `flaxzoo bench` does without.
        from ...data.batching import evaluation_batches

        rows = rows_at_once(2 * pairs.length, pairs.num_examples)
        found = [
            np.asarray(log_probs(params, batch))
            for batch in evaluation_batches(pairs, batch_size=rows)
        ]
        result = np.concatenate(found)[: pairs.num_examples]
        stored = io.BytesIO()
        np.save(stored, result)
        write_file(path, stored.getvalue())
        return result


def _checksum(config: TransformerConfig, params: Params, pairs: PairExamples) -> str:
    """Returns a hash of the model and of the tokens, which tokenizer and template made.

    The same parameters are another model with other heads, positions or norms.
    """
    whole = hashlib.blake2b(f"{pairs.length} {config!r}".encode(), digest_size=16)
    for leaf in jax.tree.leaves(params):
        whole.update(np.ascontiguousarray(leaf).tobytes())
    for side in (pairs.chosen, pairs.rejected):
        for ids, answer in side:
            whole.update(len(ids).to_bytes(8, "big") + ids.tobytes() + answer.tobytes())
    return whole.hexdigest()


def prepared_data(config: TrainConfig, log: LogFn) -> DataConfig:
    """Returns the data of a run with what its objective adds to them, such as an open reference.

    Raises:
        RunError: The objective needs the model that the run starts from, and there is none, or
            adapters are trained to a rounded copy of it.
    """
    source, lora = config.init_from, config.lora
    if source is None and config.objective.needs_init_from:
        raise RunError(
            f"objective {config.objective.kind} compares a model with the one that it begins "
            "with: give --init-from, such as the run of supervised fine-tuning"
        )

    def open_reference() -> ReferenceModel:
        assert source is not None
        if lora is not None and lora.frozen_dtype == "bfloat16":
            raise RunError(
                "lora.frozen_dtype bfloat16 rounds the model, and objective.reference precomputed "
                "does not: give objective.reference frozen, which is the same model without "
                "adapters"
            )
        return ReferenceModel(source, config.init_step, log)

    return config.objective.prepare(config.data, open_reference)
