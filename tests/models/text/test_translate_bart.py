"""A BART and an mBART of the hub, with their tokenizers, write what they write in transformers."""

import pytest
import tokenizers
import torch
import transformers
from flaxzoo import models

from ...support.marian_tokenizer import train_sentencepiece

TEXTS = ["the cat sat on the mat", "a dog ran", "the dog"]
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
}


def bart_tokenizer(folder):
    backend = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend.train_from_iterator(TEXTS * 9, 300, special_tokens=special, show_progress=False)
    backend.save_model(str(folder))
    return transformers.BartTokenizer.from_pretrained(folder)


def mbart_tokenizer(folder):
    model = train_sentencepiece(TEXTS * 9, vocab_size=18, hard_vocab_limit=True)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    return transformers.MBartTokenizer.from_pretrained(folder, src_lang="de_DE")


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize(("model", "forced"), [("Bart", "<s>"), ("MBart", "fr_XX")])
def test_texts_are_those_of_transformers(model, forced, tmp_path):
    tokenizer = (bart_tokenizer if model == "Bart" else mbart_tokenizer)(tmp_path)
    first = tokenizer.convert_tokens_to_ids(forced)
    torch.manual_seed(1)
    config = getattr(transformers, f"{model}Config")(vocab_size=len(tokenizer), **SIZES)
    theirs = getattr(transformers, f"{model}ForConditionalGeneration")(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0, 0.6)
    theirs.final_logits_bias[0, tokenizer.all_special_ids] = -9  # so that words are written
    settings = {"num_beams": 3, "max_new_tokens": 8, "early_stopping": False}
    settings |= {"forced_bos_token_id": first, "decoder_start_token_id": 2}
    theirs.generation_config.update(**settings)
    theirs.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    expected = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        written = theirs.generate(ids, do_sample=False)
        assert written[0, :2].tolist() == [2, first]
        expected.append(tokenizer.decode(written[0], skip_special_tokens=True).strip())
    translate = models.TextTranslator.of_run(tmp_path / "hf")
    assert [found[0].text for found in translate(TEXTS)] == expected
    assert any(expected)
