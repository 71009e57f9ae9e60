"""What a recipe will cost, before anything runs: parameters, bytes, FLOP, memory, time.

No formula is repeated here: one client's update is really run, on made-up data of the right shape, and what it sends,
computes and holds is counted.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedmix.core.algorithm import Algorithm
from fedmix.core.method import VECTORS
from fedmix.core.tree import flatten, nbytes
from fedmix.core.types import Examples, Message
from fedmix.engines.client import one_thread
from fedmix.engines.local import cores
from fedmix.errors import DataMissing, SettingError
from fedmix.rng import stream
from fedmix.settings.build import Experiment, build
from fedmix.settings.federate import build_federation
from fedmix.settings.recipe import Recipe

# A client's step is repeated for this long to see how long it takes.
MEASURE_SECONDS = 2.0
MOST_CHOICES = 6  # of layers to share, in a model of many
FEDAVG = "fedavg"
NOTE = "without pruning and evaluation; time estimated from a short measurement on this machine"
GROWING = "; with the experts that there are at first: each further one costs as much again"


@dataclass(frozen=True)
class _Trial:
    """What one mini-batch of one client costs. held_bytes: what is held for the backward pass."""

    reply: Message
    private_bytes: int
    flop: int  # of a step
    flop_once: int  # of a client's round, beside its steps
    held_bytes: int
    step_seconds: float


def plan_recipe(recipe: Recipe, data_dir: str | None = None, workers: int | None = None) -> dict[str, Any]:
    """The costs of a recipe; where its data is not at hand, from the sizes that its publisher gives."""
    if workers is not None and workers < 1:
        raise SettingError(f"--workers must be 1 or more. Got {workers} instead.")
    try:
        return plan(build(recipe, data_dir=data_dir), workers)
    except DataMissing as missing:
        federation = build_federation(recipe.data, recipe.seed, only_sizes=True)
        costs = plan(build(recipe, federation), workers)
        note = f"{costs['note']}; {recipe.data.source} is not here, its published sizes were used: {missing}"
        return costs | {"note": note}


def plan_sharing(recipe: Recipe, data_dir: str | None = None, workers: int | None = None) -> list[dict[str, Any]]:
    """What FedMix costs for each choice of what its experts share, layer by layer from the input; FedAvg's costs are first."""
    if not hasattr(recipe.method_settings, "shared"):
        raise SettingError(f"--shared needs a method whose experts may share. {recipe.algorithm} has no such setting.")
    rows = [{"shared": "FedAvg", "setting": "", **plan_recipe(replace(recipe, algorithm=FEDAVG), data_dir, workers)}]
    for words, setting in _choices(recipe, data_dir):
        settings = replace(recipe.method_settings, shared=setting)
        costs = plan_recipe(recipe.with_method_settings(settings), data_dir, workers)
        rows.append({"shared": words, "setting": setting, **costs})
    return rows


def _choices(recipe: Recipe, data_dir: str | None) -> list[tuple[str, Any]]:
    """In words and as a setting: nothing, the first layer, the first two, ... and all but the output layer."""
    plain = replace(recipe, algorithm=FEDAVG)
    try:
        experiment = build(plain, data_dir=data_dir)
    except DataMissing:
        experiment = build(plain, build_federation(recipe.data, recipe.seed, only_sizes=True))
    model = experiment.model
    layers = model.layers_in_order(model.template, experiment.algorithm.setup.example)
    inner = [layer for layer in layers if layer != model.output and not layer.startswith(f"{model.output}.")]
    if not inner:
        return [("nothing", "none")]
    some = [(", ".join(inner[:count]), inner[:count]) for count in range(1, len(inner))]
    if len(some) > MOST_CHOICES:
        some = [some[round(i * (len(some) - 1) / (MOST_CHOICES - 1))] for i in range(MOST_CHOICES)]
        some = [(f"{layers[0]} to {layers[-1]}", layers) for _, layers in some]
    return [("nothing", "none"), *some, ("all but output", "all-but-output")]


