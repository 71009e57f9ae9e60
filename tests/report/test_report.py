"""The report's numbers: what is read of run directories, whatever state they are in, and what is said of it."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from conftest import fedmix
from made_runs import made_up, three_runs

from fedmix.errors import RunError
from fedmix.report.figures import draw_figures, table_csv, table_latex
from fedmix.report.groups import ON, differing, groups, table
from fedmix.report.page import as_json, report
from fedmix.report.page_data import page_data
from fedmix.report.runs import flat, read_runs
from fedmix.report.show import sparkline
from fedmix.report.verdict import glance
from fedmix.settings.reading import make_recipe, recipe_table


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return three_runs(tmp_path_factory.mktemp("report"))


def test_seeds_are_one_group_and_the_winner_is_named(runs):
    found = read_runs([str(runs)])
    made = groups(found)
    assert sorted((group.name, len(group.runs)) for group in made) == [("FedAvg", 1), ("FedMix", 2)]
    rows = {row["method"]: row for row in table(made)}
    mixes = [json.loads((runs / f"fedmix-{seed}" / "summary.json").read_text()) for seed in (0, 1)]
    tuned = [summary["accuracy"]["test"]["fine_tuned"]["mean"] for summary in mixes]
    mean, deviation = sum(tuned) / 2, abs(tuned[0] - tuned[1]) / 2**0.5  # the sample deviation of two
    assert rows["FedMix"]["fine-tuned, test"] == pytest.approx([100 * mean, 100 * deviation])
    assert rows["FedAvg"]["fine-tuned, test"][1] is None
    server = [summary["accuracy"]["validation"]["server"]["mean"] for summary in mixes]
    assert rows["FedMix"]["server, validation"][0] == pytest.approx(100 * sum(server) / 2)
    sent = [sum(summary[key] for key in ("bytes_down", "bytes_up")) for summary in mixes]
    assert rows["FedMix"]["GiB"] == pytest.approx(sum(sent) / 2 / 2**30)
    best = max(rows.values(), key=lambda row: row["fine-tuned, test"][0])["method"]
    verdict = glance(made)["verdict"]
    assert verdict.startswith(f"{best} against ")
    assert "one seed, so how much another seed would change is not known" in verdict
    for words in ("fine-tuned (test)", "as sent (validation)", "server (validation)", "no identity (validation)"):
        assert words in verdict
    assert glance(made)["wrong"] == []


def test_curves_and_maps_are_what_the_metrics_say(runs):
    data = page_data(read_runs([str(runs / "fedmix-0")]))
    lines = [json.loads(line) for line in (runs / "fedmix-0" / "metrics.jsonl").read_text().splitlines()]
    (series,) = data["curves"][0]
    assert series["round"] == [1, 2, 3, 4]
    assert series["server"] == pytest.approx(
        [100 * line["accuracy"]["validation"]["server"]["mean"] for line in lines], rel=1e-3
    )
    sent = [sum(line["bytes_down"] + line["bytes_up"] for line in lines[: t + 1]) / 2**30 for t in range(4)]
    assert series["gib"] == pytest.approx(sent, rel=1e-3)
    (run,) = data["runs"]
    true = json.loads((runs / "fedmix-0" / "federation.json").read_text())["groups"]
    assert run["maps"]["groups"] == sorted(true)  # clients in the order of their groups
    order = [int(name) for name in run["maps"]["clients"]]
    for s, row in zip(order, run["maps"]["frames"][-1]["zs"], strict=True):
        there = len(row)  # slots that never held an expert are not drawn
        assert row == pytest.approx(lines[-1]["q_zs"][s][:there], abs=1e-3)
        assert sum(lines[-1]["q_zs"][s][there:]) == 0
    assert sum(run["clients"]["labels"][0]) == run["clients"]["points"][0]


def test_runs_that_differ_in_a_setting_are_told_apart(tmp_path):
    for eta in (0.0, 0.5, 0.9):
        made_up(tmp_path / f"eta-{eta}", more=f"[fedmix]\neta = {eta}\n")
    made = groups(read_runs([str(tmp_path)]))
    assert [group.name for group in made] == ["FedMix, eta 0.0", "FedMix, eta 0.5", "FedMix, eta 0.9"]
    assert differing([group.runs for group in made]) == ["fedmix.eta"]
    (line,) = page_data(read_runs([str(tmp_path)]))["sweep"]["keys"]["fedmix.eta"]
    assert line["values"] == [0.0, 0.5, 0.9]


def test_a_setting_that_older_runs_do_not_have_tells_apart_only_what_nothing_else_does(tmp_path):
    made_up(tmp_path / "old", more="[fedmix]\ngamma = 0.99\n")
    made_up(tmp_path / "new", more="[fedmix]\ngamma = 0.9\nfull_steps = false\n")
    assert [group.name for group in groups(read_runs([str(tmp_path)]))] == ["FedMix, gamma 0.9", "FedMix, gamma 0.99"]
    made_up(tmp_path / "full", more="[fedmix]\ngamma = 0.99\nfull_steps = true\n")
    assert {group.name for group in groups(read_runs([str(tmp_path)]))} == {
        "FedMix, gamma 0.99",
        "FedMix, gamma 0.9",
        "FedMix, gamma 0.99, full steps",
    }


def test_what_is_on_or_off_is_named_where_it_is_not_the_default(tmp_path):
    made_up(tmp_path / "a", more="[fedmix]\ngate_through_features = true\n")
    made_up(tmp_path / "b", more="[fedmix]\ngate_through_features = false\n")
    assert {group.name for group in groups(read_runs([str(tmp_path)]))} == {
        "FedMix",
        "FedMix, no gate through features",
    }
    switches = {key: value for key, value in flat(recipe_table(make_recipe({}))).items() if isinstance(value, bool)}
    assert [key.split(".")[-1] for key, value in switches.items() if value] == list(ON)


def test_methods_that_are_trained_differently_say_so(tmp_path):
    made_up(tmp_path / "a", more="[training]\nlabel_counts = true\n")
    made_up(tmp_path / "b", algorithm="fedavg", more="[training]\nlabel_counts = false\n")
    assert [group.name for group in groups(read_runs([str(tmp_path)]))] == ["FedMix, label counts", "FedAvg"]
    shutil.rmtree(tmp_path / "b")
    made_up(tmp_path / "b", algorithm="fedavg", more="[training]\nlabel_counts = true\n")
    assert [group.name for group in groups(read_runs([str(tmp_path)]))] == ["FedMix", "FedAvg"]


def test_a_method_is_told_apart_by_its_own_settings_alone(tmp_path):
    for gamma in (0.9, 0.99):
        made_up(tmp_path / f"mix-{gamma}", more=f"[fedmix]\ngamma = {gamma}\n[model]\nchannels = []\n")
    for channels in ("[]", "[8]"):
        more = f"[fedmix]\ngamma = 0.99\n[model]\nchannels = {channels}\n"
        made_up(tmp_path / f"avg{channels}", algorithm="fedavg", more=more)
    assert {group.name for group in groups(read_runs([str(tmp_path)]))} == {
        "FedMix, gamma 0.9",
        "FedMix, gamma 0.99",
        "FedAvg",
        "FedAvg, channels [8]",
    }


def test_lines_of_a_sweep_are_named_like_groups(tmp_path):
    for eta in (0.0, 0.9):
        for full in ("true", "false"):
            made_up(tmp_path / f"{eta}-{full}", more=f"[fedmix]\neta = {eta}\nfull_steps = {full}\n")
    lines = page_data(read_runs([str(tmp_path)]))["sweep"]["keys"]["fedmix.eta"]
    assert {line["name"] for line in lines} == {"FedMix", "full steps"}


def test_a_grid_of_two_settings_is_drawn_against_each_with_other_methods_beside(tmp_path):
    for eta, experts, accuracy in ((0.0, 2, 0.7), (0.9, 2, 0.6), (0.0, 4, 0.9), (0.9, 4, 0.8)):
        more = f"[fedmix]\neta = {eta}\nexperts = {experts}\n"
        made_up(tmp_path / f"{eta}-{experts}", more=more, accuracy=accuracy)
    made_up(tmp_path / "fedavg", algorithm="fedavg", accuracy=0.5)
    own = page_data(read_runs([str(tmp_path)]))["sweep"]
    assert list(own["keys"]) == ["fedmix.eta", "fedmix.experts"]
    assert [(line["name"], line["values"]) for line in own["keys"]["fedmix.eta"]] == [
        ("experts 2", [0.0, 0.9]),
        ("experts 4", [0.0, 0.9]),
    ]
    assert [row["fine-tuned, test"][0] for row in own["keys"]["fedmix.experts"][0]["rows"]] == [70, 90]
    assert [(row["method"], row["fine-tuned, test"][0]) for row in own["beside"]] == [("FedAvg", 50)]
    made = draw_figures(read_runs([str(tmp_path / "0.0-2"), str(tmp_path / "0.9-2")]), tmp_path / "figures")
    assert {"sweep.svg", "sweep.png", "q-clients-fedmix-eta-0.0.png"} <= set(made)


def cut(folder, rounds):
    """As if it had been stopped there."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:rounds]))
    (folder / "summary.json").unlink()


