"""Tokenizers of folders as runs and as folders again: transformers reads the same texts each time.

A folder becomes a run, the run a folder, that folder a run, and so on. Ids, token types, truncation
and padding are those of ``AutoTokenizer`` on the first folder.
"""

import json

import pytest
import tokenizers
from flaxzoo.data import load_tokenizer
from flaxzoo.data.features.bert_inputs import Template, encode_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

NAMES = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "en_XX")
TEXTS = ["the old man went down to the sea", "to the sea", "", "Sea\n the  old, was calm!", "old"]
PAIRS = [("the old man", "went down"), ("a sea", ""), ("", "to"), ("sea " * 9, "old"), ("a", "b c")]


def byte_level():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return trained(backend, trainers.BpeTrainer, alphabet=pre_tokenizers.ByteLevel.alphabet())


def metaspace():
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return trained(backend, trainers.BpeTrainer)


def word_pieces():
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(backend, trainers.WordPieceTrainer)


def trained(backend, trainer, alphabet=()):
    options = {"vocab_size": 300, "special_tokens": [*NAMES], "initial_alphabet": [*alphabet]}
    backend.train_from_iterator(TEXTS * 3, trainer(show_progress=False, **options))
    return backend


def template(single, pair):
    ids = [(name, NAMES.index(name)) for name in NAMES]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


ROBERTA = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
BEGINS = template("<s> $A", "<s> $A <s>:1 $B:1")
NOTHING = processors.ByteLevel(trim_offsets=False)
TYPED = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
BERT = template("<s>:0 $A:0 </s>:0", "<s>:0 $A:0 </s>:0 $B:1 </s>:1")
FAMILIES = {
    "bert": (word_pieces, BERT, "bert", TYPED),
    "bert without types": (word_pieces, BERT, "bert", {}),
    "distilbert": (word_pieces, BERT, "distilbert", {}),
    "roberta": (byte_level, ROBERTA, "roberta", {}),
    "roberta with types": (byte_level, BERT, "roberta", TYPED),
    "bart": (byte_level, ROBERTA, "bart", {}),
    "mbart": (metaspace, template("$A </s> en_XX", "$A $B </s> en_XX"), "mbart", {}),
    "mbart-50": (metaspace, template("en_XX $A </s>", "en_XX $A $B </s>"), "mbart", {}),
    "t5": (metaspace, template("$A </s>", "$A </s> $B </s>"), "t5", {}),
    "mt5 left": (metaspace, template("$A </s>", "$A $B </s>"), "mt5", {"padding_side": "left"}),
    "pegasus": (metaspace, template("$A </s>", "$A $B </s>"), "pegasus", {}),
    "bart without template": (byte_level, NOTHING, "bart", {}),
    "gpt2": (byte_level, NOTHING, "gpt2", {}),
    "gpt2 left": (byte_level, NOTHING, "gpt2", {"padding_side": "left"}),
    "gpt2 splits": (byte_level, NOTHING, "gpt2", {"split_special_tokens": True}),
    "gpt2 truncates left": (byte_level, NOTHING, "gpt2", {"truncation_side": "left"}),
    "opt": (byte_level, template("</s> $A", "</s> $A </s> $B"), "opt", {}),
    "bloom": (byte_level, NOTHING, "bloom", {"padding_side": "left"}),
    "llama": (metaspace, BEGINS, "llama", {"padding_side": "left"}),
    "llama 3": (byte_level, processors.Sequence([NOTHING, BEGINS]), "llama", {}),
    "gemma": (metaspace, BEGINS, "gemma", {"padding_side": "left"}),
    "qwen2": (byte_level, NOTHING, "qwen3", {}),
    "qwen3 embedding": (
        byte_level,
        processors.Sequence([NOTHING, template("$A </s>", "$A </s> $B </s>")]),
        "qwen3",
        {"padding_side": "left"},
    ),
    "phi3": (metaspace, NOTHING, "phi3", {"padding_side": "left"}),
    "mistral": (metaspace, BEGINS, "mistral", {}),
    "gpt-neox": (byte_level, NOTHING, "gpt_neox", {}),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def trip(request, tmp_path_factory):
    """What transformers reads of a folder, of two exports, and all tokenizers of ours."""
    make, processor, model_type, stated = FAMILIES[request.param]
    backend = make()
    backend.post_processor = processor
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    work_folder = tmp_path_factory.mktemp("trip")
    theirs, ours = [], []
    for number in range(3):
        folder = work_folder / str(number)
        if number == 0:
            PreTrainedTokenizerFast(tokenizer_object=backend, **roles, **stated).save_pretrained(
                folder
            )
        else:
            closing = model_type in ("t5", "mt5", "bart", "mbart", "pegasus")
            line = ours[-1].export(folder, closing=closing, padding_side="right")
            assert ("special tokens" in line) != ("split_special_tokens" in stated)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs.append(AutoTokenizer.from_pretrained(folder))
        ours.append(load_tokenizer(folder))
        ours[-1].save(work_folder / f"run {number}")
        ours.append(load_tokenizer(work_folder / f"run {number}"))
    return theirs, ours


def rows_of(theirs, texts, **options):
    # A batch: outside of one, transformers reads an empty second text as none.
    found = theirs(*([text] for text in texts), **options)
    [ids] = found["input_ids"]
    [types] = found.get("token_type_ids", [[0] * len(ids)])
    return ids, types


def test_texts_and_pairs(trip):
    theirs, ours = trip
    for texts in [*((text,) for text in TEXTS), *PAIRS]:
        right = rows_of(theirs[0], texts)
        assert [rows_of(other, texts) for other in theirs[1:]] == [right] * 2
        for tokenizer in ours:
            framed = tokenizer.frame.join(*tokenizer.encode_batch(texts))
            assert (framed.ids, framed.types) == right
            assert len(texts) == 2 or tokenizer.encode(texts[0]) == right[0]
            assert tokenizer.source_frame == tokenizer.frame


def test_batches_and_names_of_special_tokens(trip):
    theirs, _ = trip
    first, *others = theirs
    for other in others:
        assert other.padding_side == first.padding_side
        assert other.truncation_side == first.truncation_side
        assert other(TEXTS, padding=True)["input_ids"] == first(TEXTS, padding=True)["input_ids"]
        for text in ("sea</s>", "<s>old", "</s>"):
            assert other(text)["input_ids"] == first(text)["input_ids"]


WORDS = st.lists(st.sampled_from("the old man sea was calm , Sea!".split()), max_size=12)


@settings(max_examples=25, deadline=None)
@given(one=WORDS, other=st.none() | WORDS, length=st.integers(8, 20))
def test_rows_are_truncated_as_there(trip, one, other, length):
    theirs, ours = trip
    texts = (" ".join(one),) if other is None else (" ".join(one), " ".join(other))
    right = rows_of(theirs[0], texts, truncation=True, max_length=length)
    if not right[0]:
        return
    rows, _ = encode_texts([texts], ours[-1], Template.of(ours[-1], length), ["here"])
    row, size = rows.example(0), len(right[0])
    assert row["attention_mask"].tolist() == [1] * size + [0] * (length - size)
    assert row["input_ids"][:size].tolist() == right[0]
    assert row["token_type_ids"][:size].tolist() == right[1]
