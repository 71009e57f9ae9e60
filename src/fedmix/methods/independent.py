"""Independent training: a model on each client, and nothing is exchanged."""

from functools import partial

from fedmix.core.method import Anonymous, Method, Setup
from fedmix.methods.fedavg import with_private
from fedmix.methods.local_global import average_representations
from fedmix.methods.page import NoSettings, Page


def independent(setup: Setup, settings: NoSettings) -> Method:
    """FedAvg in which every parameter is private."""
    logits = partial(average_representations, setup.model, [setup.model.output], "before")
    return with_private(setup, lambda name: True, Anonymous("logits averaged", logits))


PAGE = Page("independent", independent)
