"""The files of a run directory: their names, what is in them, and how those of older versions are read.

All code that writes or reads a run uses this module, so it needs neither torch nor NumPy.

There are four kinds of accuracy, and each figure says on which data it was measured, `validation` or `test`:

    fine_tuned    the server's weights after some epochs on the client itself
    as_sent       the weights that the client sent to the server when it last took part
    server        the server's weights with the client's private parts
    no_identity   all clients' points together, predicted by somebody who does not know whose they are
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from fedmix.errors import RunError

# The version of the files. Directories of version 1 have no run.json; version 2 had other names for the kinds of accuracy.
VERSION = 3

RECIPE = "recipe.toml"
RUN = "run.json"
ENVIRONMENT = "environment.json"
FEDERATION = "federation.json"
METRICS = "metrics.jsonl"
RELEASES = "releases.jsonl"
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"
AUDIT = "audit.json"
SITES = "sites.json"
# Why a run that was submitted to a server did not end.
FAILURE = "failure.json"
# How far the tools of --log have got.
LOGGED = "logged.json"
CHECKPOINTS = "checkpoints"
CLIENTS = "clients"
LOCK = "lock"
PAGE = "report.html"
NEW_CLIENTS_PICTURE = "new-clients.png"
AUDIT_PICTURE = "audit.png"
TOOL_FOLDERS = ("tensorboard", "wandb")
# What evaluate and audit leave, which is not true any more once a run goes on.
AFTERWARDS = (EVALUATION, NEW_CLIENTS_PICTURE, AUDIT, AUDIT_PICTURE)
FILES = frozenset(
    {
        RECIPE,
        RUN,
        ENVIRONMENT,
        FEDERATION,
        METRICS,
        RELEASES,
        SUMMARY,
        CHECKPOINTS,
        CLIENTS,
        LOCK,
        PAGE,
        SITES,
        FAILURE,
        LOGGED,
        *TOOL_FOLDERS,
        *AFTERWARDS,
    }
)
COMPARISON = "comparison.json"
SWEEP = "sweep.json"

Kind = Literal["fine_tuned", "as_sent", "server", "no_identity"]
KINDS: tuple[Kind, ...] = ("fine_tuned", "as_sent", "server", "no_identity")
WORDS: dict[str, str] = {
    "fine_tuned": "fine-tuned",
    "as_sent": "as sent",
    "server": "server",
    "no_identity": "no identity",
}
TEST_KINDS: tuple[Kind, ...] = ("fine_tuned", "server", "no_identity")
VALIDATION_KINDS: tuple[Kind, ...] = ("as_sent", "server", "no_identity")
# Validation figures of a run are means over this many last evaluations: accuracy moves by two points between rounds.
LAST_EVALUATIONS = 10
# Evaluations count if they are in this last share of a run's rounds: before that it is still learning.
LAST_SHARE = 0.2
# Fine-tuned figures are means over this many evaluations, where that is affordable.
FINE_TUNED_EVALUATIONS = 3


class OverClients(TypedDict):
    """A measure over clients: its mean, its standard deviation, and the mean of the worst tenth. None: no client has points."""

    mean: float | None
    std: float | None
    worst_decile: float | None


class TestAccuracy(TypedDict, total=False):
    fine_tuned: OverClients
    server: OverClients
    no_identity: float | None


class ValidationAccuracy(TypedDict):
    as_sent: OverClients
    server: OverClients
    no_identity: float | None


class Accuracy(TypedDict, total=False):
    """In a line of metrics: after this round. In a summary: `test` at the end, `validation` as mean of the last evaluations."""

    test: TestAccuracy
    validation: ValidationAccuracy


class RunFile(TypedDict):
    """run.json: the version of the files, what the method is called, what model and method are made of."""

    schema: int
    algorithm: NotRequired[str]
    title: NotRequired[str]
    model: NotRequired[str]
    code: NotRequired[str]
    found_out: NotRequired[dict[str, Any]]  # about the model, with real inputs: loading a run tries nothing


class Session(TypedDict):
    started: str
    engine: str
    workers: int
    device: str
    commit: str | None
    command: list[str]


class EnvironmentFile(TypedDict):
    """environment.json: versions, machine, and each session's command and source."""

    python: str
    packages: dict[str, str]
    platform: str
    cores: int | None
    seed: int
    sessions: list[Session]


