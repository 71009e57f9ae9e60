"""Three ways to average experts that are W + U V: both factors, one of them, or their products, factored anew at the server.

    python benchmarks/factors.py --seeds 0:5

The mean of products is not the product of means, so averaging both factors is not averaging experts. `digits-permutation` with
factors on its two layers, the number of experts found out, plain averaging at the server. fedmix ships 'both averaged'.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fedmix.api import HandedOver, train_recipe
from fedmix.core import aggregate
from fedmix.methods import fedmix as page
from fedmix.methods.fedmix_settings import FedmixSettings
from fedmix.methods.page import Page
from fedmix.running.where import Where
from fedmix.settings.reading import read_recipe

SETTINGS = {"experts": "auto", "evidence": "arriving", "shared": ["fc1"], "factor_layers": ["fc1", "out"]}


def one_fixed(setup, settings):
    """V is drawn once, is the same for all experts and is never trained: averaging U is averaging products."""
    method = page.fedmix(setup, settings)
    shipped = method.place
    return replace(method, place=lambda name: "frozen" if name.endswith(".down") else shipped(name))


def factored_anew(setup, settings):
    """Both factors are the experts' own; the mean of their products is factored by a singular value decomposition."""
    method = page.fedmix(setup, settings)
    return replace(method, restructure=partial(_restructured, setup, method.restructure))


def _restructured(setup, inner, before, after, clients, replies, fields, points):
    factors = setup.model.factors
    weights = aggregate.expert_weights(fields["q_zs"], points)
    experts = list(after.experts)
    for k, expert in enumerate(experts):
        there = [(float(weights[i, k]), reply.experts[k]) for i, reply in enumerate(replies) if k in reply.experts]
        if not there or sum(weight for weight, _ in there) == 0:
            continue
        new = dict(expert)
        for layer in factors.layers:
            up, down = f"{layer}.weight.up", f"{layer}.weight.down"
            product = sum(weight * (copy[up] @ copy[down]) for weight, copy in there)
            u, s, v = torch.linalg.svd(product, full_matrices=False)
            root = s[: factors.rank].sqrt()
            new[up], new[down] = u[:, : factors.rank] * root, root[:, None] * v[: factors.rank]
        experts[k] = new
    return inner(before, replace(after, experts=tuple(experts)), clients, replies, fields, points)


WAYS = {"both averaged": page.fedmix, "one fixed": one_fixed, "products factored anew": factored_anew}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:5", metavar="A:B")
    args = parser.parse_args()
    for rank in (2, 4, 8):
        for name, build in WAYS.items():
            own = Page(name, build, FedmixSettings, model=page.PAGE.model)
            server, bytes_sent = [], 0
            for seed in range(*map(int, args.seeds.split(":"))):
                changes = {"seed": seed, "server.optimizer": "average", "algorithm": "own"}
                changes |= {f"own.{key}": value for key, value in {**SETTINGS, "rank": rank}.items()}
                recipe = read_recipe("digits-permutation", changes=changes)
                with tempfile.TemporaryDirectory() as folder:
                    summary = train_recipe(recipe, Path(folder) / "run", Where(), HandedOver(page=own))
                server.append(summary["accuracy"]["test"]["server"]["mean"])
                bytes_sent = summary["bytes_up"] + summary["bytes_down"]
            row = {"rank": rank, "way": name, "server, test": round(statistics.fmean(server), 4)}
            row |= {"least": min(server), "MiB": round(bytes_sent / 2**20, 1)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
