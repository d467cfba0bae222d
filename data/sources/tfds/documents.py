"""Reads the documents of published TensorFlow Datasets, without tensorflow.

The data sets are stored in the usual folder of TFDS (``$TFDS_DATA_DIR`` or
``~/tensorflow_datasets``), so that data sets that are already on the machine are used. The
published validation split is used if there is one; the test split is never used.
"""

import contextlib
import hashlib
import http.client
import importlib
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import tensorflow_datasets as tfds

from ...common.errors import DataError, reason_of, reported, similar_names
from ...common.fields import require, require_one_of
from ...filters.conditions import LeftOut, keeps, left_out_note
from ..documents import Documents, Records
from ..hash_split import HashSplit, Split
from ..in_memory import plain
from ..labelled_names import LabelledSource
from ..numbered import NumberedTexts
from ..source_names import Source

# The time limit for probing the network. Without the probe, TFDS would retry a failing download for
# minutes.
_PROBE_SECONDS = 4.0
_READ_AT_ONCE = 256


def load_published(source: Source, split: Split, fraction: float, cache: Path) -> Documents:
    """Loads one split of a published data set, and downloads it first if necessary.

    Args:
      source: A source of the kind ``tfds``.
      split: ``train`` or ``validation``.
      fraction: The fraction of documents for validation if no validation split is published, in
        [0, 1).
      cache: The folder that contains cached divisions into splits.

    Returns:
      The documents, in the published order.

    Raises:
      DataError: The name, configuration or field is unknown; the data set is not on this machine
        and cannot be downloaded or prepared; or it does not allow random access.
    """
    builder = prepared_builder(source)
    splits = list(builder.info.splits)
    require_one_of(f"the splits of {source.name!r}", "train", splits, error=DataError)
    # If no validation split is published, divide the training split into both splits.
    published = "validation" in splits
    stored = split if published else "train"
    records, key = _records(builder, stored, source), _key(builder, stored, source)
    is_whole = published or (fraction == 0 and split == "train")
    problem = f"{source.name!r} has no published validation split: set validation_fraction above 0"
    require(is_whole or fraction > 0, problem, DataError)
    # The published metadata identify the content of a whole split, so its records are not read.
    if is_whole and not source.conditions:
        return Documents(records, source.part, key)

    read = partial(_kept_texts, records, source)
    # Apply the filter first, so that only the documents it keeps are divided.
    texts = NumberedTexts.of(source, (key,), read, lambda _: records, cache)
    note = left_out_note(texts.left_out) if stored == split else ""
    if is_whole:
        return replace(texts.documents(HashSplit(b""), "train"), note=note)
    division = HashSplit.of(map(bytes, texts.digests), fraction, source.name)
    return replace(texts.documents(division, split), note=note)


def _kept_texts(records: Records, source: Source, left_out: LeftOut) -> Iterator[tuple[int, str]]:
    """Yields the index and the text of each record that satisfies the source's conditions.

    Raises:
      DataError: A record lacks a field, or the value of a field cannot be compared.
    """
    # Read many records at once, because reading single records of ArrayRecord files is slow.
    for start in range(0, len(records), _READ_AT_ONCE):
        numbers = range(start, min(start + _READ_AT_ONCE, len(records)))
        for number, row in enumerate(records.__getitems__(list(numbers)), start):
            location = f"{source.name} example {number + 1}"
            # Convert the fields only if a filter may read them.
            tested = {field: plain(row[field]) for field in row if source.conditions}
            if keeps(source.conditions, tested, location, left_out):
                yield number, row[source.part].decode()


def prepared_builder(source: Source | LabelledSource) -> tfds.core.DatasetBuilder:
    """Returns the builder of a published data set, and downloads the data set if necessary.

    Raises:
      DataError: The data set is unknown, or cannot be found or downloaded.
    """
    builder = open_builder(source)
    # Check the file directly, because builder.is_prepared() warns if the folder is missing.
    if not Path(builder.data_dir, "dataset_info.json").is_file():
        download(builder, source)
    return builder


