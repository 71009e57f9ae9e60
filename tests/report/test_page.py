"""The page in a real browser: Debian's Chromium without a window, driven by Playwright. Skipped where there is none."""

import json
import re
import shutil
import time

import pytest
from made_runs import made_up, three_runs
from test_report import cut, watched

from fedmix.report.page import report
from fedmix.report.runs import read_runs

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield found
        found.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = three_runs(folder / "runs")
    evaluation = {
        "fine_tuned": {"what": "fine-tuned", "accuracy": {"mean": 0.5, "worst_decile": 0.1}, "ece": {"mean": 0.1}}
    }
    row = {"accuracy": {"mean": 0.4, "std": 0.1}}
    labelled = [{"mean_points": n, "private_parts": row, "fine_tuned": row} for n in (5, 20, 100)]
    without = {"averaged": {"what": "gates averaged", "clients": {"accuracy": {"mean": 0.3}}}}
    evaluation["new_clients"] = {"labelled": labelled, "unlabelled": without}
    (runs / "fedmix-0" / "evaluation.json").write_text(json.dumps(evaluation))
    true = [[0.1] * 10] * 8
    attack = {"total_variation": {"mean": 0.2, "most_exposed": 0.1}, "of_clients": [{"estimate": own} for own in true]}
    audit = {"names": [str(s) for s in range(8)], "true": true, "attacks": {"start": {"bias_single_step": attack}}}
    (runs / "fedmix-0" / "audit.json").write_text(json.dumps(audit | {"guess": {"total_variation": {"mean": 0.3}}}))
    file = folder / "report.html"
    file.write_text(report(read_runs([str(runs)])))
    assert file.stat().st_size < 5_000_000
    return file


class Opened:
    """A page, with everything that went wrong on it."""

    def __init__(self, browser, url, width=1200, dark=False):
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.errors, self.requests = [], []
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("body[data-drawn=yes]")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def curve(self, chart="curves", of="y"):
        return self.page.evaluate(f"document.getElementById('{chart}').data.map(trace => Array.from(trace.{of}))")


def slide(page, which, to):
    page.evaluate(
        "([id, to]) => { const own = document.getElementById(id); own.value = to; own.dispatchEvent(new Event('input')); }",
        [which, str(to)],
    )


def until(page, holds, seconds=15):
    """The page's own rules forbid Playwright's way of waiting, which evaluates text inside it."""
    end = time.monotonic() + seconds
    while not page.evaluate(holds):
        assert time.monotonic() < end, holds
        page.wait_for_timeout(100)


def test_a_comparison_loads_without_an_error_or_a_request(browser, page_file):
    with Opened(browser, page_file.as_uri()) as opened:
        page = opened.page
        page.wait_for_timeout(500)
        assert opened.errors == []
        assert opened.requests == [page_file.as_uri()]
        shown = page.evaluate("[...document.querySelectorAll('section')].filter(s => !s.hidden).map(s => s.id)")
        assert shown == ["results", "learning", "experts", "divergence", "clients", "new", "audit", "again"]
        assert page.locator("#table tbody tr").count() == 2
        assert page.locator("#verdict").inner_text()
        for chart in page.locator(".chart").all():
            if chart.is_visible():
                assert len(chart.get_attribute("aria-label")) > 20  # what is to be seen, in words
                assert page.locator(f"#{chart.get_attribute('id')}-title").inner_text()


BUTTONS = (
    "[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title || b.getAttribute('aria-label') || '')"
)


def offers_no_upload(page):
    """What the buttons of all charts say, and where Plotly would send a chart to."""
    titles = page.evaluate(BUTTONS)
    assert any("Download" in title for title in titles)  # there are buttons at all
    assert not [title for title in titles if re.search("share|cloud|upload|edit|studio", title, re.IGNORECASE)]
    settings = "c => [c._context.showSendToCloud, c._context.plotlyServerURL]"
    found = page.evaluate(f"[...document.querySelectorAll('.js-plotly-plot')].map({settings})")
    assert all(setting == [False, ""] for setting in found)


