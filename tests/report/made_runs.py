"""Run directories for the report's tests: three small real ones, and made-up ones with whatever a test needs."""

import json

import fedmix

SETTINGS = {"rounds": 4, "evaluation": {"every": 1, "share_private": True}, "training": {"epochs": 1}}


def three_runs(folder):
    """FedMix with two seeds, and FedAvg: really trained."""
    for algorithm, seed in (("fedmix", 0), ("fedmix", 1), ("fedavg", 0)):
        fedmix.train(
            "digits-permutation",
            data={"clients": 8, "permutations": 2, "share": 0.5},
            algorithm=algorithm,
            seed=seed,
            engine="serial",
            out=folder / f"{algorithm}-{seed}",
            **SETTINGS,
        )
    return folder


def made_up(
    folder,
    rounds=20,
    clients=5,
    experts=3,
    every=5,
    name="made-up",
    names=None,
    algorithm="fedmix",
    seed=0,
    more="",
    local=0.8,
):
    """A run directory with smooth numbers in it. more: further lines of its recipe."""
    folder.mkdir(parents=True)
    names = names or [f"client {s}" for s in range(clients)]
    (folder / "recipe.toml").write_text(
        f"name = {json.dumps(name)}\nalgorithm = {json.dumps(algorithm)}\nrounds = {rounds}\nseed = {seed}\n{more}"
    )
    (folder / "environment.json").write_text(
        json.dumps({"packages": {"fedmix": "0"}, "sessions": [{"command": ["fedmix", "train"], "engine": "local"}]})
    )
    federation = {"clients": names, "points": {"train": [10] * clients}, "classes": 2, "labels": ["no", "yes"]}
    federation |= {"side": "label", "label_counts": [[3, 7]] * clients, "groups": None}
    (folder / "federation.json").write_text(json.dumps(federation))
    q = [[1 / experts] * experts for _ in range(clients)]
    with open(folder / "metrics.jsonl", "w") as file:
        for t in range(1, rounds + 1):
            line = {
                "round": t,
                "loss": 2 / t,
                "bytes_down": 2**20,
                "bytes_up": 2**20,
                "seconds": 0.1,
                "divergence": 1.0,
            }
            line |= {"expert_use": [1 / experts] * experts, "experts_returned": [clients] * experts, "warnings": []}
            if t % every == 0:
                score = {"mean": t / rounds, "std": 0.1, "worst_decile": 0.1}
                line |= {"accuracy": {"local": score, "server": score, "global": None}, "q_zs": q, "q_zc": q[:2]}
            file.write(json.dumps(line) + "\n")
    scores = {"accuracy": {"mean": local, "std": 0.1, "worst_decile": 0.5}, "ece": {"mean": 0.1}, "nll": {"mean": 0.4}}
    each = {kind: dict.fromkeys(names, local) for kind in ("local", "server")}
    summary = {"scores": {"local": scores, "server": scores, "global": None}, "accuracy_of_clients": each, "q_zs": q}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