class FederationFile(TypedDict):
    """federation.json: what a trained model needs to know of the data, so that it can be used without the data."""

    clients: list[str]
    points: dict[str, list[int]]
    input: list[int]
    classes: int
    labels: list[Any]  # what the user calls the classes: words, truth values or numbers
    features: list[dict[str, Any]]
    categories: int
    side: str
    groups: list[int] | None
    label_counts: list[list[int]] | None
    held_out: list[str]
    left_out: int
    mean: list[float]
    std: list[float]
    kinds: NotRequired[list[str]]  # what the values of c are called, where c is a column
    side_moments: NotRequired[list[list[float]]]  # what a vector c was standardised with
    roles: NotRequired[dict[str, Any]]  # which column of a table is the label, the client, the side
    input_kind: NotRequired[str]  # "float", "integer" or "bytes"
    input_parts: NotRequired[list[dict[str, Any]]]  # several inputs, or sequences, as rows of one tensor
    digest: str


class LeftOut(TypedDict):
    """A client that a round went on without."""

    client: int
    name: NotRequired[str]
    reason: str
    field: NotRequired[str]


class StructureEvent(TypedDict):
    """An expert that was split into several (its own number among them), merged into another, or retired.

    clients: how many each of the new ones has, or how many the one had that is gone.
    """

    what: Literal["split", "merged", "retired"]
    expert: int
    into: list[int] | int
    clients: list[int] | int


class MetricsLine(TypedDict):
    """A line of metrics.jsonl: a round. What is not required is there after an evaluation, or where a method tells it."""

    round: int
    loss: float
    bytes_down: int
    bytes_up: int
    seconds: float
    divergence: float | None
    clients: list[int]
    refused: list[LeftOut]
    absent: list[LeftOut]
    warnings: NotRequired[list[str]]
    accuracy: NotRequired[Accuracy]
    scores: NotRequired[dict[str, float]]  # on validation data with the server's weights, means over clients
    bound: NotRequired[float]
    bytes_evaluation: NotRequired[int]
    seconds_evaluation: NotRequired[float]
    expert_use: NotRequired[list[float]]
    experts_returned: NotRequired[list[int]]
    experts: NotRequired[list[int]]  # that there are, where their number is found out
    structure: NotRequired[list[StructureEvent]]  # what changed about them in this round
    divergence_experts: NotRequired[list[float]]
    divergence_layers: NotRequired[list[dict[str, float]]]
    q_zc: NotRequired[list[list[float]]]
    q_zs: NotRequired[list[list[float]]]


class Measured(TypedDict):
    """The rounds whose evaluations a summary's figures are means of."""

    fine_tuned: list[int]
    validation: list[int]


class Clusters(TypedDict):
    """How well the experts that clients use most tell their true groups apart."""

    adjusted_rand_index: float
    groups: list[int]
    found: list[int]


class Privacy(TypedDict):
    """What noise guarantees: (epsilon, delta) of the client that answered most often, or why it guarantees nothing."""

    noise: float
    epsilon: float | None
    delta: float | None
    rounds_of_a_client: int | None
    why_none: str | None


class Summary(TypedDict):
    """summary.json: what came out and what it cost. `of_clients`: accuracy by data, kind and name of the client."""

    algorithm: str
    title: str
    recipe: str
    scale: str
    rounds: int
    seed: int
    clients: int
    parameters: int
    bytes_down: int
    bytes_up: int
    bytes_evaluation: int
    loss: float
    accuracy: Accuracy
    measured: Measured
    of_clients: dict[str, dict[str, dict[str, float]]]
    scores: dict[str, Any]
    seconds: float
    warnings: list[str]
    best: NotRequired[dict[str, Any]]  # the round that is best on validation data, by what, and its value
    stopped: NotRequired[dict[str, Any]]  # why the run ended before its rounds were over, and how many these were
    privacy: NotRequired[Privacy]
    notes: NotRequired[dict[str, str]]
    groups: NotRequired[list[int]]
    clusters: NotRequired[Clusters]
    q_zc: NotRequired[list[list[float]]]
    q_zs: NotRequired[list[list[float]]]


