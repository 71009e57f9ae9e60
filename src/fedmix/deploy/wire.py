"""Flower's records over a socket of this machine: between a site's short-lived ClientApp and its worker.

A message is two sizes, a head in JSON, and the bytes of its tensors one after the other. Nothing here imports torch, so that a
ClientApp starts fast.
"""

import json
import socket
import struct
import time
from typing import Any

from fedmix.errors import ClientError

LONGEST = 1 << 40  # bytes of a message
_SIZES = struct.Struct(">QQ")  # bytes of the head, and of all tensors


def send(connection: socket.socket, kind: str, content: Any) -> None:
    """Send a message.

    kind: what is asked, or "answer". content: a RecordDict of tensors and a table, or text where there is an error.
    """
    if isinstance(content, str):
        _send_parts(connection, {"kind": kind, "error": content, "arrays": []}, [])
        return
    rows, blobs = [], []
    for key, array in content["tensors"].items():
        rows.append((key, array.dtype, list(array.shape), array.stype, len(array.data)))
        blobs.append(array.data)
    _send_parts(connection, {"kind": kind, "arrays": rows, "table": content["table"]["json"]}, blobs)


def _send_parts(connection: socket.socket, head: dict[str, Any], blobs: list[bytes]) -> None:
    written = json.dumps(head).encode()
    sizes = _SIZES.pack(len(written), sum(map(len, blobs)))
    connection.sendall(sizes + written)
    for blob in blobs:
        connection.sendall(blob)


def receive(connection: socket.socket) -> tuple[str, Any]:
    """Receive a message: its kind and its content. Content that is text is an error."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    size_of_head, size_of_tensors = _SIZES.unpack(_exactly(connection, _SIZES.size))
    if size_of_head + size_of_tensors > LONGEST:
        raise ClientError("a message of the worker is longer than any can be")
    head = json.loads(bytes(_exactly(connection, size_of_head)))
    if "error" in head:
        return head["kind"], head["error"]
    arrays = {}
    for key, dtype, shape, stype, length in head["arrays"]:  # they come in this order
        data = bytes(_exactly(connection, length))
        arrays[key] = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=data)
    table = ConfigRecord({"json": head["table"]})
    return head["kind"], RecordDict({"tensors": ArrayRecord(arrays), "table": table})


def _connected(path: str, seconds: float) -> socket.socket:
    """Connect to the worker, which may not have started yet."""
    until = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > until:
                raise ClientError(f"this site's worker does not answer ({error.strerror})") from error
            time.sleep(0.1)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """Receive this many bytes."""
    data = bytearray(size)
    view, received = memoryview(data), 0
    while received < size:
        more = connection.recv_into(view[received:], min(size - received, 1 << 20))
        if not more:
            raise ClientError("the other side of a site's socket is gone")
        received += more
    return data


def table(value: Any) -> Any:
    """Make a message without tensors."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    return RecordDict({"tensors": ArrayRecord(), "table": ConfigRecord({"json": json.dumps(value)})})


def ask(path: str, kind: str, content: Any, seconds: float = 60.0) -> Any:
    """Ask the worker at this socket, and give its answer. seconds: in which it must have started, or started again."""
    with _connected(path, seconds) as connection:
        try:
            send(connection, kind, content)
            _, answer = receive(connection)
        except OSError as error:
            raise ClientError(f"this site's worker ended while it worked ({error.strerror})") from error
    if isinstance(answer, str):
        raise ClientError(answer)
    return answer
