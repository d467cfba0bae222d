"""Searches as a folder's `generation_config.json` asks for them, against transformers' own."""

import json

import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.hf.generation_config import stored_request
from flaxzoo.models.hf.tensors.mapping import WeightsError

from ...support import marian

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

# As the published folders have it, but for the sizes.
PUBLISHED = {
    "_from_model_config": True,
    "bad_words_ids": [[marian.PAD]],
    "bos_token_id": 0,
    "decoder_start_token_id": marian.PAD,
    "eos_token_id": marian.EOS,
    "forced_eos_token_id": marian.EOS,
    "max_length": 13,
    "num_beams": 4,
    "pad_token_id": marian.PAD,
    "renormalize_logits": True,
    "transformers_version": "4.32.0.dev0",
}
ASKED = {
    "greedy": {"num_beams": 1},
    "as published": {},
    "everything": {
        "length_penalty": 0.4,
        "early_stopping": True,
        "renormalize_logits": False,
        "bad_words_ids": [[marian.PAD], [7], [marian.EOS], [5, 11], [8, 20, 4]],
        "suppress_tokens": [3, 9],
        "forced_eos_token_id": None,
        "max_new_tokens": 11,
        "num_return_sequences": 3,
        "temperature": 0.3,
    },
    # As BART's summarizers have it.
    "no repetition": {
        **{"min_length": 8, "no_repeat_ngram_size": 2, "num_beams": 3, "length_penalty": 2.0},
        **{"early_stopping": True, "renormalize_logits": False},
    },
    "greedy, each token once": {
        # The number of new tokens comes before the length.
        **{"num_beams": 1, "min_new_tokens": 5, "min_length": 9, "no_repeat_ngram_size": 1},
    },
}
LENGTHS = (9, 6, 4, 7)


def write(folder, name, fields):
    (folder / name).write_text(json.dumps(fields))


