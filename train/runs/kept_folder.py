"""Checks that a run folder was not deleted or replaced during training."""

import dataclasses
import shutil
from contextlib import suppress
from pathlib import Path

from orbax.checkpoint.utils import TMP_DIR_SUFFIX

from ...data.common.errors import RunError
from ...data.common.fields import require
from ...models.run_files import CHECKPOINTS, CONFIG_FILE, numbered


@dataclasses.dataclass(frozen=True)
class KeptFolder:
    """A run folder and the content of its `config.json`, which identifies the folder."""

    folder: Path
    content: bytes

    @classmethod
    def of(cls, folder: Path) -> "KeptFolder":
        """Records a folder with its current `config.json`."""
        return cls(folder, (folder / CONFIG_FILE).read_bytes())

    def check(self, saved: int | None = None) -> None:
        """Checks that the folder is still the same, and that it contains the saved checkpoint.

        Args:
            saved: the step of a saved checkpoint, or None. The folder must have the checkpoint of
              this step or of a later step.

        Raises:
            RunError: the folder was deleted or replaced, or the checkpoint is missing.
        """
        try:
            content = (self.folder / CONFIG_FILE).read_bytes()
        except OSError:
            content = None
        is_saved = saved is None or any(step >= saved for step in numbered(self.folder))
        # The error message names the first of these paths that is missing or was replaced.
        checks = (
            (self.folder, self.folder.is_dir()),
            (self.folder / CONFIG_FILE, content == self.content),
            (self.folder / CHECKPOINTS / str(saved), is_saved),
        )
        for path, unchanged in checks:
            require(
                unchanged,
                f"{path} was {'replaced' if path.exists() else 'deleted or moved'} during "
                f"training, so the run cannot save anything in {self.folder}: restore this path, "
                "or give another --workdir",
                error=RunError,
            )

    def remove_rest(self) -> None:
        """Removes partial checkpoints from a folder that was deleted while they were written."""
        if (self.folder / CONFIG_FILE).exists():
            return
        for folder in (self.folder / CHECKPOINTS).glob(f"*{TMP_DIR_SUFFIX}"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.folder / CHECKPOINTS, self.folder):
            # The folder may be missing, or contain other files, which are kept.
            with suppress(OSError):
                folder.rmdir()
