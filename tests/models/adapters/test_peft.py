"""Adapters against peft on torch: numbers, gradients, and folders in both directions."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.adapters.lora import by_path, nested

torch = pytest.importorskip("torch")
peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

RNG = np.random.default_rng(0)
# peft asks transformers by a name that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
IDS = RNG.integers(3, 31, (3, 9))
LABELS = {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A class of transformers, and adapters of it, ours and peft's."""

    base: str
    """The class of the base."""
    config: str
    fields: dict[str, Any]
    targets: tuple[str, ...]
    theirs: dict[str, Any]
    """The fields of peft's configuration for adapters as ours."""
    inputs: dict[str, np.ndarray]
    written: set[str]
    """The names of modules in the `adapter_config.json` that we write."""
    tuned: str | None = None
    """The class of the adapted model, if it has another head."""


def ids(**more):
    return {"input_ids": IDS, **more}


KINDS = {
    "gpt2": Kind(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16},
        ("attention", "up"),
        {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"},
        ids(),
        {"c_attn", "attn.c_proj", "c_fc"},
    ),
    "llama": Kind(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "vocab_size": 31,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        },
        ("query", "value", "down"),
        {"target_modules": "all-linear", "use_rslora": True, "task_type": "CAUSAL_LM"},
        ids(),
        {"q_proj", "v_proj", "down_proj"},
    ),
    "bert": Kind(
        "BertForMaskedLM",
        "BertConfig",
        {
            "vocab_size": 31,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
        },
        ("layers/attention/output", "query"),
        {
            "target_modules": ["query", "output.dense"],
            "modules_to_save": ["pooler", "classifier"],
            "task_type": "SEQ_CLS",
            "rank_pattern": {"query": 2},
            "alpha_pattern": {"query": 12},
        },
        ids(attention_mask=np.ones_like(IDS)),
        {"query", "attention.output.dense"},
        "BertForSequenceClassification",
    ),
    "marian": Kind(
        "MarianMTModel",
        "MarianConfig",
        {
            "vocab_size": 31,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        ("decoder/.*(query|key)", "encoder/.*/up"),
        {"target_modules": ["q_proj", "fc2"], "task_type": "SEQ_2_SEQ_LM"},
        ids(attention_mask=np.ones_like(IDS), decoder_input_ids=IDS[:, :5]),
        {
            *(f"encoder_attn.{name}" for name in ("q_proj", "k_proj")),
            *(
                f"model.decoder.layers.{i}.self_attn.{name}"
                for i in range(2)
                for name in ("q_proj", "k_proj")
            ),
            *(f"model.encoder.layers.{i}.fc1" for i in range(2)),
        },
    ),
}


def theirs_of(model, inputs):
    with torch.no_grad():
        return model(**{name: torch.tensor(x) for name, x in inputs.items()}).logits.numpy()


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """A random model of transformers, saved."""
    kind = KINDS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, kind.config)(**kind.fields, tie_word_embeddings=True)
    base = getattr(transformers, kind.base)(config).eval()
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    base.save_pretrained(folder)
    return kind, folder


def reloaded(kind, folder):
    more = {} if kind.tuned is None else LABELS
    return getattr(transformers, kind.tuned or kind.base).from_pretrained(folder, **more).eval()


def random(params):
    return jax.tree.map(lambda x: jnp.asarray(RNG.normal(0, 0.2, x.shape), jnp.float32), params)


@pytest.mark.slow
def test_peft_loads_ours(made, tmp_path, assert_close):
    kind, folder = made
    model, params = models.load(folder)
    whole: tuple[str, ...] = ()
    if kind.tuned is not None:
        model = models.create(model.config.with_head("sequence_classification", ("a", "b", "c")))
        fresh, old = by_path(models.init_params(model, jax.random.key(0))), by_path(params)
        whole = tuple(path for path in fresh if path not in old)
        params = nested({path: old.get(path, x) for path, x in fresh.items()})
    config = models.LoRAConfig(
        rank=3,
        alpha=12.0,
        targets=kind.targets,
        also_trained=whole,
        use_rslora="use_rslora" in kind.theirs,
    )
    lora = models.make_lora(config, model)
    trained, frozen = jax.jit(lora.init)(jax.random.key(1), params)
    trained = random(trained)
    models.save_adapter(tmp_path / "out", model, lora, trained, base=str(folder))
    tuned = peft.PeftModel.from_pretrained(reloaded(kind, folder), tmp_path / "out").eval()
    merged = jax.jit(lora.merge)(trained, frozen)
    apply = jax.jit(lambda params: model.apply({"params": params}, **kind.inputs).logits)
    assert_close(theirs_of(tuned, kind.inputs), apply(merged))
    assert set(
        json.loads((tmp_path / "out/adapter_config.json").read_text())["target_modules"]
    ) == (kind.written)
    # The folder as we read it is the same model, and names its base itself.
    read, again = models.load(tmp_path / "out")
    assert read.config.head == model.config.head
    jax.tree.map(assert_close, again, merged)


