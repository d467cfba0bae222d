"""Speculative decoding: a draft model proposes tokens, and the model verifies them in one call.

Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", and Chen et al.
2023, "Accelerating large language model decoding with speculative sampling". The draft model
samples K tokens in sequence, each from its distribution q. The model computes its own distributions
p for these K tokens and for the next token. A token x is accepted with probability
min(1, p(x) / q(x)). The first rejected token is replaced by a sample from max(0, p - q),
normalized. If all tokens are accepted, one more token is sampled from p. Every token therefore has
exactly the distribution p, whatever q is, so a poor draft model only makes generation slower.

p and q are the distributions after temperature, filters, penalties and bans. With temperature 0, a
token is accepted if it is the model's best token, so the text does not change.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from ...data.common.fields import PositiveInt, check_value, require
from ..heads.specs import CAUSAL_HEADS, require_head
from ..model import Model
from ..nn.masks import AnyArray
from ..nn.typing import Array, Bool, Float, Int, Key, Params
from .request import GenerationRequest
from .rows import NewTokens, RowCaches, RowStates
from .sample import History, SamplingParams, checked, log_probabilities, processed_logits
from .unstack_layers import unstack_layers

NUM_DRAFT_TOKENS = 4
"""The default number of tokens that a draft model proposes at a time."""
_PROPOSE, _ACCEPT, _REPLACE = 0, 1, 2
"""The three random choices that a token may require. Each choice uses a different random key."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """A small model that proposes tokens to a larger model with the same vocabulary.

    Raises:
      UserError: the number of tokens is out of range, or the model is not suitable as a draft
        model.
    """

    model: Model
    params: Params
    num_tokens: int = NUM_DRAFT_TOKENS
    """The number of tokens proposed at a time, K."""

    def __post_init__(self) -> None:
        longest = self.model.config.max_length
        require_head(
            self.model.config, CAUSAL_HEADS, "is not a draft model", "give a causal language model"
        )
        check_value("num_assistant_tokens", self.num_tokens, PositiveInt)
        # `propose` reads two tokens before the proposed tokens.
        require(
            self.num_tokens + 2 <= longest,
            f"a draft model that reads {longest} tokens cannot propose {self.num_tokens} at a "
            f"time: propose at most {longest - 2}, or give another draft model",
        )

    @staticmethod
    def check_request(request: GenerationRequest, *, searched: bool = False) -> None:
        """Raises UserError if a draft model cannot be used with the request."""
        require(
            request.num_beams == 1 and not searched,
            f"a draft model cannot be used in beam search, got num_beams "
            f"{request.num_beams}: leave the draft model out, or give num_beams 1",
        )

    def unstacked(self) -> "Draft":
        """Returns the draft model in the layout that decodes fastest (`unstack_layers`)."""
        return Draft(*unstack_layers(self.model, self.params), self.num_tokens)

    def check(self, model: Model) -> None:
        """Checks that the draft model can propose tokens to a model.

        Raises:
          UserError: the vocabularies differ, or a model cannot remove tokens.
        """
        ours, theirs = model.config, self.model.config
        require_head(ours, CAUSAL_HEADS, "takes no draft model", "leave the draft model out")
        require(
            ours.vocab_size == theirs.vocab_size,
            f"the draft model has a vocabulary of {theirs.vocab_size} tokens, and the model has "
            f"{ours.vocab_size} tokens: give a draft model with the same tokens",
        )
        # Rejected tokens are removed from both caches, so both models must support the removal.
        for name, config in (("model", ours), ("draft model", theirs)):
            require(
                not config.recent_shapes,
                f"the {name} caches inputs of the last tokens (head_convolution), so that no token "
                "can be removed: leave the draft model out",
            )
            for field, problem in _CANNOT_REMOVE.items():
                require(
                    not getattr(config, field),
                    f"the {name} has {field} {getattr(config, field)}, {problem}: leave the draft "
                    "model out",
                )


_CANNOT_REMOVE = {
    # XLA's ragged matrix products cannot be vmapped over rows.
    "num_experts": "whose rows advance in step",
    # If a call crosses this length, earlier tokens would be rotated by the wrong frequencies.
    "reread_length": "beyond which its cache is recomputed",
}
"""The configuration fields that make it impossible to remove rejected tokens, with the reasons."""


@dataclasses.dataclass
class Acceptance:
    """The numbers of proposed and accepted tokens."""

    calls: int = 0
    """The number of verifications. Each one verifies the K tokens proposed for one row."""
    proposed: int = 0
    accepted: int = 0

    def add(self, proposed: int, accepted: int) -> None:
        """Adds the token counts of another verification."""
        self.calls, self.proposed = self.calls + 1, self.proposed + proposed
        self.accepted += accepted

    def __str__(self) -> str:
        rate, tokens = self.accepted / max(self.proposed, 1), self.accepted / max(self.calls, 1)
        return (
            f"draft: {self.accepted:,} of {self.proposed:,} proposed tokens accepted ({rate:.1%}), "
            f"{1 + tokens:.2f} tokens for each call of the model"
        )


@struct.dataclass
class Proposed:
    """The K tokens that a draft model proposes for each of R rows."""

    tokens: Int[Array, "R K"]
    probabilities: Float[Array, "R K V"] | None
    """The distributions q that the tokens were sampled from, or None if they are greedy."""


@struct.dataclass
class DraftedStates(RowStates):
    """The state of rows with a draft model."""

    draft: RowCaches
    """The draft model's caches, which contain all tokens that precede `before`."""
    before: Int[Array, " R"]
    """The second newest token of each row. The draft model always reads the two newest tokens, even
    if it has read this one already.
    """


