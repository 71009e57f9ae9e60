"""Flower's ClientApp. In a deployment it hands each message to the worker beside it, which has torch and the data in memory; in
a simulation it is the site itself.

Imports are inside functions, so that the short-lived process of a deployment loads no more than it needs.
"""

from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

app = ClientApp()
_known: dict[str, Any] = {}  # the site of the run that this process serves


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer orders to the clients that live here: training, evaluation and whatever else the server asks for."""
    worker = context.node_config.get("worker")
    if worker:
        from fedmix.deploy.wire import ask

        return Message(content=ask(str(worker), "train", message.content), reply_to=message)
    from fedmix.engines.flower import pack_outcomes, unpack_orders

    about, orders = unpack_orders(message.content)
    return Message(content=pack_outcomes(_site(about).handle(orders)), reply_to=message)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say what this site has: names of clients and numbers of points; or why it cannot take part."""
    from fedmix.deploy.wire import ask, table
    from fedmix.errors import ClientError

    try:
        answer = ask(str(context.node_config.get("worker")), "query", message.content)
    except ClientError as error:
        answer = table({"error": str(error)})
    return Message(content=answer, reply_to=message)


def _site(about: dict[str, Any]) -> Any:
    """Give the simulation's site: it has the recipe's whole federation, and keeps private states in the run directory."""
    import tomllib
    from pathlib import Path

    from fedmix.engines.site import Site
    from fedmix.engines.store import SiteStore
    from fedmix.settings.build import build
    from fedmix.settings.importing import importable_from
    from fedmix.settings.reading import make_recipe

    for folder in about["beside"]:
        importable_from(Path(folder))
    key = f"{about['folder']} {about['recipe']}"
    if key not in _known:
        recipe = make_recipe(tomllib.loads(about["recipe"]))
        experiment = build(recipe, data_dir=about["data_dir"])
        store = SiteStore(Path(about["folder"]))
        share = recipe.evaluation.share_private
        _known.clear()
        _known[key] = Site(experiment.algorithm, experiment.federation, recipe.seed, store, share)
    return _known[key]
