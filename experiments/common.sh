# Sourced by the scripts beside it. Runs go to experiments/runs/ and are resumed where they stopped, so a script can be started again
# at any time; one that has ended is left as it is. Data: $FEDMIX_DATA or the user's cache (`fedmix data`).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FEDMIX=${FEDMIX:-.venv/bin/fedmix}
OUT=experiments/runs
# 60 to 75 % of the time where the processor multiplies bfloat16 (AVX512-BF16, AMX); docs/results.md, 'Precision', has what it costs.
BF16=(--set training.precision=bfloat16)

go() {  # go NAME RECIPE [FLAGS...]
  local out=$OUT/$1
  shift
  echo "== $out"
  "$FEDMIX" train "$@" --out "$out" --resume
}

look() {  # look NAME [FLAGS...]: every kind of inference
  local run=$OUT/$1
  shift
  [ -f "$run/evaluation.json" ] || "$FEDMIX" evaluate "$run" "$@"
}

audit() {
  local run=$OUT/$1
  shift
  [ -f "$run/audit.json" ] || "$FEDMIX" audit "$run" "$@"
}
