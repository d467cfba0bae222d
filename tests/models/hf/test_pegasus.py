"""Pegasus against a tiny random model of transformers: answers, gradients, and the way back."""

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.hf.save_weights import write_weights

from ...support import marian
from ...support.parity import note_answers, note_tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLASSES = ("PegasusForConditionalGeneration", "PegasusModel")
FIELDS = {**marian.SIZES, "activation_function": "relu"}
DRAW = np.random.RandomState(0)
IDS = {
    "input_ids": DRAW.randint(1, marian.PAD, (3, 9)),
    "attention_mask": (np.arange(9) < np.array([[9], [6], [4]])).astype(int),
    "decoder_input_ids": DRAW.randint(1, marian.PAD, (3, 7)),
}
GIVEN = {name: torch.from_numpy(x) for name, x in IDS.items()}


def make(name, folder):
    """A torch model with no parameter at its initial value, and itself saved and read as ours."""
    torch.manual_seed(0)
    theirs = getattr(transformers, name)(transformers.PegasusConfig(**FIELDS)).eval()
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            if "embed_positions" not in path:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    return theirs, *models.load(folder)


def answer(theirs):
    """Logits, where there are any, and hidden states of the last layer."""
    with torch.no_grad():
        output = theirs(**GIVEN, output_hidden_states=True)
    return output.get("logits"), output.decoder_hidden_states[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_answers_in_and_out(tmp_path, name):
    theirs, model, params = make(name, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model.config, params)
    # A body leaves with logits of its table.
    cls = getattr(transformers, CLASSES[0])
    again, info = cls.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    ours = jax.jit(model.apply)({"params": params}, **IDS)
    for direction, torchs in {"import": theirs, "export": again.eval()}.items():
        logits, hidden = answer(torchs)
        np.testing.assert_allclose(ours.last_hidden_state, hidden, atol=1e-5)
        if name != CLASSES[0]:
            note_answers(theirs, direction, ours.last_hidden_state, hidden)
            continue
        np.testing.assert_allclose(ours.logits, logits, atol=1e-5)
        note_answers(theirs, direction, ours.logits, logits)
    _, back = models.load(tmp_path / "ours")
    back = {path: back[path] for path in params}  # without the bias of logits that it was given
    assert jax.tree.all(jax.tree.map(np.array_equal, back, params))


@pytest.mark.slow
def test_every_gradient(tmp_path):
    theirs, model, params = make(CLASSES[0], tmp_path)
    ours, expected = marian.both_gradients(theirs, model, params, IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own flags
def test_tokens(tmp_path, beams):
    theirs, model, params = make(CLASSES[0], tmp_path)
    asked = {"num_beams": beams, "max_new_tokens": 12, "eos_token_id": marian.EOS}
    with torch.no_grad():
        expected = theirs.generate(
            input_ids=GIVEN["input_ids"], attention_mask=GIVEN["attention_mask"], **asked
        )
    ours = models.generate(
        model,
        params,
        IDS["input_ids"],
        attention_mask=IDS["attention_mask"],
        decoder_start_token_id=marian.PAD,
        pad_token_id=marian.PAD,
        **asked,
    )
    np.testing.assert_array_equal(ours, expected)
    note_tokens(theirs)
