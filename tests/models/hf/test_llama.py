"""Llama folders with tokenizers of both kinds, and older names of the rotary base."""

from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flaxzoo.models.hf.decoders import llama
from flaxzoo.train.cli.main import main

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
GROUPED = {"num_key_value_heads": 2, "head_dim": 6, "rope_theta": 500.0}
RNG = np.random.default_rng(0)
IDS = RNG.integers(3, 31, (3, 9))
TEXTS = ["the cat sat on the mat", "a dog sat on the cat", "the end of the log"]


def config_of(**fields):
    return llama.FORM.config_from_hf({"model_type": "llama", **FIELDS, **fields}, "config.json")


def test_older_names_of_the_rotary_base():
    old = config_of(rope_theta=7.0, rope_scaling=None)
    assert old == config_of(rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert old.rope_base == 7.0


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
    grouped = {"num_key_value_heads": 2, "head_dim": 6, "rope_theta": 500.0}
    fields = {**FIELDS, **grouped, **special, "vocab_size": len(tokenizer)}
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
        for work_folder in (folder, run, out):
            capsys.readouterr()
            arguments = ["generate", str(work_folder), "--prompt", prompt, "--max-new-tokens", "8"]
            assert main([*arguments, *options]) == 0
            assert expected in capsys.readouterr().out
