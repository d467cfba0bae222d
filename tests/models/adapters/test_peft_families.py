"""Adapters of peft for every family, in both directions, on models all of whose sizes are equal.

Where the vocabulary, the width and the feed-forward layers have one size, no shape gives a
transposed factor away.
"""

import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.hf.tensors.mapping import WeightsError
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of peft, about its own patterns
    pytest.mark.slow,
]

SIZE = 32
IDS = np.random.default_rng(0).integers(3, SIZE, (2, 9))
BODY = {
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": SIZE,
}
LLAMA = {**BODY, "num_key_value_heads": 4}
HEADS_OF_8 = {**LLAMA, "head_dim": 8}
GPT = {"n_positions": SIZE, "n_embd": SIZE, "n_layer": 2, "n_head": 4, "n_inner": SIZE}
T5 = {"d_model": SIZE, "d_kv": 8, "d_ff": SIZE, "num_layers": 2, "num_heads": 4}
BOTH = {
    "d_model": SIZE,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": SIZE,
    "decoder_ffn_dim": SIZE,
    "max_position_embeddings": SIZE,
}
NEO = {
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": SIZE,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
}
OPT = {**BODY, "ffn_dim": SIZE, "word_embed_proj_dim": SIZE}
EXPERTS = {"num_experts_per_tok": 1}
# The class without its last part, that part, and the fields of its configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("LMHeadModel", GPT),
    "GPTNeo": ("ForCausalLM", NEO),
    "GPTJ": ("ForCausalLM", {**GPT, "rotary_dim": 4}),
    "GPTNeoX": ("ForCausalLM", BODY),
    "OPT": ("ForCausalLM", {x: y for x, y in OPT.items() if x != "intermediate_size"}),
    "Bloom": ("ForCausalLM", {"hidden_size": SIZE, "n_layer": 2, "n_head": 4}),
    "Llama": ("ForCausalLM", LLAMA),
    "Mistral": ("ForCausalLM", LLAMA),
    "Mixtral": ("ForCausalLM", {**LLAMA, **EXPERTS, "num_local_experts": 2}),
    "Qwen2": ("ForCausalLM", LLAMA),
    "Qwen3": ("ForCausalLM", HEADS_OF_8),
    "Qwen3Moe": (
        "ForCausalLM",
        {**HEADS_OF_8, **EXPERTS, "num_experts": 2, "moe_intermediate_size": SIZE},
    ),
    "Gemma": ("ForCausalLM", HEADS_OF_8),
    "Gemma2": ("ForCausalLM", {**HEADS_OF_8, "query_pre_attn_scalar": 8}),
    "Gemma3": ("ForCausalLM", {**HEADS_OF_8, "query_pre_attn_scalar": 8}),
    "Phi3": ("ForCausalLM", LLAMA),
    "Falcon": (
        "ForCausalLM",
        {
            **{"hidden_size": SIZE, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"new_decoder_architecture": True, "num_kv_heads": 2},
        },
    ),
    "Olmo2": ("ForCausalLM", LLAMA),
    "Olmo3": ("ForCausalLM", LLAMA),
    "SmolLM3": ("ForCausalLM", LLAMA),
    "Granite": ("ForCausalLM", LLAMA),
    "StableLm": ("ForCausalLM", LLAMA),
    "Bert": ("ForMaskedLM", BODY),
    "Roberta": ("ForMaskedLM", {**BODY, "max_position_embeddings": SIZE + 2}),
    "DistilBert": (
        "ForMaskedLM",
        {"dim": SIZE, "hidden_dim": SIZE, "n_layers": 2, "n_heads": 4},
    ),
    "MPNet": ("ForMaskedLM", {**BODY, "max_position_embeddings": SIZE + 2}),
    "Electra": ("ForMaskedLM", {**BODY, "embedding_size": 16}),
    "ModernBert": ("ForMaskedLM", BODY),
    "Albert": ("ForMaskedLM", {**BODY, "embedding_size": 16}),
    "NomicBert": ("ForMaskedLM", BODY),
    "Gte": ("ForMaskedLM", BODY),
    "T5": ("ForConditionalGeneration", T5),
    "MT5": ("ForConditionalGeneration", T5),
    "Bart": ("ForConditionalGeneration", BOTH),
    "MBart": ("ForConditionalGeneration", BOTH),
    "Marian": ("MTModel", BOTH),
    "Pegasus": ("ForConditionalGeneration", BOTH),
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LIKE_ROBERTA = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
OF_TWO = ("T5", "MT5", "Bart", "MBart", "Marian", "Pegasus")


