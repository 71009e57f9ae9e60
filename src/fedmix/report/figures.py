"""Figures fit for a paper, from the same numbers as the page: each as SVG and PNG, tables as CSV and LaTeX."""

import contextlib
import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedmix.report.audit import draw_audit
from fedmix.report.evaluation import draw_new_clients
from fedmix.report.groups import groups
from fedmix.report.page_data import page_data, short_names
from fedmix.report.runs import ODD, Run
from fedmix.schema import VALIDATION_KINDS, WORDS

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]  # Okabe and Ito
DPI = 200
STYLES = ["-", "--", ":", "-."]  # when colours have run out
PANELS = 5  # maps beside each other
WINDOW = 10  # rounds of the sliding window over divergence
SWEEP_COLUMNS = ("fine-tuned, test", "server, validation", "no identity, validation")
Series = Callable[[dict[str, Any]], list[Any]]


def draw_figures(runs: Sequence[Run], folder: Path) -> list[str]:
    """Every figure that these runs have the numbers for; the names of the files."""
    data = page_data(runs)
    made: list[str] = []

    def keep(name: str, figure: Any) -> None:
        if figure is None:
            return
        for suffix in ("svg", "png"):
            figure.savefig(folder / f"{name}.{suffix}", dpi=DPI)
            made.append(f"{name}.{suffix}")

    folder.mkdir(parents=True, exist_ok=True)
    for kind in VALIDATION_KINDS:
        what, name = f"{WORDS[kind]} accuracy, validation, %", kind.replace("_", "-")
        for over, axis in (("round", "communication round"), ("gib", "GiB sent, down and up")):
            keep(f"{name}-over-{over}s", _curves(data, axis, what, _of(over), _of(kind), _of("round")))
    for name, what, key, rounds in (
        ("loss", "training loss", "loss", 1),
        ("divergence", "gradient divergence", "divergence", WINDOW),
        ("communication", "MiB of a round", "mib", 1),
    ):
        when = _every("round")
        keep(name, _curves(data, "communication round", what, when, _every(key), when, rounds))
    keep("clients", _clients(data))
    for key in (data["sweep"] or {"keys": {}})["keys"]:
        keep("sweep" if len(data["sweep"]["keys"]) == 1 else f"sweep-{key.split('.')[-1]}", _sweep(data["sweep"], key))
    ordered = [run for group in groups(runs) for run in group.runs]  # as in data["runs"]
    for run, own, of in zip(ordered, data["runs"], _slugs(data["runs"]), strict=True):
        keep(f"q-clients{of}", _maps(own, "zs"))
        keep(f"q-side{of}", _maps(own, "zc"))
        keep(f"experts{of}", _use(own))
        for name, found, draw in (("new-clients", run.evaluation, draw_new_clients), ("audit", run.audit, draw_audit)):
            for suffix in ("svg", "png"):
                if not found:
                    break
                with contextlib.suppress(*ODD):  # a file that is not as it should be: the page says so
                    draw(found, folder / f"{name}{of}.{suffix}")
                if (folder / f"{name}{of}.{suffix}").exists():
                    made.append(f"{name}{of}.{suffix}")
    (folder / "table.csv").write_text(table_csv(data), encoding="utf-8")
    (folder / "table.tex").write_text(table_latex(data), encoding="utf-8")
    return [*made, "table.csv", "table.tex"]


