"""Run directories as plain data: whatever is there, and in words what is missing. A run that still goes on is one too."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedmix.catalogue import TITLES
from fedmix.errors import RunError
from fedmix.report.tables import GIB, duration, printable, scaled_down, size, title_of

T = TypeVar("T")

IGNORED = ("seed", "name", "description")  # what does not make two runs different methods
ODD = (KeyError, TypeError, AttributeError, ValueError, IndexError)  # what a file that is not as it should be raises
LEVEL = 0.0005  # a lead that rounds to nothing
FINAL = ("local", "server", "global")
ON = ("gate_through_features",)  # switches that are on by default


@dataclass
class Run:
    """One run directory. `troubles`: what a reader must know before anything else."""

    path: str
    name: str
    recipe: dict[str, Any]
    lines: list[dict[str, Any]]
    summary: dict[str, Any] | None = None
    about: dict[str, Any] = field(default_factory=dict)  # run.json
    environment: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None
    troubles: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.summary is not None

    @property
    def method(self) -> str:
        return title_of({"algorithm": self.recipe.get("algorithm"), "title": self.about.get("title")})

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that tells methods apart, with dotted keys."""
        return {key: value for key, value in flat(self.recipe).items() if key not in IGNORED}

    @property
    def seed(self) -> int:
        return int(self.recipe.get("seed", 0))

    @property
    def bytes(self) -> int:
        return sum(line["bytes_down"] + line["bytes_up"] for line in self.lines)

    @property
    def seconds(self) -> float:
        return float(sum(line.get("seconds", 0.0) for line in self.lines))

    def final(self, kind: str, measure: str = "accuracy", what: str = "mean") -> float | None:
        """A figure of the end on test data; None before the end."""
        scores = ((self.summary or {}).get("scores") or {}).get(kind)
        found = scores.get(measure) if isinstance(scores, Mapping) else None
        value = found.get(what) if isinstance(found, Mapping) else found if what == "mean" else None
        return None if value is None else float(value)


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{above}.{key}" if above else key
        if isinstance(value, Mapping) and key != "args":
            found |= flat(value, name)
        else:
            found[name] = value
    return found


