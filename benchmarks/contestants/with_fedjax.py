"""FedJAX 0.0.17 on the shared setting: python with_fedjax.py SETTING"""

import sys

import jax

if not hasattr(jax, "tree_map"):  # FedJAX was written for a JAX that had it
    jax.tree_map = jax.tree_util.tree_map

import fedjax
import jax.numpy as jnp
import numpy as np
from turns import Turns


def forward(params, x):
    """LeNet-5, images and kernels channels last."""
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(
            x, params[f"{name}.weight"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[f"{name}.bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    x = jax.nn.relu(x @ params["fc.weight"].T + params["fc.bias"])
    return x @ params["out.weight"].T + params["out.bias"]


def loss_of(params, batch):
    log_p = jax.nn.log_softmax(forward(params, batch["x"]))
    return -jnp.take_along_axis(log_p, batch["y"][:, None], axis=1).mean()


def gradient(params, batch, rng):
    return jax.grad(loss_of)(params, batch)


def main(setting: str) -> None:
    data = np.load(setting)
    x, y, order = data["x"].transpose(0, 1, 3, 4, 2), data["y"].astype(np.int32), data["order"]
    params = {name.removeprefix("start."): jnp.asarray(data[name]) for name in data.files if name.startswith("start.")}
    params |= {f"conv{i}.weight": params[f"conv{i}.weight"].transpose(2, 3, 1, 0) for i in (1, 2)}
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=64, num_epochs=1, drop_remainder=False, skip_shuffle=True)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        gradient, fedjax.optimizers.sgd(0.05), fedjax.optimizers.sgd(1.0), batches
    )
    state = algorithm.init(params)
    everything = {"x": x.reshape(-1, *x.shape[2:]), "y": y.reshape(-1)}
    whole = jax.jit(loss_of)
    turns = Turns()
    for permutations in order:
        clients = [
            (
                str(s).encode(),
                fedjax.ClientDataset({"x": x[s][own], "y": y[s][own]}),
                jax.random.PRNGKey(s),
            )
            for s, own in enumerate(permutations)
        ]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        turns.stop()
        turns.done(loss=float(whole(state.params, {k: v[:1500] for k, v in everything.items()})))


if __name__ == "__main__":
    main(sys.argv[1])
