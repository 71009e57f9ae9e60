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
    accuracy=0.8,
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
                validation = {"as_sent": score, "server": score, "no_identity": None}
                line |= {"accuracy": {"validation": validation}, "q_zs": q, "q_zc": q[:2]}
            file.write(json.dumps(line) + "\n")
    accuracy = {"mean": accuracy, "std": 0.1, "worst_decile": 0.5}
    scores = {"accuracy": accuracy, "ece": {"mean": 0.1}, "nll": {"mean": 0.4}}
    of_clients = dict.fromkeys(names, accuracy["mean"])
    summary = {
        "scores": {"test": {"fine_tuned": scores, "server": scores, "no_identity": None}},
        "accuracy": {
            "test": {"fine_tuned": accuracy, "server": accuracy, "no_identity": None},
            "validation": {"as_sent": accuracy, "server": accuracy, "no_identity": None},
        },
        "of_clients": {
            "test": {"fine_tuned": of_clients, "server": of_clients},
            "validation": {"as_sent": of_clients, "server": of_clients, "no_identity": {}},
        },
        "q_zs": q,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
