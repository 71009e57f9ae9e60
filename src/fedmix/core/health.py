"""Warnings about experts: one takes all points, one is used by nobody, or one was pruned away everywhere."""

import torch
from torch import Tensor

from fedmix.core import posterior, prune

COLLAPSED = 0.95  # share of all use in one expert
IDLE = 0.05  # of an equal share, 1/K
PREMATURE = 0.25  # of the rounds


def of_clients(q_zs: Tensor, eta: float, t: int, rounds: int) -> list[str]:
    """What is wrong after round t, from what each client last returned [S, K]; clients that never took part have 1/K."""
    seen = (q_zs != posterior.uniform(1, q_zs.shape[1])).any(dim=1)
    troubles = of_use(q_zs[seen].mean(dim=0)) if bool(seen.any()) else []
    if not eta:
        return troubles
    dropped = _sent_to_nobody(q_zs, eta)
    if dropped:
        when = "premature pruning" if t <= PREMATURE * rounds else "pruned away"
        which = f"{_named(dropped)} sent to no client any more after round {t} of {rounds}"
        them = "it" if len(dropped) == 1 else "them"
        troubles.append(f"{when}: {which}; nobody trains {them}")
    return troubles


def _sent_to_nobody(q_zs: Tensor, eta: float) -> list[int]:
    """Experts below the server's own threshold for every client: one that it still sends to somebody is trained by them."""
    dropped = set(range(q_zs.shape[1]))
    for q in q_zs:
        dropped.difference_update(prune.kept(q, eta, slack=prune.SERVER_SLACK))
    return sorted(dropped)


def of_use(use: Tensor) -> list[str]:
    """What is wrong with the marginal use of each expert [K]."""
    experts = len(use)
    if experts == 1:
        return []
    most = int(torch.argmax(use))
    if float(use[most]) > COLLAPSED:
        return [f"collapse: expert {most} has {100 * float(use[most]):.0f} % of all use"]
    idle = [k for k, share in enumerate(use.tolist()) if share < IDLE / experts]
    return [f"idle: {_named(idle)} used by almost nobody"] if idle else []


def _named(experts: list[int]) -> str:
    words = ", ".join(map(str, experts))
    return f"expert {words} is" if len(experts) == 1 else f"experts {words} are"