def test_no_chart_offers_to_upload_itself(browser, page_file, tmp_path):
    with Opened(browser, page_file.as_uri()) as opened:
        offers_no_upload(opened.page)
    made_up(tmp_path / "runs" / "one")
    with watched(str(tmp_path / "runs")) as (url, _), Opened(browser, url) as opened:
        offers_no_upload(opened.page)


def test_controls_change_what_is_shown(browser, page_file):
    with Opened(browser, page_file.as_uri()) as opened:
        page = opened.page
        before = opened.curve()
        page.select_option("#measure", "server")
        assert opened.curve() != before
        by_round = opened.curve(of="x")
        page.select_option("#over", "gib")
        assert opened.curve(of="x") != by_round
        rough = opened.curve()
        slide(page, "smooth", 5)
        assert opened.curve() != rough
        assert page.locator("#smooth-is").inner_text() == "5"
        at_the_end = opened.curve("zs", "z")
        slide(page, "frame", 0)
        assert opened.curve("zs", "z") != at_the_end
        assert page.locator("#frame-is").inner_text() == "1"
        page.select_option("#layer", index=1)
        page.select_option("#client", "3")
        assert "client 3" in page.inner_text("#one-title")
        shown = page.evaluate("document.querySelectorAll('#curves .scatterlayer .trace').length")
        page.locator("#curves .legendtoggle").first.click()
        until(page, f"document.querySelectorAll('#curves .scatterlayer .trace').length < {shown}")
        assert opened.errors == []


def test_the_table_sorts_and_can_be_taken_along(browser, page_file, tmp_path):
    with Opened(browser, page_file.as_uri()) as opened:
        page = opened.page
        rows = "[...document.querySelectorAll('#table tbody tr td:first-child')].map(cell => cell.textContent)"
        page.click("#table th:has-text('GiB') button")
        up = page.evaluate(rows)
        page.click("#table th:has-text('GiB') button")
        assert page.evaluate(rows) == up[::-1]
        assert page.locator("#table th[aria-sort=descending]").inner_text().startswith("GiB")
        for button, name, words in (
            ("#csv", "fedmix.csv", '"method","fine-tuned, test"'),
            ("#latex", "fedmix.tex", r"\begin{tabular}"),
        ):
            with page.expect_download() as loaded:
                page.click(button)
            assert loaded.value.suggested_filename == name
            loaded.value.save_as(tmp_path / name)
            assert words in (tmp_path / name).read_text()


def test_seeds_are_averaged_over_the_same_rounds(browser, tmp_path):
    for seed in (0, 1):
        made_up(tmp_path / "runs" / f"seed{seed}", rounds=900, seed=seed)
    cut(tmp_path / "runs" / "seed1", 450)
    (tmp_path / "page.html").write_text(report(read_runs([str(tmp_path / "runs")])))
    with Opened(browser, f"file://{tmp_path}/page.html") as opened:
        opened.page.select_option("#measure", "loss")
        x, y = (opened.curve(of=axis)[-1] for axis in "xy")
        assert x[-1] == 900
        assert y[-1] == pytest.approx(2 / 899, rel=0.01)  # of one seed alone, rounds 898 to 900
        assert y[x.index(450)] == pytest.approx(2 / 449, rel=0.01)
        assert opened.errors == []


