"""The width of a page in a browser: one page that is loaded once and resized stands for several."""

from typing import Any

BOXES = """() => JSON.stringify([...document.querySelectorAll("[data-chart] svg.main-svg")].map(
    (one) => one.getBoundingClientRect()))"""


def resize(page: Any, width: int) -> None:
    """Set the width of the window, and wait until the charts have another size that stays."""
    size = {"width": width, "height": 800}
    if page.viewport_size == size:
        return
    before = page.evaluate(BOXES)
    page.set_viewport_size(size)
    page.wait_for_function(f"(before) => ({BOXES})() !== before", arg=before)
    last = None
    while last != (last := page.evaluate(BOXES)):
        page.wait_for_timeout(300)
