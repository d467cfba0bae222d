"""A process that ends while it removes an old checkpoint leaves none that seems damaged."""

import subprocess
import sys
from pathlib import Path

from flaxzoo.models.run_files import steps
from flaxzoo.train.engine.checkpoint import Checkpoints, set_aside_damaged

from ..train.engine.test_checkpoint import assert_same, make_state, shapes_of

SAVING = """
import os, signal, sys
from pathlib import Path
from flaxzoo.train.engine.checkpoint import Checkpoints
from tests.train.engine.test_checkpoint import make_state

unlink, removed = os.unlink, []

def killed_at_the_third(path, **options):
    removed.append(path)
    if len(removed) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    unlink(path, **options)

with Checkpoints(Path(sys.argv[1]), keep_last=1, keep_best=0) as checkpoints:
    checkpoints.save(make_state(1), {"step": 1}, None)
    checkpoints.wait()
    os.unlink = killed_at_the_third
    checkpoints.save(make_state(2), {"step": 2}, None)
"""


def test_a_process_that_is_killed_while_it_removes_a_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SAVING, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "deleted"]
    assert len(list(checkpoints.rglob("deleted/1/**/*"))) > 3  # half of it
    lines = []
    set_aside_damaged(tmp_path, lines.append)
    assert not lines
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as opened:
        state, data = opened.restore(2, shapes_of(make_state(2)))
        assert [path.name for path in checkpoints.iterdir()] == ["2"]
    assert_same(state, make_state(2))
    assert data == {"step": 2}
    assert steps(tmp_path) == [2]
