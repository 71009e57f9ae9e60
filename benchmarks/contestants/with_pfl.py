"""pfl 0.6 on the shared setting: python with_pfl.py SETTING THREADS"""

import sys

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from plain import LeNet5, loss_of
from turns import Turns


class Net(LeNet5):
    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        self.train(not is_eval)
        return torch.nn.functional.cross_entropy(self(inputs), targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(0.0, 1)}


class Turn(TrainingProcessCallback):
    """A round is over: answer, and wait for the next turn."""

    def __init__(self, where: dict[str, int], data: dict[str, np.ndarray]) -> None:
        self.where, self.data = where, data
        self.turns = Turns()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.turns.stop()
        self.turns.done(loss=loss_of(model.pytorch_model.state_dict(), self.data))
        self.where["round"] += 1
        return False, Metrics()


def main(setting: str, threads: int) -> None:
    torch.set_num_threads(threads)
    data = dict(np.load(setting))
    x, y, order = torch.from_numpy(data["x"]), torch.from_numpy(data["y"]), data["order"]
    rounds, clients, _ = order.shape
    where = {"round": 0}

    def client(s: int) -> Dataset:
        own = order[where["round"], s]
        return Dataset(raw_data=[x[s][own], y[s][own]], user_id=str(s))

    def everybody():
        while True:
            yield from range(clients)

    sampler = everybody()
    users = FederatedDataset(client, user_sampler=lambda: next(sampler))
    net = Net()
    net.load_state_dict({name: torch.from_numpy(data[f"start.{name}"]) for name, _ in net.named_parameters()})
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=clients, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=users, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.05, local_batch_size=64),
        model_eval_params=NNEvalHyperParams(local_batch_size=64),
        callbacks=[Turn(where, data)],
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
