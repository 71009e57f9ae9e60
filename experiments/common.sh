# Sourced by the scripts beside it. Runs go to runs/experiments/ and are resumed where they stopped, so a script can be started
# again at any time. What documents cite of an ended run is kept in experiments/runs/ (keep.py) and never rewritten; a run that
# is kept is not trained again unless AGAIN=1. Data: $FEDMIX_DATA or the user's cache (`fedmix data`).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FEDMIX=${FEDMIX:-.venv/bin/fedmix}
PYTHON=${PYTHON:-.venv/bin/python}
OUT=runs/experiments
KEPT=experiments/runs
# 60 to 75 % of the time where the processor multiplies bfloat16 (AVX512-BF16, AMX); docs/results.md, 'Precision', has what it costs.
BF16=(--set training.precision=bfloat16)
NAMES=()

is_kept() {
  [ "${AGAIN:-0}" != 1 ] && [ -f "$KEPT/$1/summary.json" ]
}

go() {  # go NAME RECIPE [FLAGS...]
  local name=$1
  shift
  if is_kept "$name"; then
    echo "== $name is kept in $KEPT"
    return
  fi
  echo "== $name"
  "$FEDMIX" train "$@" --out "$OUT/$name" --resume
  NAMES+=("$name")
}

look() {  # look NAME [FLAGS...]: every kind of inference
  local name=$1
  shift
  is_kept "$name" || [ -f "$OUT/$name/evaluation.json" ] || "$FEDMIX" evaluate "$OUT/$name" "$@"
}

audit() {
  local name=$1
  shift
  is_kept "$name" || [ -f "$OUT/$name/audit.json" ] || "$FEDMIX" audit "$OUT/$name" "$@"
}

keep_ended() {  # at the end of a script, or where it was stopped: what has ended
  local name
  for name in "${NAMES[@]}"; do
    [ ! -f "$OUT/$name/summary.json" ] || "$PYTHON" experiments/keep.py "$OUT/$name" "$KEPT/$name"
  done
}
trap keep_ended EXIT
