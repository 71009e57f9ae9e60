"""fedmix beside its peers on one setting, in one run: `make bench`.

Every contestant is a process of its own (peers in virtual environments under .bench/) and takes turns, a round at a time,
so that all of them meet the same noise. A row counts only if its training loss after two rounds is within 1 % of ours.
What the cores can multiply (2 processes x 1 thread) is measured between the turns. Results: docs/performance.json,
docs/performance.png and a table.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks" / "contestants"
BENCH = ROOT / ".bench"
SETTING = BENCH / "setting.npz"
FLOP_PER_SAMPLE = 42.9e6  # LeNet-5 on 3 x 32 x 32: forward and backward, without the gradient of the input
ROUND_FLOP = FLOP_PER_SAMPLE * 4500
PEERS = {
    "pfl": ["pfl[pytorch]==0.6.0", "torch>=2.6,<2.14"],
    "flower": ["flwr[simulation]==1.41.0", "torch>=2.6,<2.14"],
    "fedjax": ["fedjax==0.0.17", "jax==0.10.2"],
}


class Contestant:
    """A process that does one round for each line it is given."""

    def __init__(self, name: str, python: Path, script: str, *args: str, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = open(BENCH / f"{name.replace('/', '-')}.log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(python), str(HERE / script), str(SETTING), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | (env or {}),
            cwd=BENCH,
        )
        self.answers: list[dict[str, float]] = []

    def turn(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended before its turn did; see {self.log.name}")
        self.answers.append(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()

    def seconds(self, warm: int) -> list[float]:
        return [answer["seconds"] for answer in self.answers[warm:]]


def contestants(peers: bool) -> list[Contestant]:
    own = Path(sys.executable)
    made = [
        Contestant("fedmix local", own, "ours.py", "local", "fedavg"),
        Contestant("fedmix serial", own, "ours.py", "serial", "fedavg"),
        Contestant("plain PyTorch loop", own, "plain.py"),
        Contestant("fedmix local, K = 4", own, "ours.py", "local", "fedmix", "fedmix.experts=4"),
    ]
    if peers:
        for name, packages in PEERS.items():
            environment(name, packages)
        made += [
            Contestant("pfl 0.6, 1 thread", BENCH / "pfl/bin/python", "with_pfl.py", "1"),
            Contestant("pfl 0.6, 2 threads", BENCH / "pfl/bin/python", "with_pfl.py", "2"),
            Contestant("Flower 1.41, Ray", BENCH / "flower/bin/python", "with_flower.py"),
            Contestant("FedJAX 0.0.17", BENCH / "fedjax/bin/python", "with_fedjax.py"),
        ]
    return made


def environment(name: str, packages: Sequence[str]) -> None:
    """A virtual environment for a peer, made once."""
    ready = BENCH / name / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(BENCH / name)], check=True)
        pip = [str(BENCH / name / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
        ready.touch()


def measure(rounds: int, warm: int, peers: bool) -> dict[str, Any]:
    peak = Contestant("matrix product", Path(sys.executable), "peak.py")
    entered = contestants(peers)
    try:
        for t in range(rounds + warm):
            for each in entered:
                each.turn()
                print(f"round {t + 1}  {each.name:22s} {each.answers[-1]}", file=sys.stderr, flush=True)
            peak.turn()
    finally:
        for each in (*entered, peak):
            each.close()
    flop_per_second = [answer["flop_per_second"] for answer in peak.answers[warm:]]
    return {"rows": rows(entered, flop_per_second, warm), "peak_flop_per_second": statistics.median(flop_per_second)}


def rows(entered: Sequence[Contestant], peak: Sequence[float], warm: int) -> list[dict[str, Any]]:
    ours = entered[0]
    base, reference = ours.seconds(warm), ours.answers[1]["loss"]
    made = []
    for each in entered:
        seconds = each.seconds(warm)
        experts = 4 if "K = 4" in each.name else 1
        loss = each.answers[1]["loss"]
        share = [experts * ROUND_FLOP / s / p for s, p in zip(seconds, peak, strict=True)]
        made.append(
            {
                "name": each.name,
                "seconds": statistics.median(seconds),
                "all": seconds,
                "times_ours": statistics.median(s / b for s, b in zip(seconds, base, strict=True)),
                "share_of_peak": statistics.median(share),
                "loss_after_two_rounds": loss,
                "counts": experts > 1 or abs(loss - reference) <= 0.01 * reference,
            }
        )
    return made


def table(result: dict[str, Any]) -> str:
    lines = ["| | seconds a round | times ours | share of the matrix-product peak |", "|---|---|---|---|"]
    for row in result["rows"]:
        name = row["name"] if row["counts"] else f"{row['name']} (does not count: another loss)"
        lines.append(
            f"| {name} | {row['seconds']:.2f} | {row['times_ours']:.2f} | {100 * row['share_of_peak']:.0f} % |"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    shown = sorted((r for r in result["rows"] if r["counts"] and "K = 4" not in r["name"]), key=lambda r: -r["seconds"])
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    colours = ["#1b6ca8" if row["name"].startswith("fedmix") else "#b8bec6" for row in shown]
    bars = axis.barh([row["name"] for row in shown], [row["seconds"] for row in shown], color=colours)
    words = [f"{row['seconds']:.1f} s, {100 * row['share_of_peak']:.0f} % of the peak" for row in shown]
    axis.bar_label(bars, labels=words, padding=4, fontsize=9)
    axis.set_xlim(0, 1.35 * max(row["seconds"] for row in shown))
    axis.set_xlabel("seconds a round, less is better")
    axis.set_title("FedAvg, CIFAR-10 setting: LeNet-5, 10 clients x 450 images")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def about() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "commit": commit.strip(),
        "command": "make bench",
        "cores": os.cpu_count(),
        "cpu": cpu or platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (medians over them)")
    parser.add_argument("--warm", type=int, default=2, help="rounds before that")
    parser.add_argument("--no-peers", action="store_true", help="only ours and a plain loop: nothing is installed")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="where performance.json and .png go")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import setting

    setting.write(SETTING)
    result = about() | measure(args.rounds, args.warm, not args.no_peers)
    (args.out / "performance.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, args.out / "performance.png")
    print(table(result))


if __name__ == "__main__":
    main()
