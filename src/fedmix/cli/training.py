"""Commands that train, and what training will cost."""

import itertools
import json
from pathlib import Path
from typing import Any

from fedmix.catalogue import CATALOGUE
from fedmix.cli.output import complain, names_in, picture_of, say, show, show_summary, told_unless
from fedmix.errors import ClientError, SettingError

METHOD_HELP = f"{', '.join(CATALOGUE)}, or module:name of your own"


def changes(args: Any, **more: Any) -> dict[str, Any]:
    from fedmix.settings.recipe import parse_changes

    given_changes = parse_changes(args.set)
    given = {"rounds": args.rounds, **more}
    return given_changes | {key: value for key, value in given.items() if value is not None}


def train(args: Any) -> int:
    from fedmix.settings.recipe import folder_of_run, read_recipe

    warm = str(Path(args.warm_start).resolve()) if args.warm_start else None
    recipe = read_recipe(args.recipe, args.algorithm, changes(args, seed=args.seed, warm_start=warm), args.scale)
    inside = (Path(args.recipe) / "recipe.toml").is_file()
    default = args.recipe if inside else f"runs/{folder_of_run(recipe, recipe.name + '-')}"
    out = Path(args.out or default)
    summary = _run_one(recipe, out, args)
    if summary is None:
        return 130
    show_summary(summary, out, args.json)
    return 0


def _run_one(recipe: Any, out: Path, args: Any) -> dict[str, Any] | None:
    """Train one recipe into one directory; None if it was asked to stop on the way."""
    from fedmix.cli.progress import progress
    from fedmix.running.directory import RunDirectory
    from fedmix.running.loggers import check_tools, logging_to
    from fedmix.running.run import Stopped, check, run
    from fedmix.settings.build import EQUAL_START, build

    tools = check_tools(args.log)
    experiment = build(recipe, data_dir=args.data_dir)
    if not args.quiet and experiment.algorithm.starts_equal():
        say(EQUAL_START)
    check(experiment, args.engine, args.workers, args.device)
    directory = RunDirectory.open(out, recipe, args.resume, args.overwrite)
    try:
        small = "" if recipe.scale == "full" else f", scale {recipe.scale}"
        title = f"{recipe.algorithm}, seed {recipe.seed}{small}"
        with (
            progress(title, args.quiet) as bar,
            logging_to(tools, out, recipe, say, bar, told_unless(args.quiet)) as told,
        ):
            return run(experiment, directory, args.engine, args.workers, told, args.device, args.data_dir)
    except Stopped as stopped:
        say(str(stopped))
        return None
    finally:
        directory.close()


def compare(args: Any) -> int:
    from fedmix.report.tables import comparison, comparison_table, q_map
    from fedmix.running.files import write_json
    from fedmix.settings.recipe import folder_of_run, read_recipe

    methods = names_in(args.algorithms)
    if not methods:
        raise SettingError(f"--algorithms must name methods: {METHOD_HELP}. Got {args.algorithms!r} instead.")
    first = read_recipe(args.recipe, methods[0], _changes_for(methods[0], args), args.scale)
    seeds = _whole_numbers(args.seeds) if args.seeds else [first.seed]
    recipes = [
        read_recipe(args.recipe, method, _changes_for(method, args, seed=seed), args.scale)
        for method in methods
        for seed in seeds
    ]
    out = Path(args.out or f"runs/compare-{first.name}")
    summaries = []
    for recipe in recipes:
        summary = _run_one(recipe, out / folder_of_run(recipe), args)
        if summary is None:
            say("the methods before it are done; the same command with --resume goes on")
            return 130
        summaries.append(summary)
    rows = comparison(summaries)
    write_json(out / "comparison.json", rows)
    if args.json:
        print(json.dumps(rows))
        return 0
    show(comparison_table(rows))
    for summary in summaries:
        if "q_zs" in summary and summary["seed"] == seeds[0]:
            show(q_map(summary))
    print(f"results: {out}")
    return 0


def _changes_for(method: str, args: Any, **more: Any) -> dict[str, Any]:
    """Of one method among several: settings of a method of one's own are none of a shipped one's."""
    given = changes(args, **more)
    return {key: value for key, value in given.items() if method not in CATALOGUE or not key.startswith("own.")}


def sweep(args: Any) -> int:
    from fedmix.report.sweep import best, draw_sweep, sweep_rows, sweep_table
    from fedmix.running.files import write_json
    from fedmix.settings.recipe import parse_grid, read_recipe

    grid = parse_grid(args.set)
    given = grid.pop("seed", None) if len(grid) > 1 else None  # as good as --seeds
    varied = [key for key, values in grid.items() if len(values) > 1]
    if not varied:
        raise SettingError(
            "--set must give a setting several values, as in --set fedmix.eta=0,0.25,0.5. None has them."
        )
    if given and args.seeds:
        raise SettingError("seeds must be given once: by --seeds, or by --set seed=...")
    if "seed" in grid and args.seeds:
        raise SettingError("seeds must be given once: by --seeds, or by --set seed=...")
    if "rounds" in grid and args.rounds is not None:
        raise SettingError("rounds must be given once: by --rounds, or by --set rounds=...")
    rounds = {} if args.rounds is None else {"rounds": args.rounds}
    first = read_recipe(args.recipe, args.algorithm, {k: v[0] for k, v in grid.items()} | rounds, args.scale)
    seeds = _whole_numbers(args.seeds) if args.seeds else given or [first.seed]
    todo = []
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        for seed in [point["seed"]] if "seed" in point else seeds:
            recipe = read_recipe(args.recipe, args.algorithm, {**point, **rounds, "seed": seed}, args.scale)
            todo.append(({key: point[key] for key in varied}, recipe))
    out = Path(args.out or f"runs/sweep-{first.name}-{'-'.join(key.split('.')[-1] for key in varied)}")
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    failed: list[str] = []
    for settings, recipe in todo:
        words = ",".join(f"{key.split('.')[-1]}={value}" for key, value in settings.items())
        name = f"{words}-seed{recipe.seed}".replace("/", "_").replace(" ", "")
        if not args.quiet:
            say(f"{name} ({len(runs) + len(failed) + 1} of {len(todo)})")
        try:
            summary = _run_one(recipe, out / name, args)
        except ClientError as error:  # of this point of the grid alone: a rate that is too large, say
            failed.append(f"{name}: {error}")
            complain(failed[-1])
            continue
        if summary is None:
            say("the runs before it are done; the same command with --resume goes on")
            return 130
        runs.append((settings, summary))
    rows = sweep_rows(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "sweep.json", {"rows": rows, "failed": failed})
    drawn = picture_of(draw_sweep, rows, out / "sweep.png") if rows else None
    if args.json:
        print(json.dumps({"rows": rows, "failed": failed, "picture": drawn}))
    elif rows:
        show(sweep_table(rows))
        print(f"{best(rows)}\nresults: {out}" + (f", {drawn}" if drawn else ""))
    return 2 if failed else 0


def plan(args: Any) -> int:
    from fedmix.report.tables import plan_table
    from fedmix.running.plan import plan_recipe
    from fedmix.settings.recipe import read_recipe

    recipe = read_recipe(args.recipe, args.algorithm, changes(args), args.scale)
    costs = plan_recipe(recipe, args.data_dir, args.workers)
    if args.json:
        print(json.dumps(costs))
    else:
        show(plan_table(costs))
    return 0


def _whole_numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
        if len(set(numbers)) < len(numbers):
            raise ValueError
        return numbers
    except ValueError:
        raise SettingError(
            f"--seeds must be whole numbers with commas, each once, as in 0,1,2. Got {text!r} instead."
        ) from None
