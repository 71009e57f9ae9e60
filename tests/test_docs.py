"""What the documents show: the tutorial runs as it stands, links lead somewhere, the site is built without a warning."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MADE = {"settings.md"}  # of the site alone (docs/pages.py)


def test_the_tutorial_runs_and_finds_the_regions(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    stored = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "image/png" in stored
    assert str(ROOT) not in stored
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    asyncio.run(client.async_execute())  # raises what a cell raises
    run = tmp_path / "runs" / "tutorial" / "fedmix"
    names = json.loads((run / "federation.json").read_text())["clients"]
    q = json.loads((run / "summary.json").read_text())["q_zs"]
    experts = {(name.split("-")[0], max(range(3), key=row.__getitem__)) for name, row in zip(names, q, strict=True)}
    assert len(experts) == 3, experts  # one expert for each region
    assert len({expert for _, expert in experts}) == 3
    assert (run.parent / "report.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or path in MADE:
            continue
        there = (page.parent / path) if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name}: {target}"


def test_the_guide_to_methods_runs_as_it_stands(tmp_path, monkeypatch):
    """Its file, its commands and its check, in an empty folder."""
    text = (ROOT / "docs" / "methods.md").read_text()
    blocks = re.findall(r"```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _, _ in blocks] == ["python", "sh", "python", "python"]
    (_, name, source), (_, _, commands), (_, _, check), (_, second, phases) = blocks
    assert source == (ROOT / "examples" / "fedprox.py").read_text()
    (tmp_path / name).write_text(source)
    (tmp_path / second).write_text(phases)
    check += 'check_method("phases:fedrep", head_epochs=2)\n'
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in (["sh", "-e", "-c", commands], [sys.executable, "-c", check]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "runs" / "prox" / "summary.json").read_text())
    assert summary["title"] == "FedProx"
    assert "FedProx" in (tmp_path / "runs" / "both" / "report.html").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation's site, built without a warning."""
    pytest.importorskip("mkdocs", reason="pip install 'fedmix[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_site_has_the_reference_and_every_setting(site):
    assert "eq:" in (site / "api.html").read_text()
    assert "fedmix.eta" in (site / "settings.html").read_text()


def test_the_site_makes_no_request_to_anybody(site):
    """Every page in a browser, from disk: whatever it asks for is a file of the site."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    asked = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        for file in sorted(site.rglob("*.html")):
            page.goto(file.as_uri(), wait_until="load")
        page.goto((site / "index.html").as_uri())
        page.fill("input[name=query]", "permutation")  # search works from disk, with the site's own shim
        page.wait_for_selector(".md-search-result__item", timeout=20_000, state="attached")
        browser.close()
    assert len(asked) > 30
    foreign = [url for url in asked if not url.startswith(("file://", "data:", "blob:", "about:"))]
    assert not foreign, sorted(set(foreign))


def code_blocks(page, heading=None):
    """The Python blocks of a page, or of the part of it below a heading."""
    text = (ROOT / page).read_text()
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("page", "heading", "count"), [("README.md", None, 2), ("docs/data.md", "In Python", 7)])
def test_code_blocks_run_as_they_stand_and_twice_in_a_row(page, heading, count, tmp_path):
    blocks = code_blocks(page, heading)
    assert len(blocks) == count
    (tmp_path / "blocks.py").write_text("\n".join(blocks))
    for _ in range(2):
        done = subprocess.run([sys.executable, "blocks.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]


def test_the_tutorial_of_the_hospitals_runs_as_it_stands(tmp_path):
    """All but the deployment, which tests/deploy has; predictions are for a file that the reader has."""
    text = (ROOT / "docs" / "hospitals.md").read_text()
    blocks = re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "sh", "python", "sh", "sh"]
    shutil.copyfile(ROOT / "src" / "fedmix" / "data" / "heart-disease.csv", tmp_path / "new.csv")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for kind, block in blocks[:4]:
        command = ["sh", "-e", "-c", block] if kind == "sh" else [sys.executable, "-c", block]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
    assert "accuracy" in done.stderr
    assert (tmp_path / "runs" / "hospitals" / "report.html").exists()
