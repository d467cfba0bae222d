import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flaxzoo import data, models, train
from flaxzoo.models.encoders.encoder import EncoderConfig
from flaxzoo.models.init import parameter_shapes
from flaxzoo.models.registry import families
from flaxzoo.train.distributed import sharding
from jax.sharding import PartitionSpec
from jax.tree_util import keystr


def mesh(**sizes):
    return sharding.make_mesh(train.MeshConfig(**sizes))


UNTIED = {
    "share_embeddings": False,
    "tie_output": False,
    "output_bias": True,
    "attention_bias": True,
    "positions": "learned",
    "norm_position": "pre",
}


def with_heads(config):
    """The configuration with every head that its architecture knows, and every option."""
    if isinstance(config, models.EncoderDecoderConfig):
        return [config, dataclasses.replace(config, **UNTIED)]
    if isinstance(config, EncoderConfig):
        made = [dataclasses.replace(config, head=x, labels=("a", "b", "c")) for x in config.heads]
        writers = [x for x in made if x.head_spec.has_token_logits]
        return [*made, *(dataclasses.replace(x, tie_output=False) for x in writers)]
    if hasattr(config, "tie_output"):
        return [dataclasses.replace(config, tie_output=tied) for tied in (True, False)]
    labels = ("a", "b", "c")
    return [dataclasses.replace(config, head=head, labels=labels) for head in config.heads]


PRIMER = (("head_convolution", 3), ("residual_scalar", True))
SCALAR = (("residual_scalar", True),)
RELATIVE, BUCKETS = (("positions", "relative"),), (("positions", "buckets"),)
EXPERTS = (("num_experts", 4), ("num_shared_experts", 2))
OPTIONS = [  # that add parameters and that no preset has
    ("gpt2", models.LectureGPTConfig, PRIMER),
    ("gpt2", models.LectureGPTConfig, RELATIVE),
    ("gpt2", None, BUCKETS),
    ("gpt2", None, EXPERTS),
    ("bert-base", models.LectureBertConfig, SCALAR),
    ("bert-base", models.LectureBertConfig, RELATIVE),
    ("transformer-base", models.LectureTransformerConfig, PRIMER),
    ("transformer-base", models.LectureTransformerConfig, RELATIVE),
    ("transformer-base", None, BUCKETS),
]


def form_of(config):
    """Return what decides the names and ranks of parameters: every field, but no size."""

    def kind(x):
        is_size = isinstance(x, int | float) and not isinstance(x, bool)
        return (x == 0, x == config.d_model) if is_size else (bool(x), type(x).__name__)

    fields = {name: x for name, x in vars(config).items() if not isinstance(x, str | bool)}
    kinds = {name: kind(x) for name, x in fields.items()}
    return type(config), str(sorted((vars(config) | kinds).items()))


def of_each_form(names):
    """Return the first preset of each form: others differ from it in sizes alone."""
    return {form_of(models.preset(name)): name for name in reversed([*names])}.values()


@functools.cache
def shapes(name, config_class=None, options=()):
    preset = models.preset(name)
    config = (config_class or type(preset))(**vars(preset) | dict(options))
    trees = [parameter_shapes(models.create(c)) for c in with_heads(config)]
    leaves = [leaf for tree in trees for leaf in jax.tree.leaves_with_path(tree)]
    return {(keystr(path, simple=True, separator="/"), x.shape) for path, x in leaves}


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_every_parameter_of_every_preset_and_head_fits_one_row(family):
    for name in of_each_form(families()[family].presets):
        for parameter, shape in shapes(name):
            spec = sharding.parameter_spec(parameter, shape, mesh(), models.preset(name))
            assert len(spec) == len(shape)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_parameter_of_an_option_fits_one_row(option):
    added = shapes(*option) - shapes(option[0])
    assert added
    for parameter, shape in added:
        assert len(sharding.parameter_spec(parameter, shape, mesh())) == len(shape)


def test_no_rule_is_superfluous():
    seen = {name for preset in of_each_form(models.presets()) for name, _ in shapes(preset)}
    seen |= {name for option in OPTIONS for name, _ in shapes(*option)}
    for family in families().values():
        for pattern, axes in family.parameter_axes.items():
            assert any(sharding.re.fullmatch(pattern, name) for name in seen), pattern
            assert set(axes) <= set(sharding.MESH_AXES)


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("token_embedding/embedding", (48, 32), ("tensor", "fsdp")),
        ("position_embedding/embedding", (16, 32), (None, "fsdp")),
        ("layers/attention/key/kernel", (2, 32, 4, 8), (None, "fsdp", "tensor", None)),
        ("layers/attention/output/kernel", (2, 4, 8, 32), (None, "tensor", None, "fsdp")),
        ("layers/feed_forward/down/bias", (2, 32), (None, None)),
        ("final_norm/scale", (32,), (None,)),
        ("pooler/kernel", (32, 32), ("fsdp", None)),
        ("head/bias", (48,), ("tensor",)),
        ("encoder/layers/attention/key/kernel", (2, 32, 4, 8), (None, "fsdp", "tensor", None)),
        (
            "decoder/layers/cross_attention/output/kernel",
            (2, 4, 8, 32),
            (None, "tensor", None, "fsdp"),
        ),
        ("decoder/layers/cross_attention_norm/scale", (2, 32), (None, None)),
        ("output_bias", (48,), ("tensor",)),
        ("head/classifier/kernel", (32, 3), ("fsdp", None)),
    ],
)
def test_parameters_are_sharded_along_their_logical_axes(name, shape, spec):
    found = sharding.parameter_spec(name, shape, mesh(data=2, fsdp=2, tensor=2))
    assert found == PartitionSpec(*spec)


