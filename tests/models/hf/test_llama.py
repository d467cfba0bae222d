"""Llama against transformers: logits, gradients and decoded tokens, import and export."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax.traverse_util import flatten_dict
from flaxzoo import models
from flaxzoo.models.hf.decoders import llama
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli.main import main

from ...support.hf_weights import gradients_of
from ...support.parity import note_answers, note_tokens

FIELDS = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "grouped heads": {"num_key_value_heads": 2, "head_dim": 6, "rope_theta": 500.0},
    "one key head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "as many key heads": {"rms_norm_eps": 0.1},
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(3, 31, (3, 9))
from_pretrained: Any = transformers.LlamaForCausalLM.from_pretrained  # returns two with the info
TEXTS = ["the cat sat on the mat", "a dog sat on the cat", "the end of the log"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A random model of transformers, and the same model loaded from its folder."""
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**FIELDS, **KINDS[request.param])
    ).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.2)
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, *models.load(folder)


def test_logits_and_gradients(pair, assert_close):
    theirs, model, params = pair

    def loss(params):
        logits = model.apply({"params": params}, input_ids=IDS).logits
        return jnp.mean(jnp.square(logits)), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    expected = theirs(torch.tensor(IDS)).logits
    expected.square().mean().backward()
    assert_close(logits, expected.detach().numpy())
    note_answers(theirs, "import", logits, expected.detach())
    found = flatten_dict(gradients, sep="/")
    for path, gradient in flatten_dict(gradients_of(theirs, model.config), sep="/").items():
        assert_close(found[path], gradient)


def test_a_body_without_a_head(pair, tmp_path, assert_close):
    theirs = pair[0].model
    theirs.save_pretrained(tmp_path / "hf")
    model, params = models.load(tmp_path / "hf")
    expected = theirs(torch.tensor(IDS)).last_hidden_state.detach()
    found = jax.jit(model.apply)({"params": params}, input_ids=IDS).last_hidden_state
    assert_close(found, expected)
    note_answers(theirs, "import", found, expected)
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model.config, params)
    written = transformers.LlamaModel.from_pretrained(tmp_path / "ours")
    expected = written(torch.tensor(IDS)).last_hidden_state.detach()
    assert_close(found, expected)
    note_answers(written, "export", found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"num_beams": 1}, {"num_beams": 3, "num_return_sequences": 2}])
def test_decoded_tokens(pair, asked):
    """Greedy and beam search, with prompts that are padded on the left."""
    theirs, model, params = pair
    ids, mask = IDS.copy(), np.ones_like(IDS)
    ids[1, :4], mask[1, :4] = 0, 0
    asked = {**asked, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 2}
    expected = theirs.generate(
        torch.tensor(ids), attention_mask=torch.tensor(mask), do_sample=False, **asked
    )
    found = models.generate(model, params, ids, attention_mask=mask, **asked)
    np.testing.assert_array_equal(found, expected.numpy())
    note_tokens(theirs)


def test_exported_models_load_in_transformers(pair, tmp_path, assert_close):
    theirs, model, params = pair
    write_weights(tmp_path, model.config, params)
    loaded, info = from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor(IDS)
    assert_close(loaded(ids).logits.detach(), theirs(ids).logits.detach())
    logits = jax.jit(model.apply)({"params": params}, input_ids=IDS).logits
    note_answers(loaded, "export", logits, loaded(ids).logits.detach())
    again, _ = models.load(tmp_path)
    assert again.config == model.config


def config_of(**fields):
    return llama.FORM.config_from_hf({"model_type": "llama", **FIELDS, **fields}, "config.json")


def test_older_names_of_the_rotary_base():
    old = config_of(rope_theta=7.0, rope_scaling=None)
    assert old == config_of(rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert old.rope_base == 7.0


def test_published_configuration(tmp_path):
    """The `config.json` of Llama 3 8B describes the preset."""
    preset = models.preset("llama3-8b")
    exported = llama.FORM.config_to_hf(preset)
    (tmp_path / "config.json").write_text(json.dumps(exported))
    theirs = transformers.LlamaConfig.from_pretrained(tmp_path)
    assert theirs.to_dict()["rope_parameters"]["rope_theta"] == 500_000
    assert (theirs.num_key_value_heads, theirs.head_dim) == (8, 128)
    assert llama.FORM.config_from_hf(exported, "config.json") == dataclasses.replace(preset)


def byte_level_tokenizer():
    """A tokenizer of the kind of Llama 3: byte-level BPE, a token that begins each text."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.train_from_iterator(TEXTS, trainer)
    return backend, "<|begin_of_text|>", "<|end_of_text|>"


def sentencepiece_tokenizer():
    """A tokenizer of the kind of Llama 1 and 2: BPE of words behind "▁", unknown bytes."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    bpe = tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(bpe)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    d = tokenizers.decoders
    backend.decoder = d.Sequence(
        [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(content=" ", left=1)]
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend, "<s>", "</s>"


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize("make_tokenizer", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_a_folder_with_its_tokenizer_is_imported_and_continues_texts(
    make_tokenizer, tmp_path, capsys
):
    """As the command line is used; the text is that of transformers' model and tokenizer."""
    backend, bos, eos = make_tokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos
    )
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    fields = {**FIELDS, **KINDS["grouped heads"], **special, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    theirs: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.3)
    folder, run, out = (tmp_path / name for name in ("hf", "run", "out"))
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert main(["import", str(folder), str(run)]) == 0
    assert main(["export", str(run), str(out)]) == 0

    prompt = "the cat sat"
    ids = torch.tensor([tokenizer(prompt).input_ids])
    assert ids[0, 0] == tokenizer.bos_token_id
    for options, settings in (
        (["--temperature", "0"], {}),
        (["--num-beams", "3"], {"num_beams": 3}),
    ):
        written = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **settings
        )
        expected = tokenizer.decode(written[0], skip_special_tokens=True)
        for place in (folder, run, out):
            capsys.readouterr()
            arguments = ["generate", str(place), "--prompt", prompt, "--max-new-tokens", "8"]
            assert main([*arguments, *options]) == 0
            assert expected in capsys.readouterr().out
