"""How good the models are: for a client that took part (local, server) and without client identity (global)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedmix.core.tree import nbytes
from fedmix.core.types import Algorithm, State
from fedmix.data.federation import Federation
from fedmix.engines.client import CHUNK, Task
from fedmix.experiment.loop import Engine


@dataclass(frozen=True)
class Scores:
    """Accuracy of each client on its own points; clients without points are left out."""

    clients: Sequence[int]
    accuracy: Sequence[float]

    def summary(self) -> dict[str, float | None]:
        """Mean, standard deviation and worst decile over clients."""
        if not self.accuracy:
            return {"mean": None, "std": None, "worst_decile": None}
        values = torch.tensor(self.accuracy, dtype=torch.float64)
        return {
            "mean": float(values.mean()),
            "std": float(values.std(correction=0)),
            "worst_decile": worst_decile(self.accuracy),
        }


def worst_decile(values: Sequence[float]) -> float:
    """Mean over the worst ceil(S/10) clients."""
    worst = sorted(values)[: math.ceil(len(values) / 10)]
    return sum(worst) / len(worst)


def client_scores(
    algorithm: Algorithm, engine: Engine, state: State, clients: int, part: str, t: int, finetune: int = 0
) -> Scores:
    """Every client on its own `part`: the server's weights with its private parts, fine-tuned for some epochs or not."""
    tasks = [
        Task("evaluate", t, s, algorithm.broadcast(state, s), part=part, finetune=finetune) for s in range(clients)
    ]
    return scores_of({s: answer.numbers for s, answer in enumerate(engine.run(tasks))})


def scores_of(numbers: Mapping[int, Mapping[str, float]]) -> Scores:
    """From {client: its `correct` and `points`}."""
    seen = [s for s in sorted(numbers) if numbers[s]["points"]]
    return Scores(seen, [numbers[s]["correct"] / numbers[s]["points"] for s in seen])


@dataclass(frozen=True)
class GlobalScore:
    accuracy: float | None
    why: str  # why there is no number, or ""
    bytes: int  # private state that clients handed over for it


def global_score(
    algorithm: Algorithm, engine: Engine, state: State, federation: Federation, part: str, share_private: bool
) -> GlobalScore:
    """The union of all clients' `part` without client identity; p(s) = N_s/N over clients that ever took part."""
    if algorithm.uses_private and not share_private:
        return GlobalScore(
            None, "it needs the clients' private state, which evaluation.share_private does not allow", 0
        )
    everything = torch.from_numpy(np.concatenate(federation.parts[part]))
    if not len(everything):
        return GlobalScore(None, f"no client has {part} data", 0)
    took_part = engine.store.clients()
    privates = [engine.store.get(s, {}) for s in took_part]
    p_s = torch.tensor([float(federation.size(s)) for s in took_part], dtype=torch.float64)
    message = algorithm.broadcast(state, None)
    correct = 0
    with torch.no_grad():
        for index in torch.split(everything, CHUNK):
            log_p = algorithm.predict_anonymous(message, privates, p_s / p_s.sum(), federation.inputs(index))
            correct += int((log_p.argmax(dim=1) == federation.y[index]).sum())
    return GlobalScore(correct / len(everything), "", sum(nbytes(private) for private in privates))


def clusters(q_zs: Sequence[Sequence[float]], groups: Sequence[int]) -> dict[str, Any]:
    """How well the experts that clients use most tell their true groups apart."""
    found = [max(range(len(row)), key=row.__getitem__) for row in q_zs]
    return {"adjusted_rand_index": adjusted_rand_index(groups, found), "groups": list(groups), "found": found}


def adjusted_rand_index(a: Sequence[int], b: Sequence[int]) -> float:
    """Agreement of two partitions, 1.0 if they are the same, about 0 by chance (Hubert and Arabie, 1985)."""

    def pairs(sizes: Sequence[int]) -> int:
        return sum(math.comb(n, 2) for n in sizes)

    both = pairs(list(Counter(zip(a, b, strict=True)).values()))
    in_a, in_b, total = pairs(list(Counter(a).values())), pairs(list(Counter(b).values())), math.comb(len(a), 2)
    expected, largest = (in_a * in_b / total if total else 0.0), (in_a + in_b) / 2
    return 1.0 if largest == expected else (both - expected) / (largest - expected)
