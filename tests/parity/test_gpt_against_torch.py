"""The GPTs against tiny random models of transformers: logits, and every gradient.

OpenAI GPT and GPT-2 through the folders that transformers writes; GPT-Neo, which is here as the
pattern of GPT-3's banded layers only, by hand.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.init import parameter_shapes
from flaxzoo.train.losses.cross_entropy import cross_entropy
from safetensors.numpy import load_file, save_file

from ..support.hf_weights import gradients_of
from ..support.parity import note_answers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, P, L, D, N = 37, 16, 4, 24, 4
WINDOW = 5
SPECIAL = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
BODY = {"n_positions": P, "n_embd": D, "n_layer": L, "n_head": N}
GPT2, OPENAI = "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"
CASES = {  # class, and the fields that are not usual
    "gpt2": (GPT2, {}),
    "gpt2-odd": (GPT2, {"n_inner": 37, "layer_norm_epsilon": 0.03, "n_head": 3, "n_layer": 3}),
    "gpt2-untied": (GPT2, {"tie_word_embeddings": False, "activation_function": "silu"}),
    "gpt2-exact-gelu": (GPT2, {"activation_function": "gelu", "attn_pdrop": 0.3}),
    "gpt2-relu": (GPT2, {"activation_function": "relu", "embd_pdrop": 0.0}),
    "gpt2-unscaled": (GPT2, {"scale_attn_weights": False}),
    "gpt2-by-layer": (
        GPT2,
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "gpt2-by-layer-only": (
        GPT2,
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
    "gpt2-body": ("GPT2Model", {"tie_word_embeddings": False, "n_inner": 50}),
    "gpt": (OPENAI, {}),
    "gpt-odd": (OPENAI, {"afn": "relu", "layer_norm_epsilon": 0.03, "n_head": 3, "n_layer": 3}),
    "gpt-untied": (OPENAI, {"tie_word_embeddings": False, "afn": "swish", "resid_pdrop": 0.2}),
    "gpt-body": ("OpenAIGPTModel", {"afn": "silu"}),
}
IDS = np.random.default_rng(0).integers(0, V, (3, P))


def shaken(theirs):
    """No parameter at its initial value."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return theirs.eval()


def torch_model(case):
    name, fields = CASES[case]
    cls = getattr(transformers, name)
    return shaken(cls(cls.config_class(**{**BODY, **SPECIAL, **fields})))


def answers(theirs):
    """Logits; of a body alone, its hidden states."""
    with torch.no_grad():
        output = theirs(torch.from_numpy(IDS))
    return (output.logits if "logits" in output else output.last_hidden_state).numpy()


def hidden_states(theirs):
    with torch.no_grad():
        return theirs(torch.from_numpy(IDS), output_hidden_states=True).hidden_states[-1].numpy()


def assert_same_answers(theirs, model, params, direction="import"):
    expected = answers(theirs)
    assert np.abs(expected).max() > 1
    output = jax.jit(model.apply)({"params": params}, input_ids=IDS)
    np.testing.assert_allclose(output.last_hidden_state, hidden_states(theirs), rtol=0, atol=1e-5)
    lm = type(theirs).__name__.endswith("LMHeadModel")
    ours = np.asarray(output.logits if lm else output.last_hidden_state)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    note_answers(theirs, direction, ours, expected)


def loaded(theirs, folder, **options):
    theirs.save_pretrained(folder, **options)
    return models.load(folder)


@pytest.mark.parametrize("case", CASES)
def test_answers(case, tmp_path):
    theirs = torch_model(case)
    assert_same_answers(theirs, *loaded(theirs, tmp_path))


def test_what_each_field_becomes(tmp_path):
    fields = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3, "layer_norm_epsilon": 0.04}
    cls = transformers.GPT2LMHeadModel
    model, _ = loaded(cls(transformers.GPT2Config(**BODY, **SPECIAL, **fields)), tmp_path)
    assert model.config == models.GPTConfig(
        vocab_size=V,
        max_length=P,
        num_layers=L,
        d_model=D,
        num_heads=N,
        dropout_rate=0.1,
        embedding_dropout=0.2,
        attention_dropout=0.3,
        norm_eps=0.04,
    )