def test_long_names_that_begin_alike_stay_apart_and_every_method_has_its_clients(browser, tmp_path):
    for n in range(3):
        made_up(tmp_path / "runs" / f"run{n}", more=f'[data]\nside = "{"long " * 20}{n}"\n', accuracy=0.5 + n / 10)
    made_up(tmp_path / "runs" / "avg", algorithm="fedavg", accuracy=0.3)
    federation = json.loads((tmp_path / "runs" / "avg" / "federation.json").read_text())
    federation["labels"] = ["the same beginning, one", "the same beginning, two"]
    (tmp_path / "runs" / "avg" / "federation.json").write_text(json.dumps(federation))
    (tmp_path / "page.html").write_text(report(read_runs([str(tmp_path / "runs")])))
    with Opened(browser, f"file://{tmp_path}/page.html") as opened:
        page = opened.page
        assert [set(x) for x in opened.curve("spread", "x")] == [{0}, {1}, {2}, {3}]
        assert len(set(page.evaluate("document.getElementById('curves').data.map(t => t.name)"))) == 4
        page.select_option("#of", label="FedAvg")
        assert "FedAvg" in page.inner_text("#worst-title")
        assert "30.0" in page.inner_text("#worst")
        assert opened.curve("one", "x")[0] == [0, 1]
        assert opened.errors == []


def test_what_was_hidden_or_zoomed_into_stays_so(browser, page_file):
    with Opened(browser, page_file.as_uri()) as opened:
        page = opened.page
        page.locator("#curves .legendtoggle").first.click()
        page.wait_for_timeout(800)  # a second click might follow, Plotly thinks
        box = page.locator("#curves .nsewdrag").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 20, steps=5)
        page.mouse.up()
        look = (
            "(gd => [gd._fullLayout.xaxis.range, gd._fullData.map(t => t.visible)])(document.getElementById('curves'))"
        )
        page.wait_for_timeout(500)
        before = page.evaluate(look)
        assert "legendonly" in before[1]
        assert before[0][0] > 1.2, "nothing was zoomed into"
        slide(page, "smooth", 5)
        assert page.evaluate(look) == before


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_overflows_on_a_phone_or_in_the_dark(browser, page_file, width, dark):
    with Opened(browser, page_file.as_uri(), width, dark) as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != back
        assert opened.errors == []


def test_hostile_names_stay_text(browser, tmp_path):
    hostile = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'><b>x</b>"
    names = [hostile, "y" * 10_000, "🦊 fox", "&amp;", '"; window.hurt = 1; "']
    folder = made_up(tmp_path / "run", name=hostile, names=names)
    (tmp_path / "report.html").write_text(report(read_runs([str(folder)])))
    with Opened(browser, (tmp_path / "report.html").as_uri(), 390) as opened:
        page = opened.page
        page.select_option("#client", "0")
        assert page.evaluate("window.hurt") is None
        assert page.locator("img").count() == 0
        assert page.locator("#title").inner_text().startswith("<script>")
        assert "<b>x</b>" in page.locator("#worst").inner_text() or "<script>" in page.locator("#worst").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert opened.errors == []
        assert len(opened.requests) == 1


def test_an_unfinished_run_says_so(browser, tmp_path):
    folder = made_up(tmp_path / "run")
    (folder / "summary.json").unlink()
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: len(text) // 2])
    (tmp_path / "report.html").write_text(report(read_runs([str(folder)])))
    with Opened(browser, (tmp_path / "report.html").as_uri()) as opened:
        assert "unfinished" in opened.page.locator("#wrong").inner_text()
        assert "No run has ended yet" in opened.page.locator("#verdict").inner_text()
        assert opened.errors == []


def test_the_live_page_follows_without_reloading(browser, tmp_path):
    folder = made_up(tmp_path / "run")
    whole = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(whole[:10]))
    with watched(str(folder)) as (url, _), Opened(browser, url) as opened:
        page = opened.page
        page.evaluate("window.same = true")
        assert max(opened.curve("sent", "x")[0]) == 10
        time.sleep(0.02)
        (folder / "metrics.jsonl").write_text("".join(whole))
        until(page, "Math.max(...document.getElementById('sent').data[0].x) === 20")
        assert page.evaluate("window.same") is True
        assert "live" in page.locator("#live").inner_text()
        assert opened.errors == []
