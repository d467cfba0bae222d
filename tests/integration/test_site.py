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
)
FOUND = {
    "own loss": "extend/loss",
    "own data": "extend/data",
    "my own text": "train/text",
    "text file": "train/text",
    "SFT": "train/instruct",
    "embed": "use/embed",
    "FlaxBertForMaskedLM": "coming/flax-transformers",
    "own loop": "extend/loop",
    "v5e": "scale/plan",
    "head": "extend/head",
    "add a head": "extend/head",
    "add a family": "extend/family",
    "search documents": "use/search",
    "resume": "scale/resume",
    "other devices": "scale/devices",
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
    assert "LoRA" in browser.find_element("css selector", "article").text


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


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_wider_than_the_window(browser, address, page, width):
    browser.set_window_size(width, 900)
    browser.get(f"{address}/{page}.html")
    script = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    needed, visible = browser.execute_script(script)
    assert needed <= visible + 1
