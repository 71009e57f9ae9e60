"""fedmix: a federated mixture of experts. K expert models shared by all clients, a private gate on each.

run = fedmix.train(federation=..., model=Net, output="fc2", out="runs/mine", rounds=20)
fedmix.load("runs/mine").client("a").predict(x)
fedmix.evaluate("runs/mine", federation=..., model=Net)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmix.after.trained import load
    from fedmix.api import audit, compare, evaluate, sweep, train
    from fedmix.data.federation import Federation
    from fedmix.running.run import Stop

__version__ = "0.1.0"
__all__ = ["Federation", "Stop", "__version__", "audit", "compare", "evaluate", "load", "sweep", "train"]

_HOMES = {
    "Federation": "fedmix.data.federation",
    "train": "fedmix.api",
    "compare": "fedmix.api",
    "sweep": "fedmix.api",
    "evaluate": "fedmix.api",
    "audit": "fedmix.api",
    "load": "fedmix.after.trained",
    "Stop": "fedmix.running.run",
}


def __dir__() -> list[str]:
    """The names that completion offers, though what they stand for is imported late."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:  # late, so that `fedmix --help` does not wait for torch
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedmix' has no attribute {name!r}")
