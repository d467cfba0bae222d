"""Checksums of a checkpoint that somebody else made: nothing outside it is read."""

import hashlib
import json
import os

import pytest
from flaxzoo.data.common.files import path_inside
from flaxzoo.models.checksums import find_damage, replace_file, write_checksums


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "run/checkpoints/3"
    for name in ("params/a", "params/d/b", "metrics/metrics"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    write_checksums(folder)
    assert find_damage(folder) is None
    return folder


def listing(checkpoint):
    return json.loads((checkpoint / "checksums.json").read_text())


def write(checkpoint, content):
    (checkpoint / "checksums.json").write_text(json.dumps(content))


@pytest.mark.parametrize("content", [{}, [], None, 3, "x", {"params/a": 1}, {"params/a": [1]}])
@pytest.mark.parametrize("part", ["", "params"])
def test_an_empty_or_odd_list_switches_nothing_off(checkpoint, content, part):
    write(checkpoint, content)
    assert "checksums.json" in str(find_damage(checkpoint, part))


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 10**5])
def test_what_is_not_json_is_damage(checkpoint, raw):
    (checkpoint / "checksums.json").write_bytes(raw)
    assert "checksums.json" in str(find_damage(checkpoint))


def test_a_missing_list_is_damage(checkpoint):
    (checkpoint / "checksums.json").unlink()
    assert find_damage(checkpoint) == "checksums.json is missing"


def test_every_file_must_be_listed(checkpoint):
    (checkpoint / "params/more").write_text("x")
    assert find_damage(checkpoint) == "checksums.json lacks params/more"
    assert find_damage(checkpoint, "metrics") is None


@pytest.mark.parametrize(
    "name",
    ["params/../../../secret", "/dev/zero", "params//dev/zero", "../../secret", "params/\0", "."],
)
def test_names_stay_inside(checkpoint, tmp_path, name):
    (tmp_path / "run/secret").write_text("s")
    digest = hashlib.sha256(b"s").hexdigest()
    write(checkpoint, {**listing(checkpoint), name: [f"1 {digest}"]})
    assert find_damage(checkpoint) is not None


@pytest.mark.parametrize("target", ["/dev/zero", "../../../secret", "loop", "/dev/stdin"])
def test_links_stay_inside(checkpoint, tmp_path, target):
    (tmp_path / "run/secret").write_text("s")
    (checkpoint / "params/loop").symlink_to(target)
    write(checkpoint, {**listing(checkpoint), "params/loop": [f"1 {'0' * 64}"]})
    assert str(find_damage(checkpoint)).startswith("params/loop")


def test_a_pipe_is_not_waited_for(checkpoint):
    os.mkfifo(checkpoint / "params/pipe")
    write(checkpoint, {**listing(checkpoint), "params/pipe": ["1 0"]})
    assert find_damage(checkpoint) == "params/pipe is not a regular file"


def test_a_file_is_intact_wherever_its_replacement_stops(checkpoint, monkeypatch):
    import flaxzoo.models.checksums as module

    real, left = module.write_file, 0

    def write_file(path, content):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(module, "write_file", write_file)
    for number in range(5):
        left = number
        try:
            replace_file(checkpoint, "metrics/metrics", f"new {number}".encode())
        except KeyboardInterrupt:
            assert number < 4
        assert find_damage(checkpoint) is None
    assert (checkpoint / "metrics/metrics").read_text() == "new 4"


def test_the_cache_of_the_hub_links_to_its_blobs(tmp_path):
    snapshot = tmp_path / "models--a--b/snapshots/0f"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").mkdir()
    (tmp_path / "models--a--b/blobs/1").write_text("x")
    (snapshot / "model-00001-of-00002.safetensors").symlink_to("../../blobs/1")
    (snapshot / "other").symlink_to("../../../secret")
    assert path_inside(snapshot, "model-00001-of-00002.safetensors") is not None
    assert path_inside(snapshot, "other") is None
    assert path_inside(snapshot, 3) is None