def test_only_seeds_that_have_ended_are_results(tmp_path):
    for seed in range(3):
        made_up(tmp_path / f"mix-{seed}", seed=seed, accuracy=0.8 + seed / 100)
        made_up(tmp_path / f"avg-{seed}", seed=seed, accuracy=0.7, algorithm="fedavg")
    cut(tmp_path / "mix-2", 10)
    made = groups(read_runs([str(tmp_path)]))
    row = table(made)[0]
    assert row["method"] == "FedMix (2 of 3 seeds)"
    assert row["fine-tuned, test"] == pytest.approx([80.5, 0.5**0.5])
    assert row["GiB"] == pytest.approx(20 * 2 / 1024)
    assert row["rounds"] == 20
    verdict = glance(made)["verdict"]
    assert verdict.startswith(
        "FedMix against FedAvg, paired over clients and 2 seeds: fine-tuned (test) FedMix is ahead"
    )
    assert "(+10.5 points, +10.0 to +11.0)" in verdict


def test_a_copy_is_no_seed_and_another_number_of_rounds_no_seed_either(tmp_path):
    made_up(tmp_path / "a", accuracy=0.8)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    made_up(tmp_path / "c", rounds=10, seed=1)
    made = groups(read_runs([str(tmp_path), str(tmp_path / "a")]))
    assert [group.name for group in made] == ["FedMix, rounds 20", "FedMix, rounds 10"]
    assert [group.seeds for group in made] == ["one seed", "one seed"]
    (wrong,) = glance(made)["wrong"]
    assert wrong["what"].endswith("/a, and was left out")


