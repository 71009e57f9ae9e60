"""Flower's SuperLink, with its doors for operators shut to everyone but this machine.

Flower serves three APIs on one port: for sites (signed by their registered keys), for operators, who may start any code on
every site, and for the processes of its own. Without an account system the last two ask nobody who he is. Here they answer
to this machine alone.
"""

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

FOR_SITES = ("/v1/fleet/", "/health")
FORBIDDEN = b"of this machine's operator alone"


class OperatorsHere:
    """ASGI: what is not for sites is refused to peers that are not on this machine."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(FOR_SITES) and not _is_here(scope["client"]):
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": FORBIDDEN})
            return
        await self.app(scope, receive, send)


def _is_here(client: Any) -> bool:
    return bool(client) and ipaddress.ip_address(client[0]).is_loopback


def main() -> None:
    from flwr.superlink import main as service
    from flwr.superlink.cli.flower_superlink import flower_superlink

    create = service.create_app

    def guarded(*args: Any, **kwargs: Any) -> Any:
        app = create(*args, **kwargs)
        app.add_middleware(OperatorsHere)
        return app

    vars(service)["create_app"] = guarded
    flower_superlink()


if __name__ == "__main__":
    main()
