"""A run of adapters, exported for peft with its tokenizer, its chat template and a card."""

import dataclasses
import json

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from flaxzoo import data, models, train
from flaxzoo.data.common.errors import RunError, UserError

from ...support.run_folders import small_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("on_one_device"),
    # peft reads an attribute that transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
SAID = [
    [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "a dog"},
    ]
] * 4


@pytest.fixture(scope="module")
def folders(on_one_device, tmp_path_factory):
    """A base in the Hugging Face format, and a run of adapters on it with a moving average."""
    folder = tmp_path_factory.mktemp("adapters")
    base = small_run(folder, steps=1, model={"dropout_rate": 0.0, "max_length": 64})
    tokenizer = data.TokenizerConfig(kind="byte-bpe", vocab_size=262)
    base = dataclasses.replace(base, data=dataclasses.replace(base.data, tokenizer=tokenizer))
    train.train(base, folder / "run", quiet=True)
    train.export_model(folder / "run", folder / "base")
    rows = data.Examples.of([{"messages": messages} for messages in SAID])
    config = dataclasses.replace(
        base,
        data=data.SupervisedData(source=rows, validation=rows, length=32, tokenizer=tokenizer),
        objective=train.SFTConfig(),
        init_from=str(folder / "base"),
        lora=models.LoRAConfig(rank=2, targets=("query", "value")),
        optimizer=train.OptimizerConfig(peak_learning_rate=0.1, ema_decay=0.5),
        batch_size=4,
        steps=2,
    )
    train.train(config, folder / "adapted", quiet=True)
    return folder


@pytest.mark.parametrize("ema", [False, True])
def test_peft_opens_the_folder_alone(folders, tmp_path, ema):
    output = tmp_path / "adapter"
    base = str(folders / "base")
    train.export_model(folders / "adapted", output, form="peft", base=base, ema=ema)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(output)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    ours = data.load_tokenizer(folders / "adapted" / "tokenizer")
    (ids,) = tokenizer.apply_chat_template(SAID[:1], return_dict=False)
    assert ids == ours.encode_with_controls(ours.chat_template.render(SAID[0]))[0]
    model, params = models.load(folders / "adapted", ema=ema)
    logits = model.apply({"params": params}, input_ids=np.asarray([ids])).logits
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    plain = models.load(folders / "base")[1]
    different = jax.tree.map(lambda x, y: bool(np.any(x != y)), params, plain)
    assert any(jax.tree.leaves(different))
    card = (output / "README.md").read_text()
    assert "library_name: peft" in card
    assert "AutoPeftModelForCausalLM" in card
    assert "base_model: base\n" in card


def test_the_base_is_checked(folders, tmp_path):
    with pytest.raises(RunError, match=r"base .*run is a run folder"):
        train.export_model(
            folders / "adapted", tmp_path / "x", form="peft", base=str(folders / "run")
        )
    fields = json.loads((folders / "base" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(fields | {"n_layer": 3}))
    with pytest.raises(RunError, match=r"num_layers 3, .*2"):
        train.export_model(
            folders / "adapted", tmp_path / "x", form="peft", base=str(tmp_path / "other")
        )
    with pytest.raises(UserError, match=r"base .gpt2. .*form peft"):
        train.export_model(folders / "base", tmp_path / "x", base="gpt2")
    # Without --base, the run names the folder that it began with.
    train.export_model(folders / "adapted", tmp_path / "x", form="peft")
    written = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(folders / "base")
