"""Every recipe that comes with fedmix, with every method, on small files in the publishers' formats."""

import json

import pytest
from conftest import fedmix

from fedmix.settings.reading import read_recipe, shipped


@pytest.mark.parametrize("recipe", shipped())
def test_every_shipped_recipe_runs_with_every_method(recipe, tmp_path, small_files):
    out = str(tmp_path / "c")
    methods = "fedmix,fedavg,biased-fedavg,local-global,independent"
    command = ["compare", recipe, "--algorithms", methods, "--rounds", "2", "--out", out, "--quiet", "--json"]
    data = read_recipe(recipe).data
    fewer = []  # at full size they are planned in the tests, which runs a step of one client
    if data.source not in ("digits", "heart-disease"):
        clients = 0 if data.split == "by-writer" else 6
        fewer = ["--scale", "small", "--set", "data.share=0.4", "--set", f"data.clients={clients}"]
    done = fedmix(*command, "--set", "training.epochs=1", *fewer)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["algorithm"] for row in rows] == methods.split(",")
    assert all(0 <= row["test"]["fine_tuned"]["mean"] <= 1 for row in rows)
    assert rows[-1]["gib"]["mean"] == 0
    settings = read_recipe(recipe).fedmix
    # where their number is found out there is one at first; where they share all but the output layer they are hardly more
    experts = settings.experts if settings.experts != "auto" and settings.shared == "none" else 1
    assert rows[0]["gib"]["mean"] > 0.97 * experts * rows[1]["gib"]["mean"]
