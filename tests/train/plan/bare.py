"""Run `flaxzoo` with no packages but those that `pip install jax flax optax` brings."""

import importlib.abc
import re
import sys
from importlib import metadata

GIVEN = ("jax", "flax", "optax")


def required(names):
    """Return the distributions that `names` need, directly or through others, without extras."""
    found, pending = set(), list(names)
    while pending:
        requirement, condition, _ = pending.pop().partition(";")
        name = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()
        if name in found:
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            if not condition:  # one with a condition may be for another system or Python
                raise
            continue
        found.add(name)
        pending += [need for need in needs if "extra ==" not in need]
    return found


class Blocker(importlib.abc.MetaPathFinder):
    """Hides all other packages from `import`."""

    def __init__(self):
        available = required(GIVEN)
        self.hidden = {
            module
            for module, owners in metadata.packages_distributions().items()
            if not any(re.sub(r"[-_.]+", "-", owner).lower() in available for owner in owners)
        } - {"flaxzoo"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    blocker = Blocker()
    sys.meta_path.insert(0, blocker)
    assert {"grain", "tensorflow_datasets", "jaxtyping", "tokenizers"} <= blocker.hidden
    from flaxzoo.train.cli import main as cli

    sys.exit(cli.main(sys.argv[1:]))
