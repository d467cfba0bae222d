"""Generates the pages for commands, configurations, public names and families from the code."""

import contextlib
import dataclasses
import io
import itertools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

import flax.linen as nn
from flaxzoo import data, models, train
from flaxzoo.data.common.fields import Checked, field_docs, range_of
from flaxzoo.models.config import Execution
from flaxzoo.models.mesh_axes import MESH_AXES, MESH_AXIS_NAMES
from flaxzoo.models.registry import FAMILIES, Family, families
from flaxzoo.train.cli import main as cli
from flaxzoo.train.cli.training.list import count
from flaxzoo.train.objectives.table import OBJECTIVES, objective_class
from flaxzoo.train.recipes import RECIPES
from sphinx.pycode import ModuleAnalyzer

Page = tuple[str, str]
"""The path of a page, relative to the folder of the site, and the text of the page."""

FOLDERS = ("families", "reference/api", "reference/commands", "reference/config")
"""The folders that contain generated pages."""

PACKAGES = {"models": models, "data": data, "train": train}

HELP = {
    "train": ("quickstart", "--help-all"),
    "plan": ("quickstart", "--help"),
    "bench": ("quickstart", "--help"),
}
"""Command → the arguments that print its help, for commands that need more than `--help`."""

EXIT_STATUS = """
Every command exits with 0 on success, 2 after an error in the input, files or settings (one line
on standard error), 3 after a loss that is not finite, 130 after Ctrl-C, and 128 plus the signal if
a signal stopped training.
"""

SUPPORT_NAMES = {
    "gpt": ("GPT", "GPT-2"),
    "bert": ("BERT",),
    "roberta": ("RoBERTa",),
    "distilbert": ("DistilBERT",),
    "electra": ("ELECTRA",),
    "xlm_roberta": ("XLM-R",),
    "camembert": ("CamemBERT",),
    "roberta_prelayernorm": ("RoBERTa-PreLayerNorm",),
    "mpnet": ("MPNet",),
    "modernbert": ("ModernBERT",),
    "deberta": ("DeBERTa", "DeBERTa v2, v3"),
    "albert": ("ALBERT",),
    "nomic_bert": ("Nomic BERT",),
    "gte": ("GTE",),
    "transformer": ("Marian", "Pegasus"),
    "llama": ("Llama",),
    "mistral": ("Mistral",),
    "qwen2": ("Qwen2",),
    "qwen3": ("Qwen3",),
    "gemma": ("Gemma",),
    "gemma2": ("Gemma 2",),
    "gemma3": ("Gemma 3",),
    "phi3": ("Phi-3",),
    "mixtral": ("Mixtral",),
    "gpt_neo": ("GPT-Neo",),
    "gptj": ("GPT-J",),
    "gpt_neox": ("GPT-NeoX",),
    "opt": ("OPT",),
    "bloom": ("BLOOM",),
    "falcon": ("Falcon",),
    "qwen3_moe": ("Qwen3-MoE",),
    "olmo2": ("OLMo 2",),
    "olmo3": ("OLMo 3",),
    "smollm3": ("SmolLM3",),
    "granite": ("Granite",),
    "stablelm": ("StableLM",),
    "t5": ("T5", "mT5"),
    "bart": ("BART", "mBART"),
}
"""Family → the names of the family in the table of `support.md`."""

SUPPORT_MATRIX = """
## What each family supports

Each figure is the largest relative difference to transformers in float32, measured by the
[parity tests](../support.md). *Load* and *save* compare the outputs of loaded and saved weights,
*train* compares gradients, *embed* compares vectors of texts, and *shard* compares gradients that
eight devices computed. The column *shard* also lists the mesh axes that divide parameters; `data`
and `context` divide the batch of every family. *Generate* says whether greedy and beam search give
the tokens of transformers. A dash means that the family lacks the feature, or that no test compares
it with transformers.
"""