def base_of(family, tied, **more):
    """A random model of transformers; all parameters count."""
    suffix, fields = FAMILIES[family]
    fields = {**fields, **(LIKE_ROBERTA if family in ("Roberta", "MPNet") else SPECIAL), **more}
    if family in OF_TWO:
        fields["decoder_start_token_id"] = 0
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(family, family) + "Config")
    torch.manual_seed(0)
    made = config(vocab_size=SIZE, tie_word_embeddings=tied, **fields)
    model = getattr(transformers, family + suffix)(made).eval()
    for name, x in model.named_parameters():
        sinusoidal = family in ("Marian", "Pegasus") and "embed_positions" in name
        if not sinusoidal:
            torch.nn.init.normal_(x, 0.0 if x.ndim > 1 else 1.0, 0.15)
    return model


def randomized(model):
    torch.manual_seed(1)
    for x in model.parameters():
        if x.requires_grad:
            torch.nn.init.normal_(x, 0.0, 0.2)
    return model.eval()


def inputs_of(family):
    inputs = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    return inputs | ({"decoder_input_ids": IDS[:, :5]} if family in OF_TWO else {})


def theirs_of(model, family):
    given = {name: torch.tensor(x) for name, x in inputs_of(family).items()}
    with torch.no_grad():
        return model(**given).logits.numpy()


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, inputs):
    """Is compiled once for each family."""
    return model.apply({"params": params}, **inputs).logits


def ours_of(model, params, family):
    return np.asarray(logits_of(model, params, inputs_of(family)))


def check_equal(ours, theirs):
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def saved(family, tied, folder, **fields):
    """Saves a base and an adapter, and returns the logits of the adapter as peft loads it."""
    base = base_of(family, tied)
    base.save_pretrained(folder / "base")
    cls = type(base)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=7, **fields))
    randomized(adapted).save_pretrained(folder / "adapter")
    again = cls.from_pretrained(folder / "base")
    return theirs_of(peft.PeftModel.from_pretrained(again, folder / "adapter").eval(), family)


def modules_of(family, *kinds):
    named = base_of(family, True).named_modules()
    kind = {name: type(x).__name__.removeprefix("Falcon") for name, x in named}
    return {name.split(".")[-1] for name, x in kind.items() if x in kinds}


def head_of(family):
    names = {"Bert": "decoder", "Roberta": "lm_head.decoder", "DistilBert": "vocab_projector"}
    names |= {"Electra": "generator_lm_head", "MPNet": "lm_head.decoder", "Gte": "lm_head.decoder"}
    return names.get(family, "lm_head")


ONLY = {"GPTJ": False, "Pegasus": True}
FEW = ("GPT2", "GPTNeoX", "Llama", "Bert", "T5", "Bart")
"""Families of each form, for what does not depend on the family."""
CASES = [
    (f, tied)
    for f in FAMILIES
    for tied in (True, False)
    if (ONLY.get(f, tied) == tied if f in ONLY else tied or f in FEW)
]
WAYS = [
    (family, tied, way)
    for way in ("adapter", "module", "tokens")
    for family, tied in CASES
    if family not in OF_TWO and (way == "adapter" or (tied and family in FEW))
]


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_every_linear_map_and_the_output_are_those_of_peft(family, tied, tmp_path):
    maps = modules_of(family, "Linear", "Conv1D") - {"score"} | {head_of(family)}
    theirs = saved(family, tied, tmp_path, target_modules=sorted(maps))
    model, params = models.load(tmp_path / "adapter", base=tmp_path / "base")
    check_equal(ours_of(model, params, family), theirs)


@pytest.mark.parametrize(("family", "tied", "way"), WAYS)
def test_a_change_of_the_embedding_is_that_of_peft(family, tied, way, tmp_path):
    """Modules part: where the output shares the matrix, it stays as it was."""
    base = base_of(family, tied)
    tokens = base.get_input_embeddings()
    name = next(n for n, x in base.named_modules() if x is tokens).split(".")[-1]
    linear = next(iter(sorted(modules_of(family, "Linear", "Conv1D") - {head_of(family)})))
    fields: dict[str, Any] = {
        "adapter": {"target_modules": [name]},
        "module": {"target_modules": [linear], "modules_to_save": [name]},
        "tokens": {"target_modules": [linear], "trainable_token_indices": {name: [2, 7]}},
    }[way]
    theirs = saved(family, tied, tmp_path, **fields)
    if (family, way) == ("Bert", "tokens"):  # peft leaves out the bias of the output
        with pytest.raises(WeightsError, match=r"trainable_token_indices .*decoder\.bias"):
            models.load(tmp_path / "adapter", base=tmp_path / "base")
        return
    model, params = models.load(tmp_path / "adapter", base=tmp_path / "base")
    check_equal(ours_of(model, params, family), theirs)


