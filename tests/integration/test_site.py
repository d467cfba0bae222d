"""The built documentation site in a browser: `sphinx-build -W docs build/docs`, then this file.

It needs the packages of the extra `docs`, selenium, and Chromium with its driver.
"""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest

from ..support.browser import chromium

webdriver = pytest.importorskip("selenium.webdriver")

SITE = Path(__file__).parents[2] / "build" / "docs"
PAGES = (
    "index",
    "train/lora",
    "reference/commands/train",
    "reference/config/run",
    "families/llama",
    "explain/losses",
    "results",
    "reference/api/models",
    "genindex",
    "notebooks/04_weights",
)
FOUND = {
    "own loss": "extend/loss",
    "custom loss": "extend/loss",
    "learning rate": "explain/optimizers",
    "warmup": "explain/optimizers",
    "out of memory": "scale/plan",
    "OOM": "scale/plan",
    "batch size": "scale/plan",
    "gradient accumulation": "scale/plan",
    "mask": "explain/packing",
    "padding": "explain/packing",
    "multi gpu": "scale/devices",
    "multi node": "scale/machines",
    "checkpoint": "scale/resume",
    "quantize": "use/downloaded",
    "from_pretrained": "use/downloaded",
    "chat template": "use/chat",
    "embeddings": "use/embed",
    "tokenizer": "train/tokenizer",
    "finetune": "train/fine-tune",
    "NER": "train/fine-tune",
    "translation": "train/translate",
    "RLHF": "train/reinforcement",
    "DPO": "train/preferences",
    "tensorboard": "train/watch",
    "evaluate during training": "train/watch",
    "EMA": "explain/optimizers",
    "fine-tune classification csv": "train/fine-tune",
    "own CSV": "train/fine-tune",
    "port": "coming/flax-transformers",
    "migrate from transformers flax": "coming/flax-transformers",
    "cuda": "start/install",
    "getting started": "start/quickstart",
    "FSDP": "explain/sharding",
    "dataset": "reference/sources",
    "config": "reference/config/index",
    "temperature": "use/generate",
    "perplexity": "use/probabilities",
    "attention weights": "use/attend",
    "convert to pytorch": "use/export",
    "own data": "extend/data",
    "my own text": "train/text",
    "text file": "train/text",
    "train own text": "train/text",
    "custom tokenizer": "train/tokenizer",
    "SFT": "train/instruct",
    "embed": "use/embed",
    "FlaxBertForMaskedLM": "coming/flax-transformers",
    "own loop": "extend/loop",
    "v5e": "scale/plan",
    "head": "extend/head",
    "add a head": "extend/head",
    "add a family": "extend/family",
    "new architecture": "extend/family",
    "custom model": "extend/family",
    "new model family": "extend/family",
    "search documents": "use/search",
    "resume": "scale/resume",
    "other devices": "scale/devices",
    "resume another number of devices": "scale/devices",
    "change number of devices": "scale/devices",
    "TPU": "scale/devices",
    "export to torch": "use/export",
    "lm-eval": "use/prompt",
    "LoRA": "train/lora",
    "merge adapters": "train/lora",
    "openai": "use/serve",
    "serve": "use/serve",
    "chat": "use/chat",
}
"""What a reader searches for → the page that must be among the first three results."""
FIRST_PAGES = """
const found = Search._performSearch(...Search._parseQuery(arguments[0]));
return found.slice(-3).reverse().map(([page]) => page);
"""
TEXTS = """
return [...document.querySelectorAll(arguments[0])].map(one => one[arguments[1]].trim());
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SITE.is_dir(), reason="no site: sphinx-build -W docs build/docs"),
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="Chromium is not installed"),
]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def address():
    """Serves the site on this machine."""
    handler = functools.partial(QuietHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(webdriver, tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def test_the_search_finds_the_page_on_lora(browser, address):
    browser.get(f"{address}/search.html?q=LoRA")
    browser.find_element("css selector", "#search-results li a").click()
    assert browser.find_element("css selector", "article h1").text.startswith("LoRA")
    assert f"{address}/train/lora.html" in browser.current_url


def test_the_reference_lists_inherited_methods():
    page = (SITE / "reference" / "api" / "models" / "TextEmbedder.html").read_text(encoding="utf-8")
    assert 'id="flaxzoo.models.TextEmbedder.of_run"' in page


@pytest.fixture(scope="module")
def search(browser, address):
    """Returns the first three results of a search."""
    browser.get(f"{address}/search.html?q=LoRA")
    browser.find_element("css selector", "#search-results li a")  # the index is loaded
    return functools.partial(browser.execute_script, FIRST_PAGES)


@pytest.mark.parametrize("words", FOUND)
def test_the_search_ranks_the_page_first(search, words):
    assert FOUND[words] in search(words)


@pytest.mark.parametrize("page", PAGES)
def test_pictures_and_columns_have_names(browser, address, page):
    browser.get(f"{address}/{page}.html")
    pictures = browser.execute_script(TEXTS, "article img", "alt")
    assert all(text and not text.endswith(".png") for text in pictures)
    assert all(browser.execute_script(TEXTS, "article th", "textContent"))


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_wider_than_the_window(browser, address, page, width):
    browser.set_window_size(width, 900)
    browser.get(f"{address}/{page}.html")
    script = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    needed, visible = browser.execute_script(script)
    assert needed <= visible + 1