def plan(experiment: Experiment, workers: int | None = None) -> dict[str, Any]:
    """The costs of an experiment as a nested dict of numbers."""
    recipe, algorithm, federation = experiment.recipe, experiment.algorithm, experiment.federation
    state = algorithm.init(recipe.seed)
    message = algorithm.broadcast(state, None)
    trial = _try_one_client(experiment, message)
    cohort = min(recipe.clients_per_round or len(federation), len(federation))
    points = sum(federation.size(s) for s in range(len(federation))) / len(federation)
    steps = math.ceil(points / recipe.training.batch_size) * recipe.training.epochs
    weights_down, beside_down = _split_bytes(message.tensors, algorithm)
    weights_up, beside_up = _split_bytes(trial.reply.tensors, algorithm)
    weights_per_round = (weights_down + weights_up) * cohort
    posterior_per_round = (beside_down + beside_up) * cohort
    side_by_side = min(workers or cores(), cohort)
    round_seconds = trial.step_seconds * steps * math.ceil(cohort / side_by_side)
    return {
        "recipe": recipe.name,
        "scale": recipe.scale,
        "algorithm": recipe.algorithm,
        "title": experiment.page.title,
        "rounds": recipe.rounds,
        "clients": len(federation),
        "clients_per_round": cohort,
        "points_per_client": points,
        "steps_per_client": steps,
        "parameters": experiment.model.parameters,
        "parameters_shared": _count(state.shared) + sum(map(_count, state.experts)),
        "parameters_frozen": _count(algorithm.client.frozen),
        "parameters_private": _count(algorithm.new_client(recipe.seed)),
        "bytes": {
            "weights_per_round": weights_per_round,
            "posterior_per_round": posterior_per_round,
            "weights": weights_per_round * recipe.rounds,
            "posterior": posterior_per_round * recipe.rounds,
            "total": (weights_per_round + posterior_per_round) * recipe.rounds,
        },
        "flop_per_round": (trial.flop * steps + trial.flop_once) * cohort,
        "memory": {
            "server": nbytes(flatten(state)) + cohort * trial.reply.nbytes,
            "worker": message.nbytes + 2 * trial.reply.nbytes + trial.held_bytes,
            "private_per_client": trial.private_bytes,
        },
        "seconds_per_round": round_seconds,
        "seconds": round_seconds * recipe.rounds,
        "workers": side_by_side,
        "note": NOTE + (GROWING if algorithm.method.alive else ""),
    }


def _count(parameters: Mapping[str, Tensor]) -> int:
    return sum(values.numel() for values in parameters.values())


def _split_bytes(tensors: Mapping[str, Tensor], algorithm: Algorithm) -> tuple[int, int]:
    """The bytes of weights, and those of what a method sends beside them (for FedMix: phi and q(z|s))."""
    beside = algorithm.layout.unpack(tensors).beside
    return nbytes(tensors) - nbytes(beside), nbytes(beside)


def _try_one_client(experiment: Experiment, message: Message) -> _Trial:
    """One mini-batch through the client's own code: what it sends back, computes and holds, and how long it takes."""
    recipe, algorithm, federation = experiment.recipe, experiment.algorithm, experiment.federation
    rng = stream(recipe.seed, "plan")
    n = min(recipe.training.batch_size, max(federation.size(s) for s in range(len(federation))))
    x = federation.inputs(torch.arange(n) % len(federation.x))  # real ones: noise is no input of an embedding
    with rng.torch():
        y = torch.randint(federation.classes, (n,))
        is_vector = federation.side in VECTORS
        c = torch.randn(n, federation.categories) if is_vector else torch.randint(federation.categories, (n,))
    data = Examples(x, y, c)
    private = algorithm.new_client(recipe.seed)
    held: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        # Several tensors may be views of the same storage, which is held once.
        storage = value.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return value

    with one_thread():
        algorithm.client_update(message, private, data, rng, 1)  # what a model has to find out once is not counted
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
            reply, after = algorithm.client_update(message, private, data, rng, 1)
        with FlopCounterMode(display=False) as twice:
            algorithm.client_update(message, private, data, rng, 2)
        seconds = _median_seconds(lambda: algorithm.client_update(message, private, data, rng, 1))
    of_step = twice.get_total_flops() - counter.get_total_flops()
    # What a round does before its first step, as evidence from arriving experts.
    once = counter.get_total_flops() - of_step
    return _Trial(reply, nbytes(after), of_step, once, sum(held.values()), seconds)


def _median_seconds(step: Callable[[], Any]) -> float:
    times: list[float] = []
    began = time.perf_counter()
    while not times or time.perf_counter() - began < MEASURE_SECONDS:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
