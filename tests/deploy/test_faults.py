"""A federation in trouble: processes killed at bad moments, on purpose. Real processes on loopback; `make test-all`."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from test_deployment import PRUNED, accept, after_round, close, federation, fedmix, lines, said, weights

pytest.importorskip("flwr")

from fedmix.deploy import local, serve
from fedmix.settings.reading import read_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@contextmanager
def running(folder, out, *more):
    """`fedmix deploy run` in the background; its process."""
    command = [sys.executable, "-m", "fedmix", "deploy", "run", str(folder), "--out", str(out), "--json", *more]
    with open(out.parent / "run.err", "a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        process.stdout.close()


def ended(process, out, seconds=600):
    text, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, (out.parent / "run.err").read_text()
    return json.loads(text)


def kill(running):
    for child in running.children.values():
        os.killpg(child.process.pid, signal.SIGKILL)


def test_every_method_gives_the_numbers_of_the_plain_loop(tmp_path):
    small = ["--scale", "small", "--rounds", "3", "--quiet"]
    with federation(tmp_path / "f"):
        for method in ("fedmix", "fedavg", "biased-fedavg"):
            what = ["--algorithm", method, *small, "--json"]
            accept(tmp_path / "f", *small[:4], "--algorithm", method)
            fedmix("deploy", "run", str(tmp_path / "f"), *what, "--out", str(tmp_path / f"sites-{method}"))
            for engine in ("serial", "local"):
                out = tmp_path / f"{engine}-{method}"
                fedmix("train", "digits-skew", *what, "--engine", engine, "--out", str(out))
                assert close(weights(tmp_path / f"sites-{method}", 3), weights(out, 3)), (method, engine)


def test_a_site_that_is_killed_in_mid_round_comes_back_with_its_gate(tmp_path):
    folder, out = tmp_path / "f", tmp_path / "run"
    local.prepare(folder, 2, read_recipe("digits-skew", None, {"server.deadline": 25.0, "rounds": 25}, "small"))
    with ExitStack() as stack:
        stack.enter_context(serve.server(folder / "server", said, tmp_path / "server.log"))
        stack.enter_context(serve.site(folder / "sites" / "site-1", said, tmp_path / "1.log"))
        second = ExitStack()
        node = second.enter_context(serve.site(folder / "sites" / "site-2", said, tmp_path / "2.log"))
        local.wait_until_online(folder / "server", 2)
        process = stack.enter_context(running(folder, out))
        after_round(out, 2, process)
        time.sleep(1)  # in the middle of round 3
        kill(node)
        second.close()
        after_round(out, 3, process)
        (own,) = (folder / "sites" / "site-2" / "runs").iterdir()
        assert (own / "clients" / "1" / "000002.safetensors").is_file()
        manifest = json.loads((out / "checkpoints" / "round-000003" / "manifest.json").read_text())
        assert manifest["carried"]["engine"] == {
            str(s): 3 - s % 2 for s in range(8)
        }  # whose state of which round counts
        stack.enter_context(serve.site(folder / "sites" / "site-2", said, tmp_path / "2.log"))
        summary = ended(process, out)
    found = lines(out)
    assert summary["rounds"] == len(found) == 25
    absent = {line["round"]: sorted(row["client"] for row in line["absent"]) for line in found if line["absent"]}
    assert absent[3] == [1, 3, 5, 7]  # the clients of site-2
    assert all(row["reason"] for line in found for row in line["absent"])
    assert found[-1]["absent"] == []  # it is back
    assert 24 < found[2]["seconds"] < 40  # the round was closed at its deadline
    assert not any(
        "has no private state" in row["reason"] for line in found for row in line["absent"]
    )  # it had its gate


@pytest.mark.parametrize("victim", ["superlink", "serverapp"])
def test_a_server_that_is_killed_goes_on_from_its_last_round(victim, tmp_path):
    folder, out = tmp_path / "f", tmp_path / "run"
    local.prepare(
        folder, 2, read_recipe("digits-skew", None, {"rounds": 5, "fedmix.eta": 0.9, "fedmix.gamma": 0.3}, "small")
    )
    with ExitStack() as stack:
        server = ExitStack()
        link = server.enter_context(serve.server(folder / "server", said, tmp_path / "server.log"))
        for name in ("site-1", "site-2"):
            stack.enter_context(serve.site(folder / "sites" / name, said, tmp_path / f"{name}.log"))
        local.wait_until_online(folder / "server", 2)
        process = stack.enter_context(running(folder, out))
        after_round(out, 2, process)
        time.sleep(1)
        if victim == "superlink":
            kill(link)
            server.close()
            time.sleep(2)
            stack.enter_context(serve.server(folder / "server", said, tmp_path / "server.log"))
        else:
            stack.push(server)
            found = [pid for pid in census(folder) if "flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_text()]
            assert found
            for pid in found:
                os.kill(pid, signal.SIGKILL)
        ended(process, out)
    assert [line["round"] for line in lines(out)] == [1, 2, 3, 4, 5]
    assert all(line["absent"] == [] for line in lines(out))
    plain = ["--scale", "small", "--rounds", "5", "--quiet", "--json", *PRUNED, "--engine", "serial"]
    fedmix("train", "digits-skew", *plain, "--out", str(tmp_path / "serial"))
    assert close(weights(out, 5), weights(tmp_path / "serial", 5))


def resident(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def census(folder):
    """Processes of a federation, by the environment that they were given, and how many files and ports each has open."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"FLWR_HOME={folder.resolve()}/".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[int(pid)] = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
    return found


def test_fifty_rounds_with_clients_that_fail_at_random(tmp_path):
    """Workers are killed in mid-round with probability 0.15 a site and second or so; nothing is lost, nothing grows."""
    rng = random.Random(0)
    folder, out = tmp_path / "f", tmp_path / "run"
    local.prepare(folder, 2, read_recipe("digits-skew", None, {"rounds": 50, "server.deadline": 40.0}, "small"))
    before = census(folder)
    with local.up(folder, said) as nodes:
        watched = {
            name: running.children["link" if name == "server" else "node"].process.pid
            for name, running in nodes.items()
        }
        with running(folder, out) as process:
            after_round(out, 5, process)
            early = {name: resident(pid) for name, pid in watched.items()}
            files = census(folder)
            killed = 0
            while process.poll() is None and len(lines(out)) < 50:
                time.sleep(2.0)
                site = rng.choice(["site-1", "site-2"])
                if rng.random() < 0.15:
                    pattern = f"fedmix.deploy.worker {folder.resolve()}/sites/{site} "
                    killed += subprocess.run(["pkill", "-KILL", "-f", pattern]).returncode == 0
            summary = ended(process, out)
        late = {name: resident(pid) for name, pid in watched.items()}
        after = census(folder)
    found = lines(out)
    assert [line["round"] for line in found] == list(range(1, 51))
    assert killed >= 10
    assert any(line["absent"] for line in found)
    assert summary["accuracy"]["test"]["server"]["mean"] > 0.5
    assert census(folder) == before == {}  # everything is gone, and its ports with it
    grown = {name: late[name] - early[name] for name in early}
    print(f"killed {killed}, rounds with absent {sum(bool(line['absent']) for line in found)}, MB grown {grown}")
    assert max(grown.values()) < 60, grown
    assert len(after) <= len(files) + 1
    assert all(after[pid] <= files[pid] + 8 for pid in after if pid in files)
