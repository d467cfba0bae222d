"""The Transformer against tiny random Marian models of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models

from ..support import marian
from ..support.parity import note_answers, note_gradients, note_tokens
from ..support.requests import beams

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def inputs():
    draw = np.random.RandomState(0)
    mask = (np.arange(9) < np.array([9, 6, 4])[:, None]).astype(np.int32)
    return {
        "input_ids": draw.randint(1, marian.PAD, (3, 9)).astype(np.int32),
        "attention_mask": mask,
        "decoder_input_ids": draw.randint(1, marian.PAD, (3, 7)).astype(np.int32),
    }


@pytest.fixture
def pair(tmp_path):
    """A torch model, and itself saved and read as ours."""

    def pair(**fields):
        theirs = marian.make(**fields)
        theirs.save_pretrained(tmp_path)
        return theirs, *models.load(tmp_path)

    return pair


def as_torch(given):
    return {name: torch.from_numpy(x).long() for name, x in given.items()}


@pytest.mark.parametrize("shape", marian.SHAPES)
def test_logits_and_hidden_states(pair, shape):
    theirs, model, params = pair(**marian.SHAPES[shape])
    given = inputs()
    with torch.no_grad():
        expected = theirs(**as_torch(given), output_hidden_states=True)
    ours = jax.jit(model.apply)({"params": params}, **given)
    np.testing.assert_allclose(ours.logits, expected.logits, atol=1e-5)
    note_answers(theirs, "import", ours.logits, expected.logits)
    real = given["attention_mask"][..., None]
    np.testing.assert_allclose(
        ours.encoder_last_hidden_state * real,
        expected.encoder_last_hidden_state.numpy() * real,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        ours.last_hidden_state, expected.decoder_hidden_states[-1], atol=1e-5
    )


def test_attention_weights(pair):
    theirs, model, params = pair()
    theirs.set_attn_implementation("eager")
    given = inputs()
    given["attention_mask"][:] = 1  # what padding looks at is nobody's business
    with torch.no_grad():
        expected = theirs(**as_torch(given), output_attentions=True)
    ours = model.apply({"params": params}, **given, output_attentions=True)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        np.testing.assert_allclose(
            getattr(ours, name), torch.stack(getattr(expected, name)), atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("shape", marian.SHAPES)
def test_every_gradient(pair, shape):
    theirs, model, params = pair(**marian.SHAPES[shape])
    ours, expected = marian.both_gradients(theirs, model, params, inputs())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, expected)
    note_gradients(theirs, "gradients", ours, expected)
    largest = jax.tree.map(lambda x: float(jnp.abs(x).max()), ours)
    assert largest["output_bias"] > 1e-2
    assert largest["token_embedding"]["embedding"] > 1e-2


SEARCHES = {  # (beams, early_stopping, α)
    "greedy": (1, "never", 1.0),
    "exact": (4, "never", 1.0),
    "heuristic": (4, False, 1.0),
    "first": (4, True, 0.6),
    "shorter is better": (3, False, -0.5),
}
LENGTHS, LONGEST = (9, 6, 4, 7), 14


@pytest.fixture(scope="module", params=[0, 1])
def searched(request, tmp_path_factory):
    """A model whose targets are of many lengths, its translator, and sources to translate."""
    folder = tmp_path_factory.mktemp("marian")
    theirs = marian.make(request.param, 0.3, eos_bias=3.0)
    theirs.save_pretrained(folder)
    translator = models.Generator(*models.load(folder))
    draw = np.random.RandomState(request.param)
    return theirs, translator, [draw.randint(1, marian.PAD, n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("forced_eos", [None, marian.EOS], ids=["", "forced end"])
@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own flags
def test_search(searched, name, forced_eos):
    theirs, translator, sources = searched
    number, early_stopping, alpha = SEARCHES[name]
    ids = np.full((len(sources), max(LENGTHS)), marian.PAD)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    with torch.no_grad():
        expected = theirs.generate(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(np.arange(9) < np.array(LENGTHS)[:, None]).long(),
            num_beams=number,
            num_return_sequences=number,
            early_stopping=early_stopping,
            length_penalty=alpha,
            max_new_tokens=LONGEST,
            do_sample=False,
            bad_words_ids=[[marian.PAD]],
            forced_eos_token_id=forced_eos,
            output_scores=True,
            return_dict_in_generate=True,
        )
    ours = translator.search(
        sources,
        beams(
            num_beams=number,
            num_return_sequences=number,
            early_stopping=early_stopping,
            length_penalty=alpha,
            penalty_form="power",
            max_new_tokens=LONGEST,
            bad_words_ids=((marian.PAD,),),
            decoder_start_token_id=marian.PAD,
            eos_token_id=(marian.EOS,),
            forced_eos_token_id=forced_eos,
        ),
    )
    flat = [hypothesis for row in ours for hypothesis in row]
    assert [h.tokens + [marian.EOS] * h.ended for h in flat] == [
        _without_padding(row) for row in expected.sequences[:, 1:].tolist()
    ]
    note_tokens(theirs)
    if number > 1:
        scores = [h.score for h in flat]
        np.testing.assert_allclose(scores, expected.sequences_scores, atol=1e-4)


def _without_padding(tokens):
    while tokens[-1] == marian.PAD:
        tokens = tokens[:-1]
    return tokens


def test_searched_targets_have_many_lengths(searched):
    _, translator, sources = searched
    ids = {"decoder_start_token_id": marian.PAD, "eos_token_id": (marian.EOS,)}
    request = beams(num_return_sequences=4, max_new_tokens=LONGEST, **ids)
    found = translator.search(sources, request)
    assert len({len(h.tokens) for row in found for h in row}) >= 4
