"""Commands that train, and the one that says what training will cost."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedmix.catalogue import CATALOGUE
from fedmix.cli.output import complain, names_in, picture_of, say, say_unless, show, show_summary
from fedmix.errors import SettingError

METHOD_HELP = f"{', '.join(CATALOGUE)}, or module:name of your own"
# The exit status of a run that was asked to stop.
STOPPED = 130


def changes(args: Any, **more: Any) -> dict[str, Any]:
    """What flags change in a recipe. more: settings that have a flag to themselves, which counts more than --set."""
    from fedmix.settings.reading import parse_changes

    flags = {"rounds": args.rounds, **more}
    return parse_changes(args.set) | {key: value for key, value in flags.items() if value is not None}


def train(args: Any) -> int:
    from fedmix.running.run import Stopped
    from fedmix.settings.reading import folder_of_run, read_recipe

    warm_start = str(Path(args.warm_start).resolve()) if args.warm_start else None
    recipe = read_recipe(args.recipe, args.algorithm, changes(args, seed=args.seed, warm_start=warm_start), args.scale)
    is_run = (Path(args.recipe) / "recipe.toml").is_file()
    default = args.recipe if is_run else f"runs/{folder_of_run(recipe, recipe.name + '-')}"
    out = Path(args.out or default)
    try:
        summary = _trainer(args)(recipe, out)
    except Stopped as stopped:
        say(str(stopped))
        return STOPPED
    show_summary(summary, out, args.json)
    return 0


def _trainer(args: Any) -> Any:
    """A function that trains one recipe into one folder, with a progress bar, as the flags say."""
    from fedmix.api import HandedOver, Listeners, train_recipe
    from fedmix.cli.progress import progress
    from fedmix.running.where import Where

    where = Where(args.engine, args.workers, args.device)
    hint = say_unless(args.quiet)

    def train_one(recipe: Any, out: Path) -> Any:
        smaller = "" if recipe.scale == "full" else f", scale {recipe.scale}"
        title = f"{recipe.algorithm}, seed {recipe.seed}{smaller}"
        with progress(title, args.quiet) as watch:
            listeners = Listeners(watch, say, hint)
            return train_recipe(
                recipe, out, where, HandedOver(), args.data_dir, args.resume, args.overwrite, args.log, listeners
            )

    return train_one


def compare(args: Any) -> int:
    from fedmix.api import compare_points
    from fedmix.running.grids import comparison_points
    from fedmix.running.run import Stopped

    methods = names_in(args.algorithms)
    if not methods:
        raise SettingError(f"--algorithms must name methods: {METHOD_HELP}. Got {args.algorithms!r} instead.")
    points = comparison_points(_reader(args), methods, _seeds(args), changes(args))
    out = Path(args.out or f"runs/compare-{points[0].recipe.name}")
    try:
        comparison = compare_points(points, out, _trainer(args))
    except Stopped as stopped:
        say(str(stopped))
        say("the methods before it are done; the same command with --resume goes on")
        return STOPPED
    if args.json:
        print(json.dumps(comparison))
    else:
        _show_comparison(comparison, points, out)
    return 0


def _show_comparison(comparison: Any, points: Sequence[Any], out: Path) -> None:
    from fedmix.report.tables import comparison_table

    show(comparison_table(comparison))
    first_seed = points[0].recipe.seed
    _show_gates([out / point.name for point in points if point.recipe.seed == first_seed])
    print(f"results: {out}")


def _reader(args: Any) -> Any:
    """A function that reads the recipe of a command with a method and changes."""
    from fedmix.settings.reading import read_recipe

    return lambda method, changed: read_recipe(args.recipe, method, changed, args.scale)


def _show_gates(folders: list[Path]) -> None:
    """Show which client uses which expert, in each run that has experts."""
    from fedmix.report.tables import gates_of
    from fedmix.schema import read_summary

    for folder in folders:
        summary = read_summary(folder)
        if summary and "q_zs" in summary:
            show(gates_of(summary))


def sweep(args: Any) -> int:
    from fedmix.api import sweep_over
    from fedmix.report.comparison import chosen_kind
    from fedmix.running.grids import sweep_points
    from fedmix.running.run import Stopped
    from fedmix.settings.reading import parse_grid

    rounds = {} if args.rounds is None else {"rounds": args.rounds}
    seeds = _seeds(args)
    by = chosen_kind(args.by)
    points = sweep_points(_reader(args), parse_grid(args.set), seeds, rounds, args.algorithm)
    names = "-".join(key.split(".")[-1] for key in points[0].settings)
    out = Path(args.out or f"runs/sweep-{points[0].recipe.name}-{names}")
    tell = say_unless(args.quiet)

    def about_to(point: Any, place: int) -> None:
        tell(f"{point.name} ({place + 1} of {len(points)})")

    try:
        result = sweep_over(points, out, _trainer(args), by, about_to)
    except Stopped as stopped:
        say(str(stopped))
        say("the runs before it are done; the same command with --resume goes on")
        return STOPPED
    _show_sweep(result, out, args.json)
    return 2 if result["failed"] else 0


def _show_sweep(result: Any, out: Path, as_json: bool) -> None:
    """The result of a sweep. Where all runs failed there is nothing to draw, and no table."""
    from fedmix.report.sweep import best_words, draw_sweep, sweep_table

    for words in result["failed"]:
        complain(words)
    drawn = picture_of(draw_sweep, result, out / "sweep.png") if result["rows"] else None
    if as_json:
        print(json.dumps({**result, "picture": drawn}))
    elif result["rows"]:
        show(sweep_table(result))
        picture = f", {drawn}" if drawn else ""
        print(f"{best_words(result)}\nresults: {out}{picture}")


def plan(args: Any) -> int:
    from fedmix.report.tables import plan_table, sharing_table
    from fedmix.running.plan import plan_recipe, plan_sharing
    from fedmix.settings.reading import read_recipe

    recipe = read_recipe(args.recipe, args.algorithm, changes(args), args.scale)
    make, table = (plan_sharing, sharing_table) if args.shared else (plan_recipe, plan_table)
    costs: Any = make(recipe, args.data_dir, args.workers)
    if args.json:
        print(json.dumps(costs))
    else:
        show(table(costs))
    return 0


def _seeds(args: Any) -> list[int]:
    """The seeds of --seeds; without it none, which leaves the recipe's seed as it is."""
    return _whole_numbers(args.seeds) if args.seeds else []


def _whole_numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or len(set(numbers)) < len(numbers):
        raise SettingError(f"--seeds must be whole numbers with commas, each once, as in 0,1,2. Got {text!r} instead.")
    return numbers
