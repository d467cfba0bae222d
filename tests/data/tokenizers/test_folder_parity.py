"""Tokenizer folders against transformers: each family in each of its forms, with every setting.

A text is compared with `split_special_tokens`: names of special tokens are ordinary text here.
Models that have these names as pieces find them even so in transformers, and here they do not.
"""

import json
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from flaxzoo.data import TokenizerConfig, load_tokenizer, train_tokenizer
from flaxzoo.data.common.errors import DataError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

from ...support.marian_tokenizer import train_sentencepiece
from ...support.nasty_texts import NASTY

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Ärger, grün naïve café! don't I'LL we've",
    "hello the old man sat on the mat, and the cat sat too? yes 日本 漢字かな",
    "Numbers 3.14 and 2024; tabs\tand lines\nnew  double   triple spaces.",
    "ﬁne Ⅳ ½ ｆｕｌｌ e\u0301 a\u0308 привет мир שלום السلام",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass",
] * 4
TEXTS = [
    *(text for text in NASTY if len(text) < 200),
    "The OLD Man. The Quick ÄRGER CAFÉ",
    "hello<tool>world <tool> <tool>!",
    "x <ctrl> y<ctrl>,z",
    "a\n\n b\n\n\n  c\t\td",
    "שלום عالم 1234567 89,000.5",
    "don ' t stop . please , ok ? n't 'm",
    "ΑΣ ς İi ıI ß ẞ ﷺ ﬃ ①",
    "the " * 60,
]
ROBERTA_NAMES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def added(name, **flags):
    usual = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    return {"content": name, **usual, **flags}


def typed(name, **flags):
    return {"__type": "AddedToken", **added(name, **flags)}


def byte_pairs(folder, names):
    backend = tokenizers.ByteLevelBPETokenizer()
    options = {"min_frequency": 1, "special_tokens": names, "show_progress": False}
    backend.train_from_iterator(CORPUS, vocab_size=320, **options)
    backend.save_model(str(folder))
    return {name: (folder / name).read_bytes() for name in ("vocab.json", "merges.txt")}


def wordpieces(folder):
    backend = tokenizers.BertWordPieceTokenizer(lowercase=False, strip_accents=False)
    both = [*CORPUS, *map(str.lower, CORPUS)]
    options = {"min_frequency": 1, "show_progress": False}
    backend.train_from_iterator(both, vocab_size=250, **options)
    backend.save_model(str(folder))
    return {"vocab.txt": (folder / "vocab.txt").read_bytes()}


