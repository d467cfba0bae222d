"""Adapts a model to lm-evaluation-harness, which requests log-likelihoods and generated texts.

The harness is the package `lm_eval` (the extra `eval`). Only `harness_model` imports this file,
because it requires the package.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ....data.chat.guard import encode_guarded
from ....data.chat_templates.traced import UNKNOWN, USER, Traced, origins
from ....data.common.fields import require
from ....data.common.json_text import JsonValue
from ....data.common.progress import Progress, ignore
from ....data.tasks.translation import encode_source
from ....data.tokenizers.base import Tokenizer
from ...decoding.generator import Generator
from ...decoding.request import GenerationRequest, published_request
from ...model import Model
from ...nn.typing import Params
from ..completions import Prompt
from ..folder import beam_search_defaults, generation_defaults
from ..generate import TextGenerator
from .continuations import ContinuationScorer

NEW_TOKENS = 256
"""Default maximum number of new tokens, as in the harness."""
BATCH_SIZE = 16
"""Number of texts per batch."""

TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""A context and a continuation as texts (or None), and the token ids of both."""


class HarnessModel(ContinuationScorer, TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=…)`.

    The results equal the results of the harness's model `hf`: requests are encoded in the same way,
    and a context that is too long loses its first tokens. Common prefixes of requests are computed
    only once.

    For encoder-decoders, there are three differences from `hf`: continuations are encoded as
    targets and not as sources, a target has at most `max_gen_toks` tokens (`hf` adds the length of
    the source), and the position of a source token does not depend on the batch.

    Args:
        model: a causal language model or an encoder-decoder.
        params: its parameters.
        tokenizer: its tokenizer.
        settings: arguments of `models.generate` that apply to all texts, such as the settings that
            are stored with the model.
        search: for an encoder-decoder, the beam search that generates its targets. Defaults to
            `published_request`.
    """

    refusal = "cannot answer prompts"

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        *,
        settings: Mapping[str, JsonValue] | None = None,
        search: GenerationRequest | None = None,
    ) -> None:
        ContinuationScorer.__init__(self, model, params, tokenizer)
        TemplateLM.__init__(self)
        self.backend = "seq2seq" if self.is_encoder_decoder else "causal"
        self._settings, self._search = settings or {}, search
        self.progress = Progress()
        """Shows the number of finished requests."""
        self.in_chats = False
        """Whether the texts were formatted by a chat template. In such texts, the names of control
        tokens are encoded as control tokens and not as text.
        """

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "HarnessModel":
        if model.config.head == "seq2seq_lm":
            search = beam_search_defaults(folder, tokenizer)
            return cls(model, params, tokenizer, search=search)
        return cls(model, params, tokenizer, settings=generation_defaults(folder))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; if the vocabulary has none, the token that begins a text."""
        end = self._tokenizer.target.special_ids.eos
        return self.first_id if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """The token that represents an empty context."""
        return self.first_id

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness's cache of requests."""
        return self._tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Returns the tokens of a text, by default with the special tokens of a context."""
        del kwargs
        if add_special_tokens is False:
            return self._tokenizer.target.encode(string, add_special_tokens=False)
        if self.is_encoder_decoder:
            return encode_source(self._tokenizer, string)
        ids = self.encode_text(string)
        return [*self.added_before(ids), *ids]

    def encode_text(self, text: str) -> list[int]:
        """Returns the tokens of a text; in a chat, names of control tokens become these tokens."""
        if not self.in_chats:
            return super().encode_text(text)
        # If the chat template did not format this text, the origins of its parts are unknown.
        if not isinstance(text, Traced):
            return self._tokenizer.encode_with_controls(text)[0]
        by = origins(text).replace(UNKNOWN, USER)  # UNKNOWN is text that the harness appended
        return encode_guarded(self._tokenizer, text, by, self._tokenizer.chat_template.source)[0]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Formats a conversation with the tokenizer's chat template.

        Raises:
            UserError: the template refuses the conversation.
        """
        self.in_chats = True
        rendered = self._tokenizer.chat_template.render_traced(
            chat_history, add_generation_prompt=add_generation_prompt
        )
        return Traced(rendered.text, rendered.origins)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the chat template, which the harness uses as a cache key."""
        return self._tokenizer.chat_template.source if chat_template else ""

    def _shown(self, disable_tqdm: bool) -> Progress:
        """Returns the progress display to use, which is quiet if `disable_tqdm` is set."""
        return Progress(quiet=True) if disable_tqdm else self.progress

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        return self.encode_pair(context, continuation)

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability, and whether greedy decoding generates it."""
        del kwargs
        with self._shown(disable_tqdm).counter("requests", len(requests)) as advance:
            scores = self.score(
                [(context, continuation) for _, context, continuation in requests],
                on_batch=advance,
                log=self.progress.log,
            )
        answers = [(score.log_probability, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probability of each text. Each token of a text is scored exactly once.

        A text that is longer than the model's maximum length is divided into windows, as in the
        harness.
        """
        windows: list[TokenRequest] = []
        ends: list[int] = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        # Score the windows of all texts together, then add up the scores of each text's windows.
        scores = [score for score, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        totals = [sum(scores[a:b]) for a, b in itertools.pairwise([0, *ends])]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates a text after each context, up to a stop string.

        Raises:
            UserError: a setting of a task is not supported, or the task's maximum number of new
                tokens leaves no space for a context.
        """
        # Group the requests by their settings, with the longest contexts first.
        texts: list[str] = [""] * len(requests)
        rows = [self.tok_encode(request.args[0]) or [self.first_id] for request in requests]
        same_settings: dict[str, list[int]] = {}  # all texts of a batch must have equal settings
        for i in sorted(range(len(rows)), key=lambda i: -len(rows[i])):
            key = json.dumps(requests[i].arguments[1], sort_keys=True)
            same_settings.setdefault(key, []).append(i)
        with self._shown(disable_tqdm).counter("texts", len(requests)) as advance:
            for numbers in same_settings.values():
                for start in range(0, len(numbers), BATCH_SIZE):
                    batch = numbers[start : start + BATCH_SIZE]
                    settings = requests[batch[0]].arguments[1]
                    written = self._write([rows[i] for i in batch], settings)
                    for i, (text, _) in zip(batch, written, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].arguments, text)
                    advance(len(batch), sum(number for _, number in written))
        return texts

    @functools.cached_property
    def _writer(self) -> TextGenerator:
        stored = {"eos_token_id": self.eot_token_id, **self._settings}
        return TextGenerator(self._model, self._params, self._tokenizer, stored)

    @functools.cached_property
    def _searcher(self) -> Generator:
        return Generator(self._model, self._params)

    def _write(
        self, rows: Sequence[list[int]], settings: Mapping[str, JsonValue]
    ) -> list[tuple[str, int]]:
        """Returns the text generated after each context, and the number of its tokens."""
        # Translate the task's settings to the arguments of `models.generate`.
        given = cast("dict[str, Any]", normalize_gen_kwargs(dict(settings), NEW_TOKENS))
        until, number = list(filter(None, given["until"])), given["max_gen_toks"]
        read_here = ("until", "max_gen_toks", "do_sample")
        options = {name: value for name, value in given.items() if name not in read_here}
        if not given["do_sample"]:
            options["temperature"] = 0.0
        if self.is_encoder_decoder:
            return self._write_targets(rows, until, number, options)
        # Drop the first tokens of a context that is too long, as in the harness.
        room = self.max_length - number
        require(
            room >= 1,
            f"max_gen_toks {number} leaves no space for a context in the {self.max_length} tokens "
            "that the model reads: lower it in the task",
        )
        completed = self._writer.complete(
            [Prompt("", ids=tuple(row[-room:])) for row in rows],
            stop_strings=until,
            batch_size=None,
            log=ignore,
            **{**options, "max_new_tokens": number},
        )
        best = [each.completions[0] for each in completed]
        return [(one.text, len(one.tokens)) for one in best]

    def _write_targets(
        self,
        rows: Sequence[list[int]],
        until: Sequence[str],
        number: int,
        options: dict[str, JsonValue],
    ) -> list[tuple[str, int]]:
        """Returns the target that beam search finds for each source, and its number of tokens."""
        refused = sorted(set(options) - {"temperature"})
        require(
            not refused and (not options["temperature"]),
            f"{(refused or ['temperature'])[0]} is not supported by an encoder-decoder, "
            f"whose stored search generates the targets: remove it from the task",
        )
        stored = self._search or published_request(self._tokenizer, self._model.config.vocab_size)
        request = dataclasses.replace(
            stored, max_new_tokens=number, max_extra_tokens=None, num_return_sequences=1
        )
        sources = [row[-self.max_length :] for row in rows]
        best = [hypotheses[0].tokens for hypotheses in self._searcher.search(sources, request)]
        texts = map(self._tokenizer.target.decode, best)
        # End each text before its first stop string.
        ends = re.compile("|".join(map(re.escape, until)) or "$^")
        return [(ends.split(text)[0], len(ids)) for text, ids in zip(texts, best, strict=True)]
