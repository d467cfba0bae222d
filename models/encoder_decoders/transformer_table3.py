"""The Transformer's published sizes: table 3 of Vaswani et al. 2017.

The rows D are left out, because they differ from the base model only in dropout and label
smoothing, which are settings of a training run.

Section 5.1 mentions a vocabulary of about 37,000 tokens. The numbers of parameters in table 3 are
larger, and correspond to a vocabulary of 41,100 tokens. There are two exceptions. Neither 37,000
nor 41,100 tokens reproduce the number of parameters of "big". For learned positions, the table has
no number of parameters, and the paper does not state the number of positions.
"""

from typing import NamedTuple

from ..config import Settings


class Variation(NamedTuple):
    """A row of table 3."""

    published: str
    """The number of parameters in table 3. If the row has none, the base model's number."""
    counts: tuple[str, str]
    """The numbers of parameters with a vocabulary of 37,000 tokens and of 41,100 tokens."""
    fields: Settings
    """The fields that differ from the base model."""

    @property
    def note(self) -> str:
        """A note with the computed numbers of parameters."""
        return "computed from the sizes: {} with 37,000 tokens, {} with 41,100".format(*self.counts)


BASE: Settings = {
    "vocab_size": 37_000,
    "max_length": 1024,
    "num_layers": 6,
    "d_model": 512,
    "num_heads": 8,
    "d_ff": 2048,
}

BIG: Settings = {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "dropout_rate": 0.3}

TABLE_3: dict[str, Variation] = {
    "base": Variation("65M", ("63M", "65M"), {}),
    "big": Variation("213M", ("214M", "218M"), BIG),
    "1-head": Variation("65M", ("63M", "65M"), {"num_heads": 1}),
    "4-heads": Variation("65M", ("63M", "65M"), {"num_heads": 4}),
    "16-heads": Variation("65M", ("63M", "65M"), {"num_heads": 16}),
    "32-heads": Variation("65M", ("63M", "65M"), {"num_heads": 32}),
    "keys-16": Variation("58M", ("56M", "58M"), {"d_k": 16}),
    "keys-32": Variation("60M", ("58M", "60M"), {"d_k": 32}),
    "2-layers": Variation("36M", ("34M", "36M"), {"num_layers": 2}),
    "4-layers": Variation("50M", ("48M", "50M"), {"num_layers": 4}),
    "8-layers": Variation("80M", ("78M", "80M"), {"num_layers": 8}),
    "d-256": Variation("28M", ("27M", "28M"), {"d_model": 256}),
    "d-1024": Variation("168M", ("164M", "168M"), {"d_model": 1024}),
    "ff-1024": Variation("53M", ("50M", "53M"), {"d_ff": 1024}),
    "ff-4096": Variation("90M", ("88M", "90M"), {"d_ff": 4096}),
    "learned": Variation("65M", ("64M", "66M"), {"positions": "learned"}),
}
