"""What `make demo` shows: FedMix finds the hidden groups of clients that FedAvg cannot serve."""

import json

import pytest

from fedmix.cli import main


def trained(tmp_path, capsys, algorithm, seed):
    out = ["--algorithm", algorithm, "--seed", str(seed), "--out", str(tmp_path / f"{algorithm}-{seed}")]
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits-permutation", "--rounds", "20", "--json", "--quiet", *out])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_fedmix_recovers_the_groups_and_fedavg_cannot_serve_them(tmp_path, capsys):
    mixed, plain = (trained(tmp_path, capsys, method, 0) for method in ("fedmix", "fedavg"))
    assert mixed["clusters"]["adjusted_rand_index"] == 1.0
    assert mixed["accuracy"]["test"]["server"]["mean"] >= 0.90
    assert plain["accuracy"]["test"]["server"]["mean"] < 0.50
    assert mixed["accuracy"]["test"]["fine_tuned"]["mean"] > plain["accuracy"]["test"]["fine_tuned"]["mean"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_groups_are_recovered_in_nine_of_ten_seeds(tmp_path, capsys):
    found = [trained(tmp_path, capsys, "fedmix", seed)["clusters"]["adjusted_rand_index"] for seed in range(10)]
    assert sum(index == 1.0 for index in found) >= 9, found
