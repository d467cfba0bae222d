"""Whether a run folder is still what a run was begun in: someone may delete or replace it."""

import dataclasses
import shutil
from contextlib import suppress
from pathlib import Path

from orbax.checkpoint.utils import TMP_DIR_SUFFIX

from ...data.common.errors import RunError
from ...models.loading import CHECKPOINTS, CONFIG_FILE, numbered


@dataclasses.dataclass(frozen=True)
class KeptFolder:
    """A run folder, and the content of its `config.json`."""

    folder: Path
    content: bytes

    @classmethod
    def of(cls, folder: Path) -> "KeptFolder":
        """Returns the folder as it is now."""
        return cls(folder, (folder / CONFIG_FILE).read_bytes())

    def check(self, saved: int | None = None) -> None:
        """Checks that the folder is as it was, and has what was saved in it.

        Args:
            saved: the step of a checkpoint that it must have, or a later one.

        Raises:
            RunError: the folder is gone or another one is in its place, or the checkpoint is gone.
        """
        try:
            found = (self.folder / CONFIG_FILE).read_bytes()
        except OSError:
            found = None
        there = saved is None or any(step >= saved for step in numbered(self.folder))
        if found == self.content and there:
            return
        if found == self.content:
            missing = self.folder / CHECKPOINTS / str(saved)
        else:
            missing = self.folder / CONFIG_FILE if self.folder.is_dir() else self.folder
        what = "was replaced" if missing.exists() else "was deleted or moved"
        raise RunError(
            f"{missing} {what} during training, and nothing more can be saved in {self.folder}: "
            "restore it, or give another --workdir"
        )

    def remove_rest(self) -> None:
        """Removes what was still being written into a folder that was deleted meanwhile."""
        if (self.folder / CONFIG_FILE).exists():
            return
        for folder in (self.folder / CHECKPOINTS).glob(f"*{TMP_DIR_SUFFIX}"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.folder / CHECKPOINTS, self.folder):
            with suppress(OSError):  # it is not there, or holds other files
                folder.rmdir()
