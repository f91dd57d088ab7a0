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
def opened(path: Path, fragment: str = "", width: int = 1280, **context: Any) -> Iterator[tuple[Any, list[str]]]:
    """Open a page and wait for its script. Yields Playwright's page, and the list of its errors and console messages.

    The page's policy forbids every request, and the browser logs attempts on the console. context: options of the
    browser's context, for example color_scheme="dark".
    """
    first = _launch().new_context(viewport={"width": width, "height": 900}, **context)
    try:
        page = first.new_page()
        page.set_default_timeout(20_000)
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("html[data-ready]")
        yield page, messages
    finally:
        first.close()
