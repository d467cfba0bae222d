"""A run of adapters: it keeps only them, and is used as any other."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.adapters.lora import by_path, is_adapter
from flaxzoo.train.runs.init_from import init_from, plan_init_from

from ...support.encoders import fine_tuning

pytestmark = pytest.mark.usefixtures("on_one_device")

LORA = models.LoRAConfig(
    rank=4,
    alpha=16.0,
    dropout_rate=0.2,
    targets=("attention", "up"),
    frozen_dtype="bfloat16",
)


@pytest.fixture(scope="module")
def runs(on_one_device, work_folder, pretrained, tmp_path_factory):
    """A base of our own, and a classifier of adapters and a new head, on a bfloat16 base."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(pretrained, folder / "base")
    config = fine_tuning(
        work_folder,
        "one",
        init_from=str(folder / "base"),
        lora=LORA,
        steps=4,
        epochs=0.0,
        checkpoint_every=2,
    )
    result = train.train(config, folder / "run", quiet=True)
    return folder, config, result


def leaves(folder, **kwargs):
    return by_path(models.load(folder, **kwargs)[1])


@pytest.mark.slow
def test_a_run_of_adapters_is_used_as_any_other(runs):
    folder, _, result = runs
    scores = train.score_run(folder / "run")
    assert scores["loss"] == pytest.approx(result.validation["loss"], rel=1e-5)
    ours, base = leaves(folder / "run"), leaves(folder / "base")
    adapted = {path for path in ours if path in base and (ours[path] != base[path]).any()}
    assert {p for p in adapted if p.endswith("query/kernel")}
    rounded = base["token_embedding/embedding"].astype("bfloat16").astype("float32")
    np.testing.assert_array_equal(ours["token_embedding/embedding"], rounded)


@pytest.mark.slow
def test_a_checkpoint_holds_no_parameter_of_the_base(runs):
    folder, _, _ = runs
    stored = json.loads((folder / "run" / "config.json").read_text())
    new = ["head/classifier/bias", "head/classifier/kernel"]
    assert stored["train"]["lora"]["also_trained"] == new
    assert stored["base"]["step"] == 4
    (params,) = (folder / "run/checkpoints/4/params").glob("_METADATA")
    names = {
        "/".join(key["key"] for key in entry["key_metadata"])
        for entry in json.loads(params.read_text())["tree_metadata"].values()
    }
    assert {name for name in names if not is_adapter(name)} == set(new)
    assert not (folder / "run/checkpoints/4/frozen").exists()


@pytest.mark.slow
def test_a_resumed_run_is_the_run_never_stopped_and_others_begin_with_it(runs):
    folder, config, _ = runs
    resumed = folder / "resumed"
    shutil.copytree(folder / "run", resumed)
    shutil.rmtree(resumed / "checkpoints" / "4")
    train.train(config, resumed, quiet=True)
    whole = leaves(folder / "run")
    for path, x in leaves(resumed).items():
        np.testing.assert_array_equal(x, whole[path], err_msg=path)
    other = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=2))
    with pytest.raises(train.RunError, match=r"lora\.rank 4 → 2"):
        train.train(other, resumed, quiet=True)
    # The next run begins with the merged model.
    model = train.open_run(resumed)[0].model
    plan = plan_init_from(resumed, 4, model, model)
    fresh = models.init_params(models.create(model), jax.random.key(5))
    shardings = jax.tree.map(lambda x: x.sharding, fresh)
    begun = init_from(plan, fresh, shardings, log=lambda line: None)
    for path, x in by_path(begun).items():
        np.testing.assert_array_equal(x, whole[path], err_msg=path)


@pytest.mark.slow
def test_both_folders_may_move_and_a_base_that_is_gone_or_has_changed_is_named(runs, tmp_path):
    folder, _, _ = runs
    shutil.copytree(folder / "base", tmp_path / "base")
    shutil.copytree(folder / "run", tmp_path / "run")
    stored = json.loads((tmp_path / "run/config.json").read_text())
    stored["base"]["folder"] = "/nowhere/base"
    (tmp_path / "run/config.json").write_text(json.dumps(stored))
    assert leaves(tmp_path / "run").keys() == leaves(folder / "run").keys()
    params = next((tmp_path / "base/checkpoints/4/params").rglob("manifest.ocdbt"))
    params.write_bytes(params.read_bytes() + b"0")
    named = "has adapters of step 4 of /nowhere/base"
    with pytest.raises(ValueError, match=f"{named}, .*changed"):
        models.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ValueError, match=f"{named}"):
        models.load(tmp_path / "run")


def test_adapters_without_a_base_are_refused(train_config, tmp_path):
    with pytest.raises(train.RunError, match=r"lora .*--init-from"):
        train.train(train_config(lora=LORA), tmp_path / "run", quiet=True)


@pytest.mark.slow
def test_its_adapters_are_exported_and_imported_and_its_checkpoints_averaged(runs, tmp_path):
    folder, _, _ = runs
    notes = train.export_model(folder / "run", tmp_path / "adapter", form="peft")
    assert f"flaxzoo export {folder / 'base'} FOLDER" in notes[0]
    train.export_model(folder / "base", tmp_path / "base")
    train.import_model(tmp_path / "adapter", tmp_path / "imported", base=tmp_path / "base")
    ours, imported = leaves(folder / "run"), leaves(tmp_path / "imported")
    assert ours.keys() == imported.keys()
    for path, x in ours.items():  # the frozen ones of the run were rounded to bfloat16
        np.testing.assert_allclose(imported[path], x, rtol=2**-8, atol=1e-3, err_msg=path)
    assert models.load(tmp_path / "imported")[0].config.labels == ("LABEL_0", "LABEL_1")
    with pytest.raises(ValueError, match="adapter of peft"):
        train.open_run(tmp_path / "adapter")
    with pytest.raises(ValueError, match="no adapters"):
        train.export_model(folder / "base", tmp_path / "other", form="peft")
    train.average_checkpoints(folder / "run", tmp_path / "averaged", last=2)
    both = [leaves(folder / "run", step=step) for step in (2, 4)]
    path = "layers/attention/query/kernel"
    mean = (both[0][path] + both[1][path]) / 2
    np.testing.assert_allclose(leaves(tmp_path / "averaged")[path], mean, atol=1e-7)
    assert train.open_run(tmp_path / "averaged")[0].lora is None
