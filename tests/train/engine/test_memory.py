"""Memory that does not suffice is foreseen: before parameters exist, and before the first step."""

import dataclasses

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.engine import machine_memory, memory_summary, start
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.evaluate_config import EvaluateConfig

from ...support.devices import on_devices
from ...support.run_folders import small_run

MIB = 1 << 20


@pytest.fixture
def available(monkeypatch):
    """`available(bytes)`: sets what the machine has left."""

    def available(number):
        monkeypatch.setattr(memory_summary, "available_bytes", lambda devices: number)

    return available


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path, steps=4, evaluate_every=4, checkpoint_every=2)


def fail(*_):
    raise UserError("too large")


def no_init(monkeypatch):
    """Fails if parameters are made."""

    def compile_trainer_without(config, objective):
        program = compile_trainer(config, objective)
        return dataclasses.replace(program, init=lambda: pytest.fail("parameters were made"))

    monkeypatch.setattr(start, "compile_trainer", compile_trainer_without)


def needed(config, tmp_path, capsys):
    """The bytes that a step of a run is said to need."""
    train.train(config, tmp_path / "measured")
    line = next(x for x in capsys.readouterr().err.splitlines() if x.startswith("a step needs "))
    return float(line.split()[3]) * 1e6


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_a_step_that_does_not_fit_is_refused_before_it(
    config, tmp_path, capsys, available, monkeypatch
):
    size = needed(config, tmp_path, capsys)
    available(int(size * 0.8))
    no_init(monkeypatch)
    message = (
        r"a step .* MB .*micro_batches \(now 1\), .*batch_size \(now 8\), .*execution.remat full$"
    )
    with pytest.raises(UserError, match=message):
        train.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()  # another batch size is another run


