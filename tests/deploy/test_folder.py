"""What `fedmix deploy init` writes, what `check` says of it, and who may knock at which door."""

import asyncio
import json
import os
import re
import ssl
import stat
import tomllib

import numpy as np
import pytest
from conftest import fedmix

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedmix.deploy import local, secrets
from fedmix.deploy.acceptance import agreed_recipe
from fedmix.deploy.check import check
from fedmix.deploy.folder import init, read_server, read_site
from fedmix.deploy.serve import commands
from fedmix.deploy.superlink import OperatorsHere
from fedmix.errors import FedmixError, RunError, SettingError
from fedmix.settings.reading import read_recipe


@pytest.fixture
def made(tmp_path):
    init(tmp_path / "f", ["a", "b", "c"], "fedmix.example.org:8443")
    return tmp_path / "f"


def test_a_consortium_gets_everything_it_needs(made):
    assert read_server(made / "server").address == "fedmix.example.org:8443"
    for name in "abc":
        own = made / "sites" / name
        assert read_site(own).name == name
        assert read_site(own).server == "fedmix.example.org:8443"
        assert not read_site(own).share_private
        assert (own / "ca.crt").read_bytes() == (made / "server" / "ca.crt").read_bytes()
        assert (own / "node.pub").read_bytes() == (made / "server" / "keys" / f"{name}.pub").read_bytes()
        assert os.access(own / "start.sh", os.X_OK)
        assert "fedmix deploy serve" in (own / f"fedmix-{name}.service").read_text()
        assert agreed_recipe(own) == agreed_recipe(made / "server")
    assert agreed_recipe(made / "server").data.args["sites"] == ["a", "b", "c"]
    tomllib.loads((made / "server" / "app" / "pyproject.toml").read_text())


def test_secrets_are_for_their_owner_alone_and_nobody_has_anothers(made):
    modes = {
        str(path.relative_to(made)): stat.S_IMODE(path.stat().st_mode)
        for path in made.rglob("*")
        if b"PRIVATE KEY" in (path.read_bytes() if path.is_file() else b"")
    }
    assert modes == dict.fromkeys(
        ["server/ca.key", "server/server.key", "sites/a/node.key", "sites/b/node.key", "sites/c/node.key"], 0o600
    )
    assert len({(made / "sites" / name / "node.key").read_bytes() for name in "abc"}) == 3


def test_the_servers_certificate_is_for_its_name_and_of_this_authority(made):
    authority = x509.load_pem_x509_certificate((made / "server" / "ca.crt").read_bytes())
    own = x509.load_pem_x509_certificate((made / "server" / "server.crt").read_bytes())
    own.verify_directly_issued_by(authority)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fedmix.example.org", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    ssl.create_default_context().load_cert_chain(made / "server" / "server.crt", made / "server" / "server.key")
    assert 800 < secrets.days_left(made / "server" / "server.crt") < 830
    key = serialization.load_ssh_private_key((made / "sites" / "a" / "node.key").read_bytes(), None)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    assert (made / "sites" / "a" / "node.pub").read_bytes().startswith(line)
    assert key.curve.name == "secp384r1"  # the curve that Flower takes


@pytest.mark.parametrize(
    ("sites", "address", "words"),
    [
        ("a,A", "h:1", "each site once"),
        ("a,../b", "h:1", "each site once"),
        (",", "h:1", "each site once"),
        ("a,b", "host", "host:port"),
        ("a,b", "host:99999", "host:port"),
    ],
)
def test_init_refuses_what_cannot_be(sites, address, words, tmp_path):
    done = fedmix("deploy", "init", str(tmp_path / "f"), "--sites", sites, "--address", address)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "f").exists()


def test_init_overwrites_nothing(made):
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    done = fedmix("deploy", "init", str(made), "--sites", "x")
    assert done.returncode == 2
    assert "nothing is overwritten" in done.stderr
    assert before == {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="there already"):
        secrets.make_node_key(made / "sites" / "a" / "node.key", made / "x.pub", "a")


def test_the_commands_behind_it_are_shown(made):
    environment, ((*_, last),) = commands(made / "server")
    assert last.endswith("superlink.db")
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    shown = fedmix("deploy", "serve", str(made / "sites" / "b"), "--show").stdout
    assert "--auth-supernode-private-key" in shown
    assert "fedmix.example.org:8443" in shown
    assert "--insecure" not in shown


def site_rows(folder):
    return {row["check"]: row for row in check(folder)}


def with_data(folder, shape=(30,), labels=2, n=60, name="data.npz"):
    rng = np.random.default_rng(0)
    np.savez(folder / name, x=rng.normal(size=(n, *shape)).astype("float32"), y=rng.integers(0, labels, n))


def test_a_sound_site_is_told_so(made):
    own = made / "sites" / "a"
    with_data(own)
    rows = site_rows(own)
    assert [name for name, row in rows.items() if not row["ok"]] == ["server"]  # there is none at that address
    assert "must be reachable" in rows["server"]["found"]
    assert "1 client; points: 42 train, 6 validation, 12 test" in rows["data"]["found"]


