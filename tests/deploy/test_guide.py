"""docs/deploy.md, command by command, as a reader would type it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

GUIDE = Path(__file__).parents[2] / "docs" / "deploy.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_sites_from_nothing(tmp_path):
    section = GUIDE.read_text().partition("## Three sites")[2].partition("## When something")[0]
    commands = re.findall(r"```sh\n(.*?)```", section, re.S)
    assert len(commands) == 8
    script = "set -euo pipefail\n" + "\n".join(commands)
    here = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=800,
        start_new_session=True,
    )
    logs = "".join((tmp_path / f"{name}.log").read_text()[-2000:] for name in ("server", "north"))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    run = tmp_path / "clinic" / "server" / "runs" / "clinic-fedmix-seed0"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["clients"] == 3
    assert summary["accuracy"]["test"]["no_identity"] is None
    assert "never leave" in summary["notes"]["accuracy.test.no_identity"]
    assert summary["accuracy"]["test"]["fine_tuned"]["mean"] > 0.9
    assert len((tmp_path / "north.csv").read_text().splitlines()) == 401
    assert "3 of 3 sites" in done.stdout
