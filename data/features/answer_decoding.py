"""From the scores of starts and ends back to answers, cut out of their passages.

The rules of google-research/bert ``run_squad.py``: an answer starts where its window has
the most context, is not longer than a limit, and no answer scores what ``[CLS]`` does in the
window that finds it least likely. Here all spans compete, not those of the best starts and
ends only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..sources.squad import SpanExample
from .bert_inputs import BertInputs
from .predictions import output, softmax
from .sliding_windows import most_context


@dataclass(frozen=True, eq=False)
class SpanDecoding:
    """Which window is whose, and where its tokens are in the passage.

    Attributes:
        ranges: The passage tokens of each window, half-open, int32 [R, 2].
        first_rows: The first window of each question, and the end, int64 [questions + 1].
        offsets: For each passage the characters of its tokens, half-open, int32 [tokens, 2].
        max_answer_length: Tokens in an answer.
        unanswerable: Whether there may be no answer.
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
    ) -> list[dict[str, Any]]:
        """Finds the best answers to each question over all of its windows.

        Args:
            predictions: ``start_logits`` and ``end_logits``, float [R, T].
            tokens: The framed windows.
            examples: The questions.
            n_best: The answers to give, at least 1.

        Returns:
            For each question ``{"id", "answer", "score", "probability", "start", "end",
            "n_best"}``: the sum of the two logits, the probability among the n best, the
            half-open range of characters in the passage, and the n best alike, best first.
            No answer is ``""`` from None to None.
        """
        starts = output(predictions, "start_logits", len(tokens))
        ends = output(predictions, "end_logits", len(tokens))
        decoded = []
        for i, example in enumerate(examples):
            rows = range(self.first_rows[i], self.first_rows[i + 1])
            spans = self._best_spans(rows, starts, ends, tokens, n_best)
            found = _as_text(spans, example.passage, self.offsets[example.passage], n_best)
            if self.unanswerable or not found:
                nothing = min(float(starts[row, 0]) + float(ends[row, 0]) for row in rows)
                found.append({"answer": "", "score": nothing, "start": None, "end": None})
                found.sort(key=lambda answer: -answer["score"])
                found = found[:n_best]
            chances = softmax(np.array([answer["score"] for answer in found])).tolist()
            best = [{**a, "probability": p} for a, p in zip(found, chances, strict=True)]
            decoded.append({"id": example.id, **best[0], "n_best": best})
        return decoded

    def _best_spans(
        self, rows: range, starts: np.ndarray, ends: np.ndarray, tokens: BertInputs, n_best: int
    ) -> list[tuple[float, int, int]]:
        """The best spans of passage tokens (score, first, last), best first.

        Some more than are asked for: several may be the same text.
        """
        ranges = self.ranges[rows.start : rows.stop]
        if not ranges[0, 1]:  # a passage of which the tokenizer leaves nothing
            return []
        speaks = most_context(ranges)
        found = []
        for number, (row, (first, last)) in enumerate(zip(rows, ranges.tolist(), strict=True)):
            place = slice(tokens.second[row], tokens.second[row] + last - first)
            start = np.where(speaks[first:last] == number, starts[row, place], -np.inf)
            end = np.pad(ends[row, place], (0, self.max_answer_length - 1), constant_values=-np.inf)
            scores = start[:, None] + sliding_window_view(end, self.max_answer_length)
            for at in _largest(scores, 4 * n_best):
                begin, more = divmod(at, self.max_answer_length)
                score = float(scores[begin, more])
                if score > -np.inf:
                    found.append((score, first + begin, first + begin + more))
        return sorted(found, key=lambda span: -span[0])


def _largest(scores: np.ndarray, number: int) -> list[int]:
    """The places of the largest scores, best first."""
    flat = scores.ravel()
    number = min(number, len(flat))
    places = np.argpartition(-flat, number - 1)[:number]
    return places[np.argsort(-flat[places], kind="stable")].tolist()


def _as_text(
    spans: Sequence[tuple[float, int, int]], passage: str, offsets: np.ndarray, n_best: int
) -> list[dict[str, Any]]:
    """Cuts spans out of a passage, each distinct text once."""
    found: dict[str, dict[str, Any]] = {}
    for score, first, last in spans:
        start, end = int(offsets[first, 0]), int(offsets[last, 1])
        text = passage[start:end]
        start += len(text) - len(text.lstrip())  # a piece may hold the blank before its word
        text = text.strip()
        if text and text not in found:
            found[text] = {
                "answer": text, "score": score, "start": start, "end": start + len(text)
            }  # fmt: skip
        if len(found) == n_best:
            break
    return list(found.values())
