import json
import sys
from pathlib import Path

import pytest
from flaxzoo.train.config import to_dict
from flaxzoo.train.distributed import launch

from .several import set_devices


@pytest.fixture
def run_in_two(monkeypatch, tmp_path):
    """`run_in_two(devices, *jobs)`: the status of two processes that do `jobs` of several.py."""

    def run(devices, *jobs, silence=60):
        set_devices(monkeypatch, devices)
        specs = [[to_dict(config), str(folder), *rest] for config, folder, *rest in jobs]
        (tmp_path / "jobs.json").write_text(json.dumps(specs))
        program = Path(__file__).with_name("several.py")
        arguments = [str(tmp_path / "jobs.json"), str(silence)]
        return launch.launch([sys.executable, "-W", "error", str(program), *arguments], 2)

    return run
