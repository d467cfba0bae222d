"""Which records of a source are used: conditions on fields, and stored selections."""
