"""The shipped methods, a page each, and what a page of your own is made of.

from fedmix.methods import Method, Page, fedavg
"""

from fedmix.core.method import (
    Aggregate,
    Anonymous,
    Answer,
    Arrival,
    Batch,
    Departure,
    Field,
    Method,
    Parts,
    Setup,
    cross_entropy,
    outputs,
)
from fedmix.methods.page import NoSettings, Page

__all__ = [
    "Aggregate",
    "Anonymous",
    "Answer",
    "Arrival",
    "Batch",
    "Departure",
    "Field",
    "Method",
    "NoSettings",
    "Page",
    "Parts",
    "Setup",
    "cross_entropy",
    "outputs",
]
