"""Run directories as plain data: whatever is there, and in words what is missing. A run that still goes on is one too."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from fedmix import schema
from fedmix.errors import RunError
from fedmix.report.words import printable, title_of
from fedmix.schema import LeftOut, MetricsLine, Summary

T = TypeVar("T")

# what does not make two runs different methods
IGNORED = ("seed", "name", "description")
# what code raises that reads a file which is not as it should be
ODD = (KeyError, TypeError, AttributeError, ValueError, IndexError)


@dataclass
class Run:
    """One run directory. `troubles`: what a reader must know before anything else; `notes`: what is good to know."""

    path: str
    name: str
    recipe: dict[str, Any]
    lines: list[MetricsLine]
    summary: Summary | None = None
    # run.json
    about: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None
    troubles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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
        scores = cast(Mapping[str, Any], self.summary or {}).get("scores") or {}
        of_kind = (scores.get("test") or {}).get(kind)
        value = of_kind.get(measure) if isinstance(of_kind, Mapping) else None
        return _figure(value, what)

    def validation(self, kind: str) -> float | None:
        """The mean of the last evaluations on validation data; a run that goes on has it too."""
        if self.summary is not None:
            accuracy: Mapping[str, Any] = self.summary["accuracy"]
            return _figure(accuracy.get("validation", {}).get(kind), "mean")
        means: Mapping[str, Any] = schema.mean_validation(schema.judged_lines(self.lines))
        return _figure(means[kind], "mean")

    def of_clients(self, part: str, kind: str) -> dict[str, float]:
        """Each client's accuracy by its name; nothing where the run does not have it."""
        if self.summary is None:
            return {}
        return (self.summary["of_clients"].get(part) or {}).get(kind) or {}


def _figure(value: Any, what: str) -> float | None:
    """`what` of a figure that is over clients; one number is its own mean, and has nothing else."""
    if isinstance(value, Mapping):
        value = value.get(what)
    elif what != "mean":
        value = None
    return None if value is None else float(value)


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings with dotted keys."""
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{above}.{key}" if above else key
        if isinstance(value, Mapping) and key != "args":
            settings |= flat(value, name)
        else:
            settings[name] = value
    return settings


def find_runs(paths: Sequence[str]) -> list[Path]:
    """The run directories among these, or below them (as `compare` and `sweep` leave them)."""
    runs: list[Path] = []
    for given in paths:
        path = Path(given)
        is_run = (path / schema.RECIPE).is_file()
        below = [path] if is_run else sorted(file.parent for file in path.glob(f"*/{schema.RECIPE}"))
        if not below:
            raise RunError(
                f"{given} must be a run directory, or hold some. It has no recipe.toml, nor has a folder in it."
            )
        runs += below
    return list({path.resolve(): path for path in runs}.values())


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Every run, each seed of a method once: a copy would look like evidence."""
    runs: dict[tuple[str, int], Run] = {}
    for path in find_runs(paths):
        run = read_run(path)
        settings = json.dumps(run.settings, sort_keys=True, default=str)
        first = runs.setdefault((settings, run.seed), run)
        if first is not run:
            first.troubles.append(f"{run.path} has the same settings and seed as {first.path}, and was left out")
    return list(runs.values())


def part_of(run: Run, file: str, work: Callable[[Run], T], otherwise: T) -> T:
    """What `work` makes of a run; where a file of it is not as it should be, that is said, and `otherwise` is given."""
    try:
        return work(run)
    except ODD:
        words = f"{file} is not as it should be; what could not be read was left out"
        if words not in run.troubles:
            run.troubles.append(words)
        return otherwise


def read_run(path: Path) -> Run:
    """What a run directory holds. Only a recipe that cannot be read is an error: without it nothing is known."""
    files = _Files(path)
    recipe = _recipe(path)
    lines = files.lines()
    run = Run(
        path=str(path),
        name=str(recipe.get("name", path.name)),
        recipe=recipe,
        lines=lines,
        summary=files.summary(lines),
        about=files.read(schema.RUN, must=False) or {},
        environment=files.read(schema.ENVIRONMENT) or {},
        federation=files.federation(),
        evaluation=files.evaluation(),
        audit=files.read(schema.AUDIT, must=False),
        troubles=files.troubles,
        notes=[schema.OLDER] if files.older else [],
    )
    if run.summary is None:
        reached = lines[-1]["round"] if lines else 0
        run.troubles.append(f"unfinished: round {reached:,} of {recipe.get('rounds', 0):,}")
    run.troubles += part_of(run, schema.METRICS, _what_went_wrong, [])
    return run


