"""A generative model on each client, so that somebody without identity can weigh clients by p(s|x) (sec:NewShardInf)."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fedmix.after.options import Stages
from fedmix.core import vae
from fedmix.core.types import Message
from fedmix.data.federation import Federation
from fedmix.engines.client import CHUNK, Task
from fedmix.errors import DataError
from fedmix.rng import stream
from fedmix.running.evaluate import Crowd
from fedmix.running.loop import Engine, everyone

# With this many numbers in the clients' training inputs, training their densities takes minutes, not hours.
QUICK = 10_000_000
# This many clients train a density between two reports of progress.
AT_ONCE = 10


class Densities:
    """A generative model of each client's inputs."""

    def __init__(self, federation: Federation, crowd: Crowd, seed: int, watch: Stages) -> None:
        self.federation, self.crowd, self.seed, self.watch = federation, crowd, seed, watch
        self._messages: list[Message] = []

    @property
    def nbytes(self) -> int:
        """The size of what clients hand over for it."""
        return sum(message.nbytes for message in self._messages)

    def train(self, engine: Engine, t: int, asked: bool | None) -> str | None:
        """Train them all, or say why not. asked: None leaves them out where that would take hours."""
        why_not = self._why_not(asked)
        if why_not:
            return why_not
        clients = list(self.crowd.clients)
        for start in range(0, len(clients), AT_ONCE):
            self.watch("a VAE on each client", start, len(clients))
            tasks = [Task("density", t, s, Message({})) for s in clients[start : start + AT_ONCE]]
            self._messages += everyone(engine.run(tasks))
        return None

    def _why_not(self, asked: bool | None) -> str | None:
        if asked is False:
            return "not asked for (--no-vae)"
        numbers = sum(self.federation.size(s) for s in self.crowd.clients) * self.federation.x[0].numel()
        if asked is None and numbers > QUICK:
            return f"left out: a VAE on each client would learn {numbers / 1e6:,.0f} million numbers; --vae asks for it"
        return self._why_not_these_inputs()

    def _why_not_these_inputs(self) -> str | None:
        try:
            for federation in (self.federation, self.federation.held_out or self.federation):
                _refuse_inputs_without_range(federation)
        except DataError as error:
            return str(error)
        return None

    def posterior(self, new: Federation, points: int) -> Callable[[Tensor], Tensor]:
        """The function log p(s|x): inputs [B, ...] -> [B, S]. It is called for chunk after chunk, `points` inputs in all."""
        models = [dict(message.tensors) for message in self._messages]
        chunks: Iterator[int] = iter(range(points))

        def log_p_sx(x: Tensor) -> Tensor:
            chunk = next(chunks)
            self.watch("p(s|x) of new inputs", min(chunk * CHUNK, points), points)
            rng = stream(self.seed, "evaluate", "density", chunk)
            log_p_xs = vae.log_densities(models, new.unit(x).flatten(1), rng)
            return torch.log_softmax(log_p_xs.to(torch.float64) + self.crowd.log_p_s, dim=1)

        return log_p_sx


def _refuse_inputs_without_range(federation: Federation) -> None:
    """Refuse inputs that are not in [0, 1], which a density needs. Two images are enough to know; of others all are tried."""
    count = 2 if federation.mean else len(federation.x)
    federation.unit(federation.inputs(torch.arange(count)))