class About(TypedDict):
    """Which run a file of evaluate or audit is about."""

    recipe: str
    scale: str
    algorithm: str
    title: NotRequired[str]
    seed: int
    round: int
    rounds: int
    clients: int


class EvaluationFile(About):
    """evaluation.json: every kind of inference."""

    evaluated: int
    fine_tuned: dict[str, Any]
    as_sent: dict[str, Any]
    server: dict[str, Any]
    label_counts: NotRequired[dict[str, Any]]
    no_identity: dict[str, Any]
    new_clients: dict[str, Any]
    notes: dict[str, str]
    seconds: float


class AuditFile(About):
    """audit.json: what the server could have learnt about the clients' labels."""

    audited: int
    side: str
    names: list[str]
    points: list[int]
    true: list[list[float]]
    true_side: list[list[float]] | None
    guess: dict[str, Any]
    guess_side: dict[str, Any] | None
    attacks: dict[str, dict[str, Any]]
    absent: dict[str, Any]
    protection: dict[str, Any]
    notes: dict[str, str]
    seconds: float


def judged_rounds(evaluated: Sequence[int], rounds: int) -> list[int]:
    """The evaluations that a run of this many rounds is judged by: its last ten, as far as they lie in its last fifth."""
    late = [t for t in evaluated if t > (1 - LAST_SHARE) * rounds]
    return late[-LAST_EVALUATIONS:] or list(evaluated[-1:])


# -- reading -----------------------------------------------------------------------------------------------------------


def read_run(path: Path) -> RunFile:
    """run.json of a run directory. An older directory has none; then it is what can be said about such a run."""
    file = path / RUN
    if not file.exists():
        return {"schema": 1}
    about = _read(file, "describe the run")
    version = about.get("schema")
    if not isinstance(version, int):
        raise RunError(f"{file} must describe the run. It is damaged (no version).")
    if version > VERSION:
        raise RunError(
            f"{path} must be of a version that this fedmix knows. Its files are of schema {version}, and this fedmix "
            f"knows up to {VERSION}; use a newer fedmix."
        )
    return cast(RunFile, about)


def read_federation(path: Path) -> FederationFile:
    """federation.json of a run directory. A kept run may name another run with the same data: {"same_as": "../seed-0"}."""
    file = path / FEDERATION
    about = _read(file, "describe the run's data")
    if "same_as" in about:
        file = path / str(about["same_as"]) / FEDERATION
        about = _read(file, "describe the run's data")
    missing = [key for key in ("digest", "clients", "classes", "categories", "input") if key not in about]
    if missing:
        raise RunError(f"{file} must describe the run's data. It is damaged (no {missing[0]}).")
    return cast(FederationFile, about)


def read_summary(path: Path) -> Summary | None:
    """summary.json of a run that has ended; None: it has not."""
    file = path / SUMMARY
    if not file.exists():
        return None
    summary = _read(file, "be a summary")
    if is_older(summary):
        summary = modern_summary(summary, read_metrics(path))
    return cast(Summary, summary)


def read_metrics(path: Path) -> list[MetricsLine]:
    """The lines of metrics.jsonl; a last line that was cut off is left out."""
    file = path / METRICS
    if not file.exists():
        return []
    lines: list[MetricsLine] = []
    for text in file.read_text().splitlines():
        try:
            lines.append(modern_line(json.loads(text)))
        except json.JSONDecodeError:
            break
    return lines


