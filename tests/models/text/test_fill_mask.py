"""Words compared for a mask, on a model that has learned a sentence by heart."""

import json
import math

import jax
import numpy as np
import optax
import pytest
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli.main import main

pytestmark = pytest.mark.usefixtures("on_one_device")

SIZES = {"max_length": 16, "num_layers": 1, "d_model": 16, "num_heads": 2}
PIECES = [*WORDPIECE_SPECIALS, *"the train pulled into station pea ##nut .".split()]


@pytest.fixture(scope="module")
def stations():
    """A small BERT that has learned one sentence by heart."""
    tokenizer = wordpiece(PIECES, lowercase=True)
    config = models.BertConfig(
        vocab_size=len(PIECES), d_ff=32, head="masked_lm", dropout_rate=0.0, **SIZES
    )
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    whole = np.array([tokenizer.encode("the train pulled into the station .")])
    masked = whole.repeat(whole.shape[1] - 2, 0)
    np.fill_diagonal(masked[:, 1:], tokenizer.special_ids.mask)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def learn(params, state):
        def loss(params):
            logits = model.apply({"params": params}, input_ids=masked).logits
            labels = np.broadcast_to(whole, masked.shape)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(60):
        params, state = learn(params, state)
    return config, params, tokenizer


@pytest.mark.slow
def test_train_is_more_probable_than_peanut(stations, tmp_path, capsys):
    config, params, tokenizer = stations
    folder = tmp_path / "bert"
    folder.mkdir()
    write_weights(folder, config, params)
    tokenizer.save(folder)
    text = "The [MASK] pulled into the station"
    command = ["fill-mask", str(folder), text, "--words", "peanut", "train"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[1:] == ["train", "train"]
    assert lines[1].split()[1:4] == ["peanut", "pea", "##nut"]
    assert lines[1].endswith(" of the best")
    assert main([*command, "--json"]) == 0
    train_, peanut = json.loads(capsys.readouterr().out)["words"]
    assert train_["probability"] > 0.5 > 100 * peanut["probability"]
    # A word of one token has the probability that is shown without --words.
    filler = models.MaskFiller(models.create(config), params, tokenizer)
    [best] = filler(text, top_k=1)[0]
    assert (best.token, best.probability) == ("train", pytest.approx(train_["probability"]))
    # Pieces are filled from left to right, with masks in place of those to come.
    special = tokenizer.special_ids
    pea, nut = PIECES.index("pea"), PIECES.index("##nut")
    front = [special.cls, PIECES.index("the")]
    back = [*tokenizer.encode("pulled into the station", add_special_tokens=False), special.sep]
    expected = 0.0
    model = models.create(config)

    @jax.jit
    def forward(params, ids):
        logits = model.apply({"params": params}, input_ids=ids[None]).logits[0]
        return jax.nn.log_softmax(logits)

    for filled, at, piece in (([special.mask] * 2, 2, pea), ([pea, special.mask], 3, nut)):
        ids = np.array([*front, *filled, *back])
        expected += forward(params, ids)[at, piece]
    [word] = filler.compare(text, ["peanut"])
    assert word.log_probability == pytest.approx(float(expected), rel=1e-4)
    assert word.probability == pytest.approx(math.exp(word.log_probability))
    for wrong, message in (
        (("the [MASK] [MASK]", ["train"]), "2 masks"),
        ((text, ["zug"]), "word 'zug' .*vocabulary"),
        ((text, []), "words"),
    ):
        with pytest.raises(UserError, match=message):
            filler.compare(*wrong)
