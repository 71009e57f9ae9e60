"""One site's key can neither answer nor give orders for another: real processes, requests as Flower's own protocol has them."""

import json
import sqlite3
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_tree, no_object_id_recompute
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from test_deployment import accept, after_round, federation, lines

from fedmix.deploy import serve
from fedmix.deploy.folder import read_server
from fedmix.deploy.superlink import MOST_OPEN, SERVER, Bound, Refused

ROUNDS = ["--scale", "small", "--rounds", "400"]


class Attacker:
    """Whoever holds the key of one site and speaks Flower's protocol."""

    def __init__(self, folder, site):
        self.key = load_ssh_private_key((folder / "sites" / site / "node.key").read_bytes(), None)
        self.public = public_key_to_bytes(self.key.public_key())
        self.address = f"https://localhost:{read_server(folder / 'server').port}/v1/fleet/"
        self.trust = ssl.create_default_context(cafile=str(folder / "server" / "ca.crt"))

    def post(self, route, request):
        stamp = now().isoformat()
        headers = {
            "Content-Type": PROTOBUF_MEDIA_TYPE,
            TIMESTAMP_HEADER: stamp,
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self.public).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(self.key, stamp.encode("ascii"))).decode(),
        }
        asked = urllib.request.Request(self.address + route, data=request.SerializeToString(), headers=headers)
        try:
            with urllib.request.urlopen(asked, context=self.trust, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code


def message(run, source, target, reply_to=""):
    content = RecordDict({"tensors": ArrayRecord(), "table": ConfigRecord({"json": json.dumps({"recipe": "evil"})})})
    metadata = Metadata(run, "", source, target, reply_to, "1", time.time(), 600.0, "train")
    made = Message(content, metadata=metadata)
    with no_object_id_recompute():
        metadata.__dict__["_message_id"] = made.object_id
        return message_to_proto(made), get_object_tree(made)


def pushed(node, *what):
    proto, tree = message(*what)
    return PushMessagesRequest(node=Node(node_id=node), messages_list=[proto], message_object_trees=[tree])


def asked_of(folder, node, seconds=60):
    """The newest question to a node, as the server's database has it: run and message."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with sqlite3.connect(f"file:{folder / 'server' / 'flower' / 'superlink.db'}?mode=ro", uri=True) as database:
            rows = database.execute(
                "SELECT run_id, message_id, dst_node_id FROM message_ins ORDER BY created_at DESC"
            ).fetchall()
        for run, name, target in rows:
            if target % 2**64 == node:
                return run % 2**64, name
        time.sleep(0.02)
    raise AssertionError("nobody was asked anything")


def test_a_sites_key_neither_answers_nor_orders_for_another(tmp_path):
    folder, out = tmp_path / "f", tmp_path / "run"
    with federation(folder):
        accept(folder, *ROUNDS)
        names = json.loads((folder / "server" / "flower" / "registered.json").read_text())
        one, two = (int(names[name]["node"]) for name in ("site-1", "site-2"))
        command = [sys.executable, "-m", "fedmix", "deploy", "run", str(folder), *ROUNDS, "--quiet", "--out", str(out)]
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            attacker = Attacker(folder, "site-1")
            after_round(out, 1, running)
            run, question = asked_of(folder, two)
            refused = {
                "an order as if from the server": ("push-messages", pushed(one, run, SERVER, two)),
                "an order in its own name": ("push-messages", pushed(one, run, one, two)),
                "an answer in site-2's name": ("push-messages", pushed(one, run, two, SERVER, question)),
                "an answer to site-2's question": ("push-messages", pushed(one, run, one, SERVER, question)),
                "an answer to nothing": ("push-messages", pushed(one, run, one, SERVER, "0" * 64)),
                "two at once": (
                    "push-messages",
                    PushMessagesRequest(node=Node(node_id=one), message_object_trees=[ObjectTree()] * 2),
                ),
                "site-2's tensors": (
                    "pull-object",
                    PullObjectRequest(node=Node(node_id=one), run_id=run, object_id=question),
                ),
                "a receipt of site-2's question": (
                    "confirm-message-received",
                    ConfirmMessageReceivedRequest(node=Node(node_id=one), run_id=run, message_object_id=question),
                ),
                "a part of somebody's answer": (
                    "push-object",
                    PushObjectRequest(node=Node(node_id=one), run_id=run, object_id="0" * 64, session_id="x"),
                ),
            }
            for what, (route, request) in refused.items():
                assert attacker.post(route, request) == 403, what
            # the node that a request names is the key's: Flower's own check
            assert attacker.post("pull-messages", PullMessagesRequest(node=Node(node_id=two))) == 401
            assert attacker.post("push-messages", pushed(two, run, two, SERVER, question)) == 401
            after_round(out, len(lines(out)) + 2, running)
            found = lines(out)  # before anything is stopped
        finally:
            running.terminate()
            running.communicate(timeout=120)
        assert serve.online(folder / "server") == ["site-1", "site-2"]
    assert all(line["absent"] == line["refused"] == [] for line in found)


def asked(**changes):
    named = {"src_node_id": 7, "dst_node_id": SERVER, "reply_to_message_id": "m", "run_id": 1}
    return SimpleNamespace(**(named | changes))


def test_a_site_may_answer_what_it_was_handed():
    bound = Bound()
    bound.handed(7, "m", 1, frozenset({"m", "x"}))
    bound.check_answer(7, asked())
    bound.check_object(7, 1, "x")
    bound.check_receipt(7, "m")
    bound.uploads(7, "s")
    bound.check_upload(7, "s")
    for wrong in (
        lambda: bound.check_answer(8, asked(src_node_id=8)),
        lambda: bound.check_answer(7, asked(run_id=2)),
        lambda: bound.check_object(7, 2, "x"),
        lambda: bound.check_object(8, 1, "x"),
        lambda: bound.check_receipt(8, "m"),
        lambda: bound.check_upload(8, "s"),
    ):
        with pytest.raises(Refused):
            wrong()
    for number in range(MOST_OPEN):
        bound.handed(7, f"n{number}", 1, frozenset())
    with pytest.raises(Refused):  # long ago: memory does not grow with a run
        bound.check_answer(7, asked())
