"""A `tokenizer.json` as Llama's: characters that no token has are bytes, as in transformers."""

import json

import pytest
import tokenizers
import transformers
from flaxzoo.data import load_tokenizer

from ...support.nasty_texts import NASTY

SPECIAL = ["<unk>", "<s>", "</s>"]
# Names of special tokens are ordinary text here.
TEXTS = [*(text for text in NASTY if not any(name in text for name in SPECIAL)), "naïve 漢 the cat"]


@pytest.fixture(scope="module", params=["legacy", "prefix space", "none"])
def pair(request, tmp_path_factory):
    """transformers' tokenizer of a folder, and ours; spaces are marked in one of three ways."""
    parts = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders
    normalizers, pre_tokenizers, decoders = parts
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    ending = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if request.param == "legacy":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        ending.append(decoders.Strip(content=" ", left=1))
    elif request.param == "prefix space":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        ending.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(ending)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=310, special_tokens=[*SPECIAL, *bytes_], show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat", "naïve dogs two  spaces"] * 9, trainer)
    content = json.loads(backend.to_str())  # bytes are ordinary tokens in published files
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in SPECIAL]
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_tokens([tokenizers.AddedToken("<|word|>", normalized=False)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, load_tokenizer(folder)


def test_bytes_that_are_no_text(pair):
    theirs, ours = pair
    half = theirs("a漢").input_ids[:-1]  # the last byte of the character is missing
    for ids in (half, half[-1:], [*half, *theirs("b").input_ids[1:]], [3 + 0xFF], []):
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
