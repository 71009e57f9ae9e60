"""Biased FedAvg: one model, but the bias of the output layer is each client's own, so that it can follow its labels."""

from functools import partial

from fedmix.core.method import Anonymous, Method, Setup
from fedmix.errors import ModelError
from fedmix.methods.fedavg import average_weights, with_private
from fedmix.methods.page import NoSettings, Page


def biased_fedavg(setup: Setup, settings: NoSettings) -> Method:
    """FedAvg with a private bias in the output layer."""
    bias = f"{setup.model.output}.bias"
    if bias not in setup.model.shapes:
        raise ModelError(
            f"biased-fedavg needs an output layer with a bias. {setup.model.output!r} has none; give it one."
        )
    averaged = Anonymous("biases averaged", partial(average_weights, setup.model))
    return with_private(setup, lambda name: name == bias, averaged)


PAGE = Page("biased FedAvg", biased_fedavg, paper="Reisser et al., 2021 (a baseline there)")
