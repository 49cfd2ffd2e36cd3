"""The report in a real browser: headless Chromium, driven by Playwright, from file:// only."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from made_up_run import ATTACK, attack_everywhere, grow, write_run
from serving import serving
from sologrpo.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH")

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: Any) -> Path:
    path = write_run(tmp_path_factory.mktemp("runs") / "quickstart")
    write_report(path)
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Tab:
    """An open page with its charts drawn, its console messages, and its network requests."""

    def __init__(self, chromium: Any, path: Path | str, **context: Any) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page = chromium.new_context(**{"viewport": DESKTOP} | context).new_page()
        self.page.set_default_timeout(120_000)  # machines that test are busy
        self.page.on("console", lambda message: self.hear(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path if isinstance(path, str) else path.as_uri())
        if context.get("java_script_enabled", True):
            self.page.wait_for_function("!document.querySelector('.plot:not(.js-plotly-plot)')")

    def hear(self, message: str) -> None:
        if "auto-margin redraws" not in message:  # Plotly, of a chart that changes: it is drawn
            self.messages.append(message)

    def entries(self, list_id: str) -> Any:
        """The visible entries of a list."""
        return self.page.locator(f"#{list_id} [data-verdict]:visible")

    def filters(self, list_id: str) -> Any:
        return self.page.locator(f"form[data-list={list_id}]")


@pytest.fixture(scope="module")
def opened(chromium: Any, run_dir: Path) -> Iterator[Tab]:
    tab = Tab(chromium, run_dir / "report.html")
    yield tab
    tab.page.context.close()


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    """The report, with its filters as they are at first."""
    yield opened
    assert opened.messages == []
    for button in opened.page.get_by_role("button", name="reset").all():
        button.click()
    opened.page.mouse.move(5, 5)


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_the_page_opens_without_errors_and_without_network(
    chromium: Any, run_dir: Path, size: dict[str, int], scheme: str
) -> None:
    path = run_dir / "report.html"
    tab = Tab(chromium, path, viewport=size, color_scheme=scheme)
    assert tab.requests == [path.as_uri()]
    width = tab.page.evaluate("document.documentElement.scrollWidth")
    assert width == size["width"]  # nothing is wider than the screen
    shade = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", shade))
    assert (red + green + blue < 150) == (scheme == "dark")
    assert tab.messages == []
    tab.page.context.close()


def test_hostile_output_stays_text(chromium: Any, tmp_path: Path) -> None:
    attack_everywhere(tmp_path)
    tab = Tab(chromium, write_report(tmp_path))
    tab.filters("completion-list").get_by_label("open all").check()
    tab.filters("problem-list").get_by_label("open all").check()
    for plot in tab.page.locator(".plot").all():
        plot.hover()
    assert tab.page.locator("#completion-list pre").first.inner_text() == ATTACK
    assert tab.page.title() == f"{tmp_path.name}: training report"
    assert tab.page.locator("img, .plot a").count() == 0
    assert tab.messages == []
    assert len(tab.requests) == 1


def test_policy_stops_other_scripts(chromium: Any, run_dir: Path) -> None:
    tab = Tab(chromium, run_dir / "report.html")
    tab.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'document.title = \"owned\"'}))"
    )
    assert tab.page.title() == "quickstart: training report"
    assert "Content Security Policy" in tab.messages[0]


def test_problems_are_filtered_and_shown_a_page_at_a_time(tab: Tab) -> None:
    entries, filters = tab.entries("problem-list"), tab.filters("problem-list")
    more = tab.page.locator("#problem-list + button")
    assert entries.count() == 12
    entries.nth(1).locator("summary").click()
    more.click()
    assert entries.count() == 24
    assert entries.nth(1).get_attribute("open") is not None  # an opened entry stays open
    filters.get_by_label("verdict").select_option("newly wrong")
    assert filters.locator("output").inner_text() == "3 of 60 match"
    assert not more.is_visible()
    filters.get_by_label("with an answer").select_option("truncated")
    assert entries.count() == 0  # the problems 9, 27 and 45; truncated are multiples of 11
    filters.get_by_role("button", name="reset").click()
    assert filters.locator("output").inner_text() == "60 in total"
    assert entries.count() == 12


def test_completions_are_filtered_and_searched(tab: Tab) -> None:
    entries, filters = tab.entries("completion-list"), tab.filters("completion-list")
    filters.get_by_label("verdict").select_option("right")
    filters.get_by_label("reward from").fill("1.5")
    assert filters.locator("output").inner_text() == "14 of 224 match"
    filters.get_by_label("step").select_option("19")
    assert [entry.get_attribute("data-reward") for entry in entries.all()] == ["2"]
    filters.get_by_label("to", exact=True).fill("1.9")
    assert entries.count() == 0
    filters.get_by_role("button", name="reset").click()
    search = filters.get_by_label("search")
    search.press_sequentially("  37 + 5")
    assert filters.locator("output").inner_text() == "1 of 224 match"
    search.fill("WHAT IS 37 + 1?")  # of all eight of the group
    search.press("Enter")  # sends nothing
    filters.get_by_label("open all").check()
    assert entries.locator("pre:visible").count() == 8
    filters.get_by_label("open all").uncheck()
    assert entries.locator("pre:visible").count() == 0


def test_charts_are_read_with_the_arrow_keys(tab: Tab) -> None:
    figure = tab.page.get_by_label("Reward", exact=True)
    readout = figure.locator(".hoverlayer .legend")
    for key, step, validation in (
        ("ArrowLeft", 40, True),
        ("ArrowLeft", 39, False),
        ("ArrowRight", 40, True),
        ("ArrowRight", 40, True),  # there is no step 41
    ):
        figure.press(key)
        readout.get_by_text(f"step {step}").wait_for()
        assert ("validation accuracy : 51%" in readout.text_content()) == validation


def test_everything_is_there_without_scripts(chromium: Any, run_dir: Path) -> None:
    tab = Tab(chromium, run_dir / "report.html", java_script_enabled=False)
    assert tab.entries("problem-list").count() == 60
    assert tab.entries("completion-list").count() == 224
    assert not tab.filters("problem-list").is_visible()
    assert "The charts need JavaScript" in tab.page.locator("header").inner_text()


# --- the page of a run that trains -----------------------------------------------------------


def test_the_page_follows_a_run_until_it_stops(chromium: Any, tmp_path: Path) -> None:
    run = tmp_path / "growing"
    with serving(run) as address:
        tab = Tab(chromium, address)
        state = tab.page.locator(".live")
        assert state.inner_text().startswith(f"Waiting nothing is training in {run} yet")
        with FileLock(run / ".lock"):
            attack_everywhere(run)
            grow(run, range(1, 13))
            state.get_by_text("Training: step 12 of 40").wait_for()
            assert tab.page.locator("img, .plot a").count() == 0
            assert tab.page.locator(".warnings").inner_text().endswith(ATTACK)
        state.get_by_text("Stopped at step 12 of 40").wait_for()
        assert tab.messages == []
        assert set(tab.requests) == {f"{address}/"}
    tab.page.get_by_text("The server of this page has stopped").wait_for()
    assert not state.is_visible()
    tab.page.context.close()


def test_what_is_read_stays_until_it_is_closed(chromium: Any, tmp_path: Path) -> None:
    run = tmp_path / "growing"
    grow(run, range(1, 3))
    with serving(run) as address:
        tab = Tab(chromium, address)
        filters = tab.filters("completion-list")
        filters.get_by_label("verdict").select_option("wrong")
        entry = tab.entries("completion-list").first
        entry.locator("summary").click()
        grow(run, range(3, 4))
        tab.page.get_by_text("The run has logged more.").wait_for()
        entry.locator("summary").click()
        filters.get_by_role("button", name="reset").click()
        tab.page.evaluate("scrollTo(0, 1500)")
        tab.page.locator(".live").get_by_text("step 3 of 40").wait_for()
        tab.page.wait_for_function("scrollY === 1500")
        assert tab.messages == []
    tab.page.context.close()
