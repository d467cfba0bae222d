"""A valid folder in Hugging Face's format, and ways to break it with the message of each."""

import json
import struct

import numpy as np
from flaxzoo import models
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.hf.save_weights import write_weights
from safetensors.numpy import load_file, save_file

CONFIG = models.BertConfig(
    vocab_size=32,
    max_length=16,
    num_layers=2,
    d_model=16,
    num_heads=4,
    d_ff=48,
    activation="relu",
    norm_eps=1e-6,
    head="token_classification",
    labels=("O", "B-LOC", "I-LOC"),
)


def write(folder, params):
    """Write the valid folder, with a tokenizer."""
    write_weights(folder, CONFIG, params)
    wordpiece([*WORDPIECE_SPECIALS, *"abcdefgh"], lowercase=True).save(folder)


def edit(name, **fields):
    """Return a function that changes a JSON file of the folder."""

    def change(folder):
        content = json.loads((folder / name).read_text())
        content.update(fields)
        (folder / name).write_text(json.dumps(content))

    return change


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def tensors(**changes):
    """Return a function that replaces tensors, or removes those given as None."""

    def change(folder):
        file = folder / "model.safetensors"
        content = load_file(file) | {name.replace("__", "."): x for name, x in changes.items()}
        save_file({name: x for name, x in content.items() if x is not None}, file)

    return change


def raw(change):
    """Return a function that changes the bytes of the safetensors file."""

    def changed(folder):
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return changed


def header(change):
    """Return a function that changes the header of the safetensors file and corrects its length."""

    def changed(content):
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        new = json.dumps(entries).encode()
        return struct.pack("<Q", len(new)) + new + content[8 + length :]

    return raw(changed)


def indexed(**places):
    """Replace the tensors by an index that assigns them to files."""

    def change(folder):
        content = {"weight_map": {name.replace("__", "."): file for name, file in places.items()}}
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


WORDS = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"
BREAKS = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is no JSON": (text("config.json", "{"), "config.json .*valid JSON"),
    "config is a list": (text("config.json", "[]"), "config.json .*JSON list"),
    "unknown family": (edit("config.json", model_type="bort"), "'bort'.* bert"),
    "unknown field": (edit("config.json", rope_theta=1.0), "config.json.* rope_theta"),
    "activation": (edit("config.json", hidden_act="mish"), "hidden_act 'mish' .* 'gelu'"),
    "relative positions": (
        edit("config.json", position_embedding_type="relative_key"),
        "position_embedding_type 'relative_key'",
    ),
    "head": (edit("config.json", architectures=["BertForParsing"]), "BertForParsing"),
    "positions that nothing counts": (
        edit(
            "config.json",
            model_type="roberta",
            architectures=["RobertaForTokenClassification"],
            pad_token_id=None,
        ),
        "pad_token_id None",
    ),
    "size is a word": (
        edit("config.json", hidden_size="wide"),
        "hidden_size 'wide' .*whole number",
    ),
    "sizes disagree": (edit("config.json", num_attention_heads=3), "num_heads 3"),
    "wider than its tensors": (
        edit("config.json", hidden_size=32),
        r"vocab_size 32 .* 16; .* 33 ",
    ),
    "more layers": (
        edit("config.json", num_hidden_layers=3),
        r"num_hidden_layers 3 .* 2; .*lacks .* 13 ",
    ),
    "fewer layers": (
        edit("config.json", num_hidden_layers=1),
        r"num_hidden_layers 1 .* 2; .*reads .* 13 ",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
    "pickled": (pickled, "pickled .*never"),
    "truncated": (raw(lambda b: b[:-10]), "model.safetensors .*safetensors file"),
    "header too long": (
        raw(lambda b: struct.pack("<Q", 2**40) + b[8:]),
        "model.safetensors .*safetensors file",
    ),
    "header is no JSON": (
        raw(lambda b: b[:8] + b"?" + b[9:]),
        "model.safetensors .*safetensors file",
    ),
    "offsets beyond the end": (
        header(lambda h: h[WORDS].update(data_offsets=[0, 2**30])),
        "model.safetensors .*safetensors file",
    ),
    "shape beside its offsets": (
        header(lambda h: h[WORDS].update(shape=[32, 17])),
        "model.safetensors .*safetensors file",
    ),
    "another dtype beside its offsets": (
        header(lambda h: h[WORDS].update(dtype="F64")),
        "model.safetensors .*safetensors file",
    ),
    "overlapping offsets": (
        header(lambda h: h[QUERY].update(data_offsets=h[WORDS]["data_offsets"], shape=[32, 16])),
        "model.safetensors .*safetensors file",
    ),
    "bytes of no tensor": (
        raw(lambda b: b + bytes(4)),
        "model.safetensors .*safetensors file",
    ),
    "a dtype that is not read": (
        lambda f: (
            tensors(**{QUERY: np.zeros((16, 16), np.uint8)})(f),
            header(lambda h: h[QUERY].update(dtype="F8_E4M3"))(f),
        ),
        f"{QUERY} .*model.safetensors .*F8_E4M3, .*F64",
    ),
    "whole numbers": (
        tensors(**{QUERY: np.zeros((16, 16), np.int32)}),
        f"{QUERY} .*safetensors .*int32",
    ),
    "lacking": (tensors(**{QUERY: None}), f"lacks {QUERY}"),
    "unused tensor": (tensors(adapter=np.zeros(3)), "reads adapter"),
    "index is no JSON": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            text("model.safetensors.index.json", "{")(f),
        ),
        "index.json is not an index",
    ),
    "index leads outside": (
        indexed(**{WORDS: "../model.safetensors"}),
        r"points to '\.\./model.safetensors'",
    ),
    "index leads nowhere": (indexed(**{WORDS: "gone.safetensors"}), "gone.safetensors, which is"),
    "index is mistaken": (indexed(more="part.safetensors"), "more is in part.safetensors"),
}
