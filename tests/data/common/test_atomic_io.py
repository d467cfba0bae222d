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


@pytest.mark.parametrize("make", [build_folder, new_folder])
def test_a_folder_that_cannot_be_replaced_is_filled(tmp_path, monkeypatch, make):
    def busy(self):
        raise OSError(16, "Device or resource busy")

    folder = tmp_path / "mounted"
    folder.mkdir()
    monkeypatch.setattr(Path, "rmdir", busy)
    make(folder, fill)
    assert files(folder) == ["config.json", "part/x"]


def test_a_failure_leaves_a_mounted_folder_empty(tmp_path, monkeypatch):
    def busy(self):
        raise OSError(16, "Device or resource busy")

    def fail(folder):
        fill(folder)
        raise KeyboardInterrupt

    folder = tmp_path / "mounted"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", busy)
        with pytest.raises(KeyboardInterrupt):
            build_folder(folder, fail)
    assert not any(folder.iterdir())


@pytest.mark.parametrize("make", [build_folder, new_folder])
def test_a_mounted_folder_that_another_process_is_filling_is_filled_too(
    tmp_path, monkeypatch, make
):
    def busy(self):
        raise OSError(16, "Device or resource busy")

    def slow(path):
        make(folder, fill)  # the second process begins and ends meanwhile
        fill(path)

    folder = tmp_path / "mounted"
    folder.mkdir()
    monkeypatch.setattr(Path, "rmdir", busy)
    make(folder, slow)
    assert files(folder) == ["config.json", "part/x"]


def test_a_folder_that_holds_something_is_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert build_folder(tmp_path, pytest.fail) == tmp_path
    with pytest.raises(DataError, match="exists and holds something"):
        new_folder(tmp_path, pytest.fail)


def test_a_path_with_a_nul_character_is_refused():
    with pytest.raises(DataError, match="NUL"):
        write_file(Path("a\0b"), b"x")
