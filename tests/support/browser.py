"""Chromium without a window, driven by selenium."""

import contextlib
import shutil


@contextlib.contextmanager
def chromium(webdriver, profile):
    """Starts Chromium with a folder for its profile."""
    options = webdriver.ChromeOptions()
    for argument in (
        *("headless", "no-sandbox", "disable-gpu", "no-first-run", "window-size=1280,900"),
        *("disable-background-networking", "disable-component-update", f"user-data-dir={profile}"),
    ):
        options.add_argument(f"--{argument}")
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.implicitly_wait(20)
    try:
        yield driver
    finally:
        driver.quit()
