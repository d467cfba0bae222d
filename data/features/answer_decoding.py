"""Extracts answers from passages, based on the logits of their starts and ends.

The rules follow google-research/bert ``run_squad.py``. An answer may start at a token only in the
window where the token has the most context, and the length of an answer is limited. The score of
"no answer" is the lowest score of ``[CLS]`` among all windows of the passage. In contrast to the
original, all spans are candidates, not only spans between the tokens with the largest start and end
logits.

The probability of an answer is P(start) · P(end), where each P is a softmax over ``[CLS]`` and the
passage tokens of the window that contains the answer (Devlin et al. 2018, section 4.2). Question
tokens, separators and padding cannot be answers. Answers from different windows are ranked by their
sums of logits instead of these probabilities, because the probabilities of each window sum to one,
even if the window does not contain the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..sources.squad import SpanExample
from .bert_inputs import BertInputs
from .predictions import Prediction, output
from .sliding_windows import most_context


@dataclass(frozen=True, eq=False)
class SpanDecoding:
    """The questions of R windows, and the passage tokens that each window contains.

    Attributes:
      ranges: The half-open range of passage tokens in each window, int32 [R, 2].
      first_rows: The index of the first window of each question, followed by R, int64
        [num_questions + 1].
      offsets: The half-open character ranges of each passage's tokens, int32 [num_tokens, 2].
      max_answer_length: The maximum number of tokens in an answer.
      unanswerable: Whether "no answer" may be predicted.
    """

    ranges: np.ndarray
    first_rows: np.ndarray
    offsets: dict[str, np.ndarray]
    max_answer_length: int
    unanswerable: bool

    def decode(
        self,
        predictions: dict[str, np.ndarray],
        tokens: BertInputs,
        examples: Sequence[SpanExample],
        n_best: int,
    ) -> list[Prediction]:
        """Finds the best answers to each question in all windows of its passage.

        Args:
          predictions: ``start_logits`` and ``end_logits``, float [R, T].
          tokens: The windows, including special tokens.
          examples: The questions.
          n_best: The number of answers to return for each question, at least 1.

        Returns:
          For each question ``{"id", "answer", "score", "probability", "start", "end", "n_best"}``.
          The ``score`` is the sum of the two logits and ranks the answers. The ``probability`` is
          P(start) · P(end) in the window. ``start`` and ``end`` are the half-open character range
          in the passage. ``n_best`` contains the best answers in the same form, in descending
          order. "No answer" is ``""`` with None as start and end.
        """
        starts = output(predictions, "start_logits", len(tokens))  # [R, T]
        ends = output(predictions, "end_logits", len(tokens))  # [R, T]
        decoded = []
        for i, example in enumerate(examples):
            rows = range(self.first_rows[i], self.first_rows[i + 1])
            spans = self._best_spans(rows, starts, ends, tokens=tokens, n_best=n_best)
            found = _as_text(spans, example.passage, self.offsets[example.passage], n_best)
            if self.unanswerable or not found:
                # The score of "no answer" is at position 0 ([CLS] in BERT). Use the window with the
                # lowest score, because other windows may not contain the answer.
                nothing, row = min(
                    (float(starts[row, 0]) + float(ends[row, 0]), row) for row in rows
                )
                found.append({
                    "answer": "", "score": nothing, "start": None, "end": None, "row": row
                })  # fmt: skip
                found.sort(key=lambda answer: -answer["score"])
                found = found[:n_best]
            for answer in found:
                # Normalize over the positions in the same window that can be part of an answer.
                row = answer.pop("row")
                seen = self._answerable(row, tokens)
                total = _log_sum(starts[row, seen]) + _log_sum(ends[row, seen])
                answer["probability"] = float(np.exp(answer["score"] - total))
            decoded.append({"id": example.id, **found[0], "n_best": found})
        return decoded

    def _answerable(self, row: int, tokens: BertInputs) -> np.ndarray:
        """Returns the positions of the first token and of the passage tokens in a window."""
        first, last = self.ranges[row]
        return np.r_[0, tokens.second[row] : tokens.second[row] + last - first]

    def _best_spans(
        self, rows: range, starts: np.ndarray, ends: np.ndarray, *, tokens: BertInputs, n_best: int
    ) -> list[tuple[float, int, int, int]]:
        """Returns the best spans of passage tokens as (score, first, last, window), best first.

        There are up to ``4 * n_best`` spans per window, because several spans may have the same
        text.
        """
        ranges = self.ranges[rows.start : rows.stop]  # [num_windows, 2]
        # A passage without tokens has a single window, which is empty.
        if not ranges[0, 1]:
            return []
        # The window with the most context for each passage token, [num_tokens].
        chosen = most_context(ranges)
        found = []
        for number, (row, (first, last)) in enumerate(zip(rows, ranges.tolist(), strict=True)):
            # The positions of the passage in the row; W = last - first tokens.
            passage = slice(tokens.second[row], tokens.second[row] + last - first)
            # An answer may start only at tokens for which this window has the most context, [W].
            start = np.where(chosen[first:last] == number, starts[row, passage], -np.inf)
            # Pad with -inf, so that every start has `max_answer_length` possible ends.
            end = np.pad(
                ends[row, passage], (0, self.max_answer_length - 1), constant_values=-np.inf
            )
            # scores[i, j] belongs to the span from token i to token i + j, [W, max_answer_length].
            scores = start[:, None] + sliding_window_view(end, self.max_answer_length)
            for index in _largest(scores, 4 * n_best):
                begin, more = divmod(index, self.max_answer_length)
                score = float(scores[begin, more])
                if score > -np.inf:
                    found.append((score, first + begin, first + begin + more, row))
        return sorted(found, key=lambda span: -span[0])


def _log_sum(logits: np.ndarray) -> float:
    """Returns the logarithm of the sum of the exponentials of logits."""
    return float(np.logaddexp.reduce(logits.astype(np.float64)))


def _largest(scores: np.ndarray, number: int) -> list[int]:
    """Returns the flat indices of the largest scores, in descending order of the scores."""
    flat = scores.ravel()
    number = min(number, len(flat))
    # Sort only the largest scores, because most spans are never used.
    indices = np.argpartition(-flat, number - 1)[:number]
    return indices[np.argsort(-flat[indices], kind="stable")].tolist()


def _as_text(
    spans: Sequence[tuple[float, int, int, int]], passage: str, offsets: np.ndarray, n_best: int
) -> list[Prediction]:
    """Extracts the texts of spans from a passage, each distinct text only once."""
    found: dict[str, Prediction] = {}
    for score, first, last, row in spans:
        start, end = int(offsets[first, 0]), int(offsets[last, 1])
        text = passage[start:end]
        # A token may include the space before its word.
        start += len(text) - len(text.lstrip())
        text = text.strip()
        if text and text not in found:
            found[text] = {
                "answer": text, "score": score, "start": start, "end": start + len(text), "row": row
            }  # fmt: skip
        if len(found) == n_best:
            break
    return list(found.values())