def find_runs(paths: Sequence[str]) -> list[Path]:
    """The run directories among these, or below them (as `compare` and `sweep` leave them)."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        below = [path] if (path / "recipe.toml").is_file() else sorted(p.parent for p in path.glob("*/recipe.toml"))
        if not below:
            raise RunError(
                f"{given} must be a run directory, or hold some. It has no recipe.toml, nor has a folder in it."
            )
        found += below
    return list({path.resolve(): path for path in found}.values())


def gather(paths: Sequence[str]) -> list[Run]:
    """Every run, each seed of a method once: a copy would look like evidence."""
    runs: dict[tuple[str, int], Run] = {}
    for path in find_runs(paths):
        run = read_run(path)
        first = runs.setdefault((json.dumps(run.settings, sort_keys=True, default=str), run.seed), run)
        if first is not run:
            first.troubles.append(f"{run.path} has the same settings and seed as {first.path}, and was left out")
    return list(runs.values())


def part_of(run: Run, file: str, work: Callable[[Run], T], otherwise: T) -> T:
    """What `work` makes of a run; where a file of it is not as it should be, that is said, and `otherwise` is given."""
    try:
        return work(run)
    except ODD:
        told = f"{file} is not as it should be; what could not be read was left out"
        if told not in run.troubles:
            run.troubles.append(told)
        return otherwise


def read_run(path: Path) -> Run:
    """What a run directory holds. Only a recipe that cannot be read is an error: without it nothing is known."""
    try:
        recipe = tomllib.loads((path / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} must be a run directory. Its recipe.toml cannot be read ({error}).") from error
    for key in ("rounds", "seed"):
        if not isinstance(recipe.get(key, 0), int):
            raise RunError(f"{path}: {key} of recipe.toml must be a whole number. Got {recipe[key]!r} instead.")
    recipe = printable(recipe)
    troubles: list[str] = []

    def read(name: str, must: bool) -> Any:
        file = path / name
        if not file.is_file():
            if must:
                troubles.append(f"{name} is missing")
            return None
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            troubles.append(f"{name} is damaged and was left out")
            return None
        return printable(found) if isinstance(found, dict) else None

    lines = _lines(path / "metrics.jsonl", troubles)
    run = Run(
        path=str(path),
        name=str(recipe.get("name", path.name)),
        recipe=recipe,
        lines=lines,
        summary=read("summary.json", must=False),
        about=read("run.json", must=False) or {},
        environment=read("environment.json", must=True) or {},
        federation=read("federation.json", must=True) or {},
        evaluation=read("evaluation.json", must=False),
        audit=read("audit.json", must=False),
        troubles=troubles,
    )
    troubles += _what_went_wrong(run)
    return run


def _lines(file: Path, troubles: list[str]) -> list[dict[str, Any]]:
    """Rounds in order; a line that was cut off is left out, and said."""
    if not file.is_file():
        return []
    found: list[dict[str, Any]] = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if not all(isinstance(line[key], int) for key in ("round", "bytes_down", "bytes_up")):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            troubles.append(f"metrics.jsonl: a line after round {found[-1]['round'] if found else 0} cannot be read")
            continue
        found.append(line | {key: printable(line[key]) for key in ("warnings", "refused", "absent") if key in line})
    return found


def _what_went_wrong(run: Run) -> list[str]:
    told: list[str] = []
    rounds, reached = run.recipe.get("rounds", 0), run.lines[-1]["round"] if run.lines else 0
    if run.summary is None:
        told.append(f"unfinished: round {reached:,} of {rounds:,}")
    told += part_of(run, "metrics.jsonl", _of_rounds, [])
    return told


def _of_rounds(run: Run) -> list[str]:
    told = list({w.split(":")[0]: w for line in run.lines for w in line.get("warnings", [])}.values())
    for kind, words in (("refused", "refused replies"), ("absent", "missing clients")):
        rows = [(line["round"], row) for line in run.lines for row in line.get(kind, [])]
        if rows:
            t, row = rows[-1]
            told.append(f"{len(rows):,} {words}, the last in round {t}: client {row['client']}, {row['reason']}")
    return told


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone: one line of a table, one curve with a band."""

    name: str
    runs: list[Run]

    @property
    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.ended]

    @property
    def seeds(self) -> str:
        """How many of its seeds have a result."""
        ended, all_ = len(self.ended), len(self.runs)
        return f"{all_} seeds" if ended == all_ > 1 else f"{ended} of {all_} seeds" if all_ > 1 else "one seed"


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by method; the name says what tells it from the others."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(run.settings, sort_keys=True, default=str), []).append(run)
    order = list(TITLES.values())
    made = sorted(
        by_settings.values(), key=lambda own: order.index(own[0].method) if own[0].method in order else len(order)
    )
    switches = _switches(made)
    names = []
    for own in made:
        first = own[0]
        told = [first.method] + ([first.name] if len({run.name for run in runs}) > 1 else [])
        same = [other for other in made if other[0].method == first.method and other[0].name == first.name]
        keys = dict.fromkeys([*differing(same), *switches])
        names.append(", ".join([*told, *called(first.settings, list(keys))]))
    return [Group(_once(names, i), own) for i, own in enumerate(made)]


