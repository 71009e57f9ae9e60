"""TensorBoard, MLflow and Weights & Biases get the numbers of metrics.jsonl, round by round, then those of summary.json.

logged.json remembers how far each of them has got: a run that is resumed goes on where it stopped, and a run that was
trained without them is sent afterwards. A tool that fails is left behind; the run goes on.
"""

import json
import logging
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fedmix.errors import SettingError, one_of
from fedmix.running.files import write_json
from fedmix.running.run import Progress
from fedmix.schema import LOGGED, MetricsLine, Summary, read_metrics, read_summary
from fedmix.settings.reading import dump_recipe, flat_settings, recipe_table
from fedmix.settings.recipe import Recipe

# Lists of which a tool gets the length.
COUNTED = ("refused", "absent", "warnings")
# What a tool does not get: who took part, and tables. They are in metrics.jsonl.
LEFT_OUT = ("round", "clients", "q_zc", "q_zs")
# How many numbers are in a request to MLflow.
BATCH = 1000
Rows = Sequence[tuple[int, Mapping[str, float]]]


class Tool(Protocol):
    """A tool that takes numbers.

    id: what the tool calls the run, in this session and in later ones. where: what to type to look at the run.
    """

    id: str
    where: str

    def put(self, rows: Rows) -> None: ...

    def close(self, ended: bool) -> None: ...


class TensorBoard:
    def __init__(self, path: Path, recipe: Recipe, id: str | None) -> None:
        from tensorboardX import SummaryWriter

        self.id = id or path.name
        self.where = f"tensorboard --logdir {path / 'tensorboard'}  (pip install tensorboard)"
        # Two sessions in the same second must not write the same file.
        suffix = f".{uuid.uuid4().hex[:8]}"
        self._writer = SummaryWriter(str(path / "tensorboard"), filename_suffix=suffix)
        if id is None:
            # TensorBoard reads Markdown, in which text that is indented stays as it is.
            settings = "".join(f"    {line}\n" for line in dump_recipe(recipe).splitlines())
            self._writer.add_text("recipe", settings, 0)

    def put(self, rows: Rows) -> None:
        for step, numbers in rows:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, ended: bool) -> None:
        self._writer.close()


class Mlflow:
    """The run at MLFLOW_TRACKING_URI, or in a file beside the run, which the runs of a folder share."""

    def __init__(self, path: Path, recipe: Recipe, id: str | None) -> None:
        # Nobody asked for telemetry.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Training waits for a request that fails: for seconds, not for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{path.resolve().parent / 'mlflow.db'}"
        local = f"mlflow ui --backend-store-uri {uri}  (pip install mlflow)"
        self.where = local if uri.startswith("sqlite:") else f"MLflow: {uri}"
        self._client = MlflowClient(tracking_uri=uri)
        if id is None:
            self.id = self._new_run(path.name, recipe)
        else:
            self.id = id
            self._client.update_run(id, "RUNNING")

    def _new_run(self, name: str, recipe: Recipe) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or recipe.name
        existing = self._client.get_experiment_by_name(experiment)
        experiment_id = existing.experiment_id if existing else self._client.create_experiment(experiment)
        id: str = self._client.create_run(experiment_id, run_name=name).info.run_id
        for key, value in flat_settings(recipe).items():
            self._client.log_param(id, key, str(value)[:500])
        return id

    def put(self, rows: Rows) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for step, numbers in rows for name, value in numbers.items()]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self.id, metrics[start : start + BATCH])

    def close(self, ended: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if ended else "KILLED")


class WeightsAndBiases:
    """The run on this machine, unless WANDB_MODE says otherwise: what is kept here can be sent later."""

    def __init__(self, path: Path, recipe: Recipe, id: str | None) -> None:
        # Nobody asked for error reports.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.id = id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            id=self.id,
            resume="allow",
            mode=mode,
            dir=path,
            project=os.environ.get("WANDB_PROJECT") or "fedmix",
            group=recipe.name,
            name=path.name,
            config=recipe_table(recipe),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        offline = f"wandb sync {path / 'wandb'}/offline-run-*-{self.id}"
        self.where = offline if mode == "offline" else f"Weights & Biases: {self._run.url}"

    def put(self, rows: Rows) -> None:
        for step, numbers in rows:
            self._run.log(dict(numbers), step=step)

    def close(self, ended: bool) -> None:
        self._run.finish(exit_code=0 if ended else 1)


