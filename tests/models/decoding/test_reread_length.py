"""A Phi-3 with LongRoPE reads its text anew when that grows beyond the trained length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.decoders.phi3 import Phi3Config
from flaxzoo.models.decoding.generator import Generator
from flaxzoo.models.rotary_scaling import RotaryScaling

pytestmark = pytest.mark.slow

TRAINED = 8
LONG = RotaryScaling(
    kind="longrope",
    original_length=TRAINED,
    short_factors=(1.3, 1.5),
    long_factors=(1.4, 5.2),
)
CONFIG = Phi3Config(
    vocab_size=50, max_length=40, num_layers=2, d_model=12, num_heads=3, d_ff=20,
    rope_scaling=LONG, rope_base=500.0, init_std=0.5,
)  # fmt: skip
PROMPTS = [list(range(4, 4 + length)) for length in (3, 6, 8, 9, 12)]
GREEDY = models.GenerationRequest(max_new_tokens=10)


@pytest.fixture(scope="module", params=[None, 3], ids=["all", "window"])
def saved(request, tmp_path_factory):
    """A folder, its model here and in transformers."""
    folder = tmp_path_factory.mktemp("phi3")
    model = models.create(Phi3Config(**{**vars(CONFIG), "window": request.param}))
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(0, 0.6, x.shape), jnp.float32),
        models.init_params(model, jax.random.key(0)),
    )
    models.save(folder / "model", model, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    return model, params, theirs


def continued(theirs, prompt):
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    return theirs.generate(ids, max_new_tokens=10, do_sample=False, **given)[0].tolist()


def test_texts_are_those_of_transformers(saved):
    model, params, theirs = saved
    expected = [continued(theirs, prompt) for prompt in PROMPTS]
    generator = Generator(model, params)
    for number in (1, 4):
        new = np.concatenate(list(generator.stream(PROMPTS, GREEDY, tokens_per_call=number)), 1)
        assert [p + row for p, row in zip(PROMPTS, new.tolist(), strict=True)] == expected
    # Rows with a position of their own are read again one by one.
    keys, texts = models.row_keys(jax.random.key(0), len(PROMPTS)), [[*p] for p in PROMPTS]
    limits = [10] * len(PROMPTS)
    for new in generator.continuous_batch(PROMPTS, GREEDY, keys=keys, limits=limits, num_rows=2):
        texts[new.text] += new.tokens
    assert texts == expected
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert models.generate(model, params, [prompt], max_new_tokens=10).tolist() == [text]


def test_a_growing_context_is_reread_once(saved):
    model, params, theirs = saved
    key = models.row_keys(jax.random.key(0), 1)
    for prompt in PROMPTS:
        context = Generator(model, params).cached_context()
        assert prompt + list(context.stream(prompt, GREEDY, key)) == continued(theirs, prompt)
        again = TRAINED + 1 if len(prompt) <= TRAINED else 0
        # The last token is not read, and the tokens at the limit are read twice.
        assert context.num_read == len(prompt) + 9 + (again and again - 1)
        # A context that is short again has the keys of a short one.
        short = PROMPTS[1]
        assert short + list(context.stream(short, GREEDY, key)) == continued(theirs, short)


def test_models_that_cannot_reread_are_refused(saved):
    model, params, _ = saved
    options = {"num_beams": 2, "max_new_tokens": 6}
    with pytest.raises(UserError, match=r"prompt 0 .*4 .*6 new .* 5 new"):
        models.generate(model, params, [PROMPTS[0] + [9]], **options)
    models.generate(model, params, [PROMPTS[0]], **options)  # reads 8 tokens
    models.generate(model, params, [PROMPTS[3]], **options)  # is long from the beginning
    with pytest.raises(UserError, match="reread_length 8"):
        Generator(model, params, draft=models.Draft(model, params, 2))