@pytest.mark.parametrize(
    ("spoil", "where", "words"),
    [
        (lambda own: with_data(own, shape=(31,)), "data", "inputs must have the shape [30]"),
        (lambda own: with_data(own, labels=5), "data", "labels must be of 0, 1"),
        (lambda own: None, "data", "was not found"),
        (lambda own: (own / "node.key").chmod(0o644), "key", "readable by its owner alone"),
        (lambda own: (own / "ca.crt").write_text("nonsense"), "authority", "Unable to load"),
        (lambda own: (own / "recipe.toml").unlink(), "recipe", "must hold the federation's recipe.toml"),
        (lambda own: (own / "site.toml").write_text("name = 3"), "settings", "name must be text"),
        (
            lambda own: (own / "recipe.toml").write_text((own / "recipe.toml").read_text().replace('"a", ', "")),
            "data",
            "must name this site",
        ),
    ],
)
def test_check_says_what_is_wrong_before_anything_is_trained(spoil, where, words, made):
    own = made / "sites" / "a"
    spoil(own)
    row = site_rows(own)[where]
    assert not row["ok"]
    assert words in row["found"]
    done = fedmix("deploy", "check", str(own))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_check_of_the_server(made):
    rows = site_rows(made / "server")
    assert [name for name, row in rows.items() if not row["ok"]] == ["server"]
    assert rows["sites' keys"]["found"] == "a, b, c"
    for key in (made / "server" / "keys").iterdir():
        key.unlink()
    assert not site_rows(made / "server")["sites' keys"]["ok"]


def test_a_folder_that_is_none_is_refused(tmp_path):
    for action in (["check"], ["serve"], ["run"]):
        done = fedmix("deploy", *action, str(tmp_path))
        assert done.returncode == 2, action
        assert "deploy init" in done.stderr
    with pytest.raises(FedmixError):
        read_site(tmp_path)


def test_a_certificate_that_has_run_out(made, monkeypatch):
    monkeypatch.setattr(secrets, "SERVER_DAYS", -0.001)
    secrets.make_certificates(made / "old", ["h"])
    assert secrets.days_left(made / "old" / "server.crt") < 0


@pytest.mark.parametrize(
    ("path", "peer", "status"),
    [
        ("/v1/fleet/pull-messages", "192.0.2.7", 200),
        ("/health", "192.0.2.7", 200),
        ("/v1/control/start-run", "192.0.2.7", 403),
        ("/v1/runtime/acquire-task", "192.0.2.7", 403),
        ("/docs", "2001:db8::1", 403),
        ("/v1/control/start-run", "127.0.0.1", 200),
        ("/v1/runtime/acquire-task", "::1", 200),
    ],
)
def test_operators_are_on_the_servers_machine(path, peer, status):
    seen = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(event):
        seen.append(event.get("status"))

    scope = {"type": "http", "path": path, "client": (peer, 1234)}
    asyncio.run(OperatorsHere(app)(scope, None, send))
    assert seen[0] == status


def test_a_local_federation_has_ports_of_its_own(tmp_path):
    folders = local.prepare(tmp_path / "f", 3, read_recipe("digits-skew"))
    ports = {read_site(folder).runtime_port for folder in folders} | {read_server(tmp_path / "f" / "server").port}
    assert len(ports) == 4
    assert read_server(tmp_path / "f" / "server").host == "127.0.0.1"
    parts = [read_site(folder).data.args for folder in folders]
    assert parts == [{"part": i, "of": 3} for i in range(3)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["deploy", "up", "digits-skew", "--local", "0", "--out", "OUT"], "--local must be 1 or more"),
        (["deploy", "up", "nowhere", "--local", "2", "--out", "OUT"], "a recipe must be one of"),
        (["predict", "--site", "OUT", "--input", "x.npz"], "must hold a site.toml"),
        (["predict", "--site", "OUT", "--input", "x.npz", "--out", "x.txt"], "--out must be a .csv or .npz"),
        (["train", "OUT.toml"], "trained by: fedmix deploy run"),
    ],
)
def test_wrong_words_are_one_line(args, words, tmp_path):
    (tmp_path / "o.toml").write_text('[data]\nsource = "sites"\nargs = {sites = ["a"], input = [3], classes = 2}\n')
    done = fedmix(*(re.sub("^OUT", str(tmp_path / "o"), arg) for arg in args))
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_needs_a_recipe_that_can_be_read(made):
    (made / "server" / "recipe.toml").write_text("rounds = 'many'")
    done = fedmix("deploy", "run", str(made))
    assert done.returncode == 2
    assert "rounds must be a whole number" in done.stderr
    assert json.loads(fedmix("deploy", "check", str(made / "server"), "--json").stdout)[1]["ok"] is False
    with pytest.raises(SettingError):
        agreed_recipe(made / "server")
