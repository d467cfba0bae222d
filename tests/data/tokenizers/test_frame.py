"""The frame of a tokenizer against what the tokenizers library and transformers make of a text."""

import json

import pytest
import tokenizers
from flaxzoo.data import DataError, load_tokenizer
from flaxzoo.data.tokenizers.base import SpecialIds
from flaxzoo.data.tokenizers.frame import Frame
from flaxzoo.data.tokenizers.huggingface import HuggingFaceTokenizer
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

VOCABULARY = {"<s>": 0, "<pad>": 1, "</s>": 2, "en_XX": 3, "a": 4, "b": 5, "c": 6}
SPECIAL = [("<s>", 0), ("</s>", 2), ("en_XX", 3)]


def template(single, pair):
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=SPECIAL)


PROCESSORS = {
    "none": None,
    "byte level": processors.ByteLevel(trim_offsets=False),
    "bert": processors.BertProcessing(("</s>", 2), ("<s>", 0)),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 0)),
    "mbart": template("$A </s> en_XX", "$A $B </s> en_XX"),
    "mbart-50": template("en_XX $A </s>", "en_XX $A $B </s>"),
    "t5": template("$A </s>", "$A </s> $B </s>"),
    "llama": template("<s> $A", "<s> $A <s>:1 $B:1"),
    "two before": template("<s> en_XX $A", "<s> en_XX $A </s> $B </s>"),
    "sequence": processors.Sequence(
        [processors.ByteLevel(), template("<s>:0 $A:0", "<s>:0 $A:0 $B:1 </s>:1")]
    ),
}


def tokenizer_with(processor):
    backend = tokenizers.Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        backend.post_processor = processor
    return HuggingFaceTokenizer(backend, SpecialIds(bos=0, eos=2, pad=1)), backend


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(("one", "other"), [("a b", "c"), ("", "b b"), ("a", ""), ("", "")])
def test_it_is_that_of_the_library(name, one, other):
    ours, backend = tokenizer_with(PROCESSORS[name])
    right = backend.encode(one)
    framed = ours.frame.join(ours.encode(one, add_special_tokens=False))
    assert (framed.ids, framed.types) == (right.ids, right.type_ids)
    assert framed.ids == ours.encode(one)
    right = backend.encode(one, other)
    texts = [ours.encode(text, add_special_tokens=False) for text in (one, other)]
    framed = ours.frame.join(*texts)
    assert (framed.ids, framed.types) == (right.ids, right.type_ids)
    for start, text, number in zip(framed.starts, texts, (0, 1), strict=True):
        assert framed.ids[start : start + len(text)] == text
        assert [i for i, owner in enumerate(right.sequence_ids) if owner == number] == list(
            range(start, start + len(text))
        )
    assert ours.frame.pair.num_added == len(right.ids) - sum(map(len, texts))


@pytest.mark.parametrize(("single", "pair"), [("$A", "$B $A"), ("$A $A", "$A $B")])
def test_other_orders_are_refused(single, pair):
    ours, _ = tokenizer_with(template(single, pair))
    with pytest.raises(DataError, match="template"):
        assert ours.frame


def test_a_template_that_fails_is_named():
    """The library frames a pair only by the first template of a sequence, and panics."""
    one = template("<s> $A", "<s> $A $B")
    ours, _ = tokenizer_with(processors.Sequence([one, template("$A </s>", "$A $B </s>")]))
    with pytest.raises(DataError, match="post_processor"):
        assert ours.frame


def test_the_tokens_before_a_document():
    for name, before in {"llama": (0,), "two before": (0, 3), "none": (0,), "t5": (0,)}.items():
        assert tokenizer_with(PROCESSORS[name])[0].begins_document == before
    assert Frame() == tokenizer_with(None)[0].frame


@pytest.mark.parametrize("direction", [None, "Left", "Right"])
def test_sides_of_tokenizer_json(direction, tmp_path):
    """A file of an older version of the library states no direction of truncation."""
    _, backend = tokenizer_with(None)
    backend.enable_truncation(4)
    backend.enable_padding()
    content = json.loads(backend.to_str())
    if direction is None:
        del content["truncation"]["direction"]
    else:
        content["truncation"]["direction"] = content["padding"]["direction"] = direction
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    side = (direction or "Right").lower()
    settings = ours.batch_settings
    assert settings is not None
    assert settings.truncation_side == theirs.truncation_side == side
    assert settings.padding_side == theirs.padding_side == side
