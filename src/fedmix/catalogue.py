"""The methods that fedmix ships: what they are called, and where their pages are. Nothing of torch here.

Recipes, the command line, reports, docs and tests read this list; to add a method is to add a page and a line. A user's own
method needs neither: `package.module:name` names its page wherever a name of this list may stand.
"""

from typing import NamedTuple


class Listed(NamedTuple):
    title: str
    page: str  # module:name
    about: str
    section: str = ""  # of recipes, which has its settings


CATALOGUE = {
    "fedmix": Listed(
        "FedMix",
        "fedmix.methods.fedmix:PAGE",
        "K experts shared by all clients, a private gate on each that chooses among them (Reisser et al., 2021)",
        "fedmix",
    ),
    "fedavg": Listed(
        "FedAvg", "fedmix.methods.fedavg:PAGE", "one model for all (McMahan et al., 2017; Reddi et al., 2020)"
    ),
    "biased-fedavg": Listed(
        "biased FedAvg", "fedmix.methods.biased_fedavg:PAGE", "one model, an output bias of its own on each client"
    ),
    "local-global": Listed(
        "Local/Global",
        "fedmix.methods.local_global:PAGE",
        "the input layer, or any named layers, on each client, the rest shared (Liang et al., 2020)",
        "local_global",
    ),
    "independent": Listed("independent", "fedmix.methods.independent:PAGE", "a model on each client, no exchange"),
}
TITLES = {name: listed.title for name, listed in CATALOGUE.items()}
SECTIONS = {listed.section: name for name, listed in CATALOGUE.items() if listed.section}
