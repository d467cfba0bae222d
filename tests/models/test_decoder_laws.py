"""Laws of the decoders of today: what an answer may depend on, and that every way to it agrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.decoders.gemma.gemma import GemmaConfig
from flaxzoo.models.decoders.gemma.gemma2 import Gemma2Config
from flaxzoo.models.decoders.gemma.gemma3 import Gemma3Config
from flaxzoo.models.decoders.gpt.bloom import BloomConfig
from flaxzoo.models.decoders.gpt.falcon import FalconConfig
from flaxzoo.models.decoders.gpt.gpt import GPTConfig
from flaxzoo.models.decoders.gpt.gpt_neo import GPTNeoConfig
from flaxzoo.models.decoders.gpt.gpt_neox import GPTNeoXConfig
from flaxzoo.models.decoders.gpt.gptj import GPTJConfig
from flaxzoo.models.decoders.gpt.opt import OPTConfig
from flaxzoo.models.decoders.granite import GraniteConfig
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.decoders.mistral import MistralConfig
from flaxzoo.models.decoders.mixtral import MixtralConfig
from flaxzoo.models.decoders.olmo2 import Olmo2Config
from flaxzoo.models.decoders.olmo3 import Olmo3Config
from flaxzoo.models.decoders.phi3 import Phi3Config
from flaxzoo.models.decoders.qwen2 import Qwen2Config
from flaxzoo.models.decoders.qwen3 import Qwen3Config
from flaxzoo.models.decoders.qwen3_moe import Qwen3MoeConfig
from flaxzoo.models.decoders.smollm3 import SmolLM3Config
from flaxzoo.models.decoders.stablelm import StableLMConfig
from flaxzoo.models.rotary_scaling import RotaryScaling
from flaxzoo.train.distributed import sharding
from flaxzoo.train.distributed.expert_parallel import over_mesh

from ..support.archetypes import cases, padded

SIZES = {
    "vocab_size": 32,
    "max_length": 16,
    "num_layers": 3,
    "d_model": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 24,
    "init_std": 0.3,
}
ALIKE = {name: x for name, x in SIZES.items() if name != "num_kv_heads"}
DYNAMIC = RotaryScaling(kind="dynamic", factor=4.0)
LONG = RotaryScaling(
    kind="longrope", original_length=6, short_factors=(1.0, 2.0), long_factors=(3.0, 4.0)
)
SHORT = RotaryScaling(
    kind="longrope",
    original_length=16,
    short_factors=(1.0, 2.0, 5.0),
    long_factors=(3.0, 4.0, 6.0),
)
CONFIGS = {
    "GPT": GPTConfig(**ALIKE),
    "Llama": LlamaConfig(**SIZES),
    "Llama, dynamic": LlamaConfig(**{**SIZES, "max_length": 6}, rope_scaling=DYNAMIC),
    "Mistral": MistralConfig(**SIZES, window=3, d_head=6),
    "Qwen2": Qwen2Config(**SIZES, window=4, full_layers=(1,)),
    "Qwen3": Qwen3Config(**SIZES, d_head=6),
    "Gemma": GemmaConfig(**SIZES),
    "Gemma 2": Gemma2Config(**SIZES, window=3, score_divisor=9, score_cap=3.0, logit_cap=2.0),
    "Gemma 3": Gemma3Config(**SIZES, window=3, full_layers=(1,), score_divisor=4, rope_base=50.0),
    "Mixtral": MixtralConfig(**SIZES, num_experts=4, window=5),
    "Mixtral, capacity": MixtralConfig(
        **SIZES, num_experts=4, experts_per_token=2, expert_capacity=2.0
    ),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, num_experts=6, experts_per_token=3),
    "Qwen3-MoE, dense layers": Qwen3MoeConfig(
        **SIZES, num_experts=6, experts_per_token=3, dense_layers=(1,), d_ff_dense=20
    ),
    "GPT of experts": GPTConfig(**ALIKE, num_experts=4, num_shared_experts=1),
    "GPT-Neo": GPTNeoConfig(**ALIKE, local_window=3, local_layers=(0, 1)),
    "GPT-J": GPTJConfig(**ALIKE, rotary_dim=2),
    "GPT-NeoX": GPTNeoXConfig(**ALIKE, rope_fraction=0.5),
    "OPT": OPTConfig(**ALIKE, norm_position="post", d_embedding=8),
    "BLOOM": BloomConfig(**ALIKE),
    "Falcon": FalconConfig(**SIZES, residual="two_norms"),
    "Falcon, ALiBi": FalconConfig(**ALIKE, positions="alibi", residual="sequential"),
    "OLMo 2": Olmo2Config(**SIZES),
    "OLMo 3": Olmo3Config(
        **SIZES,
        window=3,
        full_layers=(1,),
        rope_base=50.0,
        rope_scaling=RotaryScaling(kind="yarn", factor=4.0, original_length=6),
    ),
    "SmolLM3": SmolLM3Config(**SIZES, layers_without_positions=(1,), window=4),
    "Granite": GraniteConfig(**SIZES, attention_scale=0.3),
    "StableLM": StableLMConfig(**SIZES, rope_fraction=0.5, normalize_heads=True),
    "StableLM, parallel": StableLMConfig(
        **SIZES, rope_fraction=0.5, parallel_residual=True, attention_bias=True
    ),
    "Phi-3": Phi3Config(**SIZES, d_head=8, rope_fraction=0.5, rope_scaling=LONG),
    "Phi-4-mini": Phi3Config(**SIZES, d_head=8, rope_fraction=0.75, rope_scaling=SHORT),
}
BY_LENGTH = ("Llama, dynamic", "Phi-3")
"""Kinds whose rotations depend on the length of the row."""
# A new family is in every law. A family leaves a law here if it differs from one that remains only
# in what the law does not read; the norms and activations of a cached call are those of a full one.
CACHED_AS_ANOTHER = ("Llama", "Qwen3", "Gemma", "Gemma 2", "Mixtral", "Qwen3-MoE", "GPT-NeoX")
"""Kinds whose positions, windows and experts another kind has, too."""
SHARDED_AS_ANOTHER = (
    *("Llama", "Llama, dynamic", "Mistral", "Qwen3", "Gemma", "Gemma 2", "Gemma 3", "Mixtral"),
    *("Qwen3-MoE", "GPT-Neo", "GPT-J", "GPT-NeoX"),
)
"""Kinds whose parameters have the shapes, and whose layers the forms, of another kind."""
IDS = np.random.default_rng(0).integers(0, 32, (8, 12))


@pytest.fixture(scope="module", params=cases(CONFIGS))
def case(request):
    config = CONFIGS[request.param]
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    # Every parameter counts, also those that begin as 0 or 1.
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    params = tree.unflatten([x + rng.normal(0, 0.1, x.shape).astype(np.float32) for x in leaves])
    apply = jax.jit(lambda params, inputs: model.apply({"params": params}, **inputs).logits)
    return request.param, model, params, lambda **inputs: np.asarray(apply(params, inputs))


@pytest.mark.slow
def test_an_answer_depends_on_earlier_tokens_of_its_document_only(case, assert_close):
    """Later tokens, padding on either side, and other documents of a packed row change nothing."""
    name, _, _, logits = case
    both = np.repeat(IDS[:1], 2, axis=0)
    both[1, 8:] = (both[1, 8:] + 1) % 32
    full, later = logits(input_ids=both)
    np.testing.assert_allclose(later[:8], full[:8], atol=1e-6)
    documents = [] if name in BY_LENGTH else [(IDS[0, :5], 0), (IDS[0, 5:], 0)]
    ids, mask = padded([(IDS[0], 3), (IDS[0], 0), *documents], 15)
    left, right, *alone = logits(input_ids=ids, attention_mask=mask)
    assert_close(left[3:], full)
    assert_close(right[:12], full)
    if alone:
        segments = np.array([[1] * 5 + [2] * 7])
        (packed,) = logits(input_ids=IDS[:1], segment_ids=segments)
        assert_close(packed[:5], alone[0][:5])
        assert_close(packed[5:], alone[1][:7])


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CONFIGS, CACHED_AS_ANOTHER), indirect=True)
def test_cached_calls_equal_a_full_call(case, assert_close):
    """The prompts are padded on the left; layers are separate, as generation has them."""
    name, model, params, logits = case
    mask = np.ones((8, 12), np.int32)
    mask[0, :3] = 0
    expected = logits(input_ids=IDS, attention_mask=mask)
    decoding, unstacked = models.unstack_layers(model, params)
    cache = models.init_cache(model.config, decoding.execution, 8, 12)
    apply = jax.jit(
        lambda ids, cache: decoding.apply({"params": unstacked}, ids, mask, cache=cache)
    )
    found = []
    parts = ((0, 12),) if name in BY_LENGTH else ((0, 7), (7, 8), (8, 12))
    for start, end in parts:
        output = apply(IDS[:, start:end], cache)
        cache, found = output.cache, [*found, output.logits]
    real = mask[..., None] != 0
    assert_close(np.concatenate(found, axis=1) * real, expected * real)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CONFIGS, SHARDED_AS_ANOTHER), indirect=True)
def test_devices_and_executions_compute_the_same_gradients(case, assert_close):
    """Eight devices over three axes with layers that are unrolled and computed again."""
    _, model, params, _ = case
    of_experts = train.MeshConfig(data=1, fsdp=2, expert=2, tensor=2)
    dense = train.MeshConfig(data=2, fsdp=2, tensor=2)
    mesh = sharding.make_mesh(of_experts if model.config.num_experts else dense)
    again = models.create(model.config, models.Execution(layers="unroll", remat="dots"))

    def loss_of(apply):
        def loss(params, ids):
            return jnp.mean(jnp.square(apply({"params": params}, input_ids=ids).logits))

        return jax.jit(jax.grad(loss))

    placed = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    ids = jax.device_put(IDS, sharding.batch_sharding(mesh, IDS.shape))
    found = loss_of(over_mesh(again.apply, mesh, again.config))(placed, ids)
    jax.tree.map(assert_close, found, loss_of(model.apply)(params, IDS))
