"""The built-in page in a browser. It needs selenium, and Chromium with its driver."""

import shutil

import httpx
import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer

from ...support.browser import chromium
from ...support.server import running, wait_for

webdriver = pytest.importorskip("selenium.webdriver")
select = pytest.importorskip("selenium.webdriver.support.select")

LINES_OF_NUMBERS = """
return [...document.querySelectorAll("#cosines td")].map(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return range.getClientRects().length;
});
"""
TEXTS = ["the cat sat", "a dog ran to the red house", "the mat and the dog sat"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("on_one_device"),
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "classifier"
    words = train_tokenizer(TEXTS * 9, TokenizerConfig("wordpiece", 50))
    sizes = {"max_length": 48, "num_layers": 1, "d_model": 16, "num_heads": 2, "init_std": 0.5}
    head = {"head": "sequence_classification", "labels": ("bad", "good")}
    model = models.create(models.BertConfig(vocab_size=words.vocab_size, **sizes, **head))
    train.save_run(folder, model, models.init_params(model, jax.random.key(0)), words)
    return folder


@pytest.fixture(scope="module")
def url(run_folder, classifier, tmp_path_factory):
    names = run_folder, classifier, "--warm-up-length", "0", "--rows", "1"
    with running(tmp_path_factory.mktemp("logs"), *names) as server:
        yield server.url


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(webdriver, tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(browser, url):
    browser.set_window_size(1280, 900)
    browser.get(f"{url}/")
    return Page(browser)


class Page:
    """What a visitor does and sees."""

    def __init__(self, browser):
        self.browser = browser

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def choose(self, model, tab):
        wait_for(lambda: self.browser.find_elements("css selector", "#model option"))
        select.Select(self.find("#model")).select_by_visible_text(model)
        self.find(f"#tab-{tab}").click()

    def send(self, panel, text, selector="textarea"):
        """Types a text, sends it and waits for the answer."""
        self.find(f"#{panel} {selector}").send_keys(text)
        button = self.find(f"#{panel} .main")
        button.click()
        wait_for(lambda: button.is_enabled())

    def rows(self, table):
        return [
            [cell.text for cell in row.find_elements("css selector", "th, td")]
            for row in self.browser.find_elements("css selector", f"#{table} tr")
        ]


def test_a_conversation(page, url):
    page.choose("tiny", "chat")
    for name, value in (("temperature", "0"), ("tokens", "8")):
        page.find(f"#{name}").clear()
        page.find(f"#{name}").send_keys(value)
    messages = []
    for text in ("the small dog", "is it big?"):
        messages.append({"role": "user", "content": text})
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        messages.append(answer["choices"][0]["message"])
        page.send("chat", text)
    shown_texts = [
        x.get_attribute("textContent") for x in page.browser.find_elements("css selector", ".said")
    ]
    assert shown_texts == [message["content"] for message in messages]
    page.find("#clear").click()
    page.browser.implicitly_wait(0)
    assert not page.browser.find_elements("css selector", ".said")
    page.browser.implicitly_wait(20)


def test_cosines_of_vectors(page, classifier):
    page.choose("classifier", "embed")
    page.send("embed", "\n".join(TEXTS))
    vectors = models.TextEmbedder.of_run(classifier)(TEXTS)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    head, *rows = page.rows("cosines")
    assert head == ["16 dimensions", "1", "2", "3"]
    assert [row[0] for row in rows] == [f"{i} {text}" for i, text in enumerate(TEXTS, 1)]
    shown = np.array([row[1:] for row in rows], float)
    np.testing.assert_allclose(shown, vectors @ vectors.T, atol=0.00051)


def test_labels_and_a_refused_text(page, classifier):
    page.choose("classifier", "classify")
    page.send("classify", "\n".join(TEXTS))
    expected = train.predict(classifier, TEXTS, log=lambda _: None)
    _, *rows = page.rows("labels")
    assert [row[:2] for row in rows] == [[one["text"], one["label"]] for one in expected]
    assert all(row[2].startswith(f"{row[1]} 0.") for row in rows)
    page.find("#tab-embed").click()
    page.send("embed", "the dog\n")
    assert len(page.rows("cosines")) == 2
    page.send("embed", "dog " * 60)
    assert "48 tokens" in page.find("#problem").text
    page.browser.implicitly_wait(0)
    assert not page.rows("cosines")  # not the cosines of earlier texts
    page.browser.implicitly_wait(20)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_phone_and_both_themes_and_loads_nothing_else(page, url, theme):
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.browser.set_window_size(400, 800)
    page.choose("classifier", "embed")
    page.send("embed", "\n".join(["a very long text about dogs and cats"] * 12))
    script = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    needed, visible = page.browser.execute_script(script)
    assert needed <= visible
    lines = page.browser.execute_script(LINES_OF_NUMBERS)
    assert lines == [1] * 12 * 12
    script = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert (sum(page.browser.execute_script(script)) > 384) == (theme == "light")
    script = "return performance.getEntriesByType('resource').map(each => each.name)"
    assert all(name.startswith(f"{url}/v1/") for name in page.browser.execute_script(script))