@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("too large")])
def test_a_step_that_is_not_compiled_leaves_only_the_files_of_others(
    config, tmp_path, monkeypatch, error
):
    def write_and_fail(*_):
        (tmp_path / "run" / "notes.txt").write_text("mine")
        raise error

    monkeypatch.setattr(start, "_foresee_memory", write_and_fail)
    with pytest.raises((KeyboardInterrupt, UserError)):
        train.train(config, tmp_path / "run", quiet=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


@pytest.mark.usefixtures("on_one_device")
def test_the_lock_of_a_removed_folder_is_removed_last(config, tmp_path, monkeypatch):
    def remove(folder, **_):
        left.extend(path.name for path in folder.parent.iterdir())

    left: list[str] = []
    monkeypatch.setattr(start, "_foresee_memory", fail)
    monkeypatch.setattr(start.shutil, "rmtree", remove)
    with pytest.raises(UserError, match="too large"):
        train.train(config, tmp_path / "run", quiet=True)
    assert "lock.json" in left  # another process may make a run there when it is gone


@pytest.mark.usefixtures("on_one_device")
def test_a_started_run_keeps_its_files(config, tmp_path, monkeypatch):
    train.train(config, tmp_path / "run", quiet=True)
    before = sorted((tmp_path / "run").iterdir())
    monkeypatch.setattr(start, "_foresee_memory", fail)
    with pytest.raises(UserError, match="too large"):
        train.train(config, tmp_path / "run", quiet=True)
    assert sorted((tmp_path / "run").iterdir()) == before


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_a_step_that_barely_fits_is_warned_of(config, tmp_path, capsys, available):
    size = needed(config, tmp_path, capsys)
    available(int(size * 1.05))
    assert train.train(config, tmp_path / "run").finished
    assert "raise micro_batches" in capsys.readouterr().err
    available(int(size * 2))
    assert train.train(config, tmp_path / "run").finished
    assert "if the memory does not suffice" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_a_started_run_keeps_its_folder_and_its_batch_size(
    config, tmp_path, available, monkeypatch
):
    train.train(config, tmp_path / "run", quiet=True)
    available(100_000)
    monkeypatch.setattr(start, "check_state_fits", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"execution\.remat full$"):
        train.train(config, tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()


@pytest.mark.usefixtures("on_one_device")
def test_a_model_that_does_not_fit_is_refused_before_it_is_compiled(
    config, tmp_path, available, monkeypatch
):
    available(10_000)
    monkeypatch.setattr(start, "_foresee_memory", pytest.fail)
    no_init(monkeypatch)
    message = r"parameters .*10.0 KB .*state_dtype int8, now float32\).*mesh.fsdp, now 1\)$"
    with pytest.raises(UserError, match=message):
        train.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize(
    ("batch_size", "pattern"),
    [(1 << 24, "a step needs .*B of"), (1 << 30, "a batch needs .* GB of")],
)
def test_an_absurd_batch_is_refused_on_the_machine_as_it_is(config, tmp_path, batch_size, pattern):
    config = dataclasses.replace(config, batch_size=batch_size)
    with pytest.raises(UserError, match=f"{pattern} .* GB .*micro_b"):
        train.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_compiler_names_its_reason(config):
    def compile_step():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 20G of 16G\nhbm.")

    message = r"\(RESOURCE_EXHAUSTED: Used 20G of 16G hbm\.\)"
    with pytest.raises(UserError, match=message):
        memory_summary.check_step_fits(
            config, compile_step, jax.devices(), resumed=False, log=pytest.fail
        )


def test_virtual_devices_share_the_memory(tmp_path, available):
    config = small_run(tmp_path, steps=4, evaluate_every=4, checkpoint_every=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=32))
    shapes = compile_trainer(config, train.CAUSAL).shapes
    each = memory_summary.bytes_per_device(shapes)
    assert len(jax.devices()) == 8
    available(8 * each)
    memory_summary.check_state_fits(config, shapes, jax.devices(), resumed=False)
    available(8 * each - 1)
    with pytest.raises(UserError, match="optimizer state"):
        memory_summary.check_state_fits(config, shapes, jax.devices(), resumed=False)


@pytest.mark.parametrize("mesh", [train.MeshConfig(data=1, fsdp=8), train.MeshConfig(data=8)])
def test_tasks_need_memory_for_the_whole_parameters(mesh, tmp_path, available):
    tasks = EvaluateConfig(tasks=("prompts:answers.jsonl",))
    model = {"vocab_size": 32, "num_heads": 8}
    config = small_run(tmp_path, model=model, steps=4, mesh=mesh, evaluate=tasks)
    with on_devices(8):
        shapes = compile_trainer(config, train.CAUSAL).shapes
    # A device already has the whole of each parameter that is not sharded.
    params = jax.tree.leaves(shapes.params)
    gathered = sum(x.size * 4 for x in params if not x.sharding.is_fully_replicated)
    assert (gathered > 0) == (mesh.fsdp == 8)
    needed = 8 * memory_summary.bytes_per_device(shapes) + gathered
    available(needed)
    memory_summary.check_state_fits(config, shapes, jax.devices(), resumed=False)
    available(needed - 1)
    message = r"evaluate\.tasks .* need .*: leave evaluate\.tasks out" if gathered else "state need"
    with pytest.raises(UserError, match=message):
        memory_summary.check_state_fits(config, shapes, jax.devices(), resumed=False)
    # Tasks do not use the reference model, so a device has only its part.
    with_reference = dataclasses.replace(shapes, frozen=shapes.params)
    available(needed + 8 * memory_summary.bytes_per_device(shapes.params))
    memory_summary.check_state_fits(config, with_reference, jax.devices(), resumed=False)


@pytest.mark.parametrize("mesh", [train.MeshConfig(data=1, fsdp=8), train.MeshConfig(data=8)])
def test_tasks_need_memory_for_merged_parameters(mesh, tmp_path, available):
    """Merged parameters have float32, also if the base of the adapters has 16 bits."""
    config = small_run(
        tmp_path,
        model={"vocab_size": 32, "num_heads": 8},
        steps=4,
        mesh=mesh,
        evaluate=EvaluateConfig(tasks=("prompts:answers.jsonl",)),
        lora=models.LoRAConfig(rank=8, frozen_dtype="bfloat16"),
    )
    with on_devices(8):
        shapes = compile_trainer(config, train.CAUSAL).shapes
    merged = sum(4 * x.size for x in jax.tree.leaves(shapes.frozen))
    needed = 8 * memory_summary.bytes_per_device(shapes) + merged
    available(needed)
    memory_summary.check_state_fits(config, shapes, jax.devices(), resumed=False)
    available(needed - 1)
    with pytest.raises(UserError, match=r"evaluate\.tasks .* need "):
        memory_summary.check_state_fits(config, shapes, jax.devices(), resumed=False)


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize("parallel", ["jit", "pmap"])
def test_the_step_is_compiled_once(config, parallel):
    compiled = []
    model = dataclasses.replace(config.model, vocab_size=32)
    trainer = compile_trainer(
        dataclasses.replace(config, model=model, parallel=parallel), train.CAUSAL
    )
    example = dict.fromkeys(("input_ids", "labels", "segment_ids", "position_ids"), (8, 16))
    batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in example.items()}

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(about.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        trainer.compile(batch)
        state = trainer.init()
        trainer.step(state, {name: np.zeros((8, 16), np.int32) for name in example})
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sum("step" in function for function in compiled) == 1, compiled


class Gpu:
    """A device with counts of its memory."""

    platform = "gpu"

    def __init__(self, limit=None, used=0):
        self.limit, self.used = limit, used

    def memory_stats(self):
        return (
            None if self.limit is None else {"bytes_limit": self.limit, "bytes_in_use": self.used}
        )


def test_the_fullest_accelerator_counts():
    gpus = [Gpu(100 * MIB, 10 * MIB), Gpu(100 * MIB, 30 * MIB)]
    assert machine_memory.available_bytes(gpus) == 70 * MIB
    assert machine_memory.available_bytes([*gpus, Gpu()]) is None


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(files)`: a machine with these files in /proc and /sys/fs/cgroup."""
    monkeypatch.setattr(machine_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine_memory, "CONTROL_GROUPS", tmp_path / "cgroup")

    def machine(files):
        meminfo = "MemTotal:  4096 kB\nMemAvailable:   2048 kB\nSwapFree:  1024 kB\n"
        for name, text in {"proc/meminfo": meminfo, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return machine_memory.available_on_machine()

    return machine


VERSION_2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "cgroup/job/memory.max": f"{2 * MIB}\n",
    "cgroup/job/memory.current": f"{MIB}\n",
    "cgroup/job/memory.stat": f"anon 5\ninactive_file {MIB // 4}\nactive_file {MIB // 4}\n",
    "cgroup/job/step/memory.max": "max\n",
    "cgroup/job/step/memory.current": "77\n",
}
VERSION_1 = {
    "proc/self/cgroup": "5:cpu:/x\n4:memory:/pods/7\n0::/\n",
    "cgroup/memory/memory.limit_in_bytes": f"{2 * MIB}\n",  # the path is that of the host
    "cgroup/memory/memory.usage_in_bytes": f"{MIB}\n",
    "cgroup/memory/memory.stat": f"total_inactive_file {MIB // 4}\ntotal_active_file {MIB // 4}\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 3 * MIB),
        (VERSION_2, 3 * MIB // 2),
        (VERSION_1, 3 * MIB // 2),
        ({**VERSION_2, "cgroup/job/memory.max": "max\n"}, 3 * MIB),
        ({**VERSION_2, "cgroup/job/memory.stat": "half a li"}, MIB),
        ({name: VERSION_2[name] for name in VERSION_2 if not name.endswith("stat")}, MIB),
    ],
)
def test_a_container_may_have_less_than_its_machine(machine, files, expected):
    assert machine(files) == expected