def _read(file: Path, must: str) -> dict[str, Any]:
    """The table in a JSON file. must: what the file must do, for the message where it is damaged."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{file} must {must}. It is damaged ({type(error).__name__}: {error}).") from error
    if not isinstance(value, dict):
        raise RunError(f"{file} must {must}. It is damaged (not a table).")
    return value


# -- files of older versions -------------------------------------------------------------------------------------------

OLDER = (
    "these files are of an older fedmix, which had other names: 'local' was 'as sent' on validation data and 'fine-tuned' "
    "on test data, 'global' was 'no identity'; its fine-tuned figure is of the last round alone"
)


def is_older(table: Mapping[str, Any]) -> bool:
    """Whether a line of metrics or a summary has the names of version 2 or 1."""
    accuracy = table.get("accuracy")
    return isinstance(accuracy, Mapping) and ("local" in accuracy or "global" in accuracy)


def modern_line(line: dict[str, Any]) -> MetricsLine:
    """A line of metrics with the names of this version."""
    if not is_older(line):
        return cast(MetricsLine, line)
    before = line["accuracy"]
    validation = {
        "as_sent": before.get("local"),
        "server": before.get("server"),
        "no_identity": before.get("global"),
    }
    return cast(MetricsLine, {**line, "accuracy": {"validation": validation}})


def modern_summary(summary: Mapping[str, Any], lines: Sequence[MetricsLine]) -> dict[str, Any]:
    """A summary of version 1 or 2 with the names of this one; its validation figures come from the lines of metrics."""
    if not is_older(summary):
        return dict(summary)
    accuracy = summary["accuracy"]
    scores = summary.get("scores") or {}
    of_clients = summary.get("accuracy_of_clients") or {}
    evaluated = judged_lines(lines)
    test = {
        "fine_tuned": accuracy.get("local"),
        "server": accuracy.get("server"),
        "no_identity": accuracy.get("global"),
    }
    renamed = ("accuracy", "scores", "accuracy_of_clients")
    return {
        **{key: value for key, value in summary.items() if key not in renamed},
        "accuracy": {"test": test, "validation": mean_validation(evaluated)},
        "measured": {"fine_tuned": [summary.get("rounds")], "validation": [line["round"] for line in evaluated]},
        "of_clients": {"test": _renamed(of_clients), "validation": {}},
        "scores": {"test": _renamed(scores)},
    }


def modern_evaluation(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """evaluation.json with the names of this version."""
    if "proxy" not in evaluation:
        return dict(evaluation)
    names = {"local": "fine_tuned", "proxy": "as_sent", "counts": "label_counts", "global": "no_identity"}
    modern = {names.get(key, key): value for key, value in evaluation.items()}
    new_clients = evaluation.get("new_clients")
    if isinstance(new_clients, Mapping):
        modern["new_clients"] = _modern_new_clients(new_clients)
    return modern


def _modern_new_clients(new_clients: Mapping[str, Any]) -> dict[str, Any]:
    names = {"counts": "label_counts", "finetuned": "fine_tuned"}
    rows = new_clients.get("labelled") or ()
    labelled = [{names.get(key, key): value for key, value in row.items()} for row in rows]
    return {**new_clients, "labelled": labelled or None}


def _renamed(of_kinds: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary of version 1 or 2 has for each kind of accuracy on test data, with the names of this version."""
    names = {"local": "fine_tuned", "server": "server", "global": "no_identity"}
    return {names[kind]: value for kind, value in of_kinds.items() if kind in names}


def judged_lines(lines: Sequence[MetricsLine]) -> list[MetricsLine]:
    """The lines of metrics that a run is judged by, at its end or as far as it has come."""
    if not lines:
        return []
    evaluated = {line["round"]: line for line in lines if "validation" in (line.get("accuracy") or {})}
    last_round = lines[-1]["round"]
    return [evaluated[t] for t in judged_rounds(sorted(evaluated), last_round)]


def mean_validation(lines: Sequence[MetricsLine]) -> ValidationAccuracy:
    """The mean of several evaluations' figures on validation data."""
    tables = [line["accuracy"]["validation"] for line in lines]
    return {
        "as_sent": _mean_over_clients([table["as_sent"] for table in tables]),
        "server": _mean_over_clients([table["server"] for table in tables]),
        "no_identity": mean_of([table["no_identity"] for table in tables]),
    }


def _mean_over_clients(tables: Sequence[OverClients]) -> OverClients:
    return {
        "mean": mean_of([table["mean"] for table in tables]),
        "std": mean_of([table["std"] for table in tables]),
        "worst_decile": mean_of([table["worst_decile"] for table in tables]),
    }


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
