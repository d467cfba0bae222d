"""Fill-mask: predicts the most probable tokens or words for a mask."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from ...data.common.fields import require
from ...data.tokenizers.base import Tokenizer
from ..finite import check_outputs
from ..heads.specs import HEADS
from ..model import Model
from ..nn.typing import Params
from .bucketing import pad_batch
from .score import NextWord, TokenScore, check_known
from .text_model import TextModel


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A candidate token for a mask."""

    token: str
    id: int
    probability: float
    text: str
    """The whole text with the mask filled, as the tokenizer decodes it."""


class MaskFiller(TextModel):
    """Fills masks with a masked language model and its tokenizer.

    Raises:
        UserError: the model's head is not "pretraining" or "masked_lm", or the tokenizer has no
          mask token.
    """

    heads = tuple(name for name, head in HEADS.items() if head.predicts_masked)
    refusal = "cannot fill masks"
    remedy = f"give a run that was pretrained (head {' or '.join(heads)})"

    def __init__(self, model: Model, params: Params, tokenizer: Tokenizer) -> None:
        super().__init__(model, params, tokenizer)
        problem = f"this {tokenizer.kind} tokenizer has no mask token"
        require(tokenizer.special_ids.mask is not None, problem)
        self._normalized = jax.jit(self._over_vocabulary, static_argnums=0)

    def __call__(self, text: str, *, top_k: int = 5) -> list[list[Candidate]]:
        """Returns the `top_k` most probable tokens for each mask of a text, best first.

        Raises:
            UserError: the text has no mask or is too long, `top_k` is out of range, or a
              probability is NaN.
        """
        tokenizer = self._tokenizer
        mask = tokenizer.special_ids.mask
        problem = f"top_k {top_k} must be from 1 to {tokenizer.vocab_size}"
        require(1 <= top_k <= tokenizer.vocab_size, problem)
        ids = tokenizer.encode_with_mask(text)
        gaps = [position for position, id in enumerate(ids) if id == mask]
        require(gaps, f"the text {text!r} has no [MASK]: write [MASK] where a word is missing")
        # One call predicts all masks.
        probabilities = self._of_ids(ids, jax.nn.softmax)
        candidates = []
        for gap in gaps:
            # Ignore rows of the model's embedding table that have no token.
            best = np.argsort(-probabilities[gap, : tokenizer.vocab_size])[:top_k]
            candidates.append(
                [
                    Candidate(
                        tokenizer.token(id),
                        id,
                        float(probabilities[gap, id]),
                        tokenizer.decode([*ids[:gap], id, *ids[gap + 1 :]]),
                    )
                    for id in best.tolist()
                ]
            )
        return candidates

    def compare(self, text: str, words: Sequence[str]) -> list[NextWord]:
        """Returns the probability of each given word for the mask of a text, best first.

        A word of n tokens is predicted with n masks. The masks are filled from left to right: each
        piece of the word is predicted from the text and the pieces before it, while the pieces
        after it are masked. The probability of the word is the product of the pieces' probabilities
        (as Kauf and Ivanova 2023, "A Better Way to Do Masked Language Model Scoring", score the
        tokens within a word). The number of masks reveals the number of tokens of the word, so
        words with different numbers of tokens can be compared only approximately.

        Args:
            text: a text with one `[MASK]`. Spaces before the mask belong to the word.
            words: the words to compare.

        Raises:
            UserError: the text is too long or does not have exactly one mask, `words` is empty, the
                vocabulary lacks a character of a word, or a probability is NaN.
        """
        tokenizer = self._tokenizer
        mask = tokenizer.special_ids.mask
        assert mask is not None
        ids = tokenizer.encode_with_mask(text)
        require(
            ids.count(mask) == 1,
            f"the text {text!r} has {ids.count(mask)} masks: write one [MASK] where the words are "
            "compared",
        )
        require(words, "words is empty: give at least one word to compare")
        gap = ids.index(mask)
        # A space before the mask is a part of the word's first token.
        space = " " if text.partition(tokenizer.token(mask))[0].endswith(" ") else ""
        compared = []
        for word in words:
            pieces = tokenizer.encode(space + word.strip(), add_special_tokens=False)
            check_known(word, pieces, tokenizer)
            tokens, total = [], 0.0
            for i, piece in enumerate(pieces):
                # Fill in the pieces of the word that precede this piece, and mask the others.
                filled = [*pieces[:i], *[mask] * (len(pieces) - i)]
                row = [*ids[:gap], *filled, *ids[gap + 1 :]]
                log_probability = float(self._of_ids(row, jax.nn.log_softmax)[gap + i, piece])
                total += log_probability
                tokens.append(TokenScore(tokenizer.token(piece), piece, log_probability, total))
            compared.append(NextWord(word, tuple(tokens), total))
        return sorted(compared, key=lambda candidate: -candidate.log_probability)

    def _of_ids(self, ids: list[int], normalize: Callable[[jax.Array], jax.Array]) -> np.ndarray:
        """Returns the softmax or log-softmax over the vocabulary at each position, `[T, V]`."""
        longest = self._model.config.max_length
        problem = f"the text has {len(ids)} tokens, but the model reads {longest}: shorten it"
        require(len(ids) <= longest, problem)
        padded = pad_batch([ids], 1, longest)
        probabilities = np.asarray(self._normalized(normalize, self._params, *padded))
        check_outputs({"probabilities": probabilities[: len(ids)]})
        return probabilities

    def _over_vocabulary(
        self,
        normalize: Callable[[jax.Array], jax.Array],
        params: Params,
        ids: jax.Array,
        attention_mask: jax.Array,
    ) -> jax.Array:
        outputs = self._model.apply(
            {"params": params}, input_ids=ids, attention_mask=attention_mask
        )
        return normalize(outputs.projection.logits()[0])
