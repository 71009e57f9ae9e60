"""Methods of a user's own: FedProx in a file, FedMix's page under another name, a method in phases, the command line."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from conftest import METHODS, fedmix, small_experiment, small_federation, small_recipe, train_serially

import fedmix as package
from fedmix.core.tree import flatten
from fedmix.errors import ClientError, ModelError, SettingError
from fedmix.methods import Anonymous, Answer, Field, Method, Page, cross_entropy, outputs
from fedmix.methods.fedavg import fedavg
from fedmix.rng import stream
from fedmix.settings.build import build
from fedmix.settings.importing import importable_from, named_object
from fedmix.settings.reading import make_recipe, read_recipe
from fedmix.testing import LAWS, check_method

ROOT = Path(__file__).parents[2]
FEDPROX = ROOT / "examples" / "fedprox.py"
SMALL = ["--rounds", "3", "--quiet", "--json", "--set", "data.clients=4"]


@pytest.fixture
def prox(mine):
    """The example's file as the user's own mine.py, in the current folder."""
    mine(FEDPROX.read_text())
    return "mine:fedprox"


def proximal(mu, page=None):
    page = page or imported()
    return build(small_recipe("own", **{"own.mu": mu, "training.epochs": 3}), small_federation(), page=page)


def imported():
    import importlib.util

    spec = importlib.util.spec_from_file_location("the_example", FEDPROX)
    module = importlib.util.module_from_spec(spec)
    sys.modules["the_example"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module.fedprox


def test_the_proximal_term_acts_and_zero_is_fedavg():
    """Against autograd by hand: two epochs of one mini-batch each, the term pulling from the second step on."""
    plain, _ = train_serially(small_experiment("fedavg", **{"training.epochs": 3}))
    zero, _ = train_serially(proximal(0.0))
    strong, _ = train_serially(proximal(5.0))
    same, other = (flatten(steps[-1].state) for steps in (zero, strong))
    for name, value in flatten(plain[-1].state).items():
        assert torch.equal(value, same[name]), name
    assert not torch.equal(same["shared.out.weight"], other["shared.out.weight"])
    assert (
        proximal(5.0).algorithm.one_by_one is None
    )  # on the default engine clients are side by side, the term in each
    experiment = build(
        small_recipe("own", **{"own.mu": 0.7, "training.batch_size": 1000, "training.epochs": 2}),
        small_federation(),
        page=imported(),
    )
    algorithm, data = experiment.algorithm, experiment.federation.examples(0, "train")
    message = algorithm.broadcast(algorithm.init(0), 0)
    reply, _ = algorithm.client_update(message, {}, data, stream(0), None)
    w = {name: value.clone().requires_grad_() for name, value in message.tensors.items()}
    for _ in range(2):
        logits, _ = experiment.model.apply(w, data.x, training=True)
        far = sum((value - message.tensors[name]).square().sum() for name, value in w.items())
        loss = torch.nn.functional.cross_entropy(logits, data.y) + 0.35 * far
        grads = torch.autograd.grad(loss, list(w.values()))
        w = {n: (v - 0.1 * g).detach().requires_grad_() for (n, v), g in zip(w.items(), grads, strict=True)}
    for name, value in w.items():
        assert torch.allclose(reply.tensors[name], value.detach(), atol=1e-6), name


def test_the_example_is_thirty_lines_at_most_and_obeys_every_law(prox):
    assert len(FEDPROX.read_text().splitlines()) <= 30
    assert check_method(prox, mu=0.5) == [law.__name__ for law in LAWS]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_by_name_on_the_command_line(prox, engine):
    command = ("train", "digits-skew", "--algorithm", prox, *SMALL, "--set", "own.mu=0.5", "--engine", engine)
    done = fedmix(*command, "--out", f"runs/{engine}")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["algorithm"], summary["title"]) == (prox, "FedProx")
    assert json.loads(Path(f"runs/{engine}/run.json").read_text())["title"] == "FedProx"
    assert read_recipe(f"runs/{engine}").own == {"mu": 0.5}
    for what in (("evaluate", "--quiet"), ("audit", "--quiet"), ("report",), ("show",)):
        looked = fedmix(what[0], f"runs/{engine}", *what[1:])
        assert looked.returncode == 0, looked.stderr
        assert what[0] == "report" or "FedProx" in looked.stdout + looked.stderr
    assert "FedProx" in Path(f"runs/{engine}/report.html").read_text()
    both = fedmix(
        "compare", "digits-skew", "--algorithms", f"fedavg,{prox}", *SMALL, "--set", "own.mu=0.5", "--out", "runs/both"
    )
    assert [row["title"] for row in json.loads(both.stdout)["rows"]] == ["FedAvg", "FedProx"]
    assert sorted(path.name for path in Path("runs/both").iterdir() if path.is_dir()) == [
        "fedavg-seed0",
        "mine-fedprox-seed0",
    ]
    plan = fedmix("plan", "digits-skew", "--algorithm", prox)
    assert "FedProx" in plan.stdout


def test_engines_agree_on_it_flower_too(prox, tmp_path):
    pytest.importorskip("flwr")
    weights = {}
    for engine in ("serial", "local", "flower"):
        out = tmp_path / engine
        command = ["train", "digits-skew", "--algorithm", prox, *SMALL, "--set", "own.mu=2.0", "--engine", engine]
        done = subprocess.run(
            [sys.executable, "-m", "fedmix", *command, "--out", str(out)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        weights[engine] = package.load(out).experts[0]
    for engine in ("local", "flower"):
        for name, value in weights["serial"].items():
            assert torch.allclose(weights[engine][name], value, atol=1e-5), (engine, name)


def test_beside_the_recipe_and_in_python(tmp_path, monkeypatch):
    """A file beside the recipe, from another folder; a page that is handed over; both shown under its title."""
    beside = tmp_path / "study"
    beside.mkdir()
    shutil.copy(FEDPROX, beside / "my_method.py")
    (beside / "my.toml").write_text(
        'algorithm = "my_method:fedprox"\nrounds = 2\n[data]\nclients = 4\n[own]\nmu = 0.3\n'
        '[methods."my_method:fedprox"]\nrounds = 3\n'
    )
    monkeypatch.chdir(tmp_path)
    done = fedmix("train", str(beside / "my.toml"), "--quiet", "--json", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 3
    run = package.train(
        federation=small_federation(), algorithm=imported(), own={"mu": 0.3}, out="python", engine="serial", rounds=2
    )
    assert run.summary["title"] == "FedProx"
    with pytest.raises(SettingError, match="hand it over again: algorithm="):
        package.load("python")
    assert package.evaluate("python", federation=small_federation(), algorithm=imported(), engine="serial")
    sys.modules.pop("my_method", None)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (["--algorithm", "mine:nothing"], "cannot"),
        (["--algorithm", "mine:Settings"], r"must name a fedmix.methods.Page. 'mine:Settings' is a type"),
        (["--algorithm", "mine:fedprox", "--set", "own.nu=1"], r"a setting of \[own\] must be one of mu"),
        (["--algorithm", "mine:fedprox", "--set", "own.mu=much"], "own.mu must be a number"),
        (["--algorithm", "fedavg", "--set", "own.mu=1"], "own must be empty"),
        (["--algorithm", "fedprx"], "algorithm must be one of"),
        (["--algorithm", "no such:thing"], "algorithm must be one of"),
    ],
)
def test_what_is_wrong_is_one_line(prox, changes, wrong):
    done = fedmix("train", "digits-skew", *SMALL, *changes, "--out", "runs/wrong")
    assert done.returncode == 2
    assert re.search(wrong, done.stderr)
    assert done.stderr.count("\n") == 1
    assert not Path("runs/wrong").exists()


def test_fedmixs_page_under_another_name_gives_the_same(mine):
    """Nothing in the house knows a method by its name: metrics, evaluation, audit and module are those of FedMix."""
    source = (ROOT / "src" / "fedmix" / "methods" / "fedmix.py").read_text()
    mine(source.replace('PAGE = Page("FedMix"', 'copied = Page("Copied"'))
    settings = {"experts": 3, "gamma": 0.5}
    runs = {}
    for name, method, section in (("a", "fedmix", "fedmix"), ("b", "mine:copied", "own")):
        given = {"algorithm": method, section: settings, "training": {"batch_size": 8, "client_lr": 0.2}}
        more = {"evaluation": {"share_private": True, "every": 1}}
        runs[name] = package.train(federation=small_federation(), out=name, rounds=4, **given, **more)
    names = ("a", "b")
    metrics = [runs[name].metrics for name in names]
    for lines in metrics:
        for line in lines:
            for key in ("seconds", "seconds_evaluation"):
                line.pop(key, None)
    assert metrics[0] == metrics[1]
    assert "bound" in metrics[0][0]

    def without_names(found):
        return {key: value for key, value in found.items() if key not in ("algorithm", "title", "seconds")}

    for look in (package.evaluate, package.audit):
        one, other = (look(name, federation=small_federation()) for name in names)
        assert without_names(one) == without_names(other)
    x = small_federation().x[:6]
    with torch.no_grad():
        assert torch.equal(*(runs[name].client(1).module()(x) for name in names))
    assert (runs["a"].predict(x) == runs["b"].predict(x)).all()


@pytest.mark.parametrize("method", METHODS)
def test_shipped_methods_obey_every_law(method):
    check_method(method)


def test_a_method_that_breaks_a_law_is_told_which():
    def build_wrong(setup, settings):
        def combine(logits, features, own, held):
            return logits[0]

        return replace(fedavg(setup), combine=combine)

    with pytest.raises(AssertionError, match=r"Wrong: log p\(y\|x, s\) must be normalised"):
        check_method(Page("Wrong", build_wrong))

    def build_leaky(setup, settings):
        return replace(
            fedavg(setup),
            loss=lambda parts, fixed, batch, carry: (
                batch.weight * 0 + sum(w.sum() * 0 for w in parts.shared.values()),
                0.0,
                carry,
            ),
        )

    with pytest.raises(AssertionError, match="The training loss must fall"):
        check_method(Page("Lazy", build_leaky))


@dataclass(frozen=True)
class PhasedSettings:
    epochs: int = 2


def phased(setup, settings):
    """As FedRep (Collins et al., 2021): the private head first, with the body as it is; then the body."""
    head = setup.model.output

    def loss(parts, fixed, batch, carry):
        logits, _ = outputs(setup.model, parts, batch.x)
        return cross_entropy(logits[0], batch.y), 0.0, carry

    def train(fit, arrival):
        first, _ = fit(
            arrival.parts, loss, only=lambda n: n.startswith("private."), epochs=settings.epochs, phase="head"
        )
        second, _ = fit(first, loss, only=lambda n: n.startswith("shared."), phase="body")
        return arrival.done(second)

    return Method(
        loss=loss,
        place=lambda name: "private" if name.startswith(head) else "shared",
        train=train,
        answer=lambda done: Answer(),
    )


def test_a_programme_in_phases():
    page = Page("Phased", phased, PhasedSettings)
    check_method(page)
    experiment = build(small_recipe("own"), small_federation(), page=page)
    algorithm, data = experiment.algorithm, experiment.federation.examples(0, "train")
    assert "phases" in algorithm.one_by_one
    message, private = algorithm.broadcast(algorithm.init(0), 0), algorithm.new_client(0, 0)
    reply, after = algorithm.client_update(message, private, data, stream(0), None)
    assert set(reply.tensors) == {"fc1.weight", "fc1.bias"}
    assert not torch.equal(after["out.weight"], private["out.weight"])
    kept, adapted = algorithm.adapt(message, private, data, stream(0), 3)
    assert all(torch.equal(kept.tensors[name], value) for name, value in message.tensors.items())
    assert not torch.equal(adapted["out.weight"], private["out.weight"])


def made(build_, **changes):
    return build(small_recipe("own", **changes), small_federation(), page=Page("Made", build_))


def test_a_phase_that_trains_nothing_is_an_error():
    def build_(setup, settings):
        plain = fedavg(setup)
        train = lambda fit, arrival: arrival.done(fit(arrival.parts, plain.loss, only=lambda n: n == "out.bias")[0])  # noqa: E731
        return replace(plain, train=train)

    with pytest.raises(ClientError, match=r"a phase must train something. `only` takes none of shared\.fc1\.weight"):
        train_serially(made(build_))


def picky(setup, settings, kept=None):
    """A mixture whose client trains the expert that fits it best, and sends that one back alone."""

    def loss(parts, fixed, batch, carry):
        first = parts._replace(experts={k: w for k, w in parts.experts.items() if k == 0})
        logits, _ = outputs(setup.model, first, batch.x)
        return cross_entropy(logits[0], batch.y), 0.0, carry

    def answer(done):
        return Answer({"share": torch.tensor([1.0, 0.0])}, experts=[0], keeps=kept or {})

    return Method(
        loss=loss,
        place=lambda name: "expert",
        experts=2,
        reply={"share": Field((2,))},
        weigh="share",
        answer=answer,
        combine=lambda logits, features, own, held: torch.log_softmax(logits[0], dim=1),
    )


def test_experts_that_do_not_come_back_exclude_noise_and_sums():
    steps, _ = train_serially(made(picky))
    assert steps[-1].diagnosis.detail["experts_returned"] == [4, 0]
    for changes, why in (
        ({"privacy.clip": 1.0, "privacy.noise": 0.5}, "would tell what the noise is to hide"),
        ({"server.aggregation": "linear"}, "sums are over all of them"),
    ):
        with pytest.raises(ClientError, match=why):
            train_serially(made(picky, **changes))


def test_what_a_client_keeps_is_declared():
    def strange(setup, settings):
        return picky(setup, settings, kept={"more": torch.zeros(1)})

    with pytest.raises(ClientError, match=r"what a client keeps must be of its `own`\. 'more' is not"):
        train_serially(made(strange))

    def twice(setup, settings):
        return replace(picky(setup, settings), own=lambda weights: {"share": torch.zeros(1)})

    with pytest.raises(ModelError, match="'share' must be the name of what is private or of what is sent, not of both"):
        made(twice)


def test_own_state_starts_from_the_models_weights_and_unsaid_predictions_are_none(tmp_path):
    """A personal copy of the model, as Ditto has one; without a word on predictions without identity there are none."""

    def personal(setup, settings, anonymous=None):
        plain = fedavg(setup)
        return replace(
            plain,
            own=lambda weights: {f"v.{name}": value for name, value in weights.items()},
            prepare=lambda arrival: ({}, {}),
            models=lambda parts: [{name.removeprefix("v."): value for name, value in parts.own.items()}],
            anonymous=anonymous,
        )

    experiment = made(personal)
    algorithm = experiment.algorithm
    start = algorithm.new_client(0, 0)
    assert torch.equal(start["v.out.weight"], algorithm.init(0).shared["out.weight"])
    assert not algorithm.predicts_anonymously
    given = {"federation": small_federation(), "engine": "serial", "rounds": 1, "evaluation": {"share_private": True}}
    page = Page("Personal", personal)
    run = package.train(algorithm=page, out=tmp_path / "none", **given)
    assert run.summary["accuracy"]["test"]["no_identity"] is None
    assert "no predictions without client identity" in run.summary["notes"]["accuracy.test.no_identity"]
    notes = package.evaluate(tmp_path / "none", federation=small_federation(), algorithm=page, engine="serial")["notes"]
    assert any("no predictions without client identity" in note for note in notes.values())

    def with_shared(setup, settings):
        def shared(parts, privates, log_p_s, x):
            return torch.log_softmax(setup.model.apply(parts.shared, x, training=False)[0], dim=1)

        return personal(setup, settings, Anonymous("the shared model", shared, private=False))

    given["evaluation"] = {"share_private": False}  # nothing private is needed for it
    shared = package.train(algorithm=Page("Shared", with_shared), out=tmp_path / "shared", **given)
    assert shared.summary["accuracy"]["test"]["no_identity"] > 0
    assert shared.predict(small_federation().x[:3]).shape == (3,)


def test_groups_are_refused_where_they_would_differ():
    """Experts that differ between clients, a carry that is a number or changes its form, decay of what is left out."""

    def selects(setup, settings):
        return replace(picky(setup, settings), select=lambda extras, client: [client % 2])

    assert made(selects).algorithm.one_by_one == "clients hold different experts"

    def counts(setup, settings):
        plain = fedavg(setup)

        def loss(parts, fixed, batch, carry):
            points, penalty, _ = plain.loss(parts, fixed, batch, {})
            return points, penalty, {"step": carry["step"] + 1}

        return replace(plain, loss=loss, prepare=lambda arrival: ({}, {"step": 0}))

    assert "not made of tensors alone" in made(counts).algorithm.one_by_one

    def grows(setup, settings):
        plain = fedavg(setup)
        return replace(plain, loss=lambda p, f, b, c: (*plain.loss(p, f, b, {})[:2], {"new": b.weight.sum()}))

    assert "changes its form" in made(grows).algorithm.one_by_one
    assert made(picky).algorithm.one_by_one is None
    assert "would decay" in made(picky, **{"training.weight_decay": 0.1}).algorithm.one_by_one


def test_fields_that_are_no_distributions_are_sent_and_noise_on_them_is_refused():
    def tells(setup, settings, kind="numbers"):
        reply = {"size": Field((1,), kind=kind)}
        told = {"size": torch.tensor([123.0])}
        return replace(fedavg(setup), reply=reply, answer=lambda done: Answer(told))

    steps, _ = train_serially(made(tells))
    assert not steps[-1].refused
    with pytest.raises(SettingError, match="which has no bound that noise could hide"):
        made(tells, **{"privacy.clip": 1.0, "privacy.noise": 0.5})
    lying = made(
        lambda setup, settings: tells(setup, settings, "simplex"), **{"privacy.clip": 1.0, "privacy.noise": 0.5}
    )
    with pytest.raises(ClientError, match="must be distributions: size: off the simplex"):
        train_serially(lying)


def test_extras_survive_a_checkpoint_whatever_they_are_called():
    def keeps(setup, settings):
        return replace(
            fedavg(setup),
            init=lambda: {"round": 7, "shared": {"out.bias": torch.full((3,), 5.0)}},
            server=lambda extras, seen: extras | {"round": extras["round"] + 1},
        )

    experiment = made(keeps)
    steps, _ = train_serially(experiment)
    back = experiment.algorithm.state_from(flatten(steps[-1].state))
    assert (back.round, back.extras["round"]) == (3, 10)
    assert torch.equal(back.extras["shared"]["out.bias"], torch.full((3,), 5.0))
    assert torch.equal(back.shared["out.bias"], steps[-1].state.shared["out.bias"])


def test_a_run_goes_on_with_its_own_settings_and_code(prox):
    command = ("train", "digits-skew", "--algorithm", prox, "--quiet", "--set", "data.clients=4", "--out", "runs/x")
    assert fedmix(*command, "--rounds", "1", "--set", "own.mu=0.5").returncode == 0
    without = fedmix(*command, "--rounds", "2", "--resume")
    assert without.returncode == 2
    assert "own.mu was 0.5, now it is None" in without.stderr
    Path("mine.py").write_text(Path("mine.py").read_text().replace("settings.mu / 2", "settings.mu * 2"))
    sys.modules.pop("mine")
    changed = fedmix(*command, "--rounds", "2", "--resume", "--set", "own.mu=0.5")
    assert changed.returncode == 2
    assert "must be resumed with its own method" in changed.stderr
    Path("mine.py").write_text("# a comment\n" + FEDPROX.read_text())
    sys.modules.pop("mine")
    assert fedmix(*command, "--rounds", "2", "--resume", "--set", "own.mu=0.5").returncode == 0


@dataclass(frozen=True)
class OddSettings:
    kind: Literal["a", "b"] = "a"
    most: float | None = None
    pair: tuple[int, int] = (1, 2)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"kind": "c"}, "own.kind must be one of a, b"),
        ({"most": "x"}, "own.most must be"),
        ({"pair": [1, 2]}, "own.pair must be"),
    ],
)
def test_settings_of_any_type_are_refused_in_one_line(settings, wrong):
    page = Page("Odd", lambda setup, settings: fedavg(setup), OddSettings)
    changes = {f"own.{key}": value for key, value in settings.items()}
    with pytest.raises(SettingError, match=wrong):
        build(small_recipe("own", **changes), small_federation(), page=page)
    assert build(small_recipe("own", **{"own.kind": "b", "own.most": 2}), small_federation(), page=page)


def test_looking_for_a_name_leaves_the_path_as_it_was(prox):
    """And what lies in the current folder is found before what lies beside a recipe that was read earlier."""
    before = list(sys.path)
    other = Path("elsewhere")
    other.mkdir()
    (other / "mine.py").write_text("fedprox = 1\n")
    importable_from(other.resolve())
    assert named_object(prox, "algorithm").title == "FedProx"
    assert sys.path == before


def test_a_recipe_is_not_changed_by_reading_it():
    table = {"name": "x", "methods": {"fedavg": {"rounds": 7}}, "scales": {"small": {"rounds": 2}}}
    before = json.dumps(table)
    assert make_recipe(table, "fedavg").rounds == 7
    assert make_recipe(table, "fedavg").rounds == 7
    assert json.dumps(table) == before
