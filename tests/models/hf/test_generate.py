"""`models.generate` of causal models, against transformers' own under the same names."""

import functools
import itertools
import json
import warnings
from typing import Any

import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.decoding.generator import check_seed
from flaxzoo.models.hf.generate import as_in_generate
from flaxzoo.models.hf.tensors.mapping import WeightsError

from ...support.parity import note_tokens
from ...support.requests import beams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, P = 41, 32
PAD, EOS = 0, 5
SIZES = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": EOS}
BERT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": P,
}
GPT = {"n_positions": P, "n_embd": 24, "n_layer": 2, "n_head": 3}
FAMILIES = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", GPT),
    "openai-gpt": ("OpenAIGPT", "OpenAIGPTLMHeadModel", GPT),
    "bert": ("Bert", "BertLMHeadModel", BERT | {"is_decoder": True}),
    "roberta": ("Roberta", "RobertaForCausalLM", BERT | {"is_decoder": True}),
}
LENGTHS = (3, 9, 1, 6)


def make(family, folder):
    """A torch model in a folder, which ends now and then; and ours."""
    name, model, sizes = FAMILIES[family]
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    theirs = getattr(transformers, model)(config).eval()
    theirs.generation_config = transformers.GenerationConfig()
    with torch.no_grad():
        for parameter in theirs.parameters():
            # Mostly of the positions, so that it does not say the same again and again.
            parameter.add_((1.0 if len(parameter) == P else 0.15) * torch.randn_like(parameter))
        # What it often writes becomes its end.
        options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12}
        written = reference(theirs, *padded(), **options).sequences[:, max(LENGTHS) :]
        often = int(written.flatten().bincount().argsort()[-3])
        table = theirs.get_input_embeddings().weight
        table[[EOS, often]] = table[[often, EOS]]
    theirs.save_pretrained(folder)
    return theirs, *models.load(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(family)`: its torch model and ours."""
    return functools.cache(lambda family: make(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def gpt2(made):
    return made("gpt2")


def dealt(names, for_all=()):
    """Pairs of a family and a name: the first family has all, the others share them out.

    A search knows nothing of the model but its logits, and each pair compiles a program.
    """
    first, *others = FAMILIES
    rest = [name for name in names if name not in for_all]
    turns = zip(itertools.cycle(others), rest, strict=False)
    return [*itertools.product([first], names), *itertools.product(others, for_all), *turns]


def rows():
    draw = np.random.RandomState(0)
    return [draw.randint(6, V, length).tolist() for length in LENGTHS]


def padded():
    """The same prompts, padded on the left, and where they are."""
    ids = np.full((len(LENGTHS), max(LENGTHS)), PAD)
    for row, prompt in zip(ids, rows(), strict=True):
        row[-len(prompt) :] = prompt
    return ids, (ids != PAD).astype(int)


def reference(theirs, ids, mask, **options):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about their own flags
        return theirs.generate(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )


ASKED = {
    "greedy": {"max_new_tokens": 11, "pad_token_id": PAD},
    "greedy, no end": {"max_new_tokens": 6, "eos_token_id": None},
    "greedy, restrained": {
        "max_new_tokens": 13,
        "repetition_penalty": 1.6,
        "bad_words_ids": [[9], [EOS], [12, 30], [7, 8, 6]],
        "suppress_tokens": [14],
        "forced_eos_token_id": EOS,
    },
    "up to a length": {"max_length": 13, "num_beams": 3},
    "by default": {"num_beams": 2},
    "beams": {"num_beams": 4, "max_new_tokens": 12, "num_return_sequences": 4, "pad_token_id": PAD},
    "long ones": {
        "num_beams": 4,
        "max_new_tokens": 12,
        "length_penalty": 2.5,
        "early_stopping": "never",
        "num_return_sequences": 2,
        "pad_token_id": 3,
    },
    "short ones": {
        "num_beams": 4,
        "max_new_tokens": 12,
        "length_penalty": -1.0,
        "early_stopping": True,
        "num_return_sequences": 3,
    },
    "several ends": {
        "num_beams": 3,
        "max_new_tokens": 9,
        "eos_token_id": [EOS, 11, 20],
        "forced_eos_token_id": 11,
        "num_return_sequences": 3,
    },
    "no end": {"num_beams": 3, "max_new_tokens": 5, "eos_token_id": None},
    "restrained": {
        "num_beams": 4,
        "max_new_tokens": 10,
        "bad_words_ids": [[9], [EOS], [12, 30], [7, 8, 6]],
        "suppress_tokens": [14, 33],
        "renormalize_logits": True,
        "forced_eos_token_id": EOS,
        "num_return_sequences": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), dealt(ASKED, for_all=("greedy", "beams")))
def test_the_same_array(made, family, name):
    theirs, model, params = made(family)
    ids, mask = padded()
    options = {"eos_token_id": EOS} | ASKED[name]
    expected = reference(theirs, ids, mask, **options).sequences.numpy()
    ours = models.generate(model, params, ids, attention_mask=mask, **options)
    assert ours.dtype == np.int32
    np.testing.assert_array_equal(ours, expected)
    note_tokens(theirs)
    if options.get("pad_token_id") == PAD:
        ragged = models.generate(model, params, rows(), **options)
        np.testing.assert_array_equal(ragged, expected)
        np.testing.assert_array_equal(models.generate(model, params, ids, **options), expected)


ENDINGS = {
    "first": (True, 1.0),
    "short": (False, -1.0),
    "never": ("never", 0.7),
    "long": (False, 2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ending"), dealt(ENDINGS))
def test_the_same_scores(made, family, ending):
    theirs, model, params = made(family)
    early_stopping, length_penalty = ENDINGS[ending]
    options = {"num_beams": 4, "early_stopping": early_stopping, "length_penalty": length_penalty}
    number = {"max_new_tokens": 12, "num_return_sequences": 4, "eos_token_id": EOS}
    expected = reference(theirs, *padded(), **options, **number, pad_token_id=PAD)
    request = beams(
        **options,
        penalty_form="power",
        num_return_sequences=4,
        max_new_tokens=12,
        eos_token_id=(EOS,),
    )
    model = as_in_generate(model)
    found = models.Generator(model, params).search(rows(), request)
    flat = [hypothesis for row in found for hypothesis in row]
    for hypothesis, sequence in zip(flat, expected.sequences.tolist(), strict=True):
        tokens = hypothesis.tokens + [EOS] * hypothesis.ended
        assert sequence[max(LENGTHS) :][: len(tokens)] == tokens
    scores = [hypothesis.score for hypothesis in flat]
    np.testing.assert_allclose(scores, expected.sequences_scores, atol=1e-4)
    if length_penalty <= 1:  # else the longest win
        assert len({len(hypothesis.tokens) for hypothesis in flat}) > 2


@pytest.mark.slow
def test_searches_of_banded_attention_score_as_a_forward_pass_does(tiny):
    model = tiny(local_window=3, num_layers=3)
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]
    request = beams(
        num_beams=3,
        num_return_sequences=3,
        length_penalty=0.0,
        max_new_tokens=7,
        eos_token_id=(28,),
    )
    found = models.Generator(model.model, model.params).search(prompts, request)
    for prompt, row in zip(prompts, found, strict=True):
        for hypothesis in row:
            tokens = hypothesis.tokens + [28] * hypothesis.ended
            ids = np.zeros((1, 16), int)
            ids[0, : len(prompt) + len(tokens)] = prompt + tokens
            scores = torch.tensor(model.logits(input_ids=ids)[0]).log_softmax(-1)
            expected = sum(scores[len(prompt) + i - 1, token] for i, token in enumerate(tokens))
            assert hypothesis.log_probability == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.slow
def test_a_search_ends_where_the_model_does_and_greedy_rows_go_on(tiny):
    model = tiny()  # of 16 positions
    prompts = [list(range(1, 14)), [4]]
    searched = models.generate(model.model, model.params, prompts, num_beams=2, max_new_tokens=25)
    alone = models.generate(model.model, model.params, prompts[:1], num_beams=2, max_new_tokens=4)
    assert searched.shape == (2, 13 + 16)
    assert searched[0, :17].tolist() == alone[0].tolist()
    assert models.generate(model.model, model.params, prompts, max_new_tokens=25).shape == (2, 38)


def test_padding_may_stand_on_either_side(gpt2):
    _, *ours = gpt2
    left, mask = padded()
    right = np.array([np.roll(row, -n) for row, n in zip(left, (mask == 0).sum(1), strict=True)])
    options = {"num_beams": 3, "max_new_tokens": 7, "eos_token_id": EOS}
    expected = models.generate(*ours, left, attention_mask=mask, **options)
    for given in ({"attention_mask": right != PAD}, {"pad_token_id": PAD}):
        found = models.generate(*ours, right, **given, **options)
        np.testing.assert_array_equal(found[:, :9], right)
        np.testing.assert_array_equal(found[:, 9:], expected[:, 9:])


@pytest.mark.slow
def test_drawn_tokens(gpt2):
    _, *ours = gpt2
    options = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3}

    def drawn(**more):
        return models.generate(*ours, rows(), **options | more)[:, max(LENGTHS) :].tolist()

    assert drawn() == drawn(top_k=50, top_p=1.0, temperature=1.0)  # more than there are
    assert drawn() == drawn(top_k=0) == drawn(top_k=None)
    assert drawn() != drawn(seed=1)
    assert len({tuple(row) for row in drawn()}) == 12
    greedy = models.generate(*ours, rows(), max_new_tokens=8)[:, max(LENGTHS) :].tolist()
    for only in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-5}):
        assert drawn(**only)[::3] == greedy
    unwanted = {token for row in drawn() for token in row[:4]} - {7}
    others = drawn(suppress_tokens=sorted(unwanted))
    assert not unwanted & {token for row in others for token in row}


FILES = {
    "greedy": {"pad_token_id": PAD, "temperature": 0.7, "max_new_tokens": 9},
    "beams": {"num_beams": 3, "length_penalty": 1.7, "bad_words_ids": [[12]], "max_length": 15},
    "none": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_settings_of_a_folder(tmp_path, name):
    theirs, *ours = make("gpt2", tmp_path)
    file = tmp_path / "generation_config.json"
    file.unlink()
    if FILES[name] is not None:
        file.write_text(json.dumps({"eos_token_id": EOS} | FILES[name]))
    theirs = type(theirs).from_pretrained(tmp_path).eval()
    ids, mask = padded()
    expected = reference(theirs, ids, mask).sequences.numpy()
    options = models.generation_arguments(tmp_path)
    np.testing.assert_array_equal(
        models.generate(*ours, ids, attention_mask=mask, **options), expected
    )


def test_folders_of_before_there_was_another_file(tmp_path):
    def options(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return models.generation_arguments(tmp_path)

    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    assert options(model_type="gpt2", n_embd=24) == ends
    assert options(model_type="gpt2", eos_token_id=None, num_beams=2) == {
        "bos_token_id": 50256,
        "num_beams": 2,
    }
    assert options(model_type="openai-gpt", use_cache=True, do_sample=True) == {"do_sample": True}
    assert options(model_type="pegasus")["decoder_start_token_id"] == 0
    with pytest.raises(WeightsError, match="generation settings"):
        options(model={})
    with pytest.raises(WeightsError, match=r"config.json: no_repeat_ngram_size 3 "):
        options(model_type="gpt2", no_repeat_ngram_size=3)


REFUSED = {
    "unknown": ({"max_tokens": 3}, "'max_tokens': .*max_new_tokens"),
    "unlike any": ({"foo": 3}, "'foo': .*bad_words_ids, bos_token_id, dec"),
    "n-grams": ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size 2 "),
    "drawn beams": ({"num_beams": 2, "do_sample": True}, "do_sample True"),
    "beams that repeat": ({"num_beams": 2, "repetition_penalty": 1.5}, "repetition_penalty 1.5"),
    "another way to draw": ({"do_sample": True, "typical_p": 0.1}, "typical_p 0.1"),
    "cold": ({"do_sample": True, "temperature": -1.0}, "temperature .*got -1.0"),
    "greedy ones": ({"num_return_sequences": 2}, "num_return_sequences 2 .*num_beams 1"),
    "more than beams": ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences 3"),
    "no beams": ({"num_beams": 0}, "num_beams .*got 0"),
    "none": ({"max_new_tokens": 0}, "max_new_tokens .*got 0"),
    "no room": ({"max_length": 9}, "max_length 9 .*9 tokens"),
    "an end elsewhere": (
        {"forced_eos_token_id": 7},
        "forced_eos_token_id must .*eos_token_id 5, got 7",
    ),
    "two ends at the end": ({"forced_eos_token_id": [5, 7]}, r"forced_eos_token_id \[5, 7\]"),
    "no token": (
        {"eos_token_id": 41, "forced_eos_token_id": 41, "num_beams": 2},
        "eos_token_id 41 .*vocabulary",
    ),
    "no words": ({"bad_words_ids": [[]]}, r"^models.generate: bad_words_ids \[\[\]\]"),
    "hot beams": ({"num_beams": 2, "top_p": 7.0}, r"top_p.* 7\.0"),
    "no such word": ({"bad_words_ids": [[3, 41]]}, r"banned sequence \[3, 41\]"),
    "nothing left": ({"suppress_tokens": [*range(V)], "eos_token_id": None}, "41 tokens"),
    "more than tokens": ({"return_dict_in_generate": True}, "return_dict_in_generate True"),
    "a forced beginning": ({"forced_bos_token_id": 3}, "forced_bos_token_id 3"),
    "a mask of one row": ({"attention_mask": [1, 1]}, "attention_mask"),
    "a mask of another": ({"attention_mask": [[1], [1]]}, "attention_mask"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_in_a_line(gpt2, options, message):
    _, *ours = gpt2
    with pytest.raises(ValueError, match=message) as refused:
        models.generate(*ours, rows(), **{"eos_token_id": EOS} | options)
    assert "\n" not in str(refused.value)


WRONG = 1.9, True, "3", float("nan"), np.float32(2)


@pytest.mark.parametrize(
    "name", "max_new_tokens max_length num_beams num_return_sequences top_k".split()
)
@pytest.mark.parametrize("value", [*WRONG, -1], ids=repr)
def test_a_count_is_a_whole_number(gpt2: Any, name: str, value: Any):
    _, *ours = gpt2
    with pytest.raises(UserError, match=f"{name} .*{float(value) if value == 2 else value}"):
        models.generate(*ours, rows(), **{"do_sample": name == "top_k", name: value})


@pytest.mark.parametrize("seed", [*WRONG, -1, 2**32], ids=repr)
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(UserError, match="seed"):
        check_seed(seed)


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id", "forced_eos_token_id"])
@pytest.mark.parametrize("value", [*WRONG[:4], -1, V, 10**12, [3, V], [1.9], [True]], ids=repr)
def test_a_token_is_a_whole_number_in_the_vocabulary(gpt2: Any, name: str, value: object):
    _, *ours = gpt2
    for number in (1, 2):
        with pytest.raises(UserError, match=name.removesuffix("_token_id")):
            models.generate(*ours, rows(), **{name: value, "num_beams": number})


@pytest.mark.parametrize("name", ["bad_words_ids", "suppress_tokens"])
@pytest.mark.parametrize("value", [1.9, True, -1, V], ids=repr)
def test_banned_tokens_are_whole_numbers_in_the_vocabulary(gpt2: Any, name: str, value: object):
    _, *ours = gpt2
    tokens = [[3, value]] if name == "bad_words_ids" else [3, value]
    with pytest.raises(UserError, match=f"({name}|bad_words_ids|banned).*{value}"):
        models.generate(*ours, rows(), **{name: tokens})


@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), True])
def test_a_factor_is_a_finite_number(gpt2: Any, name: str, value: object):
    _, *ours = gpt2
    with pytest.raises(UserError, match=f"{name}.* {value}"):
        models.generate(*ours, rows(), **{"do_sample": True, name: value})


def test_integers_of_numpy_are_whole_numbers(gpt2):
    _, *ours = gpt2
    given = [[np.int64(token) for token in row] for row in rows()]
    options = {"max_new_tokens": 3, "eos_token_id": 5, "num_beams": 2}
    wrapped = {name: np.int32(value) for name, value in options.items()}
    expected = models.generate(*ours, rows(), **options)
    np.testing.assert_array_equal(models.generate(*ours, given, **wrapped), expected)


@pytest.mark.parametrize("mask", [3, "ab", [[2]], [[0.5]], [["1"]], [[None]]])
def test_a_mask_is_of_ones_and_zeros(gpt2, mask):
    _, *ours = gpt2
    with pytest.raises(UserError, match="attention_mask"):
        models.generate(*ours, [[3]], attention_mask=mask)


def test_published_end_tokens_beyond_the_vocabulary_end_nothing(tmp_path):
    config = {"model_type": "gpt2", "vocab_size": V}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = {"eos_token_id": [5, V], "pad_token_id": -1}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    assert models.generation_arguments(tmp_path) == {"eos_token_id": [5]}


@pytest.mark.parametrize(
    "ids",
    [
        [], [3, 4], 7, "ab", [[3], []], [[V]], [[-1]], [[1.9]], [[True]], [["3"]], [[None]],
        [[[3]]], [[3], 4], [[float("nan")]], [[10**12]], np.ones((1, 2)), np.ones((1, 2), bool),
    ],
    ids=repr,
)  # fmt: skip
def test_rows_that_are_none(gpt2, ids):
    _, *ours = gpt2
    for options in ({}, {"num_beams": 2}):
        with pytest.raises(UserError, match="input_ids"):
            models.generate(*ours, ids, **options)


def test_a_model_without_a_generating_head_is_refused(tiny):
    model = tiny(family="bert", head="masked_lm")
    with pytest.raises(ValueError, match=r"masked_lm .*seq2seq_lm"):
        models.generate(model.model, model.params, [[3]])


def test_a_mask_for_each_token_needs_positions(tiny):
    for model in (tiny(), tiny(family="bert", head="causal_lm")):
        with pytest.raises(ValueError, match="position_ids"):
            model(input_ids=np.zeros((1, 2), int), attention_mask=np.ones((1, 2, 2), bool))
