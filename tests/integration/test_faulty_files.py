"""Disks that are full or read-only, sources that change: one line, nothing lost, and it goes on."""

import dataclasses
import functools
import os
import resource
import shutil
import signal
import subprocess
import time

import pytest
from flaxzoo import train
from flaxzoo.data import DataError
from flaxzoo.data.sources.load_documents import load_documents
from flaxzoo.models.run_files import steps
from flaxzoo.train.engine import compile as parallel
from flaxzoo.train.engine import start
from flaxzoo.train.runs.metrics_log import MetricsLog

from ..support.objective_runs import causal, write_sources
from ..support.run_folders import assert_same, everything, kept, lines

STEPS = 12


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    work_folder = tmp_path_factory.mktemp("sources")
    write_sources(work_folder)
    return work_folder


@pytest.fixture(scope="module")
def config(sources):
    return causal(sources, steps=STEPS, log_every=1, evaluate_every=100, checkpoint_every=5)


@pytest.fixture(scope="module")
def go(on_one_device):
    """`go(config, workdir, at, do)`: trains, and calls `do` before the step that is `at`."""

    @functools.cache
    def program_of(config):
        return parallel.compile_trainer(config, train.CAUSAL)

    def go(config, workdir, at=None, do=None):
        def compile_trainer(config, objective):
            program = program_of(config)

            def step(state, batch):
                if do is not None and int(state.step) + 1 == at:
                    do()
                return program.step(state, batch)

            return dataclasses.replace(program, step=step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start, "compile_trainer", compile_trainer)
            return train.train(config, workdir, quiet=True)

    return go