def test_a_parameter_without_a_rule_is_refused():
    message = r"head/kernel \(3, 4\) .*0 rules"
    with pytest.raises(ValueError, match=message):
        sharding.parameter_spec("head/kernel", (3, 4), mesh())
    # No pattern fits a part of a name only.
    with pytest.raises(ValueError, match="0 rules"):
        sharding.parameter_spec("other/final_norm/scale", (4,), mesh())


def test_a_parameter_with_two_rules_is_refused(monkeypatch):
    gpt = families()["gpt"]
    twice = dataclasses.replace(gpt, parameter_axes={**gpt.parameter_axes, r"final_.*": (None,)})
    monkeypatch.setitem(families(), "gpt", twice)
    message = r"final_norm/scale \(4,\) .*2 rules"
    with pytest.raises(ValueError, match=message):
        sharding.parameter_spec("final_norm/scale", (4,), mesh())


def test_a_rule_of_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"final_norm/scale \(4, 4\)"):
        sharding.parameter_spec("final_norm/scale", (4, 4), mesh())


def test_a_dimension_that_is_not_divisible_is_refused():
    message = (
        r"layers/attention/query/kernel \(2, 12, 3, 4\): dimension 3 .*mesh.tensor 2: .* 1, 3,"
    )
    with pytest.raises(ValueError, match=message):
        sharding.parameter_spec("layers/attention/query/kernel", (2, 12, 3, 4), mesh(tensor=2))


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1, 1, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 4, 1, 1, 2)),
        ({"data": 2, "context": 2, "tensor": 2}, (2, 1, 1, 2, 2)),
        ({"fsdp": 2, "expert": 4}, (1, 2, 4, 1, 1)),
    ],
)
def test_mesh(sizes, shape):
    made = mesh(**sizes)
    assert made.axis_names == ("data", "fsdp", "expert", "context", "tensor")
    assert made.devices.shape == shape


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 4},
        {"data": 16},
        {"fsdp": 3},
        {"fsdp": 0},
        {"context": -1, "fsdp": -1},
    ],
)
def test_a_mesh_that_does_not_cover_all_devices_is_refused(sizes):
    with pytest.raises(ValueError, match="8 devices") as e:
        mesh(**sizes)
    for axis, size in sizes.items():
        if size != getattr(train.MeshConfig(), axis):
            assert f"mesh.{axis} {size}" in str(e.value)
    assert "mesh.tensor" not in str(e.value)  # it is the default


@pytest.mark.parametrize(
    ("shape", "part"),
    [((8,), (4,)), ((8, 6), (4, 3)), ((8, 5), (4, 5)), ((8, 3, 4), (4, 3, 2))],
)
def test_batches(shape, part):
    rows = sharding.shard_batch({"x": jnp.zeros(shape)}, mesh(data=2, context=2, tensor=2))["x"]
    assert {s.data.shape for s in rows.addressable_shards} == {part}


def test_batches_that_cannot_be_divided_are_refused():
    sharding.check_batch(mesh(fsdp=2, tensor=2), 8, 5)
    with pytest.raises(ValueError, match=r"batch_size 6 .*4 devices"):
        sharding.check_batch(mesh(fsdp=2, tensor=2), 6, 5)
    message = "data.length 18 .*mesh.context 4: .* 1, 2, 3, 6, 9, 18"
    with pytest.raises(ValueError, match=message):
        sharding.check_batch(mesh(data=2, context=4), 8, 18)


def test_the_data_axis_has_one_device_if_another_axis_takes_the_rest():
    assert dict(mesh(fsdp=-1).shape) == {**dict.fromkeys(mesh().shape, 1), "fsdp": 8}
    assert (made := mesh(tensor=2, fsdp=-1).shape)["fsdp"] == 4
    assert made["data"] == 1
    with pytest.raises(data.UserError, match=r"fsdp -1 .*tensor -1"):
        mesh(fsdp=-1, tensor=-1)


def test_sizes_from_a_run_name_its_file_and_the_remedy():
    config = train.MeshConfig(fsdp=4, tensor=2)
    with pytest.raises(
        data.UserError, match=r"fsdp 4 .*1 device.*mesh\.fsdp 1 mesh\.tensor 1 .*run/config\.json"
    ):
        sharding.make_mesh(config, jax.devices()[:1], stored_in=Path("run/config.json"))
