"""Finds a model's folder by its path or by its name on the Hugging Face hub."""

import functools
import re
from pathlib import Path

from ..data.common.errors import suggest

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""A name on the hub, `name` or `owner/name`."""
RUNS = "runs"
"""The default folder of runs. A path in this folder is never looked up on the hub."""
FILES = tuple(
    """
    config.json generation_config.json adapter_config.json adapter_model.safetensors
    model*.safetensors model.safetensors.index.json
    tokenizer.json tokenizer_config.json vocab.json vocab.txt merges.txt *.model *.spm
    target_vocab.json special_tokens_map.json
    modules.json sentence_bert_config.json config_sentence_transformers.json
    ?_*/config.json ?_*/model.safetensors
    """.split()
)
"""The files to download, without pickled files and weights for other libraries. Each module of
sentence-transformers has a folder, such as `1_Pooling`."""


REASONS = {
    **dict.fromkeys(
        ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"),
        "the Hugging Face hub cannot be reached",
    ),
    "RepositoryNotFoundError": "no such model on the Hugging Face hub: check the name",
    "GatedRepoError": "the model of this name on the Hugging Face hub needs a token: run hf auth "
    "login",
}
"""For each exception of the hub's client, the error message for the user."""


def local_folder(path: str | Path) -> Path:
    """Returns the folder of a model.

    Args:
      path: A folder, or a name on the hub. The files of a model on the hub are downloaded once into
        the hub's cache. A `Path` object and a path in an existing folder are never looked up on the
        hub.

    Raises:
      FileNotFoundError: Neither a folder nor a model on the hub has that name.
    """
    folder = Path(path).expanduser()
    if isinstance(path, Path) or folder.exists() or not NAME.fullmatch(path):
        return folder
    # Do not look up a misspelled local path on the hub. Suggest a neighboring folder instead.
    if folder.parts[0] == RUNS or (len(folder.parts) > 1 and folder.parent.is_dir()):
        neighbors = sorted(str(p) for p in folder.parent.glob("*") if p.is_dir())
        remedy = "give a run folder, which `flaxzoo train` makes"
        raise FileNotFoundError(
            f"folder {path} does not exist: "
            f"{suggest(str(folder), neighbors) if neighbors else remedy}"
        )
    return _download(path)


@functools.cache
def _download(name: str) -> Path:
    """Downloads the files of a model, and returns their folder in the hub's cache.

    The result is cached for the lifetime of the process, so that all files come from one revision.

    Raises:
      FileNotFoundError: The download failed.
    """
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:
        other = f"the Hugging Face hub answers: {str(error).strip():.80}".split("\n")[0]
        reason = REASONS.get(type(error).__name__, other)
        raise FileNotFoundError(f"folder {name} does not exist, and {reason}") from error
