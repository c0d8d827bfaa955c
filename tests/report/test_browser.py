"""The page in a real browser: drawn, quiet, and usable by pointer, keyboard, phone and in the dark."""

import re
from contextlib import contextmanager

import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError
from playwright.sync_api import expect
from resized_pages import resize

HEADS, BARS = "#s0-heads-chart", "#s0-depth-chart .point path"


@contextmanager
def opened(browser, page_file, width=1200, color_scheme="light"):
    """Open the page; at the end nothing was complained about and nothing was asked for."""
    complaints, requests = [], []
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=color_scheme, reduced_motion="reduce"
    )
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.route(re.compile("^(?!file:|data:|blob:)"), lambda route: route.abort())
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-drawn]", timeout=30_000)
    yield page
    context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith(("data:", "blob:"))} == {page_file.as_uri()}


@pytest.fixture(scope="module")
def page(browser, page_file):
    """The page, loaded once. The first test that takes it types on a page that nobody has touched."""
    with opened(browser, page_file) as page:
        yield page


@pytest.fixture
def dark_page(browser, page_file):
    with opened(browser, page_file, color_scheme="dark") as page:
        yield page


@pytest.fixture
def narrow_page(browser, page_file):
    with opened(browser, page_file, width=320) as page:
        yield page


def colour(page, selector, name):
    return page.eval_on_selector(selector, f"element => getComputedStyle(element).{name}")


def wait_for_label(page):
    """Wait for the label of a cell. On a busy machine Plotly drops labels when it draws a chart again: ask again."""
    label = page.locator(f"{HEADS} .hovertext")
    for _ in range(5):
        try:
            return label.wait_for(state="attached", timeout=5000)
        except PlaywrightTimeoutError:
            page.keyboard.press("ArrowUp")
            page.keyboard.press("ArrowDown")
    return label.wait_for(state="attached")


