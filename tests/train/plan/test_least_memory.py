"""The memory that every step needs, from shapes alone."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from flaxzoo import models, train
from flaxzoo.models.registry import families
from flaxzoo.train.cli.recipe_list import AS_PUBLISHED, GROUPS
from flaxzoo.train.config import objective_of
from flaxzoo.train.engine.compile import configured_step
from flaxzoo.train.engine.memory_summary import bytes_per_device
from flaxzoo.train.plan import worker
from flaxzoo.train.plan.least_memory import WAYS, least_memory, trained_by
from flaxzoo.train.plan.topology import parse_topology
from flaxzoo.train.recipes import RECIPES
from flaxzoo.train.state import count_parameters

SMALL: dict[str, Any] = {"model.num_layers": 2, "model.vocab_size": 512}


@pytest.mark.parametrize("way", list(WAYS)[:2])
def test_the_state_is_that_of_the_step_and_the_gradient(way):
    config = train.recipe("gpt", **SMALL)
    config = trained_by(dataclasses.replace(config, mesh=train.MeshConfig(fsdp=8)), way)
    mesh = train.make_mesh(config.mesh)
    state = configured_step(config, objective_of(config), mesh, None).state
    held = bytes_per_device((state.params, state.opt_state))
    found = least_memory(config, 8)
    number = count_parameters(state.params)
    assert found.parameters == number
    # Arrays that eight devices do not divide evenly take more than this bound.
    needed = held + 4 * number / 8
    assert 0.98 * needed < found.state <= needed


def test_adapters_need_their_base_in_16_bits():
    config = train.recipe("gpt", **SMALL)
    whole, adapted = (least_memory(trained_by(config, way), 1) for way in ("AdamW", list(WAYS)[2]))
    number = count_parameters(models.init_params(models.create(config.model), jax.random.key(0)))
    assert 2 * number < adapted.state < 2.3 * number
    assert whole.state == pytest.approx(16 * number, rel=0.01)
    assert adapted.activations < whole.activations


DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "scale" / "largest.md").read_text(encoding="utf-8")
NUMBERS = r"([\d,]+) \| ([\d,]+) \| [\d.,]+ GiB \| `(\S+)` \|$"
SIZES = re.findall(rf"^\| (\w+) \| `(\S+)` \| {NUMBERS}", PAGE, re.MULTILINE)
PUBLISHED = re.findall(rf"^\| `(\S+)` \| {NUMBERS}", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def largest_models():
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("largest_models", DOCS / "largest_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("family", "preset", "vocabulary", "number", "topology"), SIZES)
def test_a_published_size_fits_the_topology_of_the_page(
    largest_models, family, preset, vocabulary, number, topology
):
    """And no smaller one of the page."""
    config = largest_models.planned(family, preset)
    check_row(largest_models, trained_by(config, "AdamW"), vocabulary, number, topology)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "vocabulary", "number", "topology"), PUBLISHED)
def test_a_published_recipe_fits_the_topology_of_the_page(
    largest_models, recipe, vocabulary, number, topology
):
    """And no smaller one of the page."""
    config = largest_models.planned_recipe(recipe)
    check_row(largest_models, config, vocabulary, number, topology)


def check_row(script, config, vocabulary, number, topology):
    memory = least_memory(config, 1)
    assert f"{config.model.vocab_size:,}" == vocabulary
    assert f"{memory.parameters:,}" == number
    *smaller, least = script.TOPOLOGIES[: script.TOPOLOGIES.index(topology) + 1]
    assert script.fits(memory, parse_topology(least))
    assert not any(script.fits(memory, parse_topology(x)) for x in smaller)


def test_the_page_has_each_family_and_published_recipe():
    assert {row[0] for row in SIZES} == {name for name, x in families().items() if x.presets}
    published = filter(lambda name: GROUPS[AS_PUBLISHED](RECIPES[name]), RECIPES)
    assert [row[0] for row in PUBLISHED] == list(published)


def test_the_page_has_the_text_of_the_script(largest_models):
    assert PAGE.startswith(largest_models.INTRO)
    assert largest_models.SIZES in PAGE
    assert largest_models.PUBLISHED in PAGE
    heads = [line for line in PAGE.splitlines() if "topology" in line and line.startswith("|")]
    assert len(heads) == 3
    assert all(largest_models.BOUND in line for line in heads)


@pytest.mark.parametrize(
    ("family", "preset", "needed"), [("phi3", "phi3-medium", 15.1), ("llama", "llama3.1-8b", 10.5)]
)
def test_the_lower_bound_of_the_example(largest_models, family, preset, needed):
    memory = largest_models.needed(family, preset, "AdamW")
    number = parse_topology("v5e:4x4").num_devices
    assert (memory.state / number + memory.activations) / 2**30 == pytest.approx(needed, abs=0.05)
    assert f"{needed} GiB" in PAGE


@pytest.mark.slow
def test_memory_does_not_grow_with_the_window_and_is_linear_in_the_length():
    """ModernBERT's windows change the work of attention in blocks, but not its memory."""
    sizes = {"vocab_size": 64, "d_model": 32, "num_heads": 2, "d_ff": 32}

    def planned(length, window):
        fields = {f"model.{name}": size for name, size in sizes.items()}
        fields |= {"batch_size": 1, "data.length": length, "model.max_length": length}
        config = train.recipe("modernbert-quickstart", **fields, **{"model.window": window})
        return worker.plan_run(config, parse_topology("cpu:1"), jax.devices()[:1])

    narrow, wide, long = (planned(*x) for x in ((2048, 65), (2048, 1025), (4096, 65)))
    assert narrow.temp_bytes is not None
    assert long.temp_bytes is not None
    assert narrow.attention == "attention by XLA block by block"
    assert narrow.temp_bytes == wide.temp_bytes
    assert narrow.device_flops < wide.device_flops
    assert long.temp_bytes < 2 * narrow.temp_bytes
