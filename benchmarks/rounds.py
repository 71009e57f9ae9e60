"""Seconds a round of the recipes that need no files, for each engine, in one run: `make bench`.

Another recipe, another count: .venv/bin/python benchmarks/rounds.py RECIPE ROUNDS
"""

import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from fedmix.engines.store import MemoryStore
from fedmix.running.loop import rounds
from fedmix.running.where import Stage, Where
from fedmix.settings.build import build
from fedmix.settings.reading import read_recipe, shipped


def seconds_a_round(recipe: str, algorithm: str, engine: str, count: int) -> list[float]:
    experiment = build(read_recipe(recipe, algorithm))
    seed, clients = experiment.recipe.seed, len(experiment.federation)
    with Where(engine).open(Stage(experiment, MemoryStore)) as started:
        start = experiment.algorithm.init(seed)
        steps = rounds(
            experiment.algorithm, started, start, seed, clients, experiment.recipe.clients_per_round, count + 1
        )
        return [step.seconds for step in steps][1:]  # the first warms up


def main(recipes: list[str], count: int) -> None:
    table = Table(title=f"seconds a round, median of {count}", caption="FedMix / FedAvg: K = 4 experts")
    for column in ("recipe", "engine", "FedAvg", "FedMix", "FedMix / FedAvg"):
        table.add_column(column, justify="right" if column != "recipe" else "left")
    began = time.perf_counter()
    for recipe in recipes:
        for engine in ("serial", "local"):
            plain, mixed = (statistics.median(seconds_a_round(recipe, a, engine, count)) for a in ("fedavg", "fedmix"))
            table.add_row(recipe, engine, f"{plain:.3f}", f"{mixed:.3f}", f"{mixed / plain:.2f}")
    Console().print(table)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main(
        sys.argv[1:2] or [name for name in shipped() if name.startswith("digits")],
        int(sys.argv[2]) if len(sys.argv) > 2 else 5,
    )
