"""Mixtures of experts: executions against a loop over experts, and the losses of the router."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.decoders.gpt.gpt import GPTConfig
from flaxzoo.models.decoders.mixtral import MixtralConfig
from flaxzoo.models.nn import experts
from flaxzoo.models.nn.experts import Experts, RouterStatistics
from flaxzoo.models.nn.layers import ACTIVATIONS

D, F, E, K = 6, 10, 5, 2
CONFIG = GPTConfig(
    vocab_size=11,
    max_length=8,
    num_layers=1,
    d_model=D,
    num_heads=2,
    d_ff=F,
    num_experts=E,
    experts_per_token=K,
    init_std=0.5,
)
GATED = type("Gated", (GPTConfig,), {"gated_experts": True})
SHIPPED = experts.BLOCKS
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 70, D)), jnp.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """An expert's tokens fill blocks of every size, and several of the largest."""
    monkeypatch.setattr(experts, "BLOCKS", (32, 8, 2))


def loop_over_experts(params, x, config):
    """The definition: each expert for all tokens, times its weight, which may be 0."""
    probability = jax.nn.softmax(x @ params["router"], axis=-1)
    least = jnp.sort(probability, axis=-1)[..., -config.experts_per_token, None]
    weight = jnp.where(probability >= least, probability, 0)
    if config.normalize_experts:
        weight = weight / weight.sum(axis=-1, keepdims=True)
    act = ACTIVATIONS[config.activation]
    y = 0
    for i in range(config.num_experts):
        up = x @ params["up"][i]
        hidden = act(x @ params["gate"][i]) * up if "gate" in params else act(up)
        y += weight[..., i, None] * (hidden @ params["down"][i])
    for i in range(config.num_shared_experts):
        own = jax.tree.map(lambda x: x, params[f"shared_{i}"])
        up = x @ own["up"]["kernel"] + own["up"]["bias"]
        y += act(up) @ own["down"]["kernel"] + own["down"]["bias"]
    return y


def module_of(config, execution="auto"):
    return Experts(config, models.Execution(experts=execution), None)


CASES = {
    "blocked": (CONFIG, "blocked"),
    "ragged": (CONFIG, "ragged"),
    "capacity": (dataclasses.replace(CONFIG, expert_capacity=E / K), "auto"),
    "one expert": (dataclasses.replace(CONFIG, experts_per_token=1), "auto"),
    "shared": (dataclasses.replace(CONFIG, num_shared_experts=2), "auto"),
    "blocked, gated": (GATED(**dataclasses.asdict(CONFIG)), "blocked"),
    "ragged, gated": (GATED(**dataclasses.asdict(CONFIG)), "ragged"),
    "capacity, gated": (GATED(**dataclasses.asdict(CONFIG) | {"expert_capacity": 3.0}), "auto"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_execution_equals_a_loop_over_experts(case, assert_close):
    """Outputs and gradients, with more tokens than a block has."""
    config, execution = CASES[case]
    module = module_of(config, execution)
    params = module.init(jax.random.key(1), X)["params"]

    def loss(function):
        def of(params, x):
            y = function(params, x)
            return jnp.mean(jnp.sin(3 * y)), y

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1), has_aux=True))

    found = loss(lambda params, x: module.apply({"params": params}, x)[0])(params, X)
    expected = loss(lambda params, x: loop_over_experts(params, x, config))(params, X)
    jax.tree.map(assert_close, found, expected)


@pytest.mark.parametrize("execution", ["blocked", "ragged"])
def test_choices_of_experts_that_are_elsewhere_add_nothing(execution, assert_close):
    """A device has some of the experts; the parts of all devices add up to the whole."""
    module = module_of(CONFIG, execution)
    params = module.init(jax.random.key(1), X)["params"]
    mixture = experts.ExpertMixture(CONFIG, module.execution)
    rng = np.random.default_rng(2)
    chosen = jnp.asarray(np.stack([rng.permutation(E)[:K] for _ in range(210)]).reshape(3, 70, K))
    weight = jnp.asarray(rng.random((3, 70, K)), jnp.float32)

    def of(first, last):
        kernels = experts.Kernels((params["up"][first:last],), params["down"][first:last])
        return jax.jit(mixture.dropless)(
            X, experts.Choice(chosen - first, weight, jnp.ones((3, 70))), kernels
        )

    assert_close(of(0, 2) + of(2, 5), of(0, 5))


def test_an_expert_takes_its_capacity_of_each_sequence_first_choices_first():
    config = dataclasses.replace(CONFIG, num_experts=2, experts_per_token=2, expert_capacity=0.75)
    mixture = experts.ExpertMixture(config, models.Execution())
    chosen = jnp.array([[[0, 1], [0, 1], [1, 0], [0, 1]], [[1, 0]] * 4])
    real = jnp.array([[1, 1, 1, 1], [0, 1, 1, 1]])
    _, slot = mixture.dispatch(jnp.ones((2, 4, D)), experts.Choice(chosen, chosen, real))
    # Three of four: the first choices of tokens 0, 1 and 3 fill expert 0; 6 is the slot of none.
    np.testing.assert_array_equal(
        slot, [[[0, 4], [1, 5], [3, 6], [2, 6]], [[6, 6], [3, 0], [4, 1], [5, 2]]]
    )