@functools.partial(
    jax.jit, static_argnames=("model", "draft_model", "num_tokens"), donate_argnames="state"
)
def speculate(
    model: Model,
    params: Params,
    state: DraftedStates,
    live: Bool[AnyArray, " R"],
    *,
    draft_model: Model,
    draft_params: Params,
    sampling: SamplingParams,
    num_tokens: int,
) -> tuple[DraftedStates, NewTokens]:
    """Chooses 1 to K + 1 tokens for each row, with K tokens proposed by the draft model.

    Args:
      model: the model.
      params: its parameters.
      state: the rows, with the caches of the draft model.
      live: whether each row has a text. The tokens of idle rows are meaningless.
      draft_model: the model that proposes tokens.
      draft_params: its parameters.
      sampling: how tokens are chosen.
      num_tokens: the number of proposed tokens, K.

    Returns:
      The state after the chosen tokens, and the tokens.
    """
    assert isinstance(state.context, RowCaches)
    tokens = jnp.where(live, state.tokens, 0)
    context, draft = state.context.only_live(live), state.draft.only_live(live)
    start, draft_start = context.cache.index, draft.cache.index  # [R] each
    before = jnp.where(live, state.before, 0)
    state = dataclasses.replace(state, tokens=tokens, before=before, context=context, draft=draft)
    # The draft model proposes K tokens, and the model reads them in one call.
    proposed, draft = propose(
        draft_model, draft_params, state, sampling=sampling, num_tokens=num_tokens
    )
    ids = jnp.concatenate([tokens[:, None], proposed.tokens], axis=1)  # [R, K + 1]
    logits, context = context.read(model, params, ids, num_tokens + 1)
    # The penalties and bans for the token at index i depend on the proposed tokens before it.
    scores = jnp.stack(
        [
            processed_logits(logits[:, i], state.past.after(proposed.tokens, i), sampling=sampling)
            for i in range(num_tokens + 1)
        ],
        axis=1,
    )  # [R, K + 1, V]
    if sampling.greedy:
        accepted, last = verify_best(jnp.argmax(scores, axis=-1), proposed.tokens)
    else:
        assert proposed.probabilities is not None
        accepted, last = verify(
            jax.nn.softmax(scores, axis=-1),
            proposed,
            keys_of_choices(state.past, num_tokens),
        )
    # Combine the accepted tokens and the token that follows them. The remaining entries are
    # meaningless.
    index = jnp.arange(num_tokens + 1)
    new = jnp.concatenate([proposed.tokens, jnp.zeros_like(tokens)[:, None]], axis=1)
    new = jnp.where(index == accepted[:, None], last[:, None], new)  # [R, K + 1]
    log_probs = log_probabilities(logits, new) if sampling.scored else None
    chosen = NewTokens(checked(new, logits), log_probs, accepted + 1)
    # Remove the rejected tokens from both caches.
    state = dataclasses.replace(
        state,
        context=context.moved_to(start + accepted + 1),
        draft=draft.moved_to(draft_start + accepted + 1),
        tokens=last,
        before=jnp.take_along_axis(ids, accepted[:, None], axis=1)[:, 0],
        past=state.past.after(new, accepted + 1),
    )
    return state, chosen