def _recipe(path: Path) -> dict[str, Any]:
    try:
        recipe = tomllib.loads((path / schema.RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} must be a run directory. Its recipe.toml cannot be read ({error}).") from error
    for key in ("rounds", "seed"):
        if not isinstance(recipe.get(key, 0), int):
            raise RunError(f"{path}: {key} of recipe.toml must be a whole number. Got {recipe[key]!r} instead.")
    return dict(printable(recipe))


class _Files:
    """The files of a run directory, each read as far as it can be; what is wrong with them is noted in `troubles`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.troubles: list[str] = []
        self.older = False

    def read(self, name: str, must: bool = True) -> dict[str, Any] | None:
        file = self.path / name
        if not file.is_file():
            if must:
                self.troubles.append(f"{name} is missing")
            return None
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.troubles.append(f"{name} is damaged and was left out")
            return None
        return printable(table) if isinstance(table, dict) else None

    def federation(self) -> dict[str, Any]:
        """federation.json; kept runs of the same data have it once, and name the run that has it."""
        table = self.read(schema.FEDERATION) or {}
        if "same_as" in table:
            table = self.read(f"{table['same_as']}/{schema.FEDERATION}") or {}
        return table

    def lines(self) -> list[MetricsLine]:
        """Rounds in order; a line that was cut off is left out, and said."""
        file = self.path / schema.METRICS
        if not file.is_file():
            return []
        lines: list[MetricsLine] = []
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            line = _line(text)
            if line is None:
                reached = lines[-1]["round"] if lines else 0
                self.troubles.append(f"metrics.jsonl: a line after round {reached} cannot be read")
                continue
            self.older = self.older or schema.is_older(line)
            lines.append(schema.modern_line(line))
        return lines

    def summary(self, lines: Sequence[MetricsLine]) -> Summary | None:
        """summary.json with the names of this version; None before the end, or where it cannot be read."""
        table = self.read(schema.SUMMARY, must=False)
        if table is None:
            return None
        try:
            modern = schema.modern_summary(table, lines)
            # without these there is nothing to show of the end
            modern["accuracy"]["test"], modern["of_clients"], modern["scores"]
        except ODD:
            self.troubles.append("summary.json is not as it should be; what could not be read was left out")
            return None
        return cast(Summary, modern)

    def evaluation(self) -> dict[str, Any] | None:
        table = self.read(schema.EVALUATION, must=False)
        return None if table is None else schema.modern_evaluation(table)


def _line(text: str) -> dict[str, Any] | None:
    """A line of metrics, its texts without control characters; None where it is no such line."""
    try:
        line: dict[str, Any] = json.loads(text)
        whole = all(isinstance(line[key], int) for key in ("round", "bytes_down", "bytes_up"))
    except (ValueError, KeyError, TypeError):
        return None
    if not whole:
        return None
    return line | {key: printable(line[key]) for key in ("warnings", "refused", "absent") if key in line}


def _what_went_wrong(run: Run) -> list[str]:
    """Warnings, each kind of them as it was said last; and who was left out."""
    warnings = [warning for line in run.lines for warning in line.get("warnings", [])]
    last_of_kind = {warning.split(":")[0]: warning for warning in warnings}
    refused = _left_out("refused replies", [(line["round"], line.get("refused", [])) for line in run.lines])
    absent = _left_out("missing clients", [(line["round"], line.get("absent", [])) for line in run.lines])
    return [*last_of_kind.values(), *refused, *absent]


def _left_out(words: str, rounds: Sequence[tuple[int, Sequence[LeftOut]]]) -> list[str]:
    """How many clients were left out, and the last of them; nothing where there was none."""
    rows = [(t, client) for t, clients in rounds for client in clients]
    if not rows:
        return []
    t, last = rows[-1]
    return [f"{len(rows):,} {words}, the last in round {t}: client {last['client']}, {last['reason']}"]