def test_losses_of_the_router_are_those_of_the_papers():
    """Per sequence, and over the batch; padding counts in neither."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 3, 4, E))  # [L, B, T, E]
    real = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probability, axis=-1)[..., :K]
    one_hot = np.eye(E)[chosen].sum(-2)
    squared = np.log(np.exp(logits).sum(-1)) ** 2
    statistics = RouterStatistics(
        jnp.asarray((one_hot * real[..., None]).sum(2), jnp.float32),
        jnp.asarray((probability * real[..., None]).sum(2), jnp.float32),
        jnp.asarray((squared * real).sum(2), jnp.float32),
        jnp.asarray(np.broadcast_to(real.sum(1), (2, 3)), jnp.float32),
    )
    balance, z = [], []
    for row, number in enumerate((4, 2)):
        f, p = one_hot[:, row, :number].mean(1), probability[:, row, :number].mean(1)
        balance.append((E * (f * p).sum(-1)).mean())
        z.append(squared[:, row, :number].mean())
    np.testing.assert_allclose(experts.balance_loss(statistics), [*balance, 0], rtol=1e-5)
    np.testing.assert_allclose(experts.router_z_loss(statistics), [*z, 0], rtol=1e-5)
    kept = real.astype(bool)
    f, p = one_hot[:, kept].mean((0, 1)), probability[:, kept].mean((0, 1))
    expected = E * (f * p).sum()
    np.testing.assert_allclose(experts.batch_balance_loss(statistics), expected, rtol=1e-5)


def test_jitter_is_of_training_alone_and_of_each_sequence():
    config = dataclasses.replace(CONFIG, router_jitter=0.9)
    module = module_of(config)
    params = module.init(jax.random.key(1), X)
    plain, _ = module.apply(params, X)
    np.testing.assert_array_equal(plain, module_of(CONFIG).apply(params, X)[0])
    keys = models.row_keys(jax.random.key(0), 3)
    jittered, _ = module.apply(params, X, None, keys)
    assert not np.allclose(plain, jittered)
    one, _ = module.apply(params, X[1:2], None, keys[1:2])
    np.testing.assert_allclose(one, jittered[1:2], atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": -1}, "num_experts must .*-1"),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token 3 .* num_experts 2"),
        ({"num_shared_experts": -1}, "num_shared_experts must .*-1"),
        ({"num_experts": 0, "num_shared_experts": 1}, "num_shared_experts 1 .*mixture"),
        ({"num_experts": 0, "expert_capacity": 2.0}, "expert_capacity 2.0 .*mixture"),
        ({"num_experts": 0, "experts_per_token": 1}, "experts_per_token 1 .*mixture"),
        ({"expert_capacity": 0.0}, "expert_capacity must .*0.0"),
        ({"router_jitter": 1.0}, "router_jitter must .*1.0"),
        ({"router_z": -0.1}, "router_z must .*-0.1"),
    ],
)
def test_fields_out_of_range_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **fields)


def test_padding_takes_no_capacity_and_a_cached_call_drops_no_token(assert_close):
    sizes = {"vocab_size": 32, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 8}
    config = MixtralConfig(**sizes, num_experts=4, max_length=16, expert_capacity=0.5, init_std=0.5)
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    ids = np.random.default_rng(4).integers(0, 32, (2, 9))
    padded, mask = (np.pad(x, ((0, 0), (5, 2))) for x in (ids, np.ones_like(ids)))

    def logits(config, ids, *args, **kwargs):
        return models.create(config).apply({"params": params}, ids, *args, **kwargs).logits

    expected = logits(config, ids)
    assert_close(logits(config, padded, mask)[:, 5:14], expected)
    dropless = logits(dataclasses.replace(config, expert_capacity=None), ids)
    assert np.abs(expected - dropless).max() > 0.01
    cache = models.init_cache(config, models.Execution(), 2, 16)
    assert_close(logits(config, padded, mask, cache=cache)[:, 5:14], dropless)


def test_blocks_that_no_expert_can_fill_are_not_computed(monkeypatch):
    """64 tokens in blocks of 16 have 256 rows with the padding of 8 experts, as many as a block."""
    kernels = experts.Kernels((jnp.ones((8, 4, 6)),), jnp.ones((8, 6, 4)))
    chosen = jnp.zeros((64, 2), jnp.int32)
    choice = experts.Choice(chosen, jnp.ones((64, 2)), jnp.ones(64))

    def of(x):
        return experts._by_blocks(x, choice, kernels, activation=jnp.tanh)

    monkeypatch.setattr(experts, "BLOCKS", (256, 64, 16))
    program = jax.jit(of).lower(jnp.ones((64, 4))).as_text()
    products = re.findall(r"dot_general .*: \(tensor<(\d+)x4xf32>, tensor<4x6xf32>\)", program)
    assert products == ["64", "16"]


def test_the_sizes_of_blocks_that_are_used(monkeypatch, assert_close):
    """384 tokens of one expert fill a block of 256 and two of 64, 7 of another one of 16."""
    monkeypatch.setattr(experts, "BLOCKS", SHIPPED)
    assert SHIPPED == (256, 64, 16)
    rng = np.random.default_rng(0)
    x, up, down = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((391, 4), (3, 4, 6), (3, 6, 4))
    )
    chosen = jnp.asarray(np.repeat([1, 2], [384, 7])[:, None], jnp.int32)
    choice = experts.Choice(chosen, jnp.ones((391, 1)), jnp.ones(391))

    def ours(x, up, down):
        return experts._by_blocks(x, choice, experts.Kernels((up,), down), activation=jnp.tanh)

    def expected(x, up, down):
        hidden = jnp.tanh(jnp.einsum("MD,MDF->MF", x, up[chosen[:, 0]]))
        return jnp.einsum("MF,MFD->MD", hidden, down[chosen[:, 0]])

    results = [
        jax.vjp(jax.jit(function), x, up, down)[1](jnp.full((391, 4), 0.01))
        for function in (ours, expected)
    ]
    assert_close(ours(x, up, down), expected(x, up, down))
    for found, other in zip(*results, strict=True):
        assert_close(found, other)
