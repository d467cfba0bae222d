"""`--evaluate.tasks` of a run whose parameters are on several devices or in several processes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flaxzoo import data, train
from flaxzoo.train.distributed import multiprocess
from flaxzoo.train.engine import compile as compiling
from flaxzoo.train.evaluate_config import EvaluateConfig

from ...support.devices import on_devices
from ...support.run_folders import WORDS, lines, small_run
from .several import go

FSDP = train.MeshConfig(data=1, fsdp=8)


def run_with_a_task(folder):
    """Returns a run that is asked to write the words that it knows."""
    rows = [{"prompt": f"{word} the", "answer": " ".join(WORDS)} for word in WORDS]
    file = folder / "words.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_run(
        folder,
        model={"vocab_size": 304, "num_heads": 8, "dropout_rate": 0.0},
        steps=12,
        evaluate_every=6,
        checkpoint_every=6,
        optimizer=train.OptimizerConfig(peak_learning_rate=3e-2, warmup_steps=2, ema_decay=0.9),
        evaluate=EvaluateConfig(tasks=(f"prompts:{file}",), max_new_tokens=8),
        best_metric="max:words/rougeL",
    )
    tokenizer = data.TokenizerConfig(kind="byte-bpe", vocab_size=304)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=tokenizer))


def judged(run):
    """Returns the metrics of tasks in each evaluation."""
    rows = [json.loads(line) for line in lines(run)]
    found = [{name: x for name, x in row.items() if "words/" in name} for row in rows]
    return [row for row in found if row]


@pytest.mark.slow
def test_tasks_judge_sharded_parameters_as_those_of_one_device(run_in_two, tmp_path):
    config = run_with_a_task(tmp_path)
    with on_devices(1):
        program = compiling.compile_trainer(config, train.CAUSAL)
        go(config, tmp_path / "one", program_of=lambda config: program)
    sharded = dataclasses.replace(config, mesh=FSDP)
    go(sharded, tmp_path / "fsdp")
    jobs = ((sharded, tmp_path / "two-fsdp"), (config, tmp_path / "two"))
    assert run_in_two(4, *((*job, None, None) for job in jobs)) == 0
    expected = judged(tmp_path / "one")
    assert len(expected) == 3  # before training, and after steps 6 and 12
    # Other parameters, those of the other step or their average, write other words.
    scores = [x for row in expected for name, x in row.items() if name.endswith("chrf")]
    assert len(set(scores)) > 2
    for name in ("fsdp", "two-fsdp", "two"):
        assert judged(tmp_path / name) == expected, name


def test_whole_parameters_are_on_one_device_of_the_primary_process_only(monkeypatch):
    mesh = jax.make_mesh((8,), ("fsdp",))
    values = np.arange(16.0).reshape(8, 2)
    cut, whole = (
        jax.device_put(values, jax.NamedSharding(mesh, jax.P(axis))) for axis in ("fsdp", None)
    )
    found = multiprocess.on_primary({"cut": cut, "whole": whole})
    for x in found.values():
        assert x.devices() == {jax.local_devices()[0]}
        np.testing.assert_array_equal(x, values)
    monkeypatch.setattr(multiprocess, "is_primary", lambda: False)
    assert multiprocess.on_primary({"cut": cut, "whole": whole}) == {}
