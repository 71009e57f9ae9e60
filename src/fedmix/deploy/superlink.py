"""Flower's SuperLink with two checks that it does not make by itself.

Flower serves three APIs on one port: for sites, for operators, who may start runs, and for its own processes. The last two do
not check who is asking; here they answer to this machine alone (`OperatorsHere`).

A site signs every request with its registered key, and Flower compares the key with the node that the request names. But it
does not compare that node with the one that a *message* claims to come from, so that one site could answer for another, or
hand it an order as if it came from the server. Here a site may pull what is addressed to it, and answer that as itself
(`Bound`).
"""

import ipaddress
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

FOR_SITES = ("/v1/fleet/", "/health")  # paths that begin like this are open to every machine
FORBIDDEN = b"of this machine's operator alone"
SERVER = 1  # the server's own number among Flower's nodes
MOST_OPEN = 256  # questions to a site that are remembered
MOST_UPLOADS = MOST_OPEN * 16  # uploads of all sites that are remembered
CHECKED = ("pull_messages", "push_messages", "push_object", "pull_object", "confirm_message_received")


class OperatorsHere:
    """An ASGI middleware that refuses what is not for sites to peers that are not on this machine."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if _is_for_operators(scope) and not _is_here(scope["client"]):
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": FORBIDDEN})
            return
        await self.app(scope, receive, send)


def _is_for_operators(scope: Any) -> bool:
    return scope["type"] == "http" and not scope["path"].startswith(FOR_SITES)


def _is_here(client: Any) -> bool:
    """Say whether a peer is on this machine. One without an address, as on a Unix socket, does not count as here."""
    return bool(client) and ipaddress.ip_address(client[0]).is_loopback


class Refused(Exception):
    """A request of a site that is not the site's to make."""


@dataclass(frozen=True)
class _Question:
    """What a site was handed: the run that it belongs to, and the objects that it consists of."""

    run: int
    objects: frozenset[str]


class Bound:
    """What each site was handed, and so what it may pull, confirm and answer. Sites are known by the node of their key.

    It is kept in memory: a SuperLink that starts anew has ended its runs, and nobody is asked anything any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._questions: dict[int, OrderedDict[str, _Question]] = {}
        self._uploads: OrderedDict[str, int] = OrderedDict()  # Flower's session of an answer -> the node that gives it

    def handed(self, node: int, message: str, run: int, objects: frozenset[str]) -> None:
        """Remember that a site was handed a message; the oldest are forgotten."""
        with self._lock:
            questions = self._questions.setdefault(node, OrderedDict())
            questions[message] = _Question(run, objects)
            while len(questions) > MOST_OPEN:
                questions.popitem(last=False)

    def check_answer(self, node: int, metadata: Any) -> None:
        """Refuse an answer in another's name, one that does not go to the server, and one to what the site was not asked."""
        if metadata.src_node_id != node:
            raise Refused(f"node {node} answers as node {metadata.src_node_id}")
        if metadata.dst_node_id != SERVER:
            raise Refused(f"node {node} writes to node {metadata.dst_node_id}; only the server gives orders")
        question = self._question(node, metadata.reply_to_message_id)
        if question is None or question.run != metadata.run_id:
            raise Refused(f"node {node} answers what it was not asked")

    def uploads(self, node: int, session: str) -> None:
        """Remember that a site uploads its answer in this session; the oldest are forgotten."""
        with self._lock:
            self._uploads[session] = node
            while len(self._uploads) > MOST_UPLOADS:
                self._uploads.popitem(last=False)

    def check_upload(self, node: int, session: str) -> None:
        """Refuse a part of an answer that another site gives."""
        with self._lock:
            if self._uploads.get(session) != node:
                raise Refused(f"node {node} uploads a part of somebody else's answer")

    def check_object(self, node: int, run: int, name: str) -> None:
        """Refuse to hand over an object that is in no message to this site."""
        with self._lock:
            questions = list(self._questions.get(node, {}).values())
        if not any(question.run == run and name in question.objects for question in questions):
            raise Refused(f"node {node} pulls what was not sent to it")

    def check_receipt(self, node: int, message: str) -> None:
        """Refuse the receipt of a message that this site was not handed."""
        if self._question(node, message) is None:
            raise Refused(f"node {node} confirms what was not sent to it")

    def _question(self, node: int, message: str) -> _Question | None:
        with self._lock:
            return self._questions.get(node, OrderedDict()).get(message)


def _objects(tree: Any) -> frozenset[str]:
    """Name all objects of a message, which Flower sends one by one."""
    return frozenset({tree.object_id}).union(*(_objects(child) for child in tree.children))


def guarded_handlers(handlers: Any, bound: Bound) -> dict[str, Callable[..., Any]]:
    """Put each of Flower's handlers of what sites ask for behind its check, and give them by name (`CHECKED`)."""

    def pull_messages(request: Any, state: Any, store: Any) -> Any:
        answer = handlers.pull_messages(request=request, state=state, store=store)
        for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            metadata = message.metadata
            bound.handed(request.node.node_id, metadata.message_id, metadata.run_id, _objects(tree))
        return answer

    def push_messages(request: Any, state: Any) -> Any:
        node = request.node.node_id
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(f"node {node} must give one answer at a time")
        bound.check_answer(node, request.messages_list[0].metadata)
        answer = handlers.push_messages(request=request, state=state)
        bound.uploads(node, answer.session_id)
        return answer

    def push_object(request: Any, state: Any) -> Any:
        bound.check_upload(request.node.node_id, request.session_id)
        return handlers.push_object(request=request, state=state)

    def pull_object(request: Any, state: Any) -> Any:
        bound.check_object(request.node.node_id, request.run_id, request.object_id)
        return handlers.pull_object(request=request, state=state)

    def confirm_message_received(request: Any, state: Any, store: Any) -> Any:
        bound.check_receipt(request.node.node_id, request.message_object_id)
        return handlers.confirm_message_received(request=request, state=state, store=store)

    checked = (pull_messages, push_messages, push_object, pull_object, confirm_message_received)
    return {check.__name__: check for check in checked}


def bind_sites_to_their_keys() -> None:
    """Put the checks in front of Flower's handlers.

    Flower's routes exist already. They look the handlers up by name, so it is enough to exchange those.
    """
    from types import SimpleNamespace

    from fastapi import HTTPException
    from flwr.superlink.servicer.fleet import fleet_handlers

    def forbidding(handle: Callable[..., Any]) -> Callable[..., Any]:
        """Answer 403 where a handler refuses."""

        def checked(**request: Any) -> Any:
            try:
                return handle(**request)
            except Refused as error:
                print(f"fedmix: refused: {error}", flush=True)
                raise HTTPException(status_code=403, detail="not this site's to ask") from error

        return checked

    plain = {name: getattr(fleet_handlers, name) for name in CHECKED}  # before any of them is exchanged
    for name, handle in guarded_handlers(SimpleNamespace(**plain), Bound()).items():
        vars(fleet_handlers)[name] = forbidding(handle)


def main() -> None:
    """Start Flower's SuperLink with both checks; the arguments of the command line are Flower's."""
    from flwr.superlink import main as service
    from flwr.superlink.cli.flower_superlink import flower_superlink

    create = service.create_app

    def guarded(*args: Any, **kwargs: Any) -> Any:
        app = create(*args, **kwargs)
        app.add_middleware(OperatorsHere)
        return app

    vars(service)["create_app"] = guarded
    bind_sites_to_their_keys()
    flower_superlink()


if __name__ == "__main__":
    main()
