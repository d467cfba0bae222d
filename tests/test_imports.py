"""Imports point one way: between the three packages, and between the rooms of each."""

import ast
import tomllib
from pathlib import Path

import flaxzoo.data
import flaxzoo.models
import flaxzoo.train
import pytest
from flaxzoo.models.registry import FAMILIES

# In models only the room for text reads tokenizers and prompts.
READS_DATA = "text"
ALLOWED = {"models": {"models"}, "data": {"data"}, "train": {"models", "data", "train"}}
# The common room imports nothing else of ours, and every package imports it.
COMMON = "data.common."
FORBIDDEN = {
    "models": {"grain", "tensorflow", "tensorflow_datasets", "torch", "transformers"},
    "data": {"jax", "flax", "optax", "orbax", "tensorflow", "torch", "transformers"},
    "train": {"tensorflow", "torch", "transformers"},
}
REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"models": flaxzoo.models, "data": flaxzoo.data, "train": flaxzoo.train}

# The rooms (and the files beside them) of each package in order: a room imports itself and rooms
# of earlier lines.
ORDER = {
    "models": [
        {"mesh_axes", "rotary_scaling"},
        {"checksums", "config", "hub", "tokenizer"},
        {"nn", "registry"},
        {"heads", "model"},
        {*(room.partition(".")[0] for room in FAMILIES.values())},
        {"lectures"},
        {"init", "token_log_probs"},
        {"decoding", "stablehlo"},
        {"hf"},
        {"adapters"},
        {"run_files"},
        {"loading"},
        {"finite", "greatest_logits"},
        {"text"},
    ],
    "data": [
        {"common"},
        {"dataset", "orders"},
        {"mixture"},
        {"batching", "chat_templates", "filters"},
        {"sources", "tokenizers"},
        {"corpora"},
        {"features", "packing"},
        {"prepared"},
        {"tasks"},
        {"embedding", "prompts"},
        {"chat"},
    ],
    "train": [
        {"compilation_cache", "evaluate_config", "mesh", "optimizer_config", "state"},
        {"losses"},
        {"objective_config"},
        {"objectives"},
        {"config", "optim"},
        {"distributed", "recipes"},
        {"rewards"},
        {"runs"},
        {"settings"},
        {"evaluation"},
        {"search"},
        {"engine", "lectures"},
        {"convert", "plan"},
        {"serve"},
        {"cli"},
    ],
}
LEVEL = {
    (package, room): level
    for package, order in ORDER.items()
    for level, rooms in enumerate(order)
    for room in rooms
}


def _files():
    for package, module in PACKAGES.items():
        root = Path(str(module.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            yield package, root, path


def room_of(module):
    """The package of a dotted module of ours, and its room or file below that package."""
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0]


def imports(package, root, path):
    """(dotted module of ours or None, other people's package or None) of every import."""
    here = [package, *path.relative_to(root).with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield None, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield None, (node.module or "").split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            up = node.level - 1
            assert up <= len(here), f"line {node.lineno} leaves flaxzoo"
            base = here[: len(here) - up]
            if node.module:
                yield ".".join([*base, node.module]), None
            else:
                yield from ((".".join([*base, alias.name]), None) for alias in node.names)


def test_imports_point_one_way():
    wrong = [
        f"{package}/{path.relative_to(root)}: {why}"
        for package, root, path in _files()
        for why in wrong_imports(package, root, path)
    ]
    assert not wrong


def wrong_imports(package, root, path):
    """What is wrong with the imports of a file."""
    is_public_list = path == root / "__init__.py"
    own = room_of(".".join([package, *path.relative_to(root).with_suffix("").parts]))
    for ours, theirs in imports(package, root, path):
        if theirs == "flaxzoo":
            yield "imports inside the package are relative"
        if theirs in FORBIDDEN[package]:
            yield f"{package} may not import {theirs}"
        if ours is None or ours.startswith(COMMON):
            continue
        other = room_of(ours)
        if other[0] == "data" and own == ("models", READS_DATA):
            continue
        if other[0] not in ALLOWED[package]:
            yield f"{package} may not import {ours}"
            continue
        inside = other[0] == package and other != own and not is_public_list
        if inside and LEVEL[other] >= LEVEL[own]:
            yield f"{own[1]} may not import {ours}"


@pytest.mark.parametrize("package", list(PACKAGES))
def test_every_room_has_its_place_in_the_order(package):
    root = Path(str(PACKAGES[package].__file__)).parent
    rooms = {
        room_of(".".join([package, *p.relative_to(root).with_suffix("").parts]))
        for p in root.rglob("*.py")
        if p != root / "__init__.py"
    }
    assert rooms == {key for key in LEVEL if key[0] == package}


def test_every_room_is_packaged():
    """A folder without `__init__.py`, or that pyproject.toml does not name, is not installed."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)
    names = {"flaxzoo." + ".".join(f.relative_to(REPOSITORY).parts) for f in folders}
    assert set(settings["tool"]["setuptools"]["packages"]) == {"flaxzoo", *names}


@pytest.mark.parametrize("package", list(PACKAGES))
def test_every_public_name_is_there(package):
    module = PACKAGES[package]
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018