def called(settings: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Settings in a method's name: what is on or off is its name alone, and left out where that is the default, as is what is
    empty, or not there in an older run."""
    words = []
    for key in keys:
        name, value = key.split(".")[-1], settings.get(key)
        if isinstance(value, bool):
            words += [] if value == (name in ON) else [("" if value else "no ") + name.replace("_", " ")]
        elif value not in (None, [], ""):
            words.append(f"{name} {value}")
    return words


def _switches(made: Sequence[Sequence[Run]]) -> list[str]:
    """What is on in the training of some groups, whatever their method, and not in that of others: no fair comparison
    without a word of it."""
    on = [
        {key for key, value in own[0].settings.items() if value is True and key.startswith("training.")} for own in made
    ]
    return sorted({key for own in on for key in own if not all(key in other for other in on)})


def _once(names: Sequence[str], i: int) -> str:
    return names[i] if names.count(names[i]) == 1 else f"{names[i]} ({names[: i + 1].count(names[i])})"


def differing(same: Sequence[Sequence[Run]]) -> list[str]:
    """Settings that are not the same in all of these groups of one method. One that a run does not have, for it is older than
    the setting, counts only where nothing else tells that run from the others; what is on or off was off in it."""
    told = [_told(own[0].settings) for own in same]
    every = list(dict.fromkeys(key for settings in told for key in settings))
    stated = [key for key in every if len({settings[key] for settings in told if key in settings}) > 1]
    if len({tuple(settings.get(key) for key in stated) for settings in told}) < len(told):
        stated = [key for key in every if len({settings.get(key, "false") for settings in told}) > 1]
    return stated


def _told(settings: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value, default=str) for key, value in settings.items()}


def spread(values: Sequence[float | None]) -> tuple[float, float | None] | None:
    """Mean and, of several, standard deviation of those that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return mean, (sum((v - mean) ** 2 for v in known) / len(known)) ** 0.5 if len(known) > 1 else None


COLUMNS: dict[str, tuple[str, str, str, float]] = {  # name: (kind, measure, of it, factor)
    "local": ("local", "accuracy", "mean", 100),
    "server": ("server", "accuracy", "mean", 100),
    "global": ("global", "accuracy", "mean", 100),
    "worst decile": ("local", "accuracy", "worst_decile", 100),
    "calibration error": ("local", "ece", "mean", 100),
    "log loss": ("local", "nll", "mean", 1),
}


def table(made: Sequence[Group]) -> list[dict[str, Any]]:
    """A row for each group: the columns of `compare`, calibration, what was spent."""
    rows = []
    for group in made:
        told = group.ended or group.runs
        name = group.name if len(told) == len(group.runs) else f"{group.name} ({group.seeds})"
        row: dict[str, Any] = {"method": name, "seeds": len(told)}
        for column, (kind, measure, what, factor) in COLUMNS.items():
            found = spread([run.final(kind, measure, what) for run in group.runs])
            row[column] = None if found is None else [factor * found[0], found[1] and factor * found[1]]
        row["rounds"] = max((run.lines[-1]["round"] for run in told if run.lines), default=0)
        row["GiB"] = sum(run.bytes for run in told) / GIB / len(told)
        row["minutes"] = sum(run.seconds for run in told) / 60 / len(told)
        rows.append(row)
    return rows


def glance(made: Sequence[Group]) -> dict[str, Any]:
    """What a reader wants first: who won and by how much, what was spent, what went wrong."""
    runs = [run for group in made for run in group.runs]
    ended = [(group, found) for group in made if (found := spread([run.final("local") for run in group.runs]))]
    ended.sort(key=lambda pair: -pair[1][0])
    if not ended:
        verdict = "No run has ended yet: there is no result on test data."
    elif len(ended) == 1:
        group, found = ended[0]
        verdict = f"{group.name}: local accuracy {_points(found)} % on test data, {group.seeds}."
    elif len({_data(group.runs[0]) for group, _ in ended}) > 1:
        verdict = "These runs are of different data or splits of it: nobody won. The table has each."
    else:
        verdict = _comparison(ended[0], ended[1])
    scales = sorted({str(run.recipe.get("scale", "full")) for run in runs} - {"full"})
    rounds = sum(len(run.lines) for run in runs)
    spent = (
        f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {rounds:,} rounds, {size(sum(run.bytes for run in runs))} sent, "
        f"{duration(sum(run.seconds for run in runs))} of training" + "".join(f"; {scaled_down(s)}" for s in scales)
    )
    wrong = [
        {"run": f"{group.name}, seed {run.seed}", "what": what}
        for group in made
        for run in group.runs
        for what in run.troubles
    ]
    return {"verdict": verdict, "spent": spent, "wrong": wrong}


Found = tuple[Group, tuple[float, float | None]]


def _comparison(one: Found, other: Found) -> str:
    """Of the best two."""
    (first, best), (second, next_best) = one, other
    lead, noise = best[0] - next_best[0], max(best[1] or 0.0, next_best[1] or 0.0)
    alone = [group.seeds for group in (first, second)]
    seeds = alone[0] if alone[0] == alone[1] else f"{alone[0]} and {alone[1]}"
    unsure = best[1] is None or next_best[1] is None
    seeds += ": how much another seed would change is not known" if unsure else ""
    if lead < LEVEL or (not unsure and lead <= noise):
        within = "" if lead < LEVEL else ", within the spread over seeds"
        return (
            f"{first.name} and {second.name} are level{within}: local accuracy {_points(best)} and "
            f"{_points(next_best)} % ({seeds})."
        )
    return (
        f"{first.name} won: local accuracy {_points(best)} %, {100 * lead:.1f} points before {second.name} "
        f"({_points(next_best)} %; {seeds})."
    )


def _data(run: Run) -> str:
    """What must be the same where accuracies are compared: the data and who holds it, but not what c is."""
    own = {key: value for key, value in run.settings.items() if key.startswith("data.") and key != "data.side"}
    if own.get("data.source") == "own":
        own["points"] = run.federation.get("points")
    return json.dumps(own, sort_keys=True, default=str)


def _points(found: tuple[float, float | None]) -> str:
    return f"{100 * found[0]:.1f}" + (f" ± {100 * found[1]:.1f}" if found[1] is not None else "")
