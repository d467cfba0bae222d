import ast
from pathlib import Path

import flaxzoo.data
import flaxzoo.models
import flaxzoo.train
import pytest

# Which of our packages each may import, and which of others it may not.
ALLOWED = {"models": {"models"}, "data": {"data"}, "train": {"models", "data", "train"}}
FORBIDDEN = {
    "models": {"grain", "tensorflow", "tensorflow_datasets", "torch", "transformers"},
    "data": {"jax", "flax", "optax", "orbax", "tensorflow", "torch", "transformers"},
    "train": {"tensorflow", "torch", "transformers"},
}
PACKAGES = {"models": flaxzoo.models, "data": flaxzoo.data, "train": flaxzoo.train}
FILES = [
    pytest.param(package, path, id=f"{package}/{path.name}")
    for package, module in PACKAGES.items()
    for path in sorted(Path(str(module.__file__)).parent.glob("*.py"))
]


def imports(package, path):
    """(our package or None, other people's package or None) of every import in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield None, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if node.level == 0:
                yield None, parts[0]
            elif node.level == 1:
                yield package, None
            else:
                assert node.level == 2, f"line {node.lineno} leaves flaxzoo"
                names = [parts[0]] if node.module else [alias.name for alias in node.names]
                yield from ((name, None) for name in names)


@pytest.mark.parametrize(("package", "path"), FILES)
def test_directions(package, path):
    for ours, theirs in imports(package, path):
        assert ours is None or ours in ALLOWED[package]
        assert theirs != "flaxzoo", "imports inside the package are relative"
        assert theirs not in FORBIDDEN[package]


@pytest.mark.parametrize("package", ["models", "train"])
def test_every_public_name_is_there(package):
    module = PACKAGES[package]
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018