def test_the_keyboard_reaches_everything(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["y"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"

    wanted = page.evaluate(
        """() => [...document.querySelectorAll("main a, main button, main select, main summary, main [tabindex='0']")]
          .filter((one) => one.checkVisibility()).length"""
    )
    reached = page.evaluate("() => { window.seen = new Set(); return 0; }")
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        reached = page.evaluate(
            """() => { const one = document.activeElement;
              if (one.closest("main")) window.seen.add(one);
              return [window.seen.size, getComputedStyle(one).outlineStyle, one.tagName]; }"""
        )
        assert reached[1] != "none" or reached[2] == "BODY", "the focus must be visible"
    assert reached[0] == wanted

    page.focus(HEADS)
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    wait_for_label(page)
    expect(page.locator("#said")).to_have_text(re.compile("^layer 1 · head 1"))
    page.keyboard.press("Home")
    expect(page.locator("#said")).to_have_text("layer 0 · head 0, distance from averaging 2")
    page.keyboard.press("Escape")
    assert page.get_attribute(HEADS, "aria-label").startswith("Heat map of distance from averaging by layer and head")
    unnamed = page.eval_on_selector_all(
        "button, select, [role]",
        "all => all.filter((one) => !(one.ariaLabel || one.labels?.length || one.id === 'said'))",
    )
    assert unnamed == []


def test_every_chart_is_drawn_and_hovering_shows_a_cells_value(page):
    sizes = page.eval_on_selector_all(
        "[data-chart]", "all => all.map(one => one.querySelector('svg.main-svg').getBoundingClientRect().toJSON())"
    )
    assert len(sizes) == 4 + 4 + 1
    assert all(size["width"] > 300 and size["height"] > 100 for size in sizes)
    drawn = {name: page.locator(f"#s0-{name}-chart {mark}").count() for name, mark in MARKS.items()}
    assert drawn == {"heads": 1, "residual": 12, "sandwich": 5, "depth": 4}

    page.select_option("#s0-heads select", label="score range θ")
    assert "a row of scores. Here from 0.002 (layer 0, head 0)" in page.inner_text("#s0-heads-note")
    page.locator(HEADS).scroll_into_view_if_needed()
    area = page.locator(f"{HEADS} .nsewdrag").bounding_box()
    page.mouse.move(area["x"] + area["width"] * 5 / 6, area["y"] + area["height"] / 4)
    shown = page.locator(f"{HEADS} .hovertext")
    shown.wait_for()
    assert shown.text_content() == "layer 2 · head 0score range θ 0.006"  # (2 + 1)·(0 + 2)·10⁻³

    page.locator("#s0-sandwich-chart .point").first.hover(force=True)
    page.locator("#s0-sandwich-chart .hovertext").wait_for()
    assert "attained by an input 0.01" in page.locator("#s0-sandwich-chart .hovertext").text_content()


MARKS = {"heads": ".heatmaplayer image", "residual": ".point", "sandwich": ".point", "depth": ".point"}


def test_names_are_shown_and_never_run(page):
    from_file = page.evaluate("JSON.parse(document.getElementById('data').textContent)")
    assert page.inner_text("#s0-title") == "<script>alert(1)</script><img src=x onerror=alert(2)>"
    assert page.inner_text("#s1-title").startswith("</script><script>alert(3)</script><!-- \"'&amp; $title")
    assert any(
        one.startswith("</script><script>a") for one in page.locator("#s0-sandwich-chart .ytick").all_text_contents()
    )
    assert page.locator("main img, main script, main iframe").count() == 0
    assert len(page.query_selector_all("script")) == 3
    assert len(from_file) == 9


def test_the_policy_forbids_what_the_page_never_does(browser, page_file):
    context = browser.new_context()
    page = context.new_page()
    page.goto(page_file.as_uri())
    refused = page.evaluate(
        """async () => {
          const found = [];
          document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
          await fetch("https://example.org/").catch(() => {});
          document.body.append(Object.assign(document.createElement("img"), { src: "https://example.org/x.png" }));
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          document.body.append(script);
          await new Promise((resolve) => setTimeout(resolve, 100));
          return [found.sort(), Boolean(window.ran)];
        }"""
    )
    context.close()
    assert refused == [["connect-src", "img-src", "script-src-elem"], False]


def test_dark_and_light_follow_the_system_and_the_toggle(dark_page):
    page = dark_page
    marks = {"body": "backgroundColor", BARS: "fill", "#s0-depth-chart .ytick text": "fill"}

    def look():
        return [colour(page, selector, name) for selector, name in marks.items()]

    dark = look()
    assert dark[:2] == ["rgb(18, 22, 27)", "rgb(86, 180, 233)"]
    assert page.get_attribute("#theme", "aria-pressed") == "true"
    page.emulate_media(color_scheme="light")
    expect(page.locator(BARS).first).to_have_css("fill", "rgb(0, 114, 178)")
    light = look()
    assert light[0] == "rgb(251, 251, 250)"
    assert not set(dark) & set(light)
    page.focus("#theme")
    page.keyboard.press("Space")
    expect(page.locator(BARS).first).to_have_css("fill", dark[1])
    assert look() == dark
    page.keyboard.press("Enter")
    expect(page.locator(BARS).first).to_have_css("fill", light[1])
    assert look() == light
    assert page.get_attribute("#theme", "aria-pressed") == "false"


def test_a_phone_shows_it_without_scrolling_sideways(narrow_page):
    page = narrow_page
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    for width in (320, 390):
        resize(page, width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        boxes = page.eval_on_selector_all(
            "[data-chart] svg.main-svg", "all => all.map((one) => one.getBoundingClientRect().toJSON())"
        )
        assert all(box["left"] >= 0 and box["right"] <= width for box in boxes)
        assert all(box["width"] > 0.7 * width for box in boxes)


def test_tables_and_the_command_are_copied_whole(page):
    page.click("#s0-sandwich .copy")
    expect(page.locator("#s0-sandwich .copy")).to_have_text("Copied")
    rows = [line.split("\t") for line in page.evaluate("navigator.clipboard.readText()").splitlines()]
    assert rows[0] == ["method", "attained", "proved", "ratio", "Theorem D.1", "how it was proved", "seconds"]
    assert rows[1] == ["identity", "0.01", "0.02", "2.0", "0.25", "joint; a note", "2.0"]
    assert rows[3][:4] == ["mean-field", "0.001", "", ""]
    assert len(rows) == 5
    page.click("#s0-heads .copy")
    expect(page.locator("#s0-heads .copy")).to_have_text("Copied")
    heads = [line.split("\t") for line in page.evaluate("navigator.clipboard.readText()").splitlines()]
    assert [len(row) for row in heads] == [13] * 6
    assert heads[5][:3] == ["2", "1", "9.0"]
    # Where the clipboard is refused, the old way is tried.
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error()); }")
    page.click("#reproduce .copy")
    expect(page.locator("#reproduce .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("depthgauge gauge --samples 4 --tokens 128")