def renamed(vocabulary):
    """Returns a vocabulary of BERT with the names that RoBERTa has."""
    for old, new in (("[PAD]", "<pad>"), ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>")):
        vocabulary = vocabulary.replace(old.encode(), new.encode())
    return vocabulary


def pieces(name, **options):
    return {name: train_sentencepiece(CORPUS, **{"vocab_size": 200, **options})}


T5 = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ALBERT = {
    "model_type": "unigram",
    **{"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1},
    "control_symbols": ["[CLS]", "[SEP]"],
    "user_defined_symbols": ["[MASK]"],
}
DEBERTA_NAMES = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
DEBERTA = {
    "model_type": "unigram",
    **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
    **{f"{role}_piece": f"[{name}]" for role, name in (("pad", "PAD"), ("bos", "CLS"))},
    **{f"{role}_piece": f"[{name}]" for role, name in (("eos", "SEP"), ("unk", "UNK"))},
}
LLAMA = {
    "model_type": "bpe",
    "vocab_size": 440,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
}
GEMMA = {
    **LLAMA,
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_digits": True,
    **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
    "user_defined_symbols": ["<mask>", "\n\n", "  "],
}
# For each family of models: its vocabulary, and the class that its files name.
FAMILIES = {
    "bert": ("wordpiece", "BertTokenizer"),
    "distilbert": ("wordpiece", "DistilBertTokenizer"),
    "electra": ("wordpiece", "ElectraTokenizer"),
    "nomic_bert": ("wordpiece", "BertTokenizer"),
    "mpnet": ("mpnet", "MPNetTokenizer"),
    "albert": ("albert", "AlbertTokenizer"),
    "deberta": ("deberta", "DebertaTokenizer"),
    "deberta-v2": ("deberta-v2", "DebertaV2Tokenizer"),
    "roberta": ("roberta", "RobertaTokenizer"),
    "roberta-prelayernorm": ("roberta", "RobertaTokenizer"),
    "bart": ("roberta", "BartTokenizer"),
    "opt": ("roberta", "GPT2Tokenizer"),
    "gpt2": ("gpt2", "GPT2Tokenizer"),
    "gpt_neo": ("gpt2", "GPT2Tokenizer"),
    "gptj": ("gpt2", "GPT2Tokenizer"),
    "gpt_neox": ("gpt2", "GPTNeoXTokenizer"),
    "openai-gpt": ("roberta", "OpenAIGPTTokenizer"),
    "qwen2": ("gpt2", "Qwen2Tokenizer"),
    "qwen3": ("gpt2", "Qwen2Tokenizer"),
    "qwen3_moe": ("gpt2", "Qwen2Tokenizer"),
    "t5": ("t5", "T5Tokenizer"),
    "mt5": ("t5", "T5Tokenizer"),
    "pegasus": ("t5", "PegasusTokenizer"),
    "xlm-roberta": ("mbart", "XLMRobertaTokenizer"),
    "gte": ("mbart", "XLMRobertaTokenizer"),
    "camembert": ("mbart", "CamembertTokenizer"),
    "mbart": ("mbart", "MBartTokenizer"),
    "mbart50": ("mbart", "MBart50Tokenizer"),
    "llama": ("llama", "LlamaTokenizer"),
    "mistral": ("llama", "LlamaTokenizer"),
    "mixtral": ("llama parts", "LlamaTokenizer"),
    "phi3": ("llama", "LlamaTokenizer"),
    "gemma": ("gemma", "GemmaTokenizer"),
    "gemma2": ("gemma", "GemmaTokenizer"),
    "gemma3_text": ("gemma", "GemmaTokenizer"),
}
# Families with a `tokenizer.json`, the family that makes the file, and the class that is stated.
JSON = {
    "bert": ("bert", "BertTokenizerFast"),
    "distilbert": ("distilbert", None),
    "deberta": ("deberta", None),
    "deberta-v2": ("deberta-v2", "DebertaV2Tokenizer"),
    "roberta": ("roberta", "RobertaTokenizer"),
    "mpnet": ("mpnet", "MPNetTokenizerFast"),
    "opt": ("opt", None),
    "gpt_neox": ("gpt_neox", "GPTNeoXTokenizer"),
    "modernbert": ("gpt_neox", "PreTrainedTokenizerFast"),
    "qwen2": ("qwen2", "PreTrainedTokenizerFast"),
    "qwen3": ("qwen3", "Qwen2Tokenizer"),
    "t5": ("t5", "T5TokenizerFast"),
    "pegasus": ("pegasus", None),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaTokenizer"),
    "camembert": ("camembert", None),
    "mbart": ("mbart", "MBartTokenizer"),
    "mbart50": ("mbart50", "MBart50Tokenizer"),
    "llama": ("llama", "LlamaTokenizerFast"),
    "llama 3": ("qwen3", "LlamaTokenizer"),
    "bloom": ("gpt2", "BloomTokenizerFast"),
    "mistral": ("mistral", "LlamaTokenizer"),
    "phi3": ("phi3", None),
    "olmo2": ("gpt2", "GPT2Tokenizer"),
    "smollm3": ("qwen3", "PreTrainedTokenizerFast"),
    "granite": ("gpt2", "GPT2Tokenizer"),
    "stablelm": ("gpt_neox", "GPTNeoXTokenizer"),
    "falcon": ("gpt2", "PreTrainedTokenizerFast"),
    "gemma": ("gemma", "GemmaTokenizer"),
    "no model": ("llama", "PreTrainedTokenizerFast"),
}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    def work_folder():
        return tmp_path_factory.mktemp("vocabulary")

    return {
        "wordpiece": wordpieces(work_folder()),
        "mpnet": {"vocab.txt": renamed(wordpieces(work_folder())["vocab.txt"])},
        "roberta": byte_pairs(work_folder(), ROBERTA_NAMES),
        "gpt2": byte_pairs(work_folder(), ["<|endoftext|>"]),
        "albert": pieces("spiece.model", **ALBERT),
        "deberta": byte_pairs(work_folder(), DEBERTA_NAMES),
        "deberta-v2": pieces("spm.model", **DEBERTA),
        "t5": pieces("spiece.model", **T5),
        "mbart": pieces("sentencepiece.bpe.model", model_type="unigram"),
        "llama": pieces("tokenizer.model", **LLAMA),
        "llama parts": pieces(
            "tokenizer.model", **LLAMA, user_defined_symbols=["<tool>", "  "], pad_id=3
        ),
        "gemma": pieces("tokenizer.model", **GEMMA),
    }


def write(folder, files, model_type, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if model_type is not None:
        model_type = "mbart" if model_type == "mbart50" else model_type.split(" ")[0]
        contents["config"] = {"model_type": model_type}
    for name, content in contents.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def named_in(theirs, ids):
    """Returns the special tokens among the ids of a text, without the unknown one."""
    special = {id for id, token in theirs.added_tokens_decoder.items() if token.special}
    return (special - {theirs.unk_token_id}) & {*ids}


def differences(folder, texts, saved=None):
    """Returns what our tokenizer of a folder does otherwise than transformers' one."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(saved or folder)
    bare = theirs(texts, add_special_tokens=False, split_special_tokens=True).input_ids
    typed = [text for text, ids in zip(texts, bare, strict=True) if named_in(theirs, ids)]
    rows = [ours.encode(text, add_special_tokens=False) for text in typed]
    assert ours.encode_batch(typed) == rows
    assert not any(named_in(theirs, ids) for ids in rows)
    texts = [text for text in texts if text not in typed]
    found: list[tuple[Any, ...]]
    found = [] if len(theirs) == ours.vocab_size else [("size", len(theirs), ours.vocab_size)]
    for role in ("pad", "unk", "bos", "eos", "cls", "sep", "mask"):
        id = getattr(theirs, f"{role}_token_id")
        if role == "pad" and id == theirs.eos_token_id:
            id = None  # an end is no padding here
        if role != "bos" or not ours.sentinels:  # targets of T5 begin with padding
            found += [(role, id)] if getattr(ours.special_ids, role) != id else []
    batch = theirs(texts, return_offsets_mapping=True, split_special_tokens=True)
    bare = theirs(texts, add_special_tokens=False, split_special_tokens=True).input_ids
    if ours.encode_batch(texts) != bare:
        found.append(("bare",))
    rows = zip(texts, batch.input_ids, batch.offset_mapping, strict=True)
    for text, ids, offsets in rows:
        if ours.encode_with_offsets(text) != (ids, [tuple(span) for span in offsets]):
            found.append(("ids", text, theirs.convert_ids_to_tokens(ids)))
        # Without its last token a text may end in the middle of a character.
        for row in (ids, ids[:-1], ids[-1:]):
            for skip in (True, False):
                if ours.decode(row, skip) != theirs.decode(row, skip_special_tokens=skip):
                    found.append(("decoded", text, row, skip))
    pairs = list(pairwise(texts[-7:]))
    forced = True if ours.batch_settings is None else None  # no model says that there are none
    both = theirs(pairs, split_special_tokens=True, return_token_type_ids=forced)
    rows = both.get("token_type_ids", [[0] * len(ids) for ids in both.input_ids])
    for (a, b), ids, types in zip(pairs, both.input_ids, rows, strict=True):
        framed = ours.frame.join(*ours.encode_batch([a, b]))
        if (framed.ids, framed.types) != (ids, types):
            found.append(("pair", a, b))
    return found


DECODER = {"901": added("<tool>"), "900": added("<ctrl>", special=True, rstrip=True)}
# The contents of a folder's files, each of which every family is given.
FILES = {
    "no settings": {},
    "class": {"tokenizer_config": {}},
    "added tokens": {
        "tokenizer_config": {},
        "added_tokens": {"<tool>": 901, "<ctrl>": 900},
        "special_tokens_map": {"additional_special_tokens": ["<ctrl>"]},
    },
    "special tokens map": {
        "tokenizer_config": {"add_bos_token": True, "add_eos_token": True},
        "special_tokens_map": {"bos_token": "<ctrl>", "eos_token": added("<tool>", lstrip=True)},
    },
    "decoder": {
        "tokenizer_config": {"added_tokens_decoder": DECODER},
        "special_tokens_map": {"bos_token": "<ignored>"},
    },
    "extra tokens in two files": {
        "tokenizer_config": {"extra_special_tokens": ["<tool>"]},
        "special_tokens_map": {"extra_special_tokens": ["<ctrl>", "<tool>"]},
    },
    "many settings": {
        "tokenizer_config": {
            "add_prefix_space": True,
            "add_bos_token": True,
            "do_lower_case": False,
            "strip_accents": True,
            "tokenize_chinese_chars": False,
            "clean_up_tokenization_spaces": True,
            "legacy": True,
            "extra_ids": 7,
            "src_lang": "de_DE",
            "offset": 9,
            "split_by_punct": True,
            "pad_token": typed("<ctrl>", lstrip=True),
            "image_token": "<tool>",
        }
    },
    "other settings": {
        "tokenizer_config": {
            "add_prefix_space": False,
            "add_eos_token": True,
            "do_lower_case": True,
            "strip_accents": False,
            "legacy": None,
            "trim_offsets": False,
            "extra_ids": 0,
            "unk_token": "<unk>",
            "pad_token": None,
            "mask_token": typed("<mask>", lstrip=True, normalized=True),
            "extra_special_tokens": ["<tool>", typed("<ctrl>", rstrip=True)],
        }
    },
}


def contents_for(family, files):
    """Returns the contents of a folder's files, with the class of the family's tokenizer."""
    contents = json.loads(json.dumps(FILES[files]))
    if "tokenizer_config" in contents:
        contents["tokenizer_config"]["tokenizer_class"] = FAMILIES[family][1]
        if FAMILIES[family][0] in (
            "wordpiece",
            "mpnet",
        ):  # this one must be a piece of the vocabulary
            contents["tokenizer_config"].pop("unk_token", None)
        if family in ("pegasus", "mbart", "mbart50"):  # these have no vocabulary without padding
            contents["tokenizer_config"].pop("pad_token", None)
        if family in ("xlm-roberta", "camembert") and files == "other settings":
            del contents["tokenizer_config"]["pad_token"]
    return contents


# Every file for the first family of a vocabulary and a class, one for the others.
FIRST = {kind: family for family, kind in reversed(FAMILIES.items())}.values()
OLDER = [(f, files) for f in FAMILIES for files in (FILES if f in FIRST else ["class"])]


@pytest.mark.parametrize(("family", "files"), OLDER)
def test_older_formats(family, files, vocabularies, tmp_path):
    if (family, files) == ("mbart50", "no settings"):
        return  # only its class says that it is no mBART
    content = contents_for(family, files)
    folder = write(tmp_path / "given", vocabularies[FAMILIES[family][0]], family, **content)
    assert differences(folder, TEXTS) == []
    load_tokenizer(folder).save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == load_tokenizer(folder).fingerprint
    assert differences(folder, TEXTS[-8:], tmp_path / "saved") == []


@pytest.fixture(scope="module")
def json_files(vocabularies, tmp_path_factory):
    """The `tokenizer.json` that transformers saves for a family."""
    made = {}

    def file(family):
        if family not in made:
            work_folder = tmp_path_factory.mktemp("json")
            contents: dict[str, Any] = {
                "tokenizer_config": {"tokenizer_class": FAMILIES[family][1]}
            }
            contents["tokenizer_config"] |= {
                "add_bos_token": family in ("llama", "mistral", "phi3")
            }
            write(work_folder, vocabularies[FAMILIES[family][0]], family, **contents)
            AutoTokenizer.from_pretrained(work_folder).save_pretrained(work_folder / "saved")
            made[family] = (work_folder / "saved" / "tokenizer.json").read_bytes()
        return {"tokenizer.json": made[family]}

    return file


@pytest.mark.parametrize("files", ["no settings", "added tokens", "decoder", "many settings"])
@pytest.mark.parametrize("family", JSON)
def test_tokenizer_json(family, files, json_files, tmp_path):
    source, name = JSON[family]
    if (family, files) == ("mbart50", "no settings"):
        return
    contents = json.loads(json.dumps(FILES[files]))
    if "tokenizer_config" in contents or family in ("no model", "llama 3"):
        config = contents.setdefault("tokenizer_config", {})
        config |= {"tokenizer_class": name} if name else {}
        config["extra_ids"] = 100  # as in the file
    model_type = None if family == "no model" else family
    folder = write(tmp_path / "given", json_files(source), model_type, **contents)
    assert differences(folder, TEXTS[::2]) == []
    load_tokenizer(folder).save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == load_tokenizer(folder).fingerprint
    assert differences(folder, TEXTS[-8:], tmp_path / "saved") == []


@pytest.fixture(scope="module")
def pairs(vocabularies, tmp_path_factory):
    """The tokenizers of transformers and ours, for a vocabulary of each kind."""
    found = []
    for family in ("bert", "roberta", "qwen3", "t5", "mbart50", "llama", "mixtral", "gemma"):
        contents = contents_for(family, "decoder")
        work_folder = tmp_path_factory.mktemp("any")
        write(work_folder, vocabularies[FAMILIES[family][0]], family, **contents)
        found.append((AutoTokenizer.from_pretrained(work_folder), load_tokenizer(work_folder)))
    return found


# Names of sentinels are sentinels here, and the digits of other scripts are left to the libraries.
ANY_TEXT = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from([" ", "  ", "\n", "<tool>", "<ctrl>", "</s>", "▁", "\u200d", "É", "12"]),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=ANY_TEXT)
def test_any_text(pairs, text):
    for theirs, ours in pairs:
        bare = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if named_in(theirs, bare):
            assert not named_in(theirs, ours.encode(text, add_special_tokens=False))
            continue
        batch = theirs(text, return_offsets_mapping=True, split_special_tokens=True)
        ids, offsets = ours.encode_with_offsets(text)
        assert (ids, offsets) == (batch.input_ids, batch.offset_mapping)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "mistral", "gemma", "gpt2"])
def test_an_exported_vocabulary_is_read_as_it_is(model_type, tmp_path):
    ours = train_tokenizer(CORPUS, TokenizerConfig("byte-bpe", 300))
    write(tmp_path, {}, model_type)
    ours.export(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert again.fingerprint == ours.fingerprint
    ids = theirs(TEXTS, split_special_tokens=True).input_ids
    assert ours.encode_batch(TEXTS) == again.encode_batch(TEXTS) == ids


def test_the_fingerprint_follows_the_ids(vocabularies, tmp_path):
    prints = []
    for number, add_bos_token in enumerate((False, True, True)):
        config = {"tokenizer_config": {"add_bos_token": add_bos_token}}
        folder = write(tmp_path / str(number), vocabularies["roberta"], "opt", **config)
        prints.append(load_tokenizer(folder).fingerprint)
    assert prints[0] != prints[1] == prints[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", [], "tokenizer_config.json"),
        ("special_tokens_map", [], "special_tokens_map.json"),
        ("added_tokens", ["<tool>"], "added_tokens.json"),
        ("added_tokens", {"<tool>": 10**9}, "1000000000"),
        ("added_tokens", {"<tool>": "7"}, "'7'"),
        ("config", [], "config.json"),
        *(
            ("tokenizer_config", {setting: value}, message)
            for setting, value, message in [
                ("tokenizer_class", 3, "tokenizer_class"),
                ("tokenizer_class", "LukeTokenizer", "LukeTokenizer"),
                ("tokenizer_class", "T5Tokenizer", "spiece.model"),
                ("add_prefix_space", "yes", "'yes'"),
                ("bos_token", 3, "bos_token"),
                ("bos_token", {"content": 3}, "bos_token"),
                ("extra_special_tokens", "<a>", "extra_special_tokens"),
                ("additional_special_tokens", {"a": 1}, "additional_special_tokens"),
                ("added_tokens_decoder", [], "added_tokens_decoder"),
                ("added_tokens_decoder", {"x": added("a")}, "'x'"),
                ("added_tokens_decoder", {"9" * 99: added("a")}, "999"),
                ("added_tokens_decoder", {"9": {"content": "a", "lstrip": 2}}, "lstrip"),
                ("fix_mistral_regex", True, "fix_mistral_regex"),
                ("fast_tokenizer_files", ["a.json"], "fast_tokenizer_files"),
            ]
        ),
    ],
)
def test_unreadable_settings_are_named(name, content, message, vocabularies, tmp_path):
    folder = write(tmp_path, vocabularies["roberta"], "opt")
    (folder / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_language_that_the_model_lacks_is_named(vocabularies, tmp_path):
    config = {"src_lang": "de_XX"}
    folder = write(tmp_path, vocabularies["mbart"], "mbart", tokenizer_config=config)
    with pytest.raises(DataError, match=r"src_lang.*de_XX"):
        load_tokenizer(folder)


def as_is(json_files, tmp_path, **parts):
    """Writes a `tokenizer.json` of which some parts are others."""
    content = json.loads(json_files("gpt2")["tokenizer.json"])
    content["model"] |= parts.pop("model", {})
    return write(tmp_path, {}, None, tokenizer=content | parts)


def test_merges_are_not_left_out_at_random(json_files, tmp_path):
    text = "The quick brown fox jumps over the lazy dog"
    usual = load_tokenizer(as_is(json_files, tmp_path / "a")).encode(text)
    random = load_tokenizer(as_is(json_files, tmp_path / "b", model={"dropout": 0.5}))
    assert [random.encode(text) for _ in range(9)] == [usual] * 9


def test_null_states_neither_a_class_nor_a_model(json_files, tmp_path):
    folder = as_is(json_files, tmp_path)
    usual = load_tokenizer(folder).encode("The quick brown fox")
    (folder / "config.json").write_text('{"tokenizer_class": null, "model_type": null}')
    assert load_tokenizer(folder).encode("The quick brown fox") == usual


PREPEND = {"type": "Prepend", "prepend": "x" * 200}
REPLACE = {"type": "Replace", "pattern": {"String": "o"}, "content": "oo"}


def doubling(kind):
    return {"type": "Sequence", kind: [REPLACE] * 40}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": doubling("normalizers")}, "normalizer"),
        ({"decoder": doubling("decoders")}, "decoder"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "1000000"),
        ({"normalizer": {"type": "Sequence", "normalizers": [PREPEND] * 500}}, "normalizer"),
        ({"model": {"vocab": {"a": 0, "b": 10**9}, "merges": []}}, "1000000000"),
        ({"added_tokens": [{"id": 10**9, **added("<tool>")}]}, "1000000000"),
        ({"added_tokens": ["<tool>"]}, "added_tokens"),
        (
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
            "tokenizer",
        ),
    ],
)
def test_bounds_of_tokenizer_json(parts, message, json_files, tmp_path):
    with pytest.raises(DataError) as caught:
        load_tokenizer(as_is(json_files, tmp_path, **parts))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ({"type": "WordLevel", "vocab": {}, "unk_token": "a"}, "PreTrainedTokenizerFast", "empty"),
        ({"vocab": {"a": 0}, "merges": []}, "T5Tokenizer", "tokenizer_class"),
    ],
)
def test_vocabularies_that_no_tokenizer_has(model, name, message, tmp_path):
    config = {"tokenizer_class": name}
    write(tmp_path, {}, None, tokenizer={"version": "1.0", "model": model}, tokenizer_config=config)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_an_expression_that_takes_too_many_steps_is_refused(json_files, tmp_path):
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    ours = load_tokenizer(as_is(json_files, tmp_path, pre_tokenizer=split))
    for encode in (ours.encode, ours.encode_batch):
        text = "a" * 40 + "b"
        with pytest.raises(DataError):
            encode(text if encode == ours.encode else [text])


NAMED = ["<unk>", "<pad>", "</s>", "a", "b", "\u2581", "\u2581a"]


@pytest.mark.parametrize("kind", ["unigram", "words", "wordpiece", "merges"])
@pytest.mark.parametrize("text", ["a </s> b", "</s>", "a</s>b<pad>", "b <pad>", "a b", ""])
def test_names_that_are_pieces_are_ordinary_text(kind, text, tmp_path):
    """The ids are those of a vocabulary in which the special tokens have other names."""

    def ids(names, folder):
        ids = {name: id for id, name in enumerate([*names, "<", "/s>", "ab"])}
        end = names[2]
        model = {
            "unigram": lambda: models.Unigram([(name, -float(id)) for name, id in ids.items()], 0),
            "words": lambda: models.WordLevel(ids, unk_token="<unk>"),
            "wordpiece": lambda: models.WordPiece(ids, unk_token="<unk>"),
            "merges": lambda: models.BPE(
                ids,
                [("a", "b")] + [("<", "/s>")] * (end == "</s>"),
                unk_token="<unk>",
                ignore_merges=True,
            ),
        }[kind]()
        backend = tokenizers.Tokenizer(model)
        if kind != "merges":
            backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(names[:3])
        backend.post_processor = processors.BertProcessing((end, 2), (names[1], 1))
        folder.mkdir()
        backend.save(str(folder / "tokenizer.json"))
        ours = load_tokenizer(folder)
        assert [ours.encode(text, False)] * 2 == ours.encode_batch([text, text])
        assert ours.encode(text) == [1, *ours.encode(text, False), 2]
        assert ours.decode([3, 2, 4], False).count(end) == 1
        return ours.encode_with_offsets(text)

    others = ["<unk>", "other pad", "other end", *NAMED[3:]]
    assert ids(NAMED, tmp_path / "named") == ids(others, tmp_path / "others")


@pytest.mark.parametrize("family", ["bert", "roberta", "deberta", "mbart", "gemma"])
@pytest.mark.parametrize("spaces", [{}, {"lstrip": True}, {"rstrip": True}])
def test_masks_in_a_text(family, spaces, vocabularies, tmp_path):
    """The mask includes the spaces that its folder says; other names are ordinary text."""
    contents = contents_for(family, "class")
    name = "[MASK]" if "bert" in family and family != "roberta" else "<mask>"
    contents["tokenizer_config"]["mask_token"] = typed(name, special=True, **spaces)
    folder = write(tmp_path, vocabularies[FAMILIES[family][0]], family, **contents)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in (f"the old {name} sat", name, f"the{name}old", f"{name}  {name} .", f" {name}"):
        assert ours.encode_with_mask(text) == theirs(text).input_ids
    ids = ours.encode_with_mask(f"a {theirs.eos_token or '[SEP]'} {name}")
    between = ids[len(ours.frame.before) : len(ids) - len(ours.frame.after)]
    assert named_in(theirs, between) == {ours.special_ids.mask}
