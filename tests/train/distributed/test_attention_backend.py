"""Which kernel a run takes for its attention, and that it runs on each device's part."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import SpanCorruptionData
from flaxzoo.models.decoders.gemma.gemma2 import Gemma2Config
from flaxzoo.models.encoders.modernbert import ModernBertConfig
from flaxzoo.models.nn import fused_attention, stack
from flaxzoo.models.nn.kernels import flash, flash_triton
from flaxzoo.train.distributed.attention_backend import KernelChoice, choose_kernel
from flaxzoo.train.engine import compile as parallel
from flaxzoo.train.objectives.causal_lm import CAUSAL
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel


def gpu(capability="9.0"):
    kind = f"GPU {capability}"
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")


@pytest.fixture
def run(train_config):
    """`run(length=…, attention=…, dropout_rate=…, num_heads=…, dtype=…, mesh=…)`."""

    def run(
        length=128, attention="auto", dropout_rate=0.0, num_heads=4, dtype="bfloat16", **fields
    ):
        plain = train_config()
        sizes = {"max_length": length, "dropout_rate": dropout_rate, "num_heads": num_heads}
        return dataclasses.replace(
            plain,
            model=dataclasses.replace(plain.model, **sizes),
            data=dataclasses.replace(plain.data, length=length),
            execution=models.Execution(dtype=dtype, attention=attention),
            **fields,
        )

    return run


@pytest.mark.parametrize("kind", ["alibi", "buckets"])
def test_distances_of_tokens_are_for_xla(run, kind):
    config = run()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, positions=kind))
    for device in (TPU, gpu()):
        assert "biases" in choose_kernel(config, device).description


@pytest.mark.parametrize(
    ("device", "message"),
    [(gpu(), "XLA, not by cuDNN: scores are capped"), (TPU, "attention by splash attention")],
)
def test_the_capped_scores_of_gemma_2(device, message, run):
    """What is said is what the layers do: they refuse a kernel that cannot cap."""
    config = run()
    sizes = {"vocab_size": 48, "max_length": 128, "num_layers": 1, "d_model": 32, "num_heads": 2}
    model = Gemma2Config(**sizes, score_cap=50.0)
    assert message in choose_kernel(dataclasses.replace(config, model=model), device).description


@pytest.mark.parametrize(
    ("device", "length", "message"),
    [
        (TPU, 1024, "XLA block by block, not by splash attention: windows with two sides"),
        (gpu(), 1024, "XLA block by block, not by cuDNN: windows have two sides"),
        (CPU, 1024, "attention by XLA block by block"),
        (CPU, 128, "attention by XLA"),
    ],
)
def test_the_windows_of_modernbert(device, length, message, run):
    config = run(length=length)
    sizes = {"vocab_size": 48, "max_length": 1024, "num_layers": 3, "d_model": 32, "num_heads": 2}
    model = ModernBertConfig(**sizes)
    found = choose_kernel(dataclasses.replace(config, model=model), device).description
    assert message in found


@pytest.mark.parametrize(
    ("device", "fields", "message"),
    [
        (CPU, {}, "attention by XLA"),
        (TPU, {}, "attention by splash attention"),
        (gpu(), {}, "attention by cuDNN"),
        (gpu(), {"dtype": "float32"}, "XLA, not by cuDNN: the precision is float32 and not"),
        (
            gpu("7.5"),
            {},
            "XLA, not by cuDNN: the kernel requires NVIDIA's Ampere or later, got GPU 7.5",
        ),
        (
            gpu("gfx942"),
            {},
            "XLA, not by cuDNN: the kernel requires NVIDIA's Ampere or later, got GPU gfx942",
        ),
        (TPU, {"length": 64}, "XLA, not by splash attention: rows have 64 tokens, not a mult"),
        (TPU, {"dropout_rate": 0.1}, "attention by flash attention"),
        (gpu(), {"dropout_rate": 0.1}, "XLA, not by flash attention in Triton: heads have size 8"),
        (gpu(), {"dropout_rate": 0.1, "num_heads": 2}, "attention by flash attention in Triton"),
        (TPU, {"attention": "xla"}, "XLA, not by splash attention: execution.attention says so"),
        (TPU, {"attention": "flash"}, "attention by flash attention"),
    ],
)
def test_the_kernel_suits_the_device_or_the_reason_is_named(device, fields, message, run):
    assert message in choose_kernel(run(**fields), device).description


@pytest.mark.parametrize(
    ("device", "fields", "message"),
    [
        (CPU, {}, "attention by XLA block by block on a ring of 2 devices"),
        (TPU, {"length": 512}, "attention by splash attention on a ring of 2 devices"),
        (TPU, {}, "on a ring of 2 devices, not by splash attention: the 4 parts of a row have 32"),
        (gpu(), {}, "on a ring of 2 devices, not by cuDNN: the tokens of a sequence are sharded"),
        (CPU, {"length": 126}, "by XLA, not by XLA block by block: rows have 126 tokens, but mesh"),
        (
            CPU,
            {"dropout_rate": 0.1, "length": 64},
            "by XLA, not by XLA block by block: the 4 parts of a row have 16 keys",
        ),
        (CPU, {"attention": "xla"}, "attention by XLA"),
    ],
)
def test_sharded_tokens_are_attended_to_on_a_ring(device, fields, message, run):
    assert message in choose_kernel(run(**fields), device, context=2).description


def test_both_sides_of_a_translation_are_cut_alike(run):
    config = run()
    data = SpanCorruptionData(
        source="builtin:python-docs",
        length=128,
        target_length=30,
        tokenizer=config.data.tokenizer,
        num_sentinels=4,
    )
    config = dataclasses.replace(config, data=data)
    message = choose_kernel(config, CPU, context=2).description
    assert "30 tokens, but mesh.context 2 " in message


@pytest.mark.parametrize(
    ("kernel", "device", "fields", "why"),
    [
        ("cudnn", CPU, {}, "requires a gpu, got a cpu"),
        ("splash", TPU, {"dropout_rate": 0.2}, "probability 0.2"),
        ("flash", gpu(), {}, "requires a tpu, got a gpu"),
        ("blocks", CPU, {"length": 1021}, "no block of 64 to 512 tokens"),
    ],
)
def test_a_requested_kernel_that_cannot_serve_the_run_is_refused(kernel, device, fields, why, run):
    with pytest.raises(ValueError, match=f"execution.attention {kernel} .*{why}"):
        choose_kernel(run(attention=kernel, **fields), device)


@pytest.mark.parametrize(
    ("kernel", "way"),
    [
        ("splash", "mesh"),
        ("flash", "mesh"),
        pytest.param("splash", "pmap", marks=pytest.mark.slow),
        pytest.param("flash", "pmap", marks=pytest.mark.slow),
        pytest.param("triton", "mesh", marks=pytest.mark.slow),
    ],
)
def test_a_step_with_a_kernel_is_that_of_xla(kernel, way, run, monkeypatch):
    """Interpreted, over eight devices; flash attention drops the weights that one device drops."""
    assert flash.pl is flash_triton.pl
    for module, name in ((splash_attention_kernel, "make_splash_mha"), (flash.pl, "pallas_call")):
        interpreted = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, interpreted)
    ways: dict[str, dict[str, Any]] = {
        "mesh": {"mesh": train.MeshConfig(data=2, fsdp=2, tensor=2)},
        "pmap": {"parallel": "pmap"},
    }
    drops = kernel in ("flash", "triton")
    rate = 0.1 if drops else 0.0
    config = run(dtype="float32", batch_size=8, dropout_rate=rate, num_heads=2, **ways[way])
    # The interpreter takes any precision.
    limits = tuple(x for x in fused_attention.LIMITS[kernel] if "precision" not in x[1])
    monkeypatch.setitem(fused_attention.LIMITS, kernel, limits)
    ids = np.random.default_rng(0).integers(0, 48, (8, 129))
    segments = np.broadcast_to(np.repeat([1, 2, 0], [50, 70, 8]), (8, 128))
    batch = {
        "input_ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "segment_ids": segments,
        "position_ids": np.broadcast_to(np.r_[:50, :70, :8], (8, 128)),
    }
    batch = {name: x.astype(np.int32) for name, x in batch.items()}

    called = []

    def recorded(kernel, call):
        called.append(fused_attention.refusal(kernel, call))
        return called[-1]

    monkeypatch.setattr(stack, "refusal", recorded)

    def metrics(choice):
        monkeypatch.setattr(parallel, "choose_kernel", lambda *_: choice)
        program = parallel.compile_trainer(config, CAUSAL)
        assert choice.description in program.memory_summary
        return program.step(program.init(), batch)[1]

    fused = metrics(KernelChoice(kernel))
    assert None in called  # parameters are made with one token, which no kernel supports
    if drops:
        config = dataclasses.replace(config, mesh=train.MeshConfig(), parallel="jit")
        one = functools.partial(parallel.make_mesh, devices=jax.devices()[:1])
        monkeypatch.setattr(parallel, "make_mesh", one)
    xla = metrics(KernelChoice("xla"))
    assert {"loss", "gradient_norm"} <= set(fused)
    for name, value in fused.items():
        np.testing.assert_allclose(value, xla[name], rtol=1e-4, err_msg=name)
