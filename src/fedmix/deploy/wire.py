"""Flower's records over a socket of this machine: between a site's short-lived ClientApp and its worker. No torch here."""

import json
import socket
import struct
import time
from typing import Any

from fedmix.errors import ClientError

LONGEST = 1 << 40
_SIZES = struct.Struct(">QQ")


def send(connection: socket.socket, kind: str, content: Any) -> None:
    """kind: what is asked, or "answer". content: a RecordDict of tensors and a table, or text where there is an error."""
    if isinstance(content, str):
        head: dict[str, Any] = {"kind": kind, "error": content, "arrays": []}
        blobs: list[bytes] = []
    else:
        arrays = content["tensors"]
        rows = [(key, arrays[key].dtype, list(arrays[key].shape), arrays[key].stype) for key in arrays]
        blobs = [arrays[key].data for key in arrays]
        head = {
            "kind": kind,
            "arrays": [(*row, len(blob)) for row, blob in zip(rows, blobs, strict=True)],
            "table": content["table"]["json"],
        }
    written = json.dumps(head).encode()
    connection.sendall(_SIZES.pack(len(written), sum(map(len, blobs))) + written)
    for blob in blobs:
        connection.sendall(blob)


def receive(connection: socket.socket) -> tuple[str, Any]:
    """The kind and the content of a message; content that is text is an error."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    size, more = _SIZES.unpack(_exactly(connection, _SIZES.size))
    if size + more > LONGEST:
        raise ClientError("a message of the worker is longer than any can be")
    head = json.loads(bytes(_exactly(connection, size)))
    if "error" in head:
        return head["kind"], head["error"]
    arrays = {
        key: Array(dtype=dtype, shape=tuple(shape), stype=stype, data=bytes(_exactly(connection, length)))
        for key, dtype, shape, stype, length in head["arrays"]
    }
    table = ConfigRecord({"json": head["table"]})
    return head["kind"], RecordDict({"tensors": ArrayRecord(arrays), "table": table})


def _connected(path: str, seconds: float) -> socket.socket:
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
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = connection.recv_into(view[done:], min(size - done, 1 << 20))
        if not got:
            raise ClientError("the other side of a site's socket is gone")
        done += got
    return data


def table(value: Any) -> Any:
    """A message without tensors."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    return RecordDict({"tensors": ArrayRecord(), "table": ConfigRecord({"json": json.dumps(value)})})


def ask(path: str, kind: str, content: Any, seconds: float = 60.0) -> Any:
    """What the worker at this socket answers; seconds: for it to start, or to start again."""
    with _connected(path, seconds) as connection:
        try:
            send(connection, kind, content)
            _, answer = receive(connection)
        except OSError as error:
            raise ClientError(f"this site's worker ended while it worked ({error.strerror})") from error
    if isinstance(answer, str):
        raise ClientError(answer)
    return answer
