"""Folders appear complete or not at all, also where a link or a mounted disk is."""

from pathlib import Path

import pytest
from flaxzoo.data import DataError
from flaxzoo.data.common.atomic_io import build_folder, new_folder, write_file


def fill(folder):
    (folder / "part").mkdir()
    (folder / "part" / "x").write_text("x")
    (folder / "config.json").write_text("{}")


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("make", [build_folder, new_folder])
def test_an_empty_folder_behind_a_link_is_filled(tmp_path, make):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    make(tmp_path / "link", fill)
    assert (tmp_path / "link").is_symlink()
    assert files(tmp_path / "real") == ["config.json", "part/x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """An empty folder that cannot be replaced."""

    def busy(self):
        raise OSError(16, "Device or resource busy")

    folder = tmp_path / "mounted"
    folder.mkdir()
    monkeypatch.setattr(Path, "rmdir", busy)
    return folder


@pytest.mark.parametrize("make", [build_folder, new_folder])
def test_a_mounted_folder_is_filled_also_by_two_processes(mounted, make):
    def slow(path):
        make(mounted, fill)  # the second process begins and ends meanwhile
        fill(path)

    make(mounted, slow)
    assert files(mounted) == ["config.json", "part/x"]


def test_a_failure_leaves_a_mounted_folder_empty(mounted, monkeypatch):
    def fail(folder):
        monkeypatch.undo()
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_folder(mounted, fail)
    assert not any(mounted.iterdir())


def test_a_folder_that_is_not_empty_is_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert build_folder(tmp_path, pytest.fail) == tmp_path
    with pytest.raises(DataError, match=tmp_path.name):
        new_folder(tmp_path, pytest.fail)


def test_a_file_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "new" / "a"
    write_file(file, b"old")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"old", 0o644)

    def full(source, target):
        Path(source).unlink()  # so that the clean-up fails, too
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DataError, match=r"a \(No space left on device\)"):
        write_file(file, b"new")
    assert [path.read_bytes() for path in file.parent.iterdir()] == [b"old"]


def test_a_path_with_a_nul_character_is_refused():
    with pytest.raises(DataError, match="NUL"):
        write_file(Path("a\0b"), b"x")