@pytest.fixture(scope="module")
def whole(config, go, tmp_path_factory):
    """The run without a fault."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(config, folder)
    return folder


def assert_ends_as(whole, run):
    assert lines(run) == lines(whole)
    assert_same(everything(run, STEPS), everything(whole, STEPS))
    assert kept(run) == kept(whole)


def stop():
    signal.raise_signal(signal.SIGTERM)


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """A disk of 8 MiB."""
    work_folder = tmp_path / "disk"
    work_folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", work_folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not mount a disk: {error}")
    yield work_folder
    subprocess.run(["umount", work_folder], check=True)


def wait_for_checkpoint(run):
    """Waits for that of step 5, which is written in the background."""
    deadline = time.monotonic() + 60
    while 5 not in steps(run) and time.monotonic() < deadline:
        time.sleep(0.01)


def fill(disk, leave):
    """Leaves so many bytes on a disk."""
    wait_for_checkpoint(disk / "run")
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "other").write_bytes(bytes(free - leave))


def test_a_full_disk(config, go, whole, disk):
    message = r"checkpoint 10 .*1,1.* bytes, .* step 5$"
    with pytest.raises(train.RunError, match=message) as caught:
        go(config, disk / "run", at=6, do=lambda: fill(disk, leave=600_000))
    assert "\n" not in str(caught.value)
    assert kept(disk / "run") == [5]
    (disk / "other").unlink()
    go(config, disk / "run")
    assert_ends_as(whole, disk / "run")


def test_a_disk_too_full_for_metrics(config, go, whole, disk):
    go(config, disk / "run", at=7, do=stop)

    def log_while_it_fills():
        with MetricsLog(disk / "run", first_step=7, wandb_project=None) as log:
            fill(disk, leave=0)
            for _ in range(100):
                log.write(8, "train", {"loss": 1.0})

    message = r"metrics .*run \(No space"
    with pytest.raises(train.RunError, match=message) as caught:
        log_while_it_fills()
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"lock\.json: No space"):
        go(config, disk / "run")
    (disk / "other").unlink()
    go(config, disk / "run")
    assert lines(disk / "run") == lines(whole)


# Of the several writers of a checkpoint one fails first; what the others say comes too late.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
def test_files_that_may_not_be_that_large(config, go, whole, tmp_path):
    """A quota, say: it shows only when half of a checkpoint is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        wait_for_checkpoint(tmp_path / "run")
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, before[1]))

    message = r"checkpoint 10 .*\(File too large\).* step 5$"
    try:
        with pytest.raises(train.RunError, match=message) as caught:
            go(config, tmp_path / "run", at=6, do=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    go(config, tmp_path / "run")
    assert_ends_as(whole, tmp_path / "run")


def test_a_read_only_disk(config, go, whole, disk):
    go(config, disk / "run", at=7, do=stop)
    mount("-o", "remount,ro", disk)
    try:
        for name in ("run", "another"):
            with pytest.raises(DataError, match=r"folder .*writable"):
                go(config, disk / name)
    finally:
        mount("-o", "remount,rw", disk)
    assert kept(disk / "run") == [5, 7]
    go(config, disk / "run")
    assert lines(disk / "run") == lines(whole)
    assert_same(everything(disk / "run", STEPS), everything(whole, STEPS))


def trash(path):
    """Deletes a folder at once, though a checkpoint may be on its way into it."""
    gone = path.with_name(f"{path.name}.gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


DELETIONS = {
    "deleted": (trash, "run .*deleted"),
    "moved": (lambda run: run.rename(run.with_name("moved")), "run .*deleted"),
    "replaced": (lambda run: (trash(run), run.mkdir()), r"run/config\.json .*deleted"),
    "a file": (lambda run: (trash(run), run.write_text("")), "run was"),
    "other run": (lambda run: (run / "config.json").write_text("{}"), r"config\.json was replaced"),
    "without config": (lambda run: (run / "config.json").unlink(), r"config\.json was deleted"),
    "without checkpoints": (
        lambda run: trash(run / "checkpoints"),
        r"run/checkpoints \(No such file",
    ),
    "without metrics": (
        lambda run: (run / "metrics.jsonl").unlink(),
        r"metrics\.jsonl was deleted",
    ),
}


@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    ("deletion", "is_saved"), [*((name, True) for name in DELETIONS), ("deleted", False)]
)
def test_a_run_folder_that_is_deleted(config, go, tmp_path, capsys, deletion, is_saved):
    delete, message = DELETIONS[deletion]
    run = tmp_path / "run"

    def do():
        if is_saved:
            wait_for_checkpoint(run)
        delete(run)

    message = message if is_saved else "during training|cannot write"
    with pytest.raises(train.RunError, match=message) as caught:
        go(config, run, at=6 if not is_saved else 7, do=do)
    assert "\n" not in str(caught.value)
    assert "saved step" not in capsys.readouterr().err
    assert not list(tmp_path.glob("run/checkpoints/*tmp")) or (run / "config.json").exists()
    if deletion in ("deleted", "moved"):
        assert not run.exists()


def test_a_run_folder_that_is_deleted_before_a_signal(config, go, tmp_path, capsys):
    run = tmp_path / "run"
    late = dataclasses.replace(config, log_every=100, checkpoint_every=100)
    with pytest.raises(train.RunError, match=r"run .*deleted"):
        go(late, run, at=7, do=lambda: (trash(run), stop()))
    assert not run.exists()
    with pytest.raises(train.RunError, match=r"run .*deleted"):
        go(late, run, at=12, do=lambda: trash(run))
    assert not run.exists()


def test_a_run_folder_behind_a_link_may_be_moved(config, go, whole, tmp_path):
    run = tmp_path / "run"

    def move():
        run.rename(tmp_path / "moved")
        run.symlink_to(tmp_path / "moved")

    go(config, run, at=7, do=lambda: (wait_for_checkpoint(run), move()))
    assert_ends_as(whole, run)


@pytest.mark.parametrize("fault", ["changes", "vanishes"])
def test_a_source_that_changes_or_vanishes(config, go, whole, sources, tmp_path, fault):
    text = sources / "text.txt"
    before = text.read_bytes()

    def meddle():
        text.write_bytes(before + b"\n\nthe end") if fault == "changes" else text.unlink()

    try:
        go(config, tmp_path / "unaware", at=4, do=meddle)
        assert_ends_as(whole, tmp_path / "unaware")
        text.write_bytes(before)
        go(config, tmp_path / "run", at=7, do=lambda: (meddle(), stop()))
        message = "changed since .*run was created" if fault == "changes" else "no such file:"
        with pytest.raises(ValueError, match=message) as caught:
            go(config, tmp_path / "run")
        assert "\n" not in str(caught.value)
        assert kept(tmp_path / "run") == [5, 7]
    finally:
        text.write_bytes(before)
    go(config, tmp_path / "run")
    assert lines(tmp_path / "run") == lines(whole)
    assert_same(everything(tmp_path / "run", STEPS), everything(whole, STEPS))


def test_a_source_that_changes_while_it_is_read(tmp_path, monkeypatch):
    """It is read twice, for its digest and its text; one must not be kept for the other."""
    from flaxzoo.data.sources.tfds import local_dataset as text_builder

    file, write_texts = tmp_path / "text.txt", text_builder.write_texts
    file.write_text("one\n\ntwo\n\nthree")

    def late(*arguments):
        file.write_text("one\n\ntwo\n\nfour")
        write_texts(*arguments)

    def load():
        name = f"text:{file}#block"
        split = load_documents(name, "train", validation_fraction=0.0, cache_dir=tmp_path / "cache")
        return sorted(split)

    monkeypatch.setattr(text_builder, "write_texts", late)
    with pytest.raises(DataError, match=r"text:.*#block changed"):
        load()
    monkeypatch.setattr(text_builder, "write_texts", write_texts)
    assert load() == ["four", "one", "two"]
