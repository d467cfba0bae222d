"""The Transformer's published sizes, as data: table 3 of Vaswani et al. 2017.

Rows D differ from base in dropout and label smoothing only, which are a run's
settings, and are left out.

The printed parameter counts are not those of section 5.1's vocabulary of about
37,000 tokens. They are those of 41,100, but for big, and for learned positions,
for which the table prints none and the paper no number of positions.
"""

from typing import Any, NamedTuple


class Row(NamedTuple):
    """A row of table 3."""

    published: str
    """The parameter count as it is printed; base's, where the row leaves it out."""
    counts: tuple[str, str]
    """What its sizes make with 37,000 tokens, and with 41,100."""
    fields: dict[str, Any]
    """What differs from base."""

    @property
    def note(self) -> str:
        """Where the printed count and the counts of its sizes differ."""
        return "its sizes make {} with 37,000 tokens, {} with 41,100".format(*self.counts)


BASE: dict[str, Any] = {
    "vocab_size": 37_000,
    "max_length": 1024,
    "num_layers": 6,
    "d_model": 512,
    "num_heads": 8,
    "d_ff": 2048,
}

BIG: dict[str, Any] = {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "dropout_rate": 0.3}

TABLE_3: dict[str, Row] = {
    "base": Row("65M", ("63M", "65M"), {}),
    "big": Row("213M", ("214M", "218M"), BIG),
    "1-head": Row("65M", ("63M", "65M"), {"num_heads": 1}),
    "4-heads": Row("65M", ("63M", "65M"), {"num_heads": 4}),
    "16-heads": Row("65M", ("63M", "65M"), {"num_heads": 16}),
    "32-heads": Row("65M", ("63M", "65M"), {"num_heads": 32}),
    "keys-16": Row("58M", ("56M", "58M"), {"d_k": 16}),
    "keys-32": Row("60M", ("58M", "60M"), {"d_k": 32}),
    "2-layers": Row("36M", ("34M", "36M"), {"num_layers": 2}),
    "4-layers": Row("50M", ("48M", "50M"), {"num_layers": 4}),
    "8-layers": Row("80M", ("78M", "80M"), {"num_layers": 8}),
    "d-256": Row("28M", ("27M", "28M"), {"d_model": 256}),
    "d-1024": Row("168M", ("164M", "168M"), {"d_model": 1024}),
    "ff-1024": Row("53M", ("50M", "53M"), {"d_ff": 1024}),
    "ff-4096": Row("90M", ("88M", "90M"), {"d_ff": 4096}),
    "learned": Row("65M", ("64M", "66M"), {"positions": "learned"}),
}
