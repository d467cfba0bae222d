"""Configuration of the documentation site: `sphinx-build -W docs build/docs`."""

import shutil
import sys
from pathlib import Path

import flaxzoo
from docutils import nodes
from sphinx import addnodes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project, author, copyright = "flaxzoo", "the flaxzoo authors", "the flaxzoo authors"
version = release = flaxzoo.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
]
exclude_patterns = ["**/.ipynb_checkpoints"]

suppress_warnings = ["ref.python"]  # a field may have the name of a field elsewhere

# Notebooks are shown with their stored outputs.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Docstrings follow the Google style; single backticks are code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # `Attributes:` describes members that autodoc also lists
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# A default for "inherited-members" would override the option of the generated pages.
autodoc_default_options = {"members": True, "undoc-members": True}
python_use_unqualified_type_names = True
add_module_names = False

SEARCHES = {
    "coming/flax-transformers": (
        "FlaxBertForMaskedLM, Flax classes, migrate from transformers flax, port"
    ),
    "explain/attention": "attention kernels, splash attention, cuDNN",
    "explain/experts": "mixture of experts, MoE, router",
    "explain/generation": "KV caches, speculative decoding",
    "explain/optimizers": (
        "optimizers, learning rates, warmup, warm-up, schedulers, Adam, EMA, moving average"
    ),
    "explain/packing": "masks, attention masks, padding, pad tokens, packing",
    "explain/sharding": "sharding, FSDP, tensor parallelism, ZeRO, DeepSpeed",
    "extend/command": "add a command, own command",
    "extend/data": "own data, custom data, own dataset, custom datasets, data loaders",
    "extend/family": (
        "add a family, new family, add a model, new model, new architecture, custom models, "
        "own model, new model family"
    ),
    "extend/head": "add a head, head, own head",
    "extend/loop": "own loop, custom training loop, training loop",
    "extend/loss": "own loss, custom loss, loss function, callbacks",
    "reference/commands/evaluate": "evaluate",
    "reference/config/run": "mixed precision, bfloat16, bf16, fp16",
    "reference/config/index": "configuration, config, configs",
    "reference/sources": "datasets, csv, json, jsonl, parquet",
    "scale/devices": (
        "other devices, several devices, GPU, TPU, multi GPU, multi-GPU, multiple GPUs, "
        "data parallelism, distributed training, resume another number of devices, "
        "resume on another number of devices, change number of devices"
    ),
    "scale/machines": "multi node, multi-node, multiple nodes, multi-host, cluster",
    "scale/plan": (
        "v5e, memory plan, plan, out of memory, OOM, RESOURCE_EXHAUSTED, "
        "gradient accumulation, gradient checkpointing, remat, batch sizes, micro-batches"
    ),
    "scale/resume": "resume, continue training, checkpoints, crash, NaN",
    "start/install": "CUDA, requirements, dependencies",
    "start/quickstart": "quickstart, getting started, tutorials, first steps, examples",
    "train/fine-tune": (
        "fine-tune, fine-tuning, finetune, finetuning, NER, GLUE, SQuAD, text classification, "
        "question answering, freeze layers, named entities, fine-tune classification csv, own CSV, "
        "own TSV, own JSON lines"
    ),
    "train/files": "hyperparameters, settings, TOML, config file",
    "train/instruct": "SFT, chat SFT, instruction tuning",
    "train/lora": "LoRA, adapters, merge adapters, PEFT",
    "train/preferences": "DPO, reward models, preferences",
    "train/pretrain-bert": "pretrain, pretraining, masked language model, MLM",
    "train/reinforcement": "RLHF, GRPO, PPO, RLOO, reinforcement learning",
    "train/rerank": "rerankers, cross-encoders",
    "train/t5-bart": "summarization, text to text",
    "train/text": "own text, my own text, text file, train own text, train on own text",
    "train/tokenizer": (
        "tokenizers, custom tokenizers, own tokenizer, train tokenizer, vocabulary, "
        "byte-pair encoding, BPE"
    ),
    "train/translate": "translation, machine translation, BLEU",
    "train/watch": (
        "TensorBoard, wandb, Weights & Biases, monitor, logging, plot loss, "
        "evaluate during training"
    ),
    "use/attend": "attention weights, attention maps, visualize attention",
    "use/chat": "chat, tools, function calling, chat templates",
    "use/downloaded": (
        "load model, load weights, download weights, from_pretrained, Hugging Face, "
        "huggingface, pretrained model, hub, quantization, quantize"
    ),
    "use/embed": "embeddings, sentence embeddings, text vectors",
    "use/export": (
        "export to torch, export to PyTorch, convert to PyTorch, save_pretrained, safetensors"
    ),
    "use/generate": "beam search, temperature, sampling, top-k, top-p, text generation",
    "use/probabilities": "perplexity, log probabilities",
    "use/prompt": "lm-eval, lm_eval, hellaswag, few-shot",
    "use/search": "search documents, semantic search, RAG, retrieval",
    "use/serve": "openai, OpenAI client, serve, HTTP server, streaming",
}
"""Page → words that a reader may search for. The search then lists this page first.

A word of the index matches a search that has at least half of its letters, so the plural also
matches the singular.
"""

html_theme = "sphinx_book_theme"
html_title = "flaxzoo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": "https://github.com/flaxzoo/flaxzoo",
    "use_repository_button": True,
    "show_navbar_depth": 1,
    "collapse_navbar": True,  # only the current section; otherwise every page links to all pages
    "show_toc_level": 2,
    "home_page_in_toc": False,
    # The sidebar already contains the search field and the project's name.
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
}


def _make_pages(app):
    """Writes the pages that are generated from the code, and copies the notebooks."""
    import generate

    generate.write_all(HERE)
    notebooks = HERE / "notebooks"
    notebooks.mkdir(exist_ok=True)
    for path in sorted((HERE.parent / "colab").glob("*.ipynb")):
        shutil.copy(path, notebooks / path.name)


def _add_searches(app, document):
    """Adds the search words of a page to its index.

    If Sphinx reads only changed pages, its index lacks the words of the other pages. With the
    option `-E`, Sphinx reads all pages.
    """
    if searches := SEARCHES.get(app.env.docname):
        entries = [("single", words, "", "main", None) for words in searches.split(", ")]
        next(document.findall(nodes.section)).insert(1, addnodes.index(entries=entries))


def setup(app):
    """Registers the functions that generate pages and add search words."""
    app.connect("doctree-read", _add_searches)
    app.connect("config-inited", lambda app, _config: _make_pages(app))