def test_a_verdict_says_no_more_than_is_known(tmp_path):
    def verdict(*names):
        return glance(groups(read_runs([str(tmp_path / name) for name in names])))["verdict"]

    made_up(tmp_path / "mix0", accuracy=0.80)
    made_up(tmp_path / "mix1", accuracy=0.84, seed=1)
    made_up(tmp_path / "avg0", accuracy=0.81, algorithm="fedavg")
    made_up(tmp_path / "avg1", accuracy=0.815, algorithm="fedavg", seed=1)
    made_up(tmp_path / "else", more='[data]\nsource = "other"\n', algorithm="fedavg")
    assert "fine-tuned (test) level (+0.8 points, -1.0 to +2.5)" in verdict("mix0", "mix1", "avg0", "avg1")
    assert "one seed, so how much another seed would change is not known" in verdict("mix0", "avg0")
    assert "seeds are not the same, so nobody is said to be ahead" in verdict("mix1", "avg0")
    assert "nobody is ahead" in verdict("mix0", "else")


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    made_up(tmp_path / "run", name="a\x1b[31mred", names=["b\x1b]0;x\x07", *"cdef"])
    done = fedmix("show", str(tmp_path / "run"))
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "a\ufffd[31mred" in done.stdout


def test_what_went_wrong_is_said_first(tmp_path):
    folder = made_up(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[3]["absent"] = [{"client": 2, "reason": "no answer in time"}]
    lines[4]["refused"] = [{"client": 1, "field": "phi", "reason": "off the simplex"}]
    lines[5]["warnings"] = ["collapsed: one expert does all"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = " ".join(row["what"] for row in glance(groups(read_runs([str(folder)])))["wrong"])
    assert "1 missing clients, the last in round 4: client 2, no answer in time" in told
    assert "1 refused replies" in told
    assert "collapsed" in told


def write(name, text, mode="w"):
    def spoil(folder):
        with open(folder / name, mode) as file:
            file.write(text)

    return spoil


ODD = {
    "evaluation.json is not": write("evaluation.json", '{"new_clients":{"labelled":[{"points":5}]}}'),
    "audit.json is not": write("audit.json", '{"true":[[1]],"attacks":{"start":null}}'),
    "federation.json is not": write("federation.json", '{"clients": 5}'),
    "metrics.jsonl is not": write(
        "metrics.jsonl",
        '{"round":21,"bytes_down":1,"bytes_up":1,"accuracy":{"validation":{"as_sent":{"mean":"x"}}},"warnings":7,"expert_use":3}\n',
        "a",
    ),
    "after round 20": write("metrics.jsonl", '{"round":21,"bytes_down":null,"bytes_up":1}\n', "a"),
}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "summary.json").unlink(), "unfinished: round 20 of 20"),
        (lambda f: (f / "metrics.jsonl").write_text((f / "metrics.jsonl").read_text()[:-30]), "cannot be read"),
        (lambda f: (f / "metrics.jsonl").unlink(), None),
        (lambda f: (f / "environment.json").unlink(), "environment.json is missing"),
        (write("federation.json", "{"), "federation.json is damaged"),
        (write("summary.json", "[1, 2]"), "unfinished"),
        (write("evaluation.json", "{}"), None),
        *((spoil, words) for words, spoil in ODD.items()),
    ],
)
def test_a_run_in_any_state_gives_a_page_that_says_so(spoil, words, tmp_path):
    folder = made_up(tmp_path / "run")
    spoil(folder)
    done = fedmix("report", str(folder))
    assert done.returncode == 0, done.stderr
    told = [row["what"] for row in page_data(read_runs([str(folder)]))["glance"]["wrong"]]
    assert words is None or any(words in what for what in told), told
    assert fedmix("show", str(folder)).returncode == 0


