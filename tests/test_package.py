"""The project as its users meet it: the README as it stands, the examples, the wheel outside of the checkout."""

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_readmes_python_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert "mean" in capsys.readouterr().out
    assert names["run"].summary["accuracy"]["test"]["server"]["mean"] > 0.8
    assert names["client"].expert_weights(names["x"][3]).shape == (120, 2)


def test_the_readme_names_only_commands_that_exist(capsys):
    from fedmix.cli import main

    for command in set(re.findall(r"`fedmix ([a-z]+)", (ROOT / "README.md").read_text())):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0


def test_the_tabular_example_runs_and_fedmix_gains(tmp_path, capsys):
    runpy.run_path(str(ROOT / "examples" / "tabular.py"))["main"](str(tmp_path))
    server = dict(re.findall(r"(\w+): fine-tuned [\d.]+, server ([\d.]+)", capsys.readouterr().out))
    assert float(server["fedmix"]) > float(server["fedavg"])


@pytest.fixture
def elsewhere():
    """A folder outside of the checkout, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()


def test_the_wheel_works_outside_of_the_checkout(elsewhere):
    """Built, installed into a folder of its own, run from elsewhere: recipes and digits must be inside."""
    tmp_path = elsewhere
    source = tmp_path / "source"
    source.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("fedmix-*.whl")
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = "import fedmix; print(fedmix.__file__)"
    found = subprocess.run([sys.executable, "-c", where], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.startswith(str(site))
    command = [sys.executable, "-m", "fedmix", "train", "digits-skew", "--rounds", "1", "--json", "--quiet"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 1
    assert (tmp_path / "runs" / "digits-skew-fedmix-seed0" / "summary.json").exists()


def test_versions_agree():
    import tomllib

    import fedmix

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fedmix.__version__
    assert f"version: {fedmix.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert fedmix.__version__ in (ROOT / "CHANGELOG.md").read_text()