@pytest.mark.parametrize(
    "fields",
    [
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 5]},
        {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [1, 5]}},
        {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [2, 5]}},
        {"trainable_token_indices": {"lm_head": [1, 5]}},
        {"modules_to_save": ["norm", "input_layernorm"]},
        {"modules_to_save": ["layers.1.mlp"]},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
        {"target_modules": r".*\.layers\.1\..*(q|v)_proj", "use_rslora": True},
        {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
        {"rank_pattern": {"layers.0.*q_proj": 2}, "alpha_pattern": {"layers.1.*q_proj": 31}},
        {"init_lora_weights": "mica"},
        {"lora_dropout": 0.5},
    ],
    ids=str,
)
def test_fields_are_those_of_peft(fields, tmp_path):
    theirs = saved("Llama", True, tmp_path, **{"target_modules": ["q_proj"], **fields})
    model, params = models.load(tmp_path / "adapter", base=tmp_path / "base")
    check_equal(ours_of(model, params, "Llama"), theirs)


@pytest.mark.parametrize("equal", [True, False])
def test_modules_of_one_tensor_have_one_value(equal, tmp_path):
    """Two values for one tensor are refused: peft takes the one that it reads last."""
    fields = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    theirs = saved("Llama", True, tmp_path, **fields)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    embedding, output = (
        f"base_model.model.{name}.base_layer.weight" for name in ("model.embed_tokens", "lm_head")
    )
    assert embedding in tensors
    tensors[output] = tensors[embedding] + (not equal)
    save_file(tensors, file, {"format": "pt"})
    if equal:
        model, params = models.load(tmp_path / "adapter", base=tmp_path / "base")
        check_equal(ours_of(model, params, "Llama"), theirs)
        return
    with pytest.raises(WeightsError, match=r"two values .*embed_tokens.*lm_head"):
        models.load(tmp_path / "adapter", base=tmp_path / "base")


@pytest.mark.parametrize("bias", ["all", "lora_only", "none"])
@pytest.mark.parametrize("family", ["OPT", "Bert", "GPT2", "GPTNeoX", "Bart"])
def test_biases_are_those_of_peft(family, bias, tmp_path):
    maps = sorted(modules_of(family, "Linear", "Conv1D") - {"lm_head", "decoder"})
    fields: dict[str, Any] = {"bias": bias, "lora_bias": bias == "none"}
    theirs = saved(family, True, tmp_path, target_modules=maps, **fields)
    model, params = models.load(tmp_path / "adapter", base=tmp_path / "base")
    check_equal(ours_of(model, params, family), theirs)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, (".*",)) for family in FAMILIES),
        *((family, ("query",)) for family in ("GPT2", "GPTNeoX", "Bloom", "Phi3")),
    ],
)
def test_peft_loads_ours(family, targets, tmp_path):
    base = base_of(family, ONLY.get(family, True))
    base.save_pretrained(tmp_path / "base")
    model, params = models.load(tmp_path / "base")
    lora = models.make_lora(models.LoRAConfig(rank=3, targets=targets), model)
    trained, frozen = lora.init(jax.random.key(0), params)
    noise = np.random.default_rng(2)
    trained = jax.tree.map(lambda x: x + noise.normal(0, 0.2, x.shape).astype(x.dtype), trained)
    models.save_adapter(tmp_path / "adapter", model, lora, trained, base=str(tmp_path / "base"))
    ours = ours_of(model, lora.merge(trained, frozen), family)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    check_equal(ours, theirs_of(theirs, family))


@pytest.mark.parametrize(
    ("family", "fields", "name"),
    [
        ("Bart", {"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ("T5", {"target_modules": ["q"], "modules_to_save": ["shared"]}, "shared"),
        ("OPT", {"target_modules": ["embed_positions"]}, "embed_positions"),
        ("Llama", {"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ("Llama", {"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "olora"),
        (
            "Llama",
            {
                "target_modules": ["q_proj"],
                "alora_invocation_tokens": [5],
                "task_type": "CAUSAL_LM",
            },
            "alora_invocation_tokens",
        ),
        ("Mixtral", {"target_modules": "all-linear"}, "target_parameters"),
    ],
    ids=str,
)
def test_what_no_merged_model_computes_is_refused_by_name(family, fields, name, tmp_path):
    saved(family, True, tmp_path, **fields)
    with pytest.raises(WeightsError, match=name):
        models.load(tmp_path / "adapter", base=tmp_path / "base")


@pytest.mark.parametrize(
    "change",
    [
        {"future_field": 3},
        {"lora_alpha": "7"},
        {"lora_alpha": True},
        {"alpha_pattern": [1]},
        {"alpha_pattern": {"q_proj": "x"}},
        {"alpha_pattern": {"(": 3}},
        {"alpha_pattern": {"(a+)+b": 3}},
        {"modules_to_save": "norm"},
        {"use_rslora": "yes"},
        {"revision": 3},
        {"task_type": ["CAUSAL_LM"]},
        {"peft_type": None},
    ],
    ids=str,
)
def test_a_field_of_another_meaning_or_type_is_refused(change, tmp_path):
    saved("Llama", True, tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError) as error:
        models.load(tmp_path / "adapter", base=tmp_path / "base")
    assert "\n" not in str(error.value)
