"""Writes local texts as a TensorFlow Dataset of ArrayRecord files, and opens them."""

import io
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from ..documents import Records
from ..hash_split import HashSplit, Split, text_digest


class TextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The builder of a TFDS data set of texts; see ``load_documents``."""

    name = "flaxzoo_text"
    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded. Without these two fields, TFDS would search for a list of URLs next to
    # this file, and fail if the package is installed in editable mode.
    url_infos = None
    code_path = None

    def __init__(
        self, documents: Iterable[str], division: HashSplit, splits: Sequence[Split], folder: Path
    ) -> None:
        """Creates the builder from the arguments of ``write_texts``."""
        self._documents = documents
        self._division = division
        self._splits = splits
        super().__init__(data_dir=folder, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, description="Local text.", features=features)

    def _split_generators(self, dl_manager: object) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in self._splits}

    def _generate_examples(self, split: Split) -> Iterator[tuple[str, dict[str, str]]]:
        seen: Counter[bytes] = Counter()
        for text in self._documents:
            digest = text_digest(text)
            if self._division.split(digest) == split:
                seen[digest] += 1
                # TFDS orders examples by a hash of the key, so make the key from the text. A number
                # distinguishes equal texts.
                yield f"{digest.hex()}-{seen[digest]}", {"text": text}


_PREPARED = Path(TextBuilder.name, str(TextBuilder.VERSION))


def write_texts(
    documents: Iterable[str], division: HashSplit, splits: Sequence[Split], folder: Path
) -> None:
    """Writes texts for ``open_texts``.

    Args:
      documents: The texts, which are read once for each split.
      division: The division of the texts into splits.
      splits: The splits that are not empty.
      folder: The folder to write to.
    """
    builder = TextBuilder(documents, division, splits, folder)
    # Hide TFDS's message about downloads, because nothing is downloaded.
    with redirect_stdout(io.StringIO()):
        tfds.disable_progress_bar()
        try:
            builder.download_and_prepare()
        finally:
            tfds.enable_progress_bar()
    shutil.rmtree(folder / "downloads", ignore_errors=True)


def open_texts(folder: Path, split: Split) -> Records:
    """Opens the texts of a non-empty split as records of the form ``{"text": bytes}``."""
    builder: Any = tfds.builder_from_directory(folder / _PREPARED)
    return builder.as_data_source(split)
