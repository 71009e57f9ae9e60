"""One run: rounds, evaluations, checkpoints, the run directory."""
