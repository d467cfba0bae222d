"""Computes the attention weights between the words of a text for each layer and head."""

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from ...data.common.errors import suggest
from ...data.common.fields import check_value, require
from ...data.tokenizers.base import Tokenizer
from ..finite import check_outputs
from ..heads.specs import HEADS
from ..nn.typing import Float
from .text_model import TextModel
from .translate import TextTranslator

Part = Literal["cross", "encoder", "decoder"]
"""The type of attention in an encoder-decoder: from the target to the source, within the source, or
within the target."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention weights between the words of a text."""

    queries: list[str]
    """The Q words that attend."""
    keys: list[str]
    """The K words that are attended to."""
    weights: Float[np.ndarray, "L N Q K"]
    """The weights for L layers and N heads. The weights of each query sum to 1."""

    def mean(self, layer: int | None = None, head: int | None = None) -> Float[np.ndarray, "Q K"]:
        """Returns the mean weights over layers and heads, or the weights of one layer or head.

        Args:
            layer: the number of a layer, from 1. If None, the mean is over all layers.
            head: the number of a head, from 1. If None, the mean is over all heads.

        Raises:
            UserError: the layer or head does not exist.
        """
        return self.chosen(layer, head).mean(axis=(0, 1))

    def chosen(
        self, layer: int | None = None, head: int | None = None
    ) -> Float[np.ndarray, "layers heads Q K"]:
        """Returns the weights of the given layer and the given head; None selects all of them.

        Raises:
            UserError: the layer or head does not exist.
        """
        weights = self.weights
        for axis, (name, number) in enumerate((("layer", layer), ("head", head))):
            size = self.weights.shape[axis]
            if number is not None:
                require(1 <= number <= size, f"{name} {number} must be from 1 to {size}")
                weights = weights.take([number - 1], axis=axis)
        return weights

    def places(self, word: str) -> list[int]:
        """Returns the indices of the queries that equal a word, ignoring case.

        Raises:
            UserError: no query equals the word.
        """
        # Prefer queries that equal the word in the same case.
        indices = [i for i, query in enumerate(self.queries) if query == word]
        indices = indices or [
            i for i, query in enumerate(self.queries) if query.lower() == word.lower()
        ]
        choices = sorted(set(self.queries))
        require(indices, f"the text has no word {word!r}: {suggest(word, choices)}")
        return indices


class TextAttention(TextModel):
    """Computes the attention weights of texts with a model and its tokenizer.

    Example::

        attend = models.TextAttention.of_run("runs/bert")
        attention = attend("I ate in a restaurant because it was nice")
        row = attention.mean(layer=2)[attention.places("it")[0]]
        print(sorted(zip(row, attention.keys), reverse=True)[:3])

    Args:
        model: any model without a multiple-choice head.
        params: its parameters.
        tokenizer: its tokenizer.
    """

    heads = tuple(name for name, head in HEADS.items() if not head.takes_choices)
    refusal = "reads several texts at once"
    remedy = "give the run from which it was fine-tuned"

    def __call__(
        self,
        text: str,
        *,
        target: str | None = None,
        part: Part | None = None,
        by_token: bool = False,
    ) -> Attention:
        """Returns the attention weights of a text.

        If a word has several tokens, the weights from the word are the mean over its tokens, and
        the weights to the word are the sum over its tokens (Clark et al. 2019, "What Does BERT Look
        At?", section 4.1). Punctuation marks and the special tokens that the tokenizer adds are
        treated as words.

        Args:
            text: the text, or the source of an encoder-decoder.
            target: for an encoder-decoder, the translation. Defaults to the model's translation.
              The query at each position is the token that the decoder reads there.
            part: for an encoder-decoder, the attention to return. Defaults to cross-attention.
            by_token: whether to return the weights between tokens instead of words.

        Raises:
            UserError: the text is too long or empty, an argument for encoder-decoders is given
              for another model, or a weight is NaN.
        """
        tokenizer, config = self._tokenizer, self._model.config
        check_value("part", part, Part | None)
        if config.head != "seq2seq_lm":
            require(
                target is part is None, "target and part require an encoder-decoder: leave them out"
            )
            # A model that is not an encoder-decoder reads one sequence, so queries and keys are the
            # same tokens.
            ids, offsets = tokenizer.encode_with_offsets(text)
            outputs = self._run({"input_ids": ids})
            weights = outputs.attentions
            queries = keys = (text, ids, offsets, tokenizer)
        else:
            # An encoder-decoder reads a source and a target. By default, the target is the model's
            # own translation.
            start = self._target_start
            ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=False)
            ids, offsets = tokenizer.source_frame.join_offsets(ids, offsets)
            source = (text, ids, offsets, tokenizer)
            room = None
            if target is None:
                translate = TextTranslator(self._model, self._params, tokenizer)
                target = translate([text])[0][0].text
                # The tokenizer may encode the model's text with more tokens than were generated.
                room = config.max_length - len(start)
            ids, offsets = tokenizer.target.encode_with_offsets(target, add_special_tokens=False)
            ids, offsets = ids[:room], offsets[:room]
            ids, offsets = [*start, *ids], [*[(0, 0)] * len(start), *offsets]
            written = (target, ids, offsets, tokenizer.target)
            # Run the model, and select the requested attention.
            outputs = self._run({"input_ids": source[1], "decoder_input_ids": written[1]})
            weights, queries, keys = {
                "cross": (outputs.cross_attentions, written, source),
                "encoder": (outputs.encoder_attentions, source, source),
                "decoder": (outputs.decoder_attentions, written, written),
            }[part or "cross"]
        # [L, 1, N, T, S], or a tuple of L arrays with unstacked layers
        stacked = np.stack([np.asarray(layer, np.float32) for layer in weights])[:, 0]
        check_outputs({"attention weights": stacked})
        (names, of_query), (others, of_key) = (
            _units(*side, by_token=by_token) for side in (queries, keys)
        )
        # Join the tokens of each word: take the mean over queries and the sum over keys.
        averaging = of_query / of_query.sum(axis=1, keepdims=True)
        joined = np.einsum("QT,LNTS,KS->LNQK", averaging, stacked, of_key)
        return Attention(names, others, joined)

    def _run(self, inputs: dict[str, Sequence[int]]):
        """Returns the model's outputs for one text, including the attention weights."""
        longest = self._model.config.max_length
        for ids in inputs.values():
            require(
                1 <= len(ids) <= longest,
                f"the text has {len(ids)} tokens: give a text of 1 to {longest}, the limit of "
                f"the model",
            )
        rows = {name: np.array([ids], np.int32) for name, ids in inputs.items()}
        run = jax.jit(lambda params, rows: self._model.apply(
            {"params": params}, **rows, output_attentions=True
        ))  # fmt: skip
        return run(self._params, rows)


