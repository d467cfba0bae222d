"""Local texts as a data set of TFDS, on disk as ArrayRecord files."""

import io
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from .documents import HashSplit, Split, text_digest


class TextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A TFDS data set of texts; see ``load_documents``."""

    name = "flaxzoo_text"
    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded. TFDS would look for a list of addresses beside this file, and
    # cannot find its way through a package whose folders are mapped.
    url_infos: Any = None
    code_path: Any = None

    def __init__(
        self, documents: Iterable[str], division: HashSplit, splits: Sequence[Split], **kwargs: Any
    ) -> None:
        """Makes the builder.

        Args:
            documents: The texts; read once for each split.
            division: Which of them are for validation.
            splits: Those that are not empty.
            **kwargs: See ``tfds.core.DatasetBuilder``.
        """
        self._documents = documents
        self._division = division
        self._splits = splits
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, description="Local text.", features=features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in self._splits}

    def _generate_examples(self, split: Split) -> Iterator[tuple[str, dict[str, str]]]:
        seen: Counter[bytes] = Counter()
        for text in self._documents:
            digest = text_digest(text)
            if self._division.split(digest) == split:
                seen[digest] += 1
                yield f"{digest.hex()}-{seen[digest]}", {"text": text}


_PREPARED = Path(TextBuilder.name, str(TextBuilder.VERSION))


def write_texts(
    documents: Iterable[str], division: HashSplit, splits: Sequence[Split], folder: Path
) -> None:
    """Writes texts, for ``open_texts``.

    Args:
        documents: The texts; read once for each split.
        division: Which of them are for validation.
        splits: Those that are not empty.
        folder: Where to.
    """
    builder = TextBuilder(documents, division, splits, data_dir=folder, file_format="array_record")
    with redirect_stdout(io.StringIO()):  # a banner about downloads, of which there are none
        tfds.disable_progress_bar()
        try:
            builder.download_and_prepare()
        finally:
            tfds.enable_progress_bar()
    shutil.rmtree(folder / "downloads", ignore_errors=True)


def open_texts(folder: Path, split: Split) -> Any:
    """The texts of a split that is not empty, TFDS's random access to ``{"text": bytes}``."""
    builder: Any = tfds.builder_from_directory(folder / _PREPARED)
    return builder.as_data_source(split)