@pytest.mark.slow
def test_we_load_peft_s(made, tmp_path, assert_close):
    kind, folder = made
    config = peft.LoraConfig(r=3, lora_alpha=12, **kind.theirs)
    theirs = peft.get_peft_model(reloaded(kind, folder), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    theirs.save_pretrained(tmp_path / "in")
    model, params = models.load(tmp_path / "in", base=folder)
    ours = jax.jit(lambda params: model.apply({"params": params}, **kind.inputs).logits)(params)
    assert_close(ours, theirs_of(theirs, kind.inputs))


@pytest.mark.slow
def test_adapters_follow_a_base_that_is_exported_in_another_order(tiny, tmp_path, assert_close):
    """Sines and cosines alternate in our Transformer, and come one after the other in Marian's."""
    t = tiny(family="transformer")
    models.save(tmp_path / "base", t.model, t.params)
    lora = models.make_lora(models.LoRAConfig(rank=3, targets=(".*",)), t.model)
    trained, frozen = jax.jit(lora.init)(jax.random.key(1), t.params)
    trained = random(trained)
    models.save_adapter(tmp_path / "out", t.model, lora, trained)
    base = transformers.MarianMTModel.from_pretrained(tmp_path / "base").eval()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    ids = IDS % t.config.vocab_size
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "decoder_input_ids": ids}
    merged = jax.jit(lora.merge)(trained, frozen)
    assert_close(theirs_of(theirs, inputs), t.apply(merged, **inputs).logits, atol=2e-5)


@pytest.mark.slow
def test_gradients_are_those_of_peft(tmp_path, assert_close):
    kind = KINDS["llama"]
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**kind.fields)).eval()
    base.save_pretrained(tmp_path / "base")
    model, params = models.load(tmp_path / "base")
    lora = models.make_lora(models.LoRAConfig(rank=3, alpha=12.0, targets=(".*",)), model)
    trained, frozen = jax.jit(lora.init)(jax.random.key(1), params)
    trained, weights = random(trained), RNG.normal(size=(3, 9, 31)).astype(np.float32)
    models.save_adapter(tmp_path / "out", model, lora, trained)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out", is_trainable=True)
    (theirs(torch.tensor(IDS)).logits * torch.tensor(weights)).sum().backward()

    def loss(trained):
        variables = {"params": lora.combine(trained, frozen)[0]}
        return jnp.sum(lora.adapt(model.apply)(variables, input_ids=IDS).logits * weights)

    gradient = jax.jit(jax.grad(loss))(trained)
    expected = {}
    models.save_adapter(tmp_path / "gradient", model, lora, gradient)
    for name, x in theirs.named_parameters():
        if x.grad is not None:
            expected[name.replace(".default", "")] = x.grad.numpy()
    from safetensors.numpy import load_file

    ours = load_file(tmp_path / "gradient/adapter_model.safetensors")
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        assert_close(x, expected[name], atol=1e-4 * np.abs(expected[name]).max())


def folder_of(tmp_path, **fields):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type .*IA3"),
        ({"use_dora": True}, "use_dora True"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({}, "adapter_model.safetensors"),
    ],
)
def test_an_adapter_that_is_more_than_two_factors_is_refused(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        models.load(folder_of(tmp_path, **fields))


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_adapters_below_a_frozen_head_take_that_of_the_base(task, tmp_path, assert_close):
    config = transformers.BertConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, **LABELS)  # fmt: skip
    base = getattr(transformers, f"BertFor{task}")(config).eval()
    base.save_pretrained(tmp_path / "base")
    model, params = models.load(tmp_path / "base")
    lora = models.make_lora(models.LoRAConfig(rank=2, targets=("query",)), model)
    trained, frozen = lora.init(jax.random.key(0), params)
    trained = random(trained)
    models.save_adapter(tmp_path / "out", model, lora, trained)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    ours = model.apply({"params": lora.merge(trained, frozen)}, input_ids=IDS).logits
    assert_close(ours, theirs_of(theirs, {"input_ids": IDS}))
    read, again = models.load(tmp_path / "out", base=tmp_path / "base")
    assert read.config.head == model.config.head
    jax.tree.map(assert_close, again, lora.merge(trained, frozen))


def test_a_classifier_is_adapted_from_a_base_without_a_head(tmp_path, assert_close):
    config = transformers.BartConfig(vocab_size=31, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=16, pad_token_id=1, eos_token_id=2,
        decoder_start_token_id=2)  # fmt: skip
    transformers.BartModel(config).save_pretrained(tmp_path / "base")
    kind = transformers.BartForSequenceClassification
    base = kind.from_pretrained(tmp_path / "base", num_labels=2).eval()
    adapters = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["q_proj"], modules_to_save=["classification_head"]
    )
    theirs = peft.get_peft_model(base, adapters).eval()
    theirs.save_pretrained(tmp_path / "in")
    # The files of the base name the shared embedding differently than the classifier does.
    model, params = models.load(tmp_path / "in", base=tmp_path / "base")
    ids = np.array([[4, 5, 6, 2], [7, 8, 9, 2]])
    expected = theirs(input_ids=torch.asarray(ids)).logits.detach().numpy()
    assert_close(model.apply({"params": params}, input_ids=ids).logits, expected)


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")  # of biases
def test_a_bias_that_the_base_has_no_place_for_is_refused(tmp_path):
    config = transformers.LlamaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=16)  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)
    peft.get_peft_model(base, adapters).save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match=r"q_proj\.bias"):
        models.load(tmp_path / "in", base=tmp_path / "base")


def test_what_peft_cannot_save_is_refused(tiny, tmp_path):
    t = tiny(family="bert", head="sequence_classification", labels=("no", "yes"))

    def save(*also_trained):
        lora = models.make_lora(models.LoRAConfig(also_trained=also_trained), t.model)
        trained, _ = lora.init(jax.random.key(0), t.params)
        models.save_adapter(tmp_path / "out", t.model, lora, trained)

    with pytest.raises(ValueError, match=r"classifier/bias .* frozen"):
        save("head/classifier/bias")
    with pytest.raises(ValueError, match="LayerNorm"):
        save("attention_norm")
    assert not (tmp_path / "out").exists()
