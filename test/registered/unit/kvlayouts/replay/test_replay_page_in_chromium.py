"""The HTML page of a replay in a real browser: Debian's Chromium, headless, in both colour schemes and at two widths.

Skipped where Chromium or its driver is missing. Nothing is downloaded: the driver is the one of the machine.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from kvlayouts.replay.page.render import write_page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig
    from kvlayouts.replay.results import LayoutResult

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (on Debian: apt-get install chromium chromium-driver)",
)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
VIEWS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
LEAST_CONTRAST = 4.5  # WCAG 2.2, level AA, for text of any size

# The contrast of every piece of text outside of pictures with the nearest background behind it, least first.
CONTRAST = """
const luminance = colour => {
  const channels = colour.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2];
};
const ground = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
  return 'rgb(255, 255, 255)';
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const found = [];
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  if (!node.data.trim() || element.closest('svg')) continue;
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.data.trim()]);
}
return found.sort((x, y) => x[0] - y[0]);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One browser for all tests of this file, with a profile of its own."""
    assert CHROMIUM is not None
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(tmp_path: Path, identity: LayoutResult, config: ReplayConfig, trace: Trace) -> str:
    """The address of a page with a long layout name and four ranks."""
    ranks: dict[str, Any] = {
        "d2h_bytes_per_rank": (3_700_000_000, 800_000_000, 700_000_000, 900_000_000),
        "h2d_bytes_per_rank": (70_000_000, 80_000_000, 75_000_000, 71_000_000),
        "device_pages_per_rank": (16, 12, 8, 14),
        "host_pages_per_rank": (32, 30, 20, 0),
    } | dict.fromkeys(("write_acks_per_rank", "load_acks_per_rank"), (1234,) * 4)
    results = {"identity": identity, "a_strategy_of_another_distribution": replace(identity, **ranks)}
    write_page(tmp_path / "out.html", config, replace(trace, name="a_trace_with_quite_a_long_name.jsonl"), results)
    return (tmp_path / "out.html").as_uri()


def _open(browser: webdriver.Chrome, address: str, width: int, scheme: str) -> None:
    """Open the page, with everything on it unfolded; the logs then hold this visit alone."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for log in ("browser", "performance"):
        _log(browser, log)
    browser.get(address)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")


def _log(browser: webdriver.Chrome, name: str) -> list[dict[str, Any]]:
    """The entries of a log since it was last asked for."""
    entries: list[dict[str, Any]] = browser.get_log(name)  # type: ignore[no-untyped-call]  # selenium gives it no types
    return entries


def _requests(browser: webdriver.Chrome, address: str) -> list[str]:
    """What the page asked for, itself included."""
    events = [json.loads(entry["message"])["message"] for entry in _log(browser, "performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["request"]["url"] for event in sent if event["documentURL"] == address]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_page_loads_without_a_complaint_and_asks_for_nothing_else(
    width: int, scheme: str, browser: webdriver.Chrome, page: str
) -> None:
    _open(browser, page, width, scheme)
    assert _log(browser, "browser") == []
    assert [url for url in _requests(browser, page) if not url.startswith("data:")] == [page]
    assert browser.title == "KV cache replay of a_trace_with_quite_a_long_name.jsonl"


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_is_wider_than_the_screen_and_every_chart_is_seen(
    width: int, scheme: str, browser: webdriver.Chrome, page: str
) -> None:
    _open(browser, page, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).map(r => [r.width, r.height])"
    )
    assert len(sizes) == 6
    assert all(wide > 0.6 * width * (0.8 if width > 600 else 1) and high > 60 for wide, high in sizes)
    hidden = browser.execute_script(
        """return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg'))
           .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert hidden == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_all_text_stands_out_from_its_background(width: int, scheme: str, browser: webdriver.Chrome, page: str) -> None:
    _open(browser, page, width, scheme)
    found = browser.execute_script(CONTRAST)
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < LEAST_CONTRAST] == []


def test_the_colour_scheme_of_the_reader_is_followed(browser: webdriver.Chrome, page: str) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        _open(browser, page, 1280, scheme)
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        grounds[scheme] = sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    assert grounds["dark"] < 150 < 600 < grounds["light"]