def test_figures_of_odd_files_are_left_out(tmp_path):
    folder = made_up(tmp_path / "run")
    for spoil in ODD.values():
        spoil(folder)
    assert fedmix("figures", str(folder), "--out", str(tmp_path / "figures")).returncode == 0


def test_a_recipe_without_whole_numbers_is_refused_in_one_line(tmp_path):
    folder = made_up(tmp_path / "run")
    (folder / "recipe.toml").write_text('rounds = "many"\n')
    for command in ("report", "show"):
        done = fedmix(command, str(folder))
        assert done.returncode == 2
        assert "rounds of recipe.toml must be a whole number" in done.stderr


def test_names_cannot_leave_their_place(tmp_path):
    hostile = "</script><script>alert(1)</script>"
    folder = made_up(tmp_path / "run", name=hostile, names=[hostile, "x" * 10_000, "🦊", "&lt;b&gt;", "a"])
    text = report(read_runs([str(folder)]))
    assert hostile not in text
    assert text.count("</script>") == 3  # those of the page itself
    assert as_json({"a": "</script>&"}) == '{"a":"\\u003c/script\\u003e\\u0026"}'
    assert len(text) < 5_000_000


def test_a_large_run_is_thinned(tmp_path):
    """2,000 rounds of 500 clients in under 10 s and 1 GB."""
    folder = made_up(tmp_path / "run", rounds=2000, clients=500, experts=8, every=5)
    code = (
        "import re, time\nfrom pathlib import Path\n"
        "from fedmix.report.runs import read_runs\nfrom fedmix.report.page import report\n"
        f"began = time.time()\ntext = report(read_runs([{str(folder)!r}]))\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())\n"  # its own, not its parent's
        "print(time.time() - began, len(text), int(peak[1]) / 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, size, gigabytes = map(float, done.stdout.split())
    assert seconds < 10
    assert size < 5_000_000
    assert gigabytes < 1


def test_figures_and_tables(runs, tmp_path):
    made = draw_figures(read_runs([str(runs)]), tmp_path / "figures")
    assert {
        "as-sent-over-rounds.svg",
        "no-identity-over-gibs.png",
        "divergence.svg",
        "clients.png",
        "table.csv",
    } <= set(made)
    assert all((tmp_path / "figures" / name).stat().st_size > 100 for name in made)
    data = page_data(read_runs([str(runs)]))
    rows = table_csv(data).splitlines()
    assert rows[0].startswith('method,"fine-tuned, test","fine-tuned, test, deviation over seeds","server, test"')
    assert len(rows) == 3
    data["table"][0]["method"] = "50% of a_b & {c}"
    assert r"50\% of a\_b \& \{c\}" in table_latex(data)
    assert fedmix("figures", str(runs), "--out", str(tmp_path / "figures")).returncode == 2  # nothing is overwritten


def test_reports_are_where_one_looks_for_them(runs, tmp_path):
    done = fedmix("report", str(runs))
    assert done.returncode == 0
    assert done.stdout.strip() == str(runs / "report.html")
    out = tmp_path / "deep" / "page.html"
    assert fedmix("report", str(runs), "--out", str(out)).returncode == 0
    assert fedmix("report", str(runs), "--out", str(out)).returncode == 2
    assert "is a folder" in fedmix("report", str(runs), "--out", str(tmp_path), "--overwrite").stderr
    refused = fedmix("report", str(tmp_path))
    assert refused.returncode == 2
    assert "must be a run directory" in refused.stderr
    with pytest.raises(RunError):
        read_runs([str(tmp_path / "nowhere")])


def test_sparklines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, None, 1]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)))) == 50


