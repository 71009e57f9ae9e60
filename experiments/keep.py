"""Keep what documents cite of a run: settings, results and thinned metrics; no weights, and a federation once.

    python experiments/keep.py runs/experiments/cifar10/fedavg experiments/runs/cifar10/fedavg

A run that is kept already is left as it is: what a document cites is never rewritten.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from fedmix import schema

KEPT = (schema.RECIPE, schema.RUN, schema.ENVIRONMENT, schema.SUMMARY, schema.EVALUATION, schema.AUDIT)
# what a line of every round keeps; the line of an evaluation keeps its accuracies, and some of them their maps
EVERY_ROUND = ("round", "loss", "bytes_down", "bytes_up", "seconds", "divergence", "warnings", "refused", "absent")
AT_EVALUATIONS = ("accuracy", "bound", "expert_use", "experts_returned", "bytes_evaluation", "seconds_evaluation")
MAPS = ("q_zc", "q_zs", "divergence_layers")
MOST_MAPS = 12


def keep(run: Path, kept: Path, root: Path) -> bool:
    """Copy the small files of an ended run to `kept`, below `root`; False: it is there already."""
    if (kept / schema.SUMMARY).exists():
        return False
    if not (run / schema.SUMMARY).exists():
        raise SystemExit(f"{run} must have ended. It has no summary.json.")
    kept.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (run / name).exists():
            shutil.copyfile(run / name, kept / name)
    lines = [json.loads(text) for text in (run / schema.METRICS).read_text().splitlines()]
    (kept / schema.METRICS).write_text("".join(json.dumps(line) + "\n" for line in thinned(lines)))
    (kept / schema.FEDERATION).write_text(json.dumps(federation(run, kept, root)) + "\n")
    return True


def thinned(lines: list[dict]) -> list[dict]:
    """Every round in a few numbers; the maps of q of a dozen evaluations, with three decimals."""
    evaluated = [line["round"] for line in lines if "accuracy" in line]
    step = max(1, -(-len(evaluated) // MOST_MAPS))
    with_maps = set(evaluated[::-1][::step])
    short = []
    for line in lines:
        names = list(EVERY_ROUND)
        if "accuracy" in line:
            names += AT_EVALUATIONS
        if line["round"] in with_maps:
            names += MAPS
        short.append({name: rounded(line[name]) for name in names if name in line and line[name] != []})
    return short


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def federation(run: Path, kept: Path, root: Path) -> dict:
    """federation.json, or the name of a run that has the same one already."""
    described = schema.read_federation(run)
    for other in sorted(root.rglob(schema.FEDERATION)):
        table = json.loads(other.read_text()) if other.parent != kept else {}
        if "same_as" not in table and table == described:
            return {"same_as": os.path.relpath(other.parent, kept)}
    return dict(described)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    run, kept = map(Path, sys.argv[1:])
    root = Path(__file__).parent / "runs"
    print(f"kept: {kept}" if keep(run, kept, root) else f"kept before, and left as it is: {kept}")


if __name__ == "__main__":
    main()