def open_builder(source: Source | LabelledSource) -> tfds.core.DatasetBuilder:
    """Returns the builder of a published data set, without downloading the data set.

    Raises:
      DataError: The name or the configuration is unknown, or a package is missing.
    """
    # TFDS registers the data sets of these modules only when the modules are imported.
    importlib.import_module("tensorflow_datasets.text")
    importlib.import_module("tensorflow_datasets.translate")
    options = {"data_dir": os.environ.get("TFDS_DATA_DIR"), "file_format": "array_record"}
    name, _, configuration = source.location.partition("/")
    with _named_packages(source):
        try:
            return tfds.builder(source.location, **options)
        except tfds.core.DatasetNotFoundError:
            near = similar_names(name, tfds.list_builders(with_community_datasets=False))
            remedy = f"did you mean {' or '.join(near)}?" if near else "see the catalogue of TFDS"
            raise DataError(f"TFDS has no data set {name!r} ({source.name!r}): {remedy}") from None
        except (ValueError, AssertionError) as error:
            # The error does not give the reason, so check whether the configuration exists.
            known: list[str] = []
            with contextlib.suppress(ValueError):
                known = list(tfds.builder_cls(name).builder_configs)
            if configuration not in ("", *known):
                shown = ", ".join(similar_names(configuration, known) or known[:10]) or "none"
                problem = f"TFDS data set {name!r} has no configuration {configuration!r}"
                raise DataError(f"{problem}: choose from {shown}") from None
            reason = reason_of(error)[:200]
            raise DataError(f"TFDS cannot make {source.location!r}: {reason}") from None


def _named_packages(source: Source | LabelledSource) -> AbstractContextManager[None]:
    """Adds the name of a missing Python package to the errors of TFDS."""
    remedy = "install it, or copy the prepared data set to this machine"
    return reported(f"preparing {source.name!r} needs a Python package", remedy, ImportError)


def download(builder: tfds.core.DatasetBuilder, source: Source | LabelledSource) -> None:
    """Downloads and prepares a published data set.

    Raises:
      DataError: The data set cannot be downloaded, parsed or written.
    """
    with _named_packages(source):
        urls: list[str] = list(builder.url_infos or ())
        if urls:
            require(
                _is_reachable(urls[0]),
                f"{source.name!r} is not in {builder.data_dir} and cannot be downloaded "
                f"({urlsplit(urls[0]).hostname} does not answer): connect to the network, copy the "
                "prepared data set there (or set TFDS_DATA_DIR), or choose another source",
                DataError,
            )
    problem = f"TFDS could not download and prepare {source.name!r}"
    remedy = (
        'prepare it with TFDS elsewhere (file_format="array_record") and copy it to '
        f"{builder.data_dir}"
    )
    # Catch all exceptions, because TFDS does not wrap the exceptions of downloads and parsers.
    with reported(problem, remedy, Exception), _named_packages(source):
        builder.download_and_prepare()


def _is_reachable(url: str) -> bool:
    """Returns whether the host of a URL responds, using the proxy if one is set."""
    answers: queue.Queue[bool] = queue.Queue()
    # Use a daemon thread, because an unresponsive name server must not delay the exit.
    threading.Thread(target=lambda: answers.put(_responds(url)), daemon=True).start()
    try:
        return answers.get(timeout=_PROBE_SECONDS + 0.5)
    except queue.Empty:
        return False


def _responds(url: str) -> bool:
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):
            return True
    # A response with an error status also shows that the host is reachable.
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _records(builder: tfds.core.DatasetBuilder, split: str, source: Source) -> Records:
    features = cast(Mapping[str, object], builder.info.features)
    texts = sorted(n for n, kind in features.items() if isinstance(kind, tfds.features.Text))
    require_one_of(f"the text field of {source.name!r}", source.part, texts, error=DataError)
    return cast(Records, open_split(builder, split, source.name))


def open_split(builder: Any, split: str, name: str) -> Sequence[dict[str, object]]:
    """Opens a split of a data set that is on this machine.

    Raises:
      DataError: The data set does not allow random access.
    """
    problem = f"{name!r} in {builder.data_dir} allows no random access"
    remedy = 'prepare it with file_format="array_record", or set TFDS_DATA_DIR to another folder'
    with reported(problem, remedy, NotImplementedError):
        return builder.as_data_source(split)


def _key(builder: tfds.core.DatasetBuilder, split: str, source: Source) -> str:
    info = builder.info.splits[split]
    # The published metadata identify the content, so it is not necessary to read the records.
    metadata = (builder.info.full_name, split, source.part, info.num_examples, info.num_bytes)
    return hashlib.blake2b(repr(metadata).encode(), digest_size=16).hexdigest()