@contextmanager
def watched(*paths):
    process = subprocess.Popen(
        [sys.executable, "-m", "fedmix", "watch", *paths, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process.stdout.readline().split()[0], process
    finally:
        process.send_signal(2)
        assert process.wait(20) == 0  # Ctrl-C is how it ends
        process.stdout.close()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.status, answer.read()


def test_watch_serves_this_machine_alone_and_follows_the_run(tmp_path):
    folder = made_up(tmp_path / "run", rounds=20)
    made_up(tmp_path / "run2")
    whole = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(whole[:10]))
    with watched(str(folder)) as (url, _):
        assert url.startswith("http://127.0.0.1:")
        assert b"fedmix" in get(url)[1]
        first = json.loads(get(f"{url}data.json")[1])
        assert get(f"{url}data.json?known={first['version']}")[0] == 204
        time.sleep(0.02)
        (folder / "metrics.jsonl").write_text("".join(whole[:15]))
        second = json.loads(get(f"{url}data.json?known={first['version']}")[1])
        assert second["curves"][0][0]["every"]["round"][-1] == 15
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{url}recipe.toml")
        (folder / "recipe.toml").unlink()  # the run is being started again
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(f"{url}data.json")
        assert json.loads(re.search(rb'json">(.*?)</script>', get(url)[1])[1])["version"] == second["version"]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(url, Host="evil.example:80")
        assert get(url, Host="127.0.0.1")[0] == 200  # as a browser asks on port 80
        taken = fedmix("watch", str(folder.parent / "run2"), "--port", url.split(":")[2].strip("/"))
        assert taken.returncode == 2
        assert "--port" in taken.stderr
