"""What Flower costs here: a deployed round, its bytes, and a thousand clients on Ray. Takes about ten minutes.

python benchmarks/flower.py deployed      # digits on 2 SuperNodes, TLS and keys: seconds a round, bytes beside Flower's
python benchmarks/flower.py ray           # MNIST, 1,000 clients, 20 rounds: memory round by round ($FEDMIX_DATA)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedmix.deploy import local, serve
from fedmix.settings.reading import read_recipe

ROUNDS = 12


def fedmix(*args: str) -> dict:
    command = [sys.executable, "-m", "fedmix", *args, "--json", "--quiet"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def seconds(run: Path) -> list[float]:
    return [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def deployed(folder: Path) -> None:
    """digits-skew as it is (20 clients, all of them every round) behind two SuperNodes, and on this machine alone."""
    local.prepare(folder / "f", 2, read_recipe("digits-skew"))
    began = time.perf_counter()
    with local.up(folder / "f", lambda _: None):
        print(f"| two sites up, seconds | {time.perf_counter() - began:.1f} |")
        for method in ("fedmix", "fedavg"):
            out = folder / method
            what = ["--algorithm", method, "--rounds", str(ROUNDS), "--set", f"evaluation.every={ROUNDS}"]
            began = time.perf_counter()
            fedmix("deploy", "run", str(folder / "f"), *what, "--out", str(out))
            whole = time.perf_counter() - began
            fedmix("train", "digits-skew", *what, "--engine", "local", "--out", str(folder / f"{method}-local"))
            here = statistics.median(seconds(folder / f"{method}-local"))
            each = seconds(out)[1:]
            print(
                f"| {method}, a round: median, worst | {statistics.median(each):.1f}, {max(each):.1f} "
                f"(engine local: {here:.2f}) |\n| {method}, {ROUNDS} rounds with start and evaluation | {whole:.0f} |"
            )
        changes = ["--set", "data.clients=2", "--set", "model.hidden=[4000]", "--set", "evaluation.share_private=false"]
        summary = fedmix(
            *("deploy", "run", str(folder / "f"), "--rounds", "5", *changes, "--set", "evaluation.every=5"),
            *("--out", str(folder / "bytes")),
        )
        runs = serve.flower(folder / "f" / "server", "list", serve.LINK)["runs"]
        counted = max(runs, key=lambda run: run["network-traffic"]["inbound-bytes"])["network-traffic"]["inbound-bytes"]
        ours = summary["bytes_up"]
        more = f"{100 * (counted / ours - 1):+.2f} %"
        print(f"| bytes from 2 clients in 5 rounds: ours, Flower's | {ours:,}, {counted:,} ({more}) |")


def memory(mark: str) -> float:
    """MB of all processes that were started with this mark in their environment, shared pages counted once (PSS)."""
    found = 0.0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                rows = (entry / "smaps_rollup").read_text().splitlines()
                found += sum(int(row.split()[1]) for row in rows if row.startswith("Pss:")) / 1024
        except OSError:
            continue
    return found


def on_ray(folder: Path, rounds: int = 20) -> None:
    out = folder / "ray"
    command = [sys.executable, "-m", "fedmix", "train", "mnist-liang", "--engine", "flower", "--rounds", str(rounds)]
    changes = {"data.clients": 1000, "clients_per_round": 100, "evaluation.every": rounds}
    command += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    mark = f"FEDMIX_BENCHMARK={os.getpid()}"
    env = os.environ | dict([mark.split("=")])
    process = subprocess.Popen([*command, "--out", str(out), "--quiet", "--json"], stdout=subprocess.DEVNULL, env=env)
    seen = 0
    print("| round | seconds | MB of all processes |\n|---|---|---|")
    while process.poll() is None:
        time.sleep(0.5)
        if (out / "metrics.jsonl").exists() and len(each := seconds(out)) > seen:
            seen = len(each)
            print(f"| {seen} | {each[-1]:.1f} | {memory(mark):,.0f} |", flush=True)
    assert process.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["deployed", "ray"])
    part = parser.parse_args().part
    with tempfile.TemporaryDirectory(prefix="fedmix-") as scratch:
        (deployed if part == "deployed" else on_ray)(Path(scratch))


if __name__ == "__main__":
    main()
