"""The guide's table of arrays is that of the code."""

import re
from pathlib import Path

import pytest
from flaxzoo import data
from flaxzoo.data import TokenizerConfig
from flaxzoo.data.tasks.base import DataConfig

PAGE = Path(__file__).parents[2] / "docs" / "explain" / "batches.md"
SIZES = {"B": 2, "T": 32, "P": 16, "S": 32, "L": 5, "M": 5, "C": 3, "2": 2}


def rows():
    """Name of the class, and its arrays with shapes and types, for each class in the table.

    Classes with the same arrays share the rows.
    """
    section = PAGE.read_text(encoding="utf-8").split("## Arrays by kind of data\n")[1]
    section = section.split("\n## ")[0]
    tables: dict[str, dict[str, tuple[str, str]]] = {}
    kinds: list[str] = []
    for cells in re.findall(
        r"^\| ((?:`\w+`(?:, )?)*) ?\| `(\w+)` \| \[(.*?)\] \| (.+) \|$", section, re.M
    ):
        kinds = re.findall(r"\w+", cells[0]) or kinds
        for kind in kinds:
            tables.setdefault(kind, {})[cells[1]] = (
                cells[2],
                "float32" if "float32" in cells[3] else "int32",
            )
    return tables


KINDS = [
    name
    for name in sorted(data.__all__)
    if name.endswith("Data") and issubclass(getattr(data, name), DataConfig)
]


@pytest.mark.parametrize("name", KINDS)
def test_the_table_has_the_arrays_of_every_kind_of_data(name):
    config = getattr(data, name)(source="text:a", length=32, tokenizer=TokenizerConfig())
    spec = config.batch_spec(SIZES["L"], SIZES["C"])
    # Sizes that follow from other settings: gaps are short, and negatives are not known before.
    derived = {
        "SpanCorruptionData": {"T": 8},
        "EmbeddingData": {"Q": 32, "C": 1},
        "RerankData": {"C": 5},
    }
    sizes = SIZES | derived.get(name, {})
    stated = {
        array: (tuple(sizes[axis] for axis in shape.split(", ")), dtype)
        for array, (shape, dtype) in rows()[name].items()
    }

    assert stated == {array: ((SIZES["B"], *one.shape), one.dtype) for array, one in spec.items()}
