"""`flaxzoo prepare` on Apache Beam, which has an environment of its own (see .ci/run)."""

import importlib.util
import re
import shutil
import sys

import pytest
from flaxzoo import data
from flaxzoo.train.cli import main as cli

needs_beam = pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None,
    reason="Apache Beam is not installed: pip install -e '.[prepare]'",
)
TWO_WORKERS = ("--direct_num_workers", "2", "--direct_running_mode", "multi_processing")


@pytest.fixture(scope="module")
def work_folder(tmp_path_factory):
    """A folder with texts, a tokenizer, and the rows that this process alone made of both."""
    work_folder = tmp_path_factory.mktemp("work")
    for number in range(5):
        lines = [f"{'the cat sat on the mat '[number:]}{line * 'e'}" for line in range(30)]
        (work_folder / f"{number}.txt").write_text("\n\n".join(lines))
    letters = data.TokenizerConfig("characters")
    data.train_tokenizer(["the cat sat on the mat"], letters).save(work_folder / "letters")
    data.prepare(
        f"text:{work_folder}/?.txt#block", work_folder / "alone", work_folder / "letters", length=8
    )
    return work_folder


def prepare(work_folder, output, *options, length=8):
    source = f"text:{work_folder}/?.txt#block"
    tokenizer = str(work_folder / "letters")
    return cli.main(
        ["prepare", source, str(output), "--tokenizer", tokenizer, "--length", str(length)]
        + (["--", *options] if options else [])
    )


def contents(folder):
    """All files below a folder, by their paths."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@needs_beam
@pytest.mark.parametrize("options", [(), TWO_WORKERS], ids=["in process", "two workers"])
def test_workers_make_the_same_bytes(work_folder, tmp_path, capfd, options):
    output = tmp_path / "rows"
    assert prepare(work_folder, output, *options) == 0
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith(f"{output}: 5 shards made, 0 kept; ")
    assert message.endswith(f"flaxzoo train RECIPE --data.source prepared:{output} --data.length 8")
    manifest = (output / "manifest.json").read_bytes()
    assert contents(output) == contents(work_folder / "alone")
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*.array_record")}
    assert prepare(work_folder, output) == 0
    assert f"{output}: 0 shards made, 5 kept; " in capfd.readouterr().err
    assert times == {path: path.stat().st_mtime_ns for path in times}
    assert (output / "manifest.json").read_bytes() == manifest


@needs_beam
def test_a_faulty_file_is_named_and_the_others_are_done(work_folder, tmp_path, capfd):
    shutil.copytree(work_folder, tmp_path, dirs_exist_ok=True)
    assert prepare(tmp_path, tmp_path / "rows") == 0
    (tmp_path / "rows" / "manifest.json").unlink()
    shutil.rmtree(next((tmp_path / "rows" / "shards").glob("4.txt*")))
    (tmp_path / "1.txt").write_bytes(b"caf\xe9")
    capfd.readouterr()
    assert prepare(tmp_path, tmp_path / "rows") == 2
    [line] = capfd.readouterr().err.splitlines()
    assert re.match(f"flaxzoo: {tmp_path}/1.txt line 1 .*UTF-8.* 0xe9 .*byte 4", line)
    names = sorted(path.name[:5] for path in (tmp_path / "rows" / "shards").iterdir())
    assert names == ["0.txt", "2.txt", "3.txt", "4.txt"]
    assert not (tmp_path / "rows" / "manifest.json").exists()


@needs_beam
@pytest.mark.parametrize("options", [("--runner", "Nobody"), ("--direct_num_workers", "two")])
def test_options_that_beam_refuses(work_folder, tmp_path, capfd, options):
    assert prepare(work_folder, tmp_path / "rows", *options) == 2
    error = capfd.readouterr().err
    assert " ".join(options) in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "rows").exists()


@needs_beam
def test_other_settings_are_refused(work_folder, tmp_path, capfd):
    shutil.copytree(work_folder / "alone", tmp_path / "rows")
    assert prepare(work_folder, tmp_path / "rows", length=16) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"flaxzoo: {tmp_path}/rows ")
    assert "(length 8 → 16)" in line


def test_without_beam_the_extra_is_named(work_folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    assert prepare(work_folder, tmp_path / "rows") == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("flaxzoo: ")
    assert "pip install 'flaxzoo[prepare]'" in line
    assert not (tmp_path / "rows").exists()


def test_help_explains_two_dashes(capfd):
    assert cli.main(["prepare", "--help"]) == 0
    text = capfd.readouterr().out
    assert "two dashes" in " ".join(text.split()).replace("│ │ ", "")
