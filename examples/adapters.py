"""A frozen backbone with adapters as experts: little is trained and sent, and clients still find the experts that suit them.

    python examples/adapters.py            (needs MNIST and its writers: fedmix data)

A model is trained on half of MNIST's writers. For the others it is frozen; each of four experts adds factors of rank 8 to its
hidden layer and has an output layer of its own. Beside it: the same start with everything trained by FedAvg.
"""

import sys

import fedmix
from fedmix import Federation
from fedmix.settings.federate import build_federation
from fedmix.settings.reading import read_recipe


def halves(federation):
    """Two federations: every other client in the first, the rest in the second."""
    sites = {}
    for s, name in enumerate(federation.names):
        parts = {part: federation.examples(s, part) for part in ("train", "validation", "test")}
        sites[name] = {part: {"x": points.x.numpy(), "y": points.y.numpy()} for part, points in parts.items()}
    names = list(sites)
    return [Federation.from_clients({name: sites[name] for name in names[i::2]}, classes=10) for i in (0, 1)]


def main(recipe="mnist-writers", scale=None, rounds=100, layer="fc", out="runs/adapters"):
    """Print accuracy and bytes with adapters, and with everything trained. layer: the hidden layer that gets factors."""
    settings = read_recipe(recipe, scale=scale)
    first, second = halves(build_federation(settings.data, settings.seed))
    common = {"scale": scale, "rounds": rounds, "overwrite": True}
    before = fedmix.train(recipe, federation=first, algorithm="fedavg", out=f"{out}/backbone", **common)
    backbone = before.client(0).module().experts[0]
    for name, weight in backbone.named_parameters():
        weight.requires_grad_(name.startswith("out."))
    experts = {"experts": 4, "factor_layers": [layer], "rank": 8}
    adapters = fedmix.train(
        recipe, federation=second, model=backbone, output="out", out=f"{out}/adapters", fedmix=experts, **common
    )
    whole = fedmix.train(
        recipe, federation=second, algorithm="fedavg", out=f"{out}/whole", warm_start=f"{out}/backbone", **common
    )
    rows = {}
    for name, run in (("adapters as experts", adapters), ("everything, FedAvg", whole)):
        accuracy = run.summary["accuracy"]["test"]
        sent = run.summary["bytes_up"] + run.summary["bytes_down"]
        rows[name] = (accuracy["fine_tuned"]["mean"], accuracy["server"]["mean"], sent)
        print(f"{name}: fine-tuned {rows[name][0]:.3f}, server {rows[name][1]:.3f}, {sent / 2**20:.1f} MiB sent")
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