@pytest.mark.parametrize(("case", "tokens"), [("gpt2", "wte"), ("gpt", "tokens_embed")])
def test_files_as_they_used_to_be(case, tokens, tmp_path):
    """Names without a prefix, buffers of the mask, the tied table twice, fields since forgotten."""
    theirs = torch_model(case)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    for i in range(L):
        tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, P, P), bool))
        tensors[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    tensors["lm_head.weight"] = tensors[f"{tokens}.weight"].copy()
    save_file(tensors, file)
    config = tmp_path / "config.json"
    older = {"n_ctx": P, "n_special": 0, "predict_special_tokens": True, "output_past": True}
    config.write_text(json.dumps({**json.loads(config.read_text()), **older}))
    assert_same_answers(theirs, *models.load(tmp_path))


def test_a_tied_table_that_differs(tmp_path):
    torch_model("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": np.zeros((V, D), np.float32)}, file)
    message = r"lm_head.weight is tied to transformer.wte.weight, but differs"
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_out_and_in_again(case, tmp_path):
    """What we write, transformers reads to the same answers, and we to the same bits."""
    theirs = torch_model(case)
    model, params = loaded(theirs, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model.config, params)
    again, report = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert not report["unexpected_keys"]
    # Of answers the last digit depends on where the numbers lie in memory.
    expected = theirs.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, x in again.state_dict().items():
        assert torch.equal(x, expected[name]), name
    assert_same_answers(again, model, params, "export")
    model_again, params_again = models.load(tmp_path / "ours")
    assert model_again.config == model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, params_again, params))


@pytest.mark.parametrize("case", ["gpt", "gpt2", "gpt2-by-layer", "gpt2-untied"])
def test_every_gradient(case, tmp_path):
    theirs = torch_model(case)
    model, params = loaded(theirs, tmp_path)
    rng = np.random.default_rng(1)
    labels = rng.integers(0, V, (3, P))
    weights = (np.arange(P) < np.array([[P], [P - 3], [5]])).astype(np.float32)

    targets = torch.from_numpy(np.where(weights > 0, labels, -100))
    logits = theirs(torch.from_numpy(IDS)).logits
    expected_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected_loss.backward()
    expected = gradients_of(theirs, model.config)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params):
        projection = model.apply({"params": params}, input_ids=IDS).projection
        entropy = cross_entropy(projection, jnp.asarray(labels), jnp.asarray(weights))
        return entropy.loss / weights.sum()

    loss, gradient = loss_and_gradient(params)
    np.testing.assert_allclose(loss, expected_loss.item(), rtol=1e-6)
    for (path, ours), (_, torchs) in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves_with_path(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(ours, torchs, rtol=1e-5, atol=1e-6, err_msg=name)


def gpt_neo():
    config = transformers.GPTNeoConfig(
        hidden_size=D,
        num_layers=L,
        num_heads=N,
        max_position_embeddings=P,
        attention_types=[[["global", "local"], L // 2]],
        window_size=WINDOW,
        **SPECIAL,
    )
    ours = models.GPTConfig(
        vocab_size=V,
        max_length=P,
        num_layers=L,
        d_model=D,
        num_heads=N,
        local_window=WINDOW,
        scale_scores=False,
    )
    return shaken(transformers.GPTNeoForCausalLM(config)), ours


def converted(theirs):
    """Parameters of GPT-Neo as our tree: torch's Linear, projections without biases."""
    tensors = {
        name.removeprefix("transformer."): x.detach().numpy()
        for name, x in theirs.named_parameters()
    }

    def norm(name):
        return {"scale": tensors[f"{name}.weight"], "bias": tensors[f"{name}.bias"]}

    def linear(name, *shape):
        kernel, zeros = tensors[f"{name}.weight"].T, np.zeros(shape[1:], np.float32)
        return {"kernel": kernel.reshape(shape), "bias": tensors.get(f"{name}.bias", zeros)}

    def layer(i):
        at, heads = f"h.{i}.attn.attention", (N, D // N)
        attention = {
            name: linear(f"{at}.{name[0]}_proj", D, *heads) for name in ("query", "key", "value")
        }
        return {
            "attention": {**attention, "output": linear(f"{at}.out_proj", *heads, D)},
            "attention_norm": norm(f"h.{i}.ln_1"),
            "feed_forward": {
                "up": linear(f"h.{i}.mlp.c_fc", D, 4 * D),
                "down": linear(f"h.{i}.mlp.c_proj", 4 * D, D),
            },
            "feed_forward_norm": norm(f"h.{i}.ln_2"),
        }

    return {
        "token_embedding": {"embedding": tensors["wte.weight"]},
        "position_embedding": {"embedding": tensors["wpe.weight"]},
        "layers": jax.tree.map(lambda *x: np.stack(x), *map(layer, range(L))),
        "final_norm": norm("ln_f"),
    }


def test_banded_layers():
    theirs, config = gpt_neo()
    model, params = models.create(config), converted(theirs)
    assert jax.tree.map(np.shape, params) == jax.tree.map(
        lambda x: x.shape, parameter_shapes(model)
    )
    expected = answers(theirs)
    assert np.abs(expected).max() > 1
    logits = jax.jit(model.apply)({"params": params}, input_ids=IDS).logits
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
