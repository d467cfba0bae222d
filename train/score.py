"""A trained model's loss on any text."""

from pathlib import Path

import jax
import numpy as np

from ..data.causal import CausalEvaluationRows
from ..data.corpus import TokenCorpus, build_corpus
from ..data.documents import default_cache_dir
from ..data.pipeline import evaluation_batches
from ..models.loading import load, read_config
from .evaluation import evaluate, make_evaluate_fn
from .objectives import CAUSAL
from .run import Say, open_run, validation_documents, whole_source


def score_run(
    folder: str | Path, source: str | None = None, *, step: int | None = None, say: Say = print
) -> dict[str, float]:
    """Predicts every token of a text once, in rows of the length the model was trained on.

    Args:
      folder: a run folder.
      source: any source name; by default what the run validates on.
      step: which checkpoint; by default the newest.
      say: told what is remarkable about the text, in a line.

    Returns:
      `loss` (nats per token), `perplexity`, `bits_per_byte` and `tokens`.

    Raises:
      FileNotFoundError: it is not a run folder, or has no such checkpoint.
      DataError: the text cannot be had or read.
    """
    config, tokenizer = open_run(folder)
    model, params = load(folder, step=step)
    documents = validation_documents(config.data) if source is None else whole_source(source)
    corpus = build_corpus(documents, tokenizer, default_cache_dir() / "tokens")
    _report_unknown(corpus, tokenizer.special_ids.unk, say)
    recorded = read_config(folder)["data_fingerprints"]["validation"]
    if source is None and corpus.fingerprint != recorded:
        say("the validation text has changed since this run was made")
    evaluate_fn = jax.jit(make_evaluate_fn(model.apply, CAUSAL))
    rows = CausalEvaluationRows(corpus, config.data.length)
    batches = evaluation_batches(rows, batch_size=min(config.batch_size, rows.rows_per_epoch))
    return evaluate(evaluate_fn, params, batches, CAUSAL, num_bytes=corpus.num_bytes)


def _report_unknown(corpus: TokenCorpus, unknown_id: int | None, say: Say) -> None:
    unknown = 0 if unknown_id is None else int(np.count_nonzero(corpus.tokens == unknown_id))
    if unknown:
        say(f"{unknown:,} of {len(corpus.tokens):,} tokens are unknown to the tokenizer")