def write_all(site: Path) -> None:
    """Writes all generated pages into the folder of the site."""
    support = (site / "support.md").read_text(encoding="utf-8")
    pages = itertools.chain(_commands(), _configurations(), _public_names(), _family_pages(support))
    texts = {site / name: text for name, text in pages}
    # A page of an earlier build, whose code no longer exists, is not in any table of contents.
    for folder in FOLDERS:
        for path in (site / folder).rglob("*.*"):
            if path not in texts:
                path.unlink()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        # An unchanged file keeps its modification time, so that Sphinx does not read it again.
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head), *rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _cell(text: object) -> str:
    """Returns the value as text that is valid in a table cell."""
    return str(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _toctree(names: Iterable[str], *options: str) -> str:
    return "\n".join(["```{toctree}", *options, "", *names, "```", ""])


def _summary(value: object) -> str:
    """Returns the first paragraph of a docstring."""
    return _cell((value.__doc__ or "").strip().split("\n\n")[0])


def _commands() -> Iterator[Page]:
    """Yields a page for each command, and a page for all recipes."""
    rows = [(f"[`flaxzoo {name}`]({name}.md)", text) for name, (_, text) in cli.COMMANDS.items()]
    index = ["# Commands\n", _table(("command", "what it does"), rows), EXIT_STATUS]
    names = [*cli.COMMANDS, "recipes"]
    yield "reference/commands/overview.md", "\n".join([*index, _toctree(names, ":hidden:")])
    for name, (_, text) in cli.COMMANDS.items():
        words = (name, *HELP.get(name, ("--help",)))
        printed = f"```text\n$ flaxzoo {' '.join(words)}\n{_help(words)}\n```"
        page = f"# flaxzoo {name}\n\n{text[0].upper()}{text[1:]}.\n\n{printed}\n"
        yield f"reference/commands/{name}.md", page
    parts = [f"## {name}\n\n{r.summary}\n\n{r.details}\n" for name, r in RECIPES.items()]
    yield "reference/commands/recipes.md", "# Recipes\n\n" + "\n".join(map(_with_code, parts))


def _help(arguments: Iterable[str]) -> str:
    """Returns the help text that a command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*arguments])
    return printed.getvalue().rstrip()


def _with_code(text: str) -> str:
    """Returns help text as Markdown, where a command after `Run:` becomes a code block."""
    pattern = r"^Run: ((?:.*\\\n)*.*)\n?"
    return re.sub(
        pattern, lambda found: f"```text\n{found[1].strip()}\n```\n", text, flags=re.MULTILINE
    )


def _configurations() -> Iterator[Page]:
    """Yields the pages that describe all fields of a run's configuration and their ranges."""
    public = [getattr(data, name) for name in sorted(data.__all__) if name.endswith("Data")]
    kinds = [cls for cls in public if issubclass(cls, data.DataConfig)]
    run: dict[str, type] = {
        "The run": train.TrainConfig,
        "optimizer": train.OptimizerConfig,
        "mesh": train.MeshConfig,
        "execution": Execution,
        "lora": models.LoRAConfig,
    }
    groups: dict[str, tuple[str, Mapping[str, type]]] = {
        "run": ("The field `optimizer.beta1` is the option `--optimizer.beta1`.", run),
        "data": (
            "The kinds of data. A recipe chooses one kind.",
            {"tokenizer": data.TokenizerConfig, **{kind.kind: kind for kind in kinds}},
        ),
        "objective": (
            "The objectives. The first objective that learns from the recipe's data is the "
            "default.",
            {kind: objective_class(kind) for kind in OBJECTIVES},
        ),
        "model": (
            "The configuration of every family.",
            {name: record.config for name, record in families().items()},
        ),
    }
    rows = [
        (f"[{name}]({name}.md)", ", ".join(f"`{one.__name__}`" for one in classes.values()))
        for name, (_, classes) in groups.items()
    ]
    intro = "Nested frozen dataclasses describe a run. A value outside its range is rejected.\n"
    index = ["# Configuration\n", intro, _table(("section", "classes"), rows)]
    yield "reference/config/index.md", "\n".join([*index, _toctree(groups, ":hidden:")])
    for name, (intro, classes) in groups.items():
        parts = [f"# {name}\n\n{intro}\n"]
        for heading, cls in classes.items():
            parts.append(f"## {heading}\n\n`{cls.__name__}`: {_summary(cls)}\n\n{_fields(cls)}")
        yield f"reference/config/{name}.md", "\n".join(parts)


def _fields(cls: type) -> str:
    """Returns a table of all fields in a configuration class."""
    docs, hints = field_docs(cls), typing.get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        kind = ", ".join(filter(None, (_type_name(hints[field.name]), range_of(hints[field.name]))))
        text = docs.get(field.name, "")
        if field.init:
            rows.append((f"`{field.name}`", _cell(kind), _cell(_default(field)), _cell(text)))
    head = "field", "type and range", "default", "meaning"
    return _table(head, rows) if rows else "This configuration has no fields.\n"


def _type_name(hint: object) -> str:
    """Returns the name of a type as it appears in code."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin is not None and "Union" in str(origin):
        return " or ".join(map(_type_name, arguments))
    return "None" if hint is type(None) else getattr(origin or hint, "__name__", str(hint))


def _default(field: "dataclasses.Field[object]") -> str:
    if field.default is dataclasses.MISSING:
        return ""
    if dataclasses.is_dataclass(field.default):
        return f"`{type(field.default).__name__}()`"
    return f"`{field.default!r}`"


def _public_names() -> Iterator[Page]:
    """Yields an index of the public names of each package, and a page for each name."""
    intro = "Every public name of `flaxzoo.models`, `flaxzoo.data` and `flaxzoo.train`.\n"
    tree = _toctree(PACKAGES, ":maxdepth: 2")
    yield "reference/api/index.md", "\n".join(["# Python\n", intro, tree])
    for package, module in PACKAGES.items():
        names = sorted(module.__all__, key=str.lower)
        values = {name: getattr(module, name) for name in names}
        rows = [
            (f"[`{name}`]({package}/{name}.rst)", _public_summary(package, name, value))
            for name, value in values.items()
        ]
        tree = _toctree([f"{package}/{name}" for name in names], ":hidden:")
        page = [f"# flaxzoo.{package}\n", _table(("name", "summary"), rows), tree]
        yield f"reference/api/{package}.md", "\n".join(page)
        for name, value in values.items():
            yield f"reference/api/{package}/{name}.rst", _name_page(package, name, value)


def _public_summary(package: str, name: str, value: object) -> str:
    """Returns the first paragraph of the documentation of a public name."""
    if not _is_constant(value):
        return _summary(value)
    module = f"flaxzoo.{package}.{_defined_in(package, name)}"
    lines = ModuleAnalyzer.for_module(module).find_attr_docs()["", name]
    return _cell("\n".join(lines).strip().split("\n\n")[0])


def _is_constant(value: object) -> bool:
    """Returns whether a value is a constant or a type alias, documented where it is defined."""
    return not callable(value) or typing.get_origin(value) is not None


def _name_page(package: str, name: str, value: object) -> str:
    # With `eval-rst` in a Markdown page, the stored tree of the page would contain the build state.
    path, options = f"flaxzoo.{package}.{name}", ""
    if isinstance(value, type):
        kind, options = "class", f"   :members:\n   :show-inheritance:\n{_inherited(value)}"
    elif not _is_constant(value):
        kind = "function"
    else:
        # Only the file that defines a constant contains the docstring of the constant.
        kind, options = "data", "   :no-value:\n"
        path = f"flaxzoo.{package}.{_defined_in(package, name)}.{name}"
    return f"{name}\n{'=' * len(name)}\n\n.. auto{kind}:: {path}\n{options}"


def _inherited(cls: type) -> str:
    """Returns the option that also lists methods inherited from base classes of this package.

    Configurations and Flax modules have no such option: the pages of the configurations list the
    inherited fields, and the inherited methods are not part of the interface.
    """
    if issubclass(cls, Checked | nn.Module):
        return ""
    names = (base.__name__ for base in cls.__mro__ if not base.__module__.startswith("flaxzoo."))
    return f"   :inherited-members: {', '.join(names)}\n"


def _defined_in(package: str, name: str) -> str:
    """Returns the module that defines a name, according to the stub file of a package."""
    stub = Path(PACKAGES[package].__file__ or "").with_suffix(".pyi")
    found = re.search(rf"^from \.(\S+) import {name} as", stub.read_text(), re.MULTILINE)
    assert found, name
    return found[1]


def _family_pages(support: str) -> Iterator[Page]:
    """Yields a page for each family, with paper, sizes, heads and agreement with transformers."""
    head, _, *measured = re.findall(r"^\|.*\|$", support, re.MULTILINE)
    rows, matrix = [], []
    # The model variants from the lectures have no published sizes.
    published = {name: record for name, record in families().items() if record.presets}
    for name, record in published.items():
        about = (import_module(record.config.__module__).__doc__ or "").strip()
        title = about.split("\n")[0].rstrip(".").split(":")[0]
        sizes = ", ".join(f"`{preset}`" for preset in list(record.presets)[:3])
        sizes += " …" if len(record.presets) > 3 else ""
        rows.append((f"[{name}]({name}.md)", _cell(title), sizes))
        names = SUPPORT_NAMES[name]
        agreement = [row for row in measured if row.split("|")[1].strip() in names]
        parts = [f"# {name}\n\n{about}\n", _about_family(name, record)]
        matrix.append((f"[{name}]({name}.md)", *_support(record, agreement)))
        if agreement:
            parts.append(
                "## Agreement with transformers\n\nThe largest relative difference of outputs in "
                "float32 ([details](../support.md)).\n"
            )
            parts.append("\n".join([head, "| --- " * (head.count("|") - 1) + "|", *agreement, ""]))
        yield f"families/{name}.md", "\n".join(parts)
    index = [
        "# Families\n",
        _table(("family", "models", "sizes"), rows),
        SUPPORT_MATRIX,
        _table(("family", "load", "save", "train", "generate", "embed", "shard"), matrix),
        _toctree(published, ":hidden:"),
    ]
    yield "families/index.md", "\n".join(index)


def _support(record: Family, measured: list[str]) -> tuple[str, ...]:
    """Returns the row for a family in the table of supported features."""
    config = next(iter(record.presets.values())).config
    # The columns after family, head and class, in the order of `tests/parity/parity_table.py`.
    cells = [[cell.strip() for cell in row.strip("|").split("|")][3:] for row in measured]
    load, save, gradients, tokens, vectors, devices = (
        max(filter(None, column), key=_difference, default="–")
        for column in zip(*cells, strict=True)
    )
    logical = {axis for axes in record.parameter_axes.values() for axis in axes}
    shared = {axis for name in logical for axis in MESH_AXES[name]}
    experts = {"expert"} if getattr(config, "num_experts", 0) else set()
    axes = [axis for axis in MESH_AXIS_NAMES if axis in (shared - {"expert"}) | experts]
    generate = f"{tokens} tokens" if tokens == "equal" else tokens
    return load, save, gradients, generate, vectors, f"{devices} ({', '.join(axes)})"


def _difference(cell: str) -> float:
    return 0.0 if cell == "equal" else float(cell)


def _about_family(name: str, record: Family) -> str:
    """Returns the files and heads of a family, and a table of the sizes."""
    files = [f"models/{FAMILIES[name].replace('.', '/')}/{name}.py"]
    if record.hf_module:
        files.append(f"models/hf/{record.hf_module.replace('.', '/')}.py")
    first = next(iter(record.presets))
    heads = ", ".join(f"`{head}`" for head in record.presets[first].config.heads)
    rows = [
        (
            f"`{preset}`",
            f"{record.num_parameters.get(preset) or count(one.config):,}",
            f"{one.config.max_length:,}",
            one.paper,
            _cell(one.note),
        )
        for preset, one in record.presets.items()
    ]
    facts = [
        f"- Files: {', '.join(f'`{file}`' for file in files)}",
        f"- Configuration: [`{record.config.__name__}`](../reference/config/model.md)",
        f"- Heads: {heads}",
        f"- Train: `flaxzoo train {name} --preset {first}`\n",
    ]
    sizes = _table(("preset", "parameters", "context", "paper", "note"), rows)
    return "\n".join([*facts, "## Sizes\n", sizes])
