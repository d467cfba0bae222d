"""Scores pairs of texts with a language model that answers "yes" or "no" (Qwen3-Reranker).

See Zhang et al. 2025, "Qwen3 Embedding", section 2. The prompt states an instruction, a query and a
document. The score is the probability that the next token is "yes" if the only alternative is "no".
It is the sigmoid of the difference of their two logits. This difference is a linear function of the
last hidden state, so the model is run as a classifier with one label, and the logits of other
tokens are not computed.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from ...data.common.errors import UserError
from ...data.common.fields import require
from ...data.common.progress import LogFn, ignore
from ...data.features.bert_inputs import Template
from ...data.tokenizers.base import Tokenizer
from ...data.tokenizers.frame import Frame, Layout
from ..decoders.causal_lm import CausalLMConfig
from ..heads.specs import HEADS
from ..hf.cross_encoder import PairScoring
from ..hub import local_folder
from ..loading import model_config
from ..model import Model
from ..nn.typing import Params
from ..registry import create
from .folder import open_folder
from .pair_scorer import PairScorer
from .text_model import Loaded

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YesNoPrompt:
    """The prompt that presents a pair to the model. Defaults to the prompt of Qwen3-Reranker."""

    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"
    """The instruction, which explains when a document matches a query."""
    before: str = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    """The text before the pair. Names of special tokens in this text are encoded as special
    tokens.
    """
    after: str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    """The text after the pair, which is never truncated."""
    yes: str = "yes"
    """The answer for a relevant document. It must be a single token."""
    no: str = "no"
    """The answer for an irrelevant document. It must be a single token."""

    def join(self, query: str, document: str) -> str:
        """Returns the text that contains the instruction and a pair."""
        return f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: {document}"


class YesNoScorer(PairScorer):
    """A language model that answers whether a document matches a query; see `PairScorer`.

    Example::

        scorer = models.YesNoScorer.of_run("Qwen/Qwen3-Reranker-0.6B")
        scores = scorer.score([("how old is the sun", "The sun is 4.6 billion years old.")])

    Args:
        model: a model with the head `causal_lm`.
        params: its parameters.
        tokenizer: its tokenizer.
        settings: the settings for computing a score from the difference of the logits. By default,
          the score is the sigmoid of the difference, which is the probability of "yes" against
          "no".
        prompt: the text that the model reads. Defaults to the prompt of Qwen3-Reranker.

    Raises:
        UserError: the model has a different head or is not a decoder, its logits are capped or have
          a bias, or an answer is not a single token.
    """

    heads = frozenset(("causal_lm",))
    remedy = "give a language model that answers yes or no, such as a Qwen3-Reranker"

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        settings: PairScoring | None = None,
        *,
        prompt: YesNoPrompt = YesNoPrompt(),
    ) -> None:
        self._prompt = prompt
        super().__init__(model, params, tokenizer, settings)

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "YesNoScorer":
        del folder
        return cls(model, params, tokenizer)

    def with_prompt(self, prompt: YesNoPrompt) -> "YesNoScorer":
        """Returns a scorer of the same model with a different prompt or instruction."""
        model, params = self._language_model
        return YesNoScorer(model, params, self._tokenizer, self.settings, prompt=prompt)

    def _classifier(self, model: Model, params: Params) -> tuple[Model, Params]:
        """Returns a classifier whose only logit is the difference of the answers' logits."""
        self._language_model = model, params
        config = model.config
        # The model must be a decoder, because the classifier of a decoder reads the last token. If
        # the logits were capped, their difference would not be linear.
        if not isinstance(config, CausalLMConfig) or config.logit_cap or config.output_bias:
            raise UserError(
                f"{type(config).__name__} is not a decoder, or its logits are capped or have a "
                f"bias: {self.remedy}"
            )
        matrix = params["token_embedding" if config.tie_output else "output_embedding"]
        yes, no = (matrix["embedding"][self._id(word)] for word in self._answers)
        # [D, 1]: the logit of "yes" minus the logit of "no" is linear in the hidden state.
        kernel = (jnp.asarray(yes, jnp.float32) - jnp.asarray(no, jnp.float32))[:, None]
        # The difference of the two rows replaces the projection to the vocabulary.
        body = {name: x for name, x in params.items() if name != "output_embedding"}
        classifier = create(
            config.with_head("sequence_classification", self._answers[:1]), model.execution
        )
        return classifier, {**body, "head": {"classifier": {"kernel": kernel}}}

    @property
    def _answers(self) -> tuple[str, str]:
        return self._prompt.yes, self._prompt.no

    def _id(self, word: str) -> int:
        ids = self._tokenizer.encode(word, add_special_tokens=False)
        require(len(ids) == 1, f"the answer {word!r} must be one token, got {len(ids)}")
        return ids[0]

    def _template(self, length: int) -> Template:
        """Returns the tokens that surround a pair, which is encoded as one text."""
        encode = self._tokenizer.encode_with_controls
        marks = tuple(tuple(encode(text)[0]) for text in (self._prompt.before, self._prompt.after))
        single = Layout(marks, tuple((0,) * len(ids) for ids in marks), (0,))
        pad = self._tokenizer.special_ids.pad or 0
        return Template(Frame(single=single), pad, length)

    def _texts(self, pairs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Formats each pair as one text."""
        return [(self._prompt.join(query, document),) for query, document in pairs]


def answers_yes_or_no(folder: str | Path, prompt: YesNoPrompt = YesNoPrompt()) -> bool:
    """Returns whether a folder's tokenizer has the special tokens and the answers of a prompt."""
    _, tokenizer = open_folder(folder)
    # Without these special tokens, the model would read their names as text.
    names = set(re.findall(r"<\|\w+\|>", prompt.before + prompt.after))
    answers = (tokenizer.encode(word, add_special_tokens=False) for word in (prompt.yes, prompt.no))
    return names <= tokenizer.control_tokens().keys() and all(len(ids) == 1 for ids in answers)


def open_pair_scorer(
    folder: str | Path,
    *,
    step: int | None = None,
    log: LogFn = ignore,
    loaded: Loaded | None = None,
) -> PairScorer:
    """Opens a cross-encoder, or a language model that answers yes or no; see `TextModel.of_run`."""
    generates = HEADS[model_config(local_folder(folder)).head].generates
    scorer = YesNoScorer if generates else PairScorer
    return scorer.of_run(folder, step=step, log=log, loaded=loaded)
