"""Open pages in headless Chromium with Playwright."""

from __future__ import annotations

import functools
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.required import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Each box of a chart gets its instance of ECharts as `chart`, so that tests can read what is drawn.
KEEP_CHARTS = """
let library;
Object.defineProperty(window, "echarts", {
  get: () => library,
  set: (loaded) => (library = {...loaded, init: (box, ...rest) => (box.chart = loaded.init(box, ...rest))}),
});
"""


@functools.cache
def _launch() -> Any:
    """Return a browser, which ends with the process of the tests."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        unavailable("chromium", "not installed")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        unavailable("chromium", str(error))
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    return sync_playwright().start().chromium.launch(executable_path=program, args=options)


@contextmanager
def window(width: int, height: int = 900, **context: Any) -> Iterator[Any]:
    """Open a window. Yields Playwright's page. context: options of the browser's context."""
    created = _launch().new_context(viewport={"width": width, "height": height}, **context)
    try:
        yield created.new_page()
    finally:
        created.close()


@contextmanager
def opened(path: Path, fragment: str = "", width: int = 1280, **context: Any) -> Iterator[tuple[Any, list[str]]]:
    """Open a page and wait for its script. Yields Playwright's page, and the list of its errors and console messages.

    The page's policy forbids every request, and the browser logs attempts on the console. context: options of the
    browser's context, for example color_scheme="dark".
    """
    with window(width, **context) as page:
        page.set_default_timeout(20_000)
        page.add_init_script(KEEP_CHARTS)
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("html[data-ready]")
        yield page, messages