def _slugs(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What the names of a run's own files end with: nothing, where there is one run."""
    found: list[str] = []
    for run in runs if len(runs) > 1 else ():
        slug = "-" + (re.sub(r"[^a-z0-9.]+", "-", run["name"].lower()).strip("-.")[:60] or "run")
        again = sum(name == slug or name.startswith(f"{slug}-again") for name in found)
        found.append(f"{slug}-again{again}" if again else slug)
    return found or [""] * len(runs)


def _of(key: str) -> Series:
    return lambda series: series[key]


def _every(key: str) -> Series:
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
    """Above the axes, where it hides nothing."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        columns = max(1, min(4, 74 // max(len(label) + 5 for label in labels)))
        place = {"loc": "outside upper center", "ncols": columns, "frameon": False, "fontsize": 8}
        for text in axis.figure.legend(handles, labels, **place).get_texts():
            text.set_parse_math(False)


def _curves(data: dict[str, Any], x: str, y: str, at: Series, of: Series, when: Series, window: int = 1) -> Any:
    """Mean over seeds of the same rounds (`when`), with a band of one sample deviation. window: in rounds."""
    figure = _figure()
    axis = figure.subplots()
    drawn = [_curve(axis, data, g, at, of, when, window) for g in range(len(data["curves"]))]
    if not any(drawn):
        return None
    first = data["curves"][0][0]
    if at(first) is when(first):
        axis.xaxis.get_major_locator().set_params(integer=True)
    _plain(axis, x, y)
    _legend(axis)
    return figure


def _curve(axis: Any, data: dict[str, Any], g: int, at: Series, of: Series, when: Series, window: int) -> bool:
    """The line of one group; False: it has no such numbers."""
    seeds = [series for series in data["curves"][g] if any(value is not None for value in of(series))]
    if not seeds:
        return False
    points = [_points(series, at, of, when, window) for series in seeds]
    rounds = sorted({t for of_seed in points for t in of_seed})
    shared = [[of_seed[t] for of_seed in points if t in of_seed] for t in rounds]
    places = [fmean(place for place, _ in at_round) for at_round in shared]
    mean = [fmean(value for _, value in at_round) for at_round in shared]
    band = [stdev([value for _, value in at_round]) if len(at_round) > 1 else 0.0 for at_round in shared]
    colour, style = COLOURS[g % len(COLOURS)], STYLES[g // len(COLOURS) % len(STYLES)]
    marker = "o" if len(places) < 40 else ""
    axis.plot(places, mean, style, color=colour, label=data["short"][g], marker=marker, ms=3, lw=1.4)
    if len(seeds) > 1:
        low = [m - s for m, s in zip(mean, band, strict=True)]
        high = [m + s for m, s in zip(mean, band, strict=True)]
        axis.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)
    return True


def _points(
    series: dict[str, Any], at: Series, of: Series, when: Series, window: int
) -> dict[int, tuple[float, float]]:
    """Of one seed: round -> place on the axis and value, where there is one."""
    values = _slid(of(series), max(1, round(window / series["every"]["step"])))
    known = zip(when(series), at(series), values, strict=True)
    return {t: (place, value) for t, place, value in known if value is not None}


def _slid(values: Sequence[float | None], window: int) -> list[Any]:
    found: list[float | None] = []
    for i, value in enumerate(values):
        some = [v for v in values[max(0, i - window + 1) : i + 1] if v is not None]
        found.append(sum(some) / len(some) if value is not None else None)
    return found


def _maps(run: dict[str, Any], key: str) -> Any:
    """q over rounds: a few maps beside each other, the first and the last among them."""
    maps = run["maps"]
    if not maps or not maps["frames"][-1][key]:
        return None
    frames = maps["frames"]
    picked = sorted({round(i * (len(frames) - 1) / (PANELS - 1)) for i in range(PANELS)})
    rows = maps["clients"] if key == "zs" else maps["values"]
    grouped = int((key == "zs" or maps["side"] == "client") and bool(maps["groups"]))
    ratio = [0.18] * grouped + [1.0] * len(picked)
    figure = _figure(1.3 * len(picked) + 1.4, min(6.0, 1.4 + 0.12 * len(rows)))
    axes = figure.subplots(1, len(ratio), squeeze=False, width_ratios=ratio)[0]
    if grouped:
        axes[0].imshow(
            [[g] for g in maps["groups"]], cmap="tab10", vmin=0, vmax=9, aspect="auto", interpolation="nearest"
        )
        axes[0].set(xticks=[], yticks=[])
        axes[0].set_title("true\ngroup", fontsize=8, loc="left")
    for axis, i in zip(axes[grouped:], picked, strict=True):
        image = axis.imshow(frames[i][key], cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axis.set_title(f"round {frames[i]['round']}", fontsize=8)
        axis.set_xticks(range(len(frames[i][key][0])))
        axis.set_xlabel("expert", fontsize=8)
        axis.set_yticks([])
    first = axes[grouped]
    if len(rows) <= 30 and not grouped:
        first.set_yticks(range(len(rows)), [_short(name, 16) for name in rows], fontsize=7)
        for label in first.get_yticklabels():
            label.set_parse_math(False)
    (axes[0] if grouped else first).set_ylabel("client" if key == "zs" else maps["side"])
    figure.colorbar(image, ax=axes[-1], label="q(z|s)" if key == "zs" else "q(z|c)")
    return figure


def _use(run: dict[str, Any]) -> Any:
    use = run["use"]
    if not use:
        return None
    figure = _figure()
    axis = figure.subplots()
    known = [[value or 0.0 for value in row] for row in use["use"]]
    axis.stackplot(use["round"], known, colors=COLOURS, labels=[f"expert {k}" for k in range(len(known))], alpha=0.8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    _plain(axis, "communication round", "share of each expert")
    axis.set_ylim(0, 1)
    _legend(axis)
    return figure


def _clients(data: dict[str, Any]) -> Any:
    """A box for each method, over its clients in all its seeds."""
    values: dict[int, list[float]] = {}
    for run in data["runs"]:
        if run["clients"]:
            known = [100 * value for value in run["clients"]["fine_tuned"] if value is not None]
            values.setdefault(run["group"], []).extend(known)
    if not values:
        return None
    figure = _figure(max(4.0, 1.0 * len(values) + 1.5))
    axis = figure.subplots()
    axis.boxplot(list(values.values()), widths=0.5, medianprops={"color": COLOURS[1]})
    names = short_names([data["groups"][g] for g in values], 24)
    axis.set_xticks(range(1, len(values) + 1), names, fontsize=8, rotation=20 if len(values) > 3 else 0)
    for label in axis.get_xticklabels():
        label.set_parse_math(False)
    _plain(axis, "", "fine-tuned accuracy of a client, test, %")
    return figure


def _sweep(sweep: dict[str, Any], key: str) -> Any:
    """Every kind of accuracy of one line, or the fine-tuned one of several; other methods as lines without a slope."""
    lines = sweep["keys"][key]
    figure = _figure()
    axis = figure.subplots()
    columns = SWEEP_COLUMNS if len(lines) == 1 else SWEEP_COLUMNS[:1]
    drawn = [(line, column) for line in lines for column in columns]
    for i, (line, column) in enumerate(drawn):
        known = [(x, row[column]) for x, row in zip(line["values"], line["rows"], strict=True) if row[column]]
        if known:
            deviation = [value[1] or 0 for _, value in known]
            look = {"fmt": "o-", "color": COLOURS[i % len(COLOURS)], "label": line["name"] or column, "capsize": 3}
            axis.errorbar([x for x, _ in known], [value[0] for _, value in known], yerr=deviation, **look)
    for i, row in enumerate(sweep["beside"]):
        if row[SWEEP_COLUMNS[0]]:
            style = STYLES[1 + i % (len(STYLES) - 1)]
            label = f"{_short(row['method'])}, {SWEEP_COLUMNS[0]}"
            axis.axhline(row[SWEEP_COLUMNS[0]][0], color=COLOURS[7], ls=style, label=label)
    _plain(axis, key, "accuracy, %" if len(lines) == 1 else f"{SWEEP_COLUMNS[0]}, %")
    _legend(axis)
    return figure


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _cells(data: dict[str, Any]) -> list[list[Any]]:
    return [[row["method"], *(row[column] for column in data["columns"])] for row in data["table"]]


def table_csv(data: dict[str, Any]) -> str:
    """The table with a column for the deviation beside every figure that is over seeds."""
    over_seeds = {column for column in data["columns"] if any(isinstance(row[column], list) for row in data["table"])}
    head = ["method"]
    for column in data["columns"]:
        head += [column, f"{column}, deviation over seeds"] if column in over_seeds else [column]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in data["table"]:
        cells: list[Any] = [row["method"]]
        for column in data["columns"]:
            cells += (row[column] or [None, None]) if column in over_seeds else [row[column]]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return out.getvalue()


_LATEX = {c: f"\\{c}" for c in "{}$&#_%"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def table_latex(data: dict[str, Any]) -> str:
    def cell(value: Any) -> str:
        if value is None:
            return "--"
        if isinstance(value, list):
            return f"{value[0]:.2f}" + (f" $\\pm$ {value[1]:.2f}" if value[1] is not None else "")
        if isinstance(value, float):
            return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
        return "".join(_LATEX.get(c, c) for c in str(value))

    head = " & ".join(cell(name) for name in ["method", *data["columns"]])
    body = [" & ".join(map(cell, row)) + r" \\" for row in _cells(data)]
    columns = "l" + "r" * len(data["columns"])
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            head + r" \\",
            r"\hline",
            *body,
            r"\hline",
            r"\end{tabular}",
            "",
        ]
    )