TOOLS: dict[str, tuple[str, Callable[[Path, Recipe, str | None], Tool]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "mlflow": ("mlflow", Mlflow),
    "wandb": ("wandb", WeightsAndBiases),
}


def check_tools(given: str | Iterable[str] | None) -> list[str]:
    """The names of tools, each once, if they are known and installed. given: text with commas, or several names."""
    names = given.split(",") if isinstance(given, str) else given or ()
    stripped = [name.strip() for name in names if name.strip()]
    different = list(dict.fromkeys(stripped))
    for name in different:
        _refuse_unusable(name)
    return different


def _refuse_unusable(name: str) -> None:
    if name not in TOOLS:
        raise SettingError(one_of("log", name, TOOLS))
    package, _ = TOOLS[name]
    if find_spec(package) is None:
        raise SettingError(f"log {name} needs its client; install it with: pip install 'fedmix[{name}]'.")


@contextmanager
def logging_to(
    names: Sequence[str],
    path: Path,
    recipe: Recipe,
    complain: Callable[[str], None],
    watch: Callable[[Progress], None] | None = None,
    hint: Callable[[str], None] = lambda _: None,
) -> Iterator[Callable[[Progress], None]]:
    """A function to call after each round, which calls `watch` too; a run that ended is sent to its end.

    complain: is called with what went wrong with a tool. hint: is called with what to type to look at a tool's numbers.
    """
    logs = _Logs(names, path, recipe, complain, hint)

    def after_round(step: Progress) -> None:
        if watch:
            watch(step)
        logs.take(step)

    try:
        yield after_round
        logs.end()
    finally:
        logs.close()


class _Logs:
    """The tools of a run. They have threads, so they are started after the first round, when workers have been forked.

    logged.json is what it remembers: by tool, the run's id there, the last round that was sent, and whether the end was.
    """

    def __init__(
        self,
        names: Sequence[str],
        path: Path,
        recipe: Recipe,
        complain: Callable[[str], None],
        hint: Callable[[str], None],
    ) -> None:
        self._names, self._path, self._recipe = names, path, recipe
        self._complain, self._hint = complain, hint
        self._tools: dict[str, Tool] | None = None
        self._state: dict[str, Any] = {}
        self._ended = False

    def _running(self) -> list[tuple[str, Tool]]:
        """The tools that have been started and have not failed, in a list of their own: a tool may fail meanwhile."""
        return list((self._tools or {}).items())

    def take(self, step: Progress) -> None:
        """Send the numbers of a round."""
        if self._tools is None and self._names:
            self._start(step.done)
        else:
            self._put([step.metrics])

    def end(self) -> None:
        """Send the numbers of the summary, if the run has one."""
        summary = read_summary(self._path)
        if not self._names or summary is None:
            return
        last = summary["rounds"]
        if self._tools is None:
            self._start(last)
        test = numbers_of(_results(summary))
        for name, tool in self._running():
            if self._state[name].get("ended") != last:
                with self._left_behind_if_it_fails(name):
                    tool.put([(last, test)])
                    self._note(name, ended=last)
        self._ended = True

    def close(self) -> None:
        for name, tool in self._running():
            with self._left_behind_if_it_fails(name):
                tool.close(self._ended)
                self._hint(tool.where)

    def _start(self, last: int) -> None:
        """Start every tool, and send it the rounds up to `last` that it has not got yet."""
        self._tools = {}
        file = self._path / LOGGED
        if file.exists():
            self._state = json.loads(file.read_text())
        for name in self._names:
            with self._left_behind_if_it_fails(name):
                tool = TOOLS[name][1](self._path, self._recipe, self._state.get(name, {}).get("id"))
                self._note(name, id=tool.id)
                self._tools[name] = tool
        self._put([line for line in read_metrics(self._path) if line["round"] <= last])

    def _put(self, lines: Sequence[MetricsLine]) -> None:
        for name, tool in self._running():
            last_sent = self._state[name].get("round", 0)
            rows = [(line["round"], numbers_of(line)) for line in lines if line["round"] > last_sent]
            if rows:
                with self._left_behind_if_it_fails(name):
                    tool.put(rows)
                    self._note(name, round=rows[-1][0])

    def _note(self, name: str, **facts: Any) -> None:
        self._state[name] = self._state.get(name, {}) | facts
        write_json(self._path / LOGGED, self._state)

    @contextmanager
    def _left_behind_if_it_fails(self, name: str) -> Iterator[None]:
        """A tool that raises, whatever its client raises, gets nothing more in this session."""
        try:
            with warnings.catch_warnings():
                # They are warnings of the tool's own libraries.
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            (self._tools or {}).pop(name, None)
            words = " ".join(str(error).split())[:300] or type(error).__name__
            self._complain(
                f"{name} failed ({words}); the run goes on without it. "
                f"Send it what is missing later, with: fedmix train {self._path} --resume --log {name}"
            )


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a line of metrics under a name like accuracy/validation/server/mean: tools take scalars alone."""
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if key not in LEFT_OUT:
            numbers |= _numbers_in(key, len(value) if key in COUNTED else value)
    return numbers


def _numbers_in(name: str, value: Any) -> dict[str, float]:
    """The numbers of a value, each under its own path; what is no number is left out."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {name: float(value)}
    if isinstance(value, Mapping):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    else:
        return {}
    numbers: dict[str, float] = {}
    for key, part in inner:
        numbers |= _numbers_in(f"{name}/{key}", part)
    return numbers


def _results(summary: Summary) -> dict[str, Any]:
    """What came out at the end, under names that no round has: summary/accuracy/test/fine_tuned/mean."""
    wanted = ("accuracy", "scores", "clusters", "bytes_down", "bytes_up")
    return {"summary": {key: value for key, value in summary.items() if key in wanted}}