def propose(
    model: Model,
    params: Params,
    state: DraftedStates,
    *,
    sampling: SamplingParams,
    num_tokens: int,
) -> tuple[Proposed, RowCaches]:
    """Chooses K tokens with the draft model; returns the tokens and the caches.

    The draft model always reads the second newest token, even if it has already read this token.
    It has not read this token if all tokens of the previous round were accepted, because it never
    reads the last token that it proposes.
    """
    keys = keys_of_choices(state.past, num_tokens)  # [R, K + 1]

    def pick(logits: Float[Array, "R V"], past: History, keys: Key[Array, " R"]) -> Proposed:
        """Chooses one token for each row; the result has no axis for K."""
        scores = processed_logits(logits, past, sampling=sampling)
        if sampling.greedy:
            return Proposed(jnp.argmax(scores, axis=-1), None)
        tokens = jax.vmap(jax.random.categorical)(_derive(keys, _PROPOSE), scores)
        return Proposed(tokens, jax.nn.softmax(scores, axis=-1))

    def step(
        carry: tuple[RowCaches, History, Array], keys: Key[Array, " R"]
    ) -> tuple[tuple[RowCaches, History, Array], Proposed]:
        caches, past, token = carry
        past = past.after(token[:, None])
        logits, caches = caches.read(model, params, token[:, None])
        picked = pick(logits[:, 0], past, keys)
        return (caches, past, picked.tokens), picked

    # The draft model reads two tokens before the first choice, and one token before each later
    # choice.
    ids = jnp.stack([state.before, state.tokens], axis=1)  # [R, 2]
    logits, caches = state.draft.read(model, params, ids)
    first = pick(logits[:, 0], state.past, keys[:, 0])
    (caches, _, _), others = jax.lax.scan(
        step, (caches, state.past, first.tokens), keys[:, 1:num_tokens].T
    )  # [K - 1, R, …]
    # Prepend the first choice, and move the axis of rows to the front: [R, K, …].
    joined = jax.tree.map(
        lambda one, rest: jnp.moveaxis(jnp.concatenate([one[None], rest]), 0, 1), first, others
    )
    return joined, caches


def verify_best(
    best: Int[Array, "R N"], proposed: Int[Array, "R K"]
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Accepts the proposed tokens before the first one that is not the best token; N is K + 1.

    Returns:
      The number of accepted tokens, and the next token.
    """
    accepted = _until_first_false(best[:, :-1] == proposed)
    return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]


def verify(
    probabilities: Float[Array, "R N V"], proposed: Proposed, keys: Key[Array, "R N"]
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Accepts proposed tokens so that all tokens follow the model's distributions.

    See Leviathan et al. 2023, section 2.3 and algorithm 1.

    Args:
      probabilities: the distributions p of the model for N = K + 1 tokens.
      proposed: the first K tokens, and their distributions q.
      keys: a key for each token.

    Returns:
      The number of accepted tokens, and the next token.
    """
    assert proposed.probabilities is not None
    # Pad q with 0 after the last proposed token, so that the next token is drawn from p.
    q = jnp.pad(proposed.probabilities, ((0, 0), (0, 1), (0, 0)))

    def of_proposed(x: Float[Array, "R N V"]) -> Float[Array, "R K"]:
        return jnp.take_along_axis(x[:, :-1], proposed.tokens[..., None], axis=-1)[..., 0]

    def at_end(x: Float[Array, "R N V"]) -> Float[Array, "R V"]:
        return jnp.take_along_axis(x, accepted[:, None, None], axis=1)[:, 0]

    # Accept a token with the probability min(1, p / q).
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(_derive(keys[:, :-1], _ACCEPT))
    accepted = _until_first_false(uniform * of_proposed(q) < of_proposed(probabilities))
    # Replace the first rejected token by a sample from max(0, p - q), normalized.
    rest = jnp.maximum(at_end(probabilities) - at_end(q), 0)
    # max(0, p - q) is 0 everywhere only if p equals q up to rounding, or if q is NaN.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, at_end(probabilities))
    last_keys = _derive(keys, _REPLACE)[jnp.arange(accepted.shape[0]), accepted]
    return accepted, jax.vmap(jax.random.categorical)(last_keys, jnp.log(rest))


def keys_of_choices(past: History, num_tokens: int) -> Key[Array, "R N"]:
    """Returns the random keys of the next K + 1 tokens; they do not depend on the draft model."""
    counts = past.count[:, None] + jnp.arange(num_tokens + 1)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(past.keys, counts)


def _derive(keys: Key[Array, "*rows"], choice: int) -> Key[Array, "*rows"]:
    """Returns the random key of each token for one of its random choices."""
    flat = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys.reshape(-1), choice)
    return flat.reshape(keys.shape)


def _until_first_false(accepted: Bool[Array, "R K"]) -> Int[Array, " R"]:
    """Returns the number of true values before the first false value of each row."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)
