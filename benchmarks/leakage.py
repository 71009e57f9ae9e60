"""Accuracy against leakage: the same recipe with and without protection, trained and audited, as a table (docs/privacy.md).

python benchmarks/leakage.py --recipe digits-skew --seeds 0,1,2 --out runs/leakage
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import fedmix

NOISE = (0.001, 0.003, 0.01, 0.03, 0.1)
WAYS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "FedAvg": ("fedavg", {}),
    "FedAvg, linear": ("fedavg", {"server": {"aggregation": "linear"}}),
    "biased FedAvg": ("biased-fedavg", {}),
    "FedMix": ("fedmix", {}),
    "FedMix, linear": ("fedmix", {"server": {"aggregation": "linear"}}),
    "FedMix, private phi": ("fedmix", {"fedmix": {"phi": "private"}}),
    "FedMix, clip 1": ("fedmix", {"privacy": {"clip": 1.0}}),
    **{f"FedMix, clip 1, noise {z:g}": ("fedmix", {"privacy": {"clip": 1.0, "noise": z}}) for z in NOISE},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="digits-skew")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", default="runs/leakage")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    print(
        "| | local | server | bias, one step | bias, a local update | q(z\\|s) and phi, first round | at the end | epsilon |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, (method, settings) in WAYS.items():
        found = [one(args.recipe, method, settings, seed, Path(args.out) / f"{name}-{seed}") for seed in seeds]
        print(
            f"| {name} | " + " | ".join(cell([row[i] for row in found]) for i in range(len(found[0]))) + " |",
            flush=True,
        )


def one(recipe: str, method: str, settings: dict[str, dict[str, Any]], seed: int, out: Path) -> list[float | None]:
    """Local and server accuracy in %, how far attacks stay from the truth (total variation), epsilon."""
    trained = fedmix.train(recipe, out=out, resume=True, algorithm=method, seed=seed, **settings)
    audit = fedmix.audit(out)
    accuracy = trained.summary["accuracy"]["test"]
    attacks = [("start", "bias_single_step"), ("start", "bias_normalised"), ("start", "posterior_whole")]
    return [
        100 * accuracy["fine_tuned"]["mean"],
        100 * accuracy["server"]["mean"],
        *(distance(audit, *attack) for attack in (*attacks, ("end", "posterior_whole"))),
        audit["protection"]["epsilon"],
    ]


def distance(audit: dict[str, Any], when: str, attack: str) -> float | None:
    found = audit["attacks"][when].get(attack)
    return found and found["total_variation"]["mean"]


def cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = statistics.mean(known)
    return f"{mean:.3g}" if mean >= 1000 else f"{mean:.1f}" if mean > 1.5 else f"{mean:.3f}"


if __name__ == "__main__":
    main()
