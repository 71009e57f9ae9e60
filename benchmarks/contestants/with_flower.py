"""Flower 1.41 on the shared setting, Ray simulation, one CPU a client: python with_flower.py SETTING"""

import os
import sys

os.environ.update(  # before Flower and Ray are imported
    FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0"
)

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = HERE  # Ray's workers import this file too

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain import LeNet5, loss_of

SETTING = os.path.abspath(os.environ.setdefault("FEDMIX_BENCH_SETTING", sys.argv[1] if len(sys.argv) > 1 else ""))
client_app, server_app = ClientApp(), ServerApp()
cache: dict[str, object] = {}


def loaded(setting: str):
    if setting not in cache:
        cache[setting] = dict(np.load(setting))
    return cache[setting]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    data = loaded(message.content["config"]["setting"])
    s, t = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
    own = data["order"][t, s]
    x, y = torch.from_numpy(data["x"][s][own]), torch.from_numpy(data["y"][s][own])
    model = LeNet5()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for start in range(0, len(y), 64):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[start : start + 64]), y[start : start + 64])
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"loss": loss.item(), "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class Turned(FedAvg):
    """FedAvg that answers after each round's aggregation, and waits for its next turn."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.turns.stop()
        self.turns.done(loss=loss_of(arrays.to_torch_state_dict(), loaded(SETTING)))
        return arrays, metrics


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    from turns import Turns

    data = loaded(SETTING)
    model = LeNet5()
    model.load_state_dict({name: torch.from_numpy(data[f"start.{name}"]) for name, _ in model.named_parameters()})
    strategy = Turned(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=10)
    strategy.turns = Turns()
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=len(data["order"]),
        train_config=ConfigRecord({"setting": SETTING}),
    )


if __name__ == "__main__":
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=10,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )
