"""A completion that grows token by token until it ends."""

from collections.abc import Sequence

from ...data.tokenizers.base import Tokenizer
from ..decoding.request import Hypothesis
from .completions import Completion, FinishReason, Prompt


class GrowingText:
    """A growing completion of a prompt.

    Args:
        tokenizer: The tokenizer of the model.
        prompt: The prompt, with its stop strings and maximum length.
        prompt_ids: The tokens of the prompt.
        end_ids: The tokens that end the text.
        forced_end: Whether the token at the maximum length is a forced end token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        *,
        end_ids: Sequence[int] = (),
        forced_end: bool = False,
    ) -> None:
        self._tokenizer, self._stop, self._end_ids = tokenizer, prompt.stop_strings or (), end_ids
        self._forced_end = forced_end
        self.prompt, self.prompt_ids = prompt, list(prompt_ids)
        # Decoding a token may depend on the word before it, so decode the new tokens together with
        # the prompt. `_open` contains the tokens that must be decoded again, and `_closed` contains
        # the text of the tokens before them. When `_open` is decoded, the first `_skipped`
        # characters belong to the prompt.
        self._open = list(self.prompt_ids) if prompt.ids is None else []
        self._closed, self._skipped = "", len(tokenizer.decode(self._open))
        self.limit = prompt.max_new_tokens
        """The maximum length, in tokens. If None, the text is limited only by the model's maximum
        length.
        """
        self.text = ""
        self.tokens: list[int] = []
        """The new tokens, including a stop string."""
        self.log_probabilities: list[float] = []
        """The log-probabilities of the tokens, if known."""
        self.log_probability = 0.0
        """The log-probability of all tokens, including the end token."""
        self.reason: FinishReason | None = None
        """The reason why the text ended, or None while it grows."""
        self._shown = 0  # the number of characters that `take_settled` has returned

    def grow(self, tokens: Sequence[int], log_probabilities: Sequence[float] = ()) -> None:
        """Appends tokens until the text ends.

        Args:
            tokens: New tokens. Tokens after the end of the text are ignored.
            log_probabilities: The log-probability of each token, or empty if unknown.
        """
        for i, token in enumerate(tokens):
            if self.reason is not None:
                return
            # Check whether the text ends with this token, and why.
            last = self.limit is not None and len(self.tokens) + 1 == self.limit
            if last and self._forced_end:  # the model did not choose this token
                self.reason = "length"
                return
            own = log_probabilities[i : i + 1]
            self.log_probability += sum(own)
            if token in self._end_ids:
                self.reason = "end"
                return
            self.tokens.append(token)
            self.log_probabilities.extend(own)
            # Decode earlier tokens again, because a token may contain only a part of a character.
            self._open.append(token)
            decoded = self._tokenizer.decode(self._open)
            self.text = self._closed + decoded[self._skipped :]
            # An incomplete character decodes to U+FFFD.
            if self._tokenizer.joins_bytes and not decoded.endswith("\N{REPLACEMENT CHARACTER}"):
                self._skipped = max(0, self._skipped - len(decoded))
                self._closed, self._open = self.text, []
            # Cut the text at the first stop string.
            found = [index for s in self._stop if (index := self.text.find(s)) >= 0]
            if found:
                self.text = self.text[: min(found)]
                self.reason = "stop"
            elif last:
                self.reason = "length"

    def grow_to(self, hypothesis: Hypothesis) -> None:
        """Appends all tokens of a finished hypothesis of a beam search."""
        self.grow(hypothesis.tokens)
        self.log_probability = hypothesis.log_probability
        if self.reason != "stop":
            self.reason = "end" if hypothesis.ended else "length"

    @property
    def num_chosen(self) -> int:
        """The number of tokens that the model chose, including its end token."""
        return len(self.tokens) + (self.reason == "end")

    @property
    def num_settled(self) -> int:
        """The number of characters of the text that later tokens cannot change."""
        if self.reason is not None:
            return len(self.text)
        # The end of the text may change if it is an incomplete character, which decodes to U+FFFD,
        # or the beginning of a stop string.
        text = self.text.rstrip("\N{REPLACEMENT CHARACTER}")
        overlaps = [n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])]
        return len(text) - max(overlaps, default=0)

    def take_settled(self) -> str:
        """Returns the final text that earlier calls have not returned.

        Text is final if later tokens cannot change it.
        """
        begin, self._shown = self._shown, max(self._shown, self.num_settled)
        return self.text[begin : self._shown]

    def completion(self) -> Completion:
        """Returns the finished completion."""
        known = len(self.log_probabilities) == len(self.tokens)
        tokenizer = self._tokenizer
        # The model may have chosen a row of its embedding table that has no token.
        pieces = [tokenizer.token(id) if id < tokenizer.vocab_size else "" for id in self.tokens]
        return Completion(
            text=self.text,
            finish_reason=self.reason or "length",
            log_probability=self.log_probability,
            tokens=tuple(self.tokens),
            pieces=tuple(pieces),
            log_probabilities=tuple(self.log_probabilities) if known else None,
        )