@pytest.fixture(scope="module")
def theirs():
    return marian.make(1, 0.3, eos_bias=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own flags
def test_the_same_tokens_and_scores(tmp_path, theirs, name):
    theirs.save_pretrained(tmp_path)
    write(tmp_path, "generation_config.json", PUBLISHED | ASKED[name])
    draw = np.random.RandomState(1)
    sources = [draw.randint(1, marian.PAD, n).tolist() for n in LENGTHS]
    ids = np.full((len(sources), max(LENGTHS)), marian.PAD)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    model = type(theirs).from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.generate(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(ids != marian.PAD).long(),
            output_scores=True,
            return_dict_in_generate=True,
        )
    request = stored_request(tmp_path)
    [eos_id] = request.eos_token_id
    ours, params = models.load(tmp_path)
    options = models.generation_arguments(tmp_path)
    tokens = models.generate(ours, params, ids, attention_mask=ids != marian.PAD, **options)
    assert tokens.tolist() == expected.sequences.tolist()
    assert tokens.tolist() == models.generate(ours, params, sources, **options).tolist()
    found = models.Generator(ours, params).search(sources, request)
    flat = [hypothesis for row in found for hypothesis in row]
    assert len(flat) == len(expected.sequences) == len(sources) * request.num_return_sequences
    for ours, row in zip(flat, expected.sequences[:, 1:].tolist(), strict=True):
        tokens = ours.tokens + [eos_id] * ours.ended
        assert tokens == row[: len(tokens)]
        assert set(row[len(tokens) :]) <= {marian.PAD}
    if request.num_beams > 1:
        scores = [hypothesis.score for hypothesis in flat]
        np.testing.assert_allclose(scores, expected.sequences_scores, atol=1e-4)


def test_older_folders_say_it_in_their_config(tmp_path):
    fields = {"model_type": "marian", "d_model": 24, "vocab_size": marian.V}
    write(tmp_path, "config.json", fields | PUBLISHED)
    settings = stored_request(tmp_path)
    write(tmp_path, "config.json", fields)
    write(tmp_path, "generation_config.json", PUBLISHED)
    assert settings == stored_request(tmp_path)
    assert settings == models.GenerationRequest(
        num_beams=4,
        renormalize_logits=True,
        max_new_tokens=12,
        bad_words_ids=((marian.PAD,),),
        decoder_start_token_id=marian.PAD,
        eos_token_id=(marian.EOS,),
        forced_eos_token_id=marian.EOS,
        pad_token_id=marian.PAD,
    )


def test_missing_settings_equal_transformers_defaults(tmp_path):
    write(tmp_path, "config.json", {"model_type": "marian"})
    assert stored_request(tmp_path) == models.GenerationRequest(
        max_new_tokens=20,
        decoder_start_token_id=58100,
        eos_token_id=(0,),
        forced_eos_token_id=0,
        pad_token_id=58100,
    )
    write(tmp_path, "generation_config.json", {"bos_token_id": 4, "eos_token_id": [5]})
    assert stored_request(tmp_path) == models.GenerationRequest(
        max_new_tokens=20, decoder_start_token_id=4, eos_token_id=(5,)
    )
    assert stored_request(tmp_path, longest=16).max_new_tokens == 15


@pytest.mark.parametrize(
    ("fields", "shortest"),
    [
        ({"min_length": 9}, 8),
        ({"min_length": 9, "min_new_tokens": None, "no_repeat_ngram_size": None}, 8),
        ({"min_length": 9, "min_new_tokens": 5}, 5),
        ({"min_length": 9, "min_new_tokens": 0}, 0),
        ({"min_length": None}, 0),
    ],
)
def test_a_number_of_new_tokens_comes_before_a_shortest_length(tmp_path, fields, shortest):
    write(tmp_path, "config.json", {"model_type": "marian"})
    write(tmp_path, "generation_config.json", PUBLISHED | fields)
    assert stored_request(tmp_path).min_new_tokens == shortest


REFUSED = {
    "sampling": ({"do_sample": True}, "do_sample True"),
    "an empty word": ({"bad_words_ids": [[]]}, r"bad_words_ids \[\[\]\]"),
    "no list of words": ({"bad_words_ids": [3]}, r"bad_words_ids \[3\]"),
    "no list at all": ({"bad_words_ids": 3}, "bad_words_ids 3"),
    "an end that never comes": ({"suppress_tokens": [marian.EOS]}, r"suppress_tokens \[0\]"),
    "two ends": ({"eos_token_id": [0, 2]}, r"eos_token_id \[0, 2\]"),
    "no end": ({"eos_token_id": None}, "eos_token_id None"),
    "another forced end": (
        {"forced_eos_token_id": 3},
        "forced_eos_token_id must .*eos_token_id 0, got 3",
    ),
    "forced words": ({"forced_bos_token_id": "en"}, "forced_bos_token_id 'en'"),
    "shortest": ({"min_new_tokens": -3}, "min_new_tokens must be .* got -3"),
    "repetitions": ({"repetition_penalty": 1.2}, "repetition_penalty 1.2"),
    "n-grams": ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size 1.5"),
    "groups": ({"num_beam_groups": 2}, "num_beam_groups 2"),
    "early": ({"early_stopping": "soon"}, "early_stopping 'soon'"),
    "beams in words": ({"num_beams": "four"}, "num_beams 'four' must be a whole number"),
    "no beam": ({"num_beams": 0}, "num_beams must be .* got 0"),
    "more than were kept": ({"num_return_sequences": 9}, "num_return_sequences 9"),
    "unknown": ({"mirostat": 1}, "mirostat"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_in_a_line(tmp_path, fields, message):
    write(tmp_path, "config.json", {"model_type": "marian"})
    write(tmp_path, "generation_config.json", PUBLISHED | fields)
    with pytest.raises(WeightsError, match=f"generation_config.json.*{message}") as refused:
        stored_request(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[]", "is a JSON list, not an object")]
)
def test_broken_files_are_named(tmp_path, text, message):
    write(tmp_path, "config.json", {"model_type": "marian"})
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(WeightsError, match=f"generation_config.json {message}"):
        stored_request(tmp_path)