def _units(
    text: str,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
    *,
    by_token: bool,
) -> tuple[list[str], np.ndarray]:
    """Returns the words of a text, and a matrix `[words, tokens]` with 1 for each word's tokens."""
    if by_token:
        return list(map(tokenizer.token, ids)), np.eye(len(ids), dtype=np.float32)
    # Assign each token to the word that contains its end. Special tokens are words.
    words = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    names: list[str] = []
    owners: list[int] = []
    last: int | None = None  # the word of the previous token
    for id, (start, end) in zip(ids, offsets, strict=True):
        # A token that contains only white space belongs to the next word, like a space at the
        # beginning of a token.
        word = next((i for i, (_, stop) in enumerate(words) if stop > start), None)
        if start == end or word is None:
            names.append(tokenizer.token(id))
            last = None
        elif word != last:
            names.append(text[slice(*words[word])])
            last = word
        owners.append(len(names) - 1)
    return names, (np.arange(len(names))[:, None] == np.array(owners)).astype(np.float32)


def draw_attention(
    attention: Attention, layer: int | None = None, head: int | None = None
) -> bytes:
    """Draws attention weights as a PNG, with a row for each query and a column for each key.

    By default, there is one panel per layer, which shows the mean over heads or the given head. If
    only a layer is given, there is one panel per head. If a layer and a head are given, there is a
    single panel.

    Raises:
        UserError: the layer or head does not exist.
    """
    # Do not use pyplot, which would choose a window system and is not thread-safe.
    from matplotlib.figure import Figure

    weights = attention.chosen(layer, head)
    # [panels, Q, K]: one panel for each layer, or for each head of the given layer.
    if layer is None:
        panels, name = weights.mean(axis=1), "layer"
    else:
        panels, name = weights[0], "head"
    single = layer is not None and head is not None
    titles = [
        f"layer {layer}, head {head}" if single else f"{name} {i}"
        for i in range(1, len(panels) + 1)
    ]
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    # The size in inches: 0.22 for each word, and 1.2 for the labels of the axes.
    width = 1.2 + 0.22 * max(8, len(attention.keys))
    height = 1.2 + 0.22 * max(8, len(attention.queries))
    figure = Figure(figsize=(width * columns, height * rows), dpi=100, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, panel, title in zip(grid, panels, titles, strict=False):
        axes.imshow(panel, vmin=0, cmap="Blues")
        axes.set_title(title)
        axes.set_xticks(range(len(attention.keys)), attention.keys, rotation=90)
        axes.set_yticks(range(len(attention.queries)), attention.queries)
    # Hide unused panels in the last row.
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
