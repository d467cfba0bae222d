"""A model's folder, by its path or by its name on the Hugging Face hub."""

import functools
import re
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""`name` or `owner/name`."""
FILES = (
    *(
        "config.json",
        "generation_config.json",
        "model*.safetensors",
        "model.safetensors.index.json",
    ),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.spm", "target_vocab.json", "special_tokens_map.json"),
)
"""What is fetched: never a pickled file, nor weights for another library."""


def local_folder(path: str | Path) -> Path:
    """The folder of a model.

    Args:
      path: a folder, or a name on the hub, whose files are fetched once and kept in the hub's own
        cache. What exists here is never looked for there, nor is a `Path`.

    Raises:
      FileNotFoundError: there is neither.
    """
    folder = Path(path).expanduser()
    if isinstance(path, Path) or folder.exists() or not NAME.fullmatch(path):
        return folder
    return _fetched(path)


@functools.cache
def _fetched(name: str) -> Path:
    """The folder in the hub's cache; asked for once in a process, so that all of it is of one time.

    Raises:
      FileNotFoundError: it cannot be had.
    """
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".: ")
        raise FileNotFoundError(
            f"{name} does not exist here, and nothing of this name came from the Hugging Face hub "
            f"({reason}): give a folder, or a name on the hub where there is a network"
        ) from error
