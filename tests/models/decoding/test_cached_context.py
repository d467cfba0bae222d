"""A context that grows: the same tokens as without the cache, and nothing read twice."""

import itertools

import jax
import numpy as np
import pytest
from flaxzoo import data, models
from flaxzoo.models.decoding.generator import Generator, sampling_keys
from flaxzoo.models.decoding.request import GenerationRequest

CONFIGS = {
    "gpt": models.GPTConfig(vocab_size=50, max_length=80, num_layers=2, d_model=16, num_heads=2),
    "rotary": models.LectureGPTConfig(
        vocab_size=50, max_length=80, num_layers=2, d_model=16, num_heads=2, positions="rotary",
        head_convolution=3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_continued_turns_equal_a_new_conversation(name):
    model = models.create(CONFIGS[name])
    generator = Generator(model, models.init_params(model, jax.random.key(0)))
    request = GenerationRequest(
        do_sample=True, temperature=0.9, repetition_penalty=1.2, max_new_tokens=6
    )
    context, tokens, read = generator.cached_context(), [3, 4, 5, 6, 7], 0
    for turn in range(4):
        keys = sampling_keys(turn, 1)
        new = list(context.stream(tokens, request, keys))
        steps = generator.stream([tokens], request, seed=turn)
        assert new == np.concatenate(list(steps), axis=1)[0].tolist()
        if turn and name == "gpt":
            assert context.num_read - read < 12 + 6  # of more than 17 + 6 a turn
        read = context.num_read
        # The answer loses its last token, and the next turn adds eleven.
        tokens = [*tokens, *new[:-1], *range(10, 21)]


def test_truncation_is_logged_and_the_last_position_is_used():
    config = CONFIGS["gpt"]
    model = models.create(config)
    generator = Generator(model, models.init_params(model, jax.random.key(0)))
    request = GenerationRequest(do_sample=True, max_new_tokens=500)
    keys = sampling_keys(0, 1)
    new = list(generator.cached_context().stream([1] * 75, request, keys))
    assert len(new) == 6  # the last one is written and never read
    with pytest.raises(data.UserError, match=r"context .*81 tokens.* 80"):
        next(generator.cached_context().stream([1] * 81, request, keys))
    assert (
        len(list(itertools.islice(generator.cached_context().stream([1], request, keys), 2))) == 2
    )
