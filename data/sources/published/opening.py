"""Opens published data sets of tensorflow-datasets and of the Hugging Face hub."""

from collections.abc import Mapping

from ...common.json_lines import pick
from ..columnar.huggingface import open_hub
from ..labelled_names import LabelledSource, with_known_fields
from ..tfds.records import open_tfds
from .records import HubRecords, PublishedRecords


def open_published(source: LabelledSource, fields: Mapping[str, str]) -> PublishedRecords:
    """Opens a published data set, and downloads it first if necessary.

    Args:
      source: A source of the kind ``tfds`` or ``hf``.
      fields: The default fields of well-known data sets, by the name of the data set.

    Raises:
      DataError: The data set is unknown, cannot be found or downloaded, or lacks one of the
        fields.
    """
    source = with_known_fields(source, fields)
    if source.kind == "hf":
        opened: PublishedRecords = HubRecords(source, open_hub(source.location, source.name))
    else:
        opened = open_tfds(source)
    names = dict.fromkeys(opened.field_names)
    for field in (*source.fields, *(condition.field for condition in source.conditions)):
        # Raise an error now if a field does not exist.
        pick(names, field, f"{source.name!r}")
    return opened
