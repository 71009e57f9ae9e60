"""Figures fit for a paper, from the same numbers as the page: each as SVG and PNG, tables as CSV and LaTeX."""

import contextlib
import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedmix.report.audit import draw_audit
from fedmix.report.evaluation import draw_new_clients
from fedmix.report.groups import groups
from fedmix.report.page_data import page_data, short_names
from fedmix.report.runs import ODD, Run
from fedmix.schema import VALIDATION_KINDS, WORDS

# Okabe and Ito
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
DPI = 200
SUFFIXES = ("svg", "png")
# for lines beyond the last colour
STYLES = ["-", "--", ":", "-."]
# maps beside each other
PANELS = 5
# rows of a map that can have their names beside them
MOST_NAMED_ROWS = 30
# rounds of the sliding window over divergence
WINDOW = 10
TUNED = "fine-tuned, test"
SWEEP_COLUMNS = (TUNED, "server, validation", "no identity, validation")
Series = Callable[[dict[str, Any]], list[Any]]
# the name of a figure's files without their suffix, and the figure; None: these runs do not have its numbers
Named = tuple[str, Any]


def draw_figures(runs: Sequence[Run], folder: Path) -> list[str]:
    """Draw every figure that these runs have the numbers for, and return the names of the files."""
    data = page_data(runs)
    folder.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    for name, figure in _figures_of_groups(data):
        files += _save(folder, name, figure)
    # in the order of data["runs"]
    ordered = [run for group in groups(runs) for run in group.runs]
    for run, shown, ending in zip(ordered, data["runs"], _endings(data["runs"]), strict=True):
        for name, figure in _figures_of_run(shown):
            files += _save(folder, f"{name}{ending}", figure)
        files += _draw_what_came_after(run, folder, ending)
    (folder / "table.csv").write_text(table_csv(data), encoding="utf-8")
    (folder / "table.tex").write_text(table_latex(data), encoding="utf-8")
    return [*files, "table.csv", "table.tex"]


def _save(folder: Path, name: str, figure: Any) -> list[str]:
    if figure is None:
        return []
    files = [f"{name}.{suffix}" for suffix in SUFFIXES]
    for file in files:
        figure.savefig(folder / file, dpi=DPI)
    return files


def _figures_of_groups(data: dict[str, Any]) -> Iterator[Named]:
    """The figures that show all runs together."""
    yield from _figures_of_accuracy(data)
    round_by_round = {
        "loss": ("training loss", _Shown(_every("round"), _every("loss"), _every("round"))),
        "divergence": ("gradient divergence", _Shown(_every("round"), _every("divergence"), _every("round"), WINDOW)),
        "communication": ("MiB of a round", _Shown(_every("round"), _every("mib"), _every("round"))),
    }
    for name, (what, shown) in round_by_round.items():
        yield name, _curves(data, "communication round", what, shown)
    yield "clients", _clients(data)
    yield from _figures_of_sweep(data["sweep"])


def _figures_of_accuracy(data: dict[str, Any]) -> Iterator[Named]:
    """Each kind of accuracy over rounds, and over what was sent."""
    for kind in VALIDATION_KINDS:
        name = kind.replace("_", "-")
        what = f"{WORDS[kind]} accuracy, validation, %"
        for over, axis in (("round", "communication round"), ("gib", "GiB sent, down and up")):
            shown = _Shown(_of(over), _of(kind), _of("round"))
            yield f"{name}-over-{over}s", _curves(data, axis, what, shown)


def _figures_of_sweep(sweep: dict[str, Any] | None) -> Iterator[Named]:
    """A figure for each setting that varies."""
    if sweep is None:
        return
    keys = sweep["keys"]
    for key in keys:
        name = "sweep" if len(keys) == 1 else f"sweep-{key.split('.')[-1]}"
        yield name, _sweep(sweep, key)


def _figures_of_run(run: dict[str, Any]) -> Iterator[Named]:
    yield "q-clients", _maps(run, "zs")
    yield "q-side", _maps(run, "zc")
    yield "experts", _use(run)


def _draw_what_came_after(run: Run, folder: Path, ending: str) -> list[str]:
    """The pictures of `fedmix evaluate` and `fedmix audit`, where the run has been through them."""
    files: list[str] = []
    if run.evaluation:
        files += _draw_result(draw_new_clients, run.evaluation, folder, f"new-clients{ending}")
    if run.audit:
        files += _draw_result(draw_audit, run.audit, folder, f"audit{ending}")
    return files


def _draw_result(
    draw: Callable[[dict[str, Any], Path], None], result: dict[str, Any], folder: Path, name: str
) -> list[str]:
    files = [folder / f"{name}.{suffix}" for suffix in SUFFIXES]
    for file in files:
        # a result that is not as it should be gives no picture; the page says so
        with contextlib.suppress(*ODD):
            draw(result, file)
    return [file.name for file in files if file.exists()]


def _endings(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What the names of each run's files end with: nothing, where there is one run."""
    if len(runs) == 1:
        return [""]
    endings: list[str] = []
    for run in runs:
        ending = _ending(run["name"])
        again = sum(earlier == ending or earlier.startswith(f"{ending}-again") for earlier in endings)
        endings.append(f"{ending}-again{again}" if again else ending)
    return endings


def _ending(name: str) -> str:
    """A run's name in letters that any file system takes."""
    plain = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")
    return f"-{plain[:60] or 'run'}"


# -- what figures have in common ---------------------------------------------------------------------------------------


def _of(key: str) -> Series:
    """A curve that has points at evaluation rounds."""
    return lambda series: series[key]


def _every(key: str) -> Series:
    """A curve that has points at every round, or every few."""
    return lambda series: series["every"][key]


def _figure(width: float = 5.2, height: float = 3.4) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plain(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x, parse_math=False)
    axis.set_ylabel(y, parse_math=False)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(axis: Any) -> None:
    """A legend above the axes, where it hides nothing."""
    handles, labels = axis.get_legend_handles_labels()
    if not handles:
        return
    # as many columns as the longest label leaves room for
    widest = max(len(label) for label in labels) + 5
    columns = max(1, min(4, 74 // widest))
    place = {"loc": "outside upper center", "ncols": columns, "frameon": False, "fontsize": 8}
    legend = axis.figure.legend(handles, labels, **place)
    _as_plain_text(legend.get_texts())


def _as_plain_text(labels: Sequence[Any]) -> None:
    """A dollar sign in a user's name is no formula."""
    for label in labels:
        label.set_parse_math(False)


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# -- curves ------------------------------------------------------------------------------------------------------------


class _Shown(NamedTuple):
    """What is drawn of each seed's series: place on the x axis, value, round. window: smooths, in rounds."""

    at: Series
    of: Series
    when: Series
    window: int = 1


def _curves(data: dict[str, Any], x: str, y: str, shown: _Shown) -> Any:
    """A line for each group: the mean over seeds of the same rounds, with a band of one sample deviation."""
    figure = _figure()
    axis = figure.subplots()
    drawn = [_curve(axis, data, g, shown) for g in range(len(data["curves"]))]
    if not any(drawn):
        return None
    first = data["curves"][0][0]
    is_over_rounds = shown.at(first) is shown.when(first)
    if is_over_rounds:
        axis.xaxis.get_major_locator().set_params(integer=True)
    _plain(axis, x, y)
    _legend(axis)
    return figure


def _curve(axis: Any, data: dict[str, Any], g: int, shown: _Shown) -> bool:
    """The line of one group; False: it has no such numbers."""
    points_of_seeds = [_points(series, shown) for series in data["curves"][g]]
    seeds = list(filter(None, points_of_seeds))
    if not seeds:
        return False
    places, mean, deviation = _over_seeds(seeds)
    colour = COLOURS[g % len(COLOURS)]
    style = STYLES[g // len(COLOURS) % len(STYLES)]
    marker = "o" if len(places) < 40 else ""
    axis.plot(places, mean, style, color=colour, label=data["short"][g], marker=marker, ms=3, lw=1.4)
    if len(seeds) > 1:
        _draw_band(axis, places, mean, deviation, colour)
    return True


def _draw_band(
    axis: Any, places: Sequence[float], mean: Sequence[float], deviation: Sequence[float], colour: str
) -> None:
    low = [m - s for m, s in zip(mean, deviation, strict=True)]
    high = [m + s for m, s in zip(mean, deviation, strict=True)]
    axis.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)


_Points = dict[int, tuple[float, float]]


def _points(series: dict[str, Any], shown: _Shown) -> _Points:
    """For each round in which one seed has a value: its place on the x axis, and the value."""
    window = max(1, round(shown.window / series["every"]["step"]))
    values = _slid(shown.of(series), window)
    points = zip(shown.when(series), shown.at(series), values, strict=True)
    return {t: (place, value) for t, place, value in points if value is not None}


def _over_seeds(seeds: Sequence[_Points]) -> tuple[list[float], list[float], list[float]]:
    """Places, means and sample deviations, round by round, over the seeds that have come to that round."""
    places, means, deviations = [], [], []
    for t in sorted(set().union(*seeds)):
        at_round = [points[t] for points in seeds if t in points]
        at, values = zip(*at_round, strict=True)
        places.append(fmean(at))
        means.append(fmean(values))
        deviations.append(stdev(values) if len(values) > 1 else 0.0)
    return places, means, deviations


def _slid(values: Sequence[float | None], window: int) -> list[float | None]:
    """Means over a sliding window; what is not known stays so."""
    means: list[float | None] = []
    for i, value in enumerate(values):
        known = [v for v in values[max(0, i - window + 1) : i + 1] if v is not None]
        means.append(None if value is None else sum(known) / len(known))
    return means


# -- maps and use of experts -------------------------------------------------------------------------------------------


def _maps(run: dict[str, Any], key: str) -> Any:
    """q over rounds: a few maps beside each other, the first and the last among them. key: zs or zc."""
    maps = run["maps"]
    if not maps or not maps["frames"][-1][key]:
        return None
    rows = _rows_of_map(maps, key)
    frames = _some_frames(maps["frames"])
    # a narrow panel before the maps has the true groups
    groups_width = [0.18] if rows.groups else []
    widths = [*groups_width, *[1.0] * len(frames)]
    figure = _figure(1.3 * len(frames) + 1.4, min(6.0, 1.4 + 0.12 * len(rows.names)))
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for axis, frame in zip(axes[len(groups_width) :], frames, strict=True):
        image = _draw_map(axis, frame, key)
    if rows.groups:
        _draw_groups(axes[0], rows.groups)
    elif len(rows.names) <= MOST_NAMED_ROWS:
        _name_rows(axes[0], rows.names)
    axes[0].set_ylabel(rows.what)
    figure.colorbar(image, ax=axes[-1], label=rows.q)
    return figure


class _Rows(NamedTuple):
    """The rows of a map: their names, their true groups where they are clients of known groups, what they are, what q is."""

    names: Sequence[str]
    groups: Sequence[int] | None
    what: str
    q: str


def _rows_of_map(maps: dict[str, Any], key: str) -> _Rows:
    if key == "zs":
        return _Rows(maps["clients"], maps["groups"], "client", "q(z|s)")
    groups = maps["groups"] if maps["side"] == "client" else None
    return _Rows(maps["values"], groups, maps["side"], "q(z|c)")


def _some_frames(frames: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many as there are panels, at equal distances."""
    last = len(frames) - 1
    picked = sorted({round(i * last / (PANELS - 1)) for i in range(PANELS)})
    return [frames[i] for i in picked]


def _draw_groups(axis: Any, groups: Sequence[int]) -> None:
    look = {"cmap": "tab10", "vmin": 0, "vmax": 9, "aspect": "auto", "interpolation": "nearest"}
    axis.imshow([[group] for group in groups], **look)
    axis.set(xticks=[], yticks=[])
    axis.set_title("true\ngroup", fontsize=8, loc="left")


def _name_rows(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), [_short(name, 16) for name in names], fontsize=7)
    _as_plain_text(axis.get_yticklabels())


def _draw_map(axis: Any, frame: dict[str, Any], key: str) -> Any:
    q = frame[key]
    look = {"cmap": "cividis", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    image = axis.imshow(q, **look)
    axis.set_title(f"round {frame['round']}", fontsize=8)
    axis.set_xticks(range(len(q[0])))
    axis.set_xlabel("expert", fontsize=8)
    axis.set_yticks([])
    return image


def _use(run: dict[str, Any]) -> Any:
    """The share of each expert over rounds, stacked."""
    use = run["use"]
    if not use:
        return None
    figure = _figure()
    axis = figure.subplots()
    shares = [[value or 0.0 for value in of_expert] for of_expert in use["use"]]
    labels = [f"expert {k}" for k in range(len(shares))]
    axis.stackplot(use["round"], shares, colors=COLOURS, labels=labels, alpha=0.8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    _plain(axis, "communication round", "share of each expert")
    axis.set_ylim(0, 1)
    _legend(axis)
    return figure


# -- clients and sweeps ------------------------------------------------------------------------------------------------


def _clients(data: dict[str, Any]) -> Any:
    """A box for each method, over its clients in all its seeds."""
    values = _accuracies_of_clients(data["runs"])
    if not values:
        return None
    figure = _figure(max(4.0, 1.0 * len(values) + 1.5))
    axis = figure.subplots()
    axis.boxplot(list(values.values()), widths=0.5, medianprops={"color": COLOURS[1]})
    names = short_names([data["groups"][g] for g in values], 24)
    axis.set_xticks(range(1, len(values) + 1), names, fontsize=8, rotation=20 if len(values) > 3 else 0)
    _as_plain_text(axis.get_xticklabels())
    _plain(axis, "", "fine-tuned accuracy of a client, test, %")
    return figure


def _accuracies_of_clients(runs: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
    """Fine-tuned accuracies on test data in per cent, by the number of the group."""
    values: dict[int, list[float]] = {}
    for run in runs:
        if run["clients"]:
            known = [100 * value for value in run["clients"]["fine_tuned"] if value is not None]
            values.setdefault(run["group"], []).extend(known)
    return values


def _sweep(sweep: dict[str, Any], key: str) -> Any:
    """Every kind of accuracy of one line, or the fine-tuned one of several; other methods as lines without a slope."""
    lines = sweep["keys"][key]
    columns, y = (SWEEP_COLUMNS, "accuracy, %") if len(lines) == 1 else ((TUNED,), f"{TUNED}, %")
    figure = _figure()
    axis = figure.subplots()
    drawn = [(line, column) for line in lines for column in columns]
    for i, (line, column) in enumerate(drawn):
        _draw_line(axis, line, column, COLOURS[i % len(COLOURS)])
    for i, row in enumerate(sweep["beside"]):
        _draw_beside(axis, row, STYLES[1 + i % (len(STYLES) - 1)])
    _plain(axis, key, y)
    _legend(axis)
    return figure


def _draw_line(axis: Any, line: dict[str, Any], column: str, colour: str) -> None:
    """A column of the table over the values of a setting, with its deviation over seeds."""
    known: list[tuple[float, float, float]] = []
    for value, row in zip(line["values"], line["rows"], strict=True):
        if row[column]:
            mean, deviation = row[column]
            known.append((value, mean, deviation or 0))
    if known:
        values, means, deviations = zip(*known, strict=True)
        label = line["name"] or column
        axis.errorbar(values, means, yerr=deviations, fmt="o-", color=colour, label=label, capsize=3)


def _draw_beside(axis: Any, row: dict[str, Any], style: str) -> None:
    """Another method, which does not have the setting: a line without a slope."""
    if row[TUNED]:
        mean = row[TUNED][0]
        axis.axhline(mean, color=COLOURS[7], ls=style, label=f"{_short(row['method'])}, {TUNED}")


# -- tables ------------------------------------------------------------------------------------------------------------


def table_csv(data: dict[str, Any]) -> str:
    """The table with a column for the deviation beside every figure that is over seeds."""
    rows, columns = data["table"], data["columns"]
    over_seeds = {column for column in columns if any(isinstance(row[column], list) for row in rows)}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_csv_head(columns, over_seeds))
    writer.writerows(_csv_cells(row, columns, over_seeds) for row in rows)
    return out.getvalue()


def _csv_head(columns: Sequence[str], over_seeds: set[str]) -> list[str]:
    head = ["method"]
    for column in columns:
        head.append(column)
        if column in over_seeds:
            head.append(f"{column}, deviation over seeds")
    return head


def _csv_cells(row: dict[str, Any], columns: Sequence[str], over_seeds: set[str]) -> list[Any]:
    cells: list[Any] = [row["method"]]
    for column in columns:
        cells += (row[column] or [None, None]) if column in over_seeds else [row[column]]
    return ["" if cell is None else cell for cell in cells]


_LATEX = {c: f"\\{c}" for c in "{}$&#_%"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def table_latex(data: dict[str, Any]) -> str:
    """The table as a tabular environment, figures over seeds with their deviation."""
    columns = ["method", *data["columns"]]
    sides = "l" + "r" * len(data["columns"])
    lines = [
        rf"\begin{{tabular}}{{{sides}}}",
        r"\hline",
        _latex_row(columns),
        r"\hline",
        *(_latex_row([row[column] for column in columns]) for row in data["table"]),
        r"\hline",
        r"\end{tabular}",
        "",
    ]
    return "\n".join(lines)


def _latex_row(values: Sequence[Any]) -> str:
    return " & ".join(map(_latex_cell, values)) + r" \\"


def _latex_cell(value: Any) -> str:
    if value is None:
        return "--"
    if isinstance(value, list):
        mean, deviation = value
        return f"{mean:.2f}" if deviation is None else f"{mean:.2f} $\\pm$ {deviation:.2f}"
    if isinstance(value, float):
        return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
    return "".join(_LATEX.get(c, c) for c in str(value))
