"""The command line. Results go to standard output, progress to standard error; bad input is one line and status 2."""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedmix import __version__
from fedmix.errors import ClientError, FedmixError, SettingError

METHOD_HELP = "fedmix, fedavg, biased-fedavg, local-global or independent"
EXAMPLES = """examples:
  fedmix recipes                                     what can be trained
  fedmix plan digits-skew                            what it will cost
  fedmix split digits-skew                           who will hold what, as a table and a picture
  fedmix train digits-permutation --out runs/first   train; results in runs/first
  fedmix train runs/first --resume                   go on after an interruption
  fedmix evaluate runs/first                         how good it is for old clients, new clients, unknown clients
  fedmix audit runs/first                            what the server could have learnt of the clients' labels
  fedmix compare digits-skew --algorithms fedmix,fedavg --seeds 0,1,2
  fedmix sweep digits-skew --set fedmix.eta=0,0.25,0.5,0.75       accuracy against bytes
  fedmix train digits-skew --set fedmix.experts=8 --set training.client_lr=0.1
  fedmix train cifar10 --scale small                 the paper's experiment in minutes, scaled down
  fedmix data get cifar10                            download a data set from its publisher
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    args = _parser().parse_args(argv)
    try:
        status = args.command(args)
        sys.stdout.flush()
    except FedmixError as error:
        status = _complain(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing to say to it
        status = 1
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        status = _complain(f"{error.strerror or error}{where}. What was written before is still there.")
    except KeyboardInterrupt:
        status = 130
        print("fedmix: stopped", file=sys.stderr)
    sys.exit(status)


def _complain(message: str) -> int:
    print("fedmix: error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fedmix",
        description="Train a federated mixture of experts: K expert models shared by all clients, a private gate on each.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedmix {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = _command(commands, "train", _train, "train one method on one recipe")
    _recipe_options(train)
    _run_options(train)
    train.add_argument("--algorithm", metavar="A", help=f"{METHOD_HELP} (the recipe's own by default)")
    train.add_argument("--seed", type=int, metavar="N", help="of the split, the start and the order of everything")
    train.add_argument("--warm-start", metavar="RUN", help="start from the experts of another run")

    compare = _command(commands, "compare", _compare, "train several methods, print one table")
    _recipe_options(compare)
    _run_options(compare)
    methods = "fedmix,fedavg,biased-fedavg,local-global"
    compare.add_argument(
        "--algorithms", metavar="A,B,...", default=methods, help=f"methods by name (default: {methods})"
    )
    compare.add_argument("--seeds", metavar="0,1,...", help="seeds, for mean ± standard deviation (the recipe's own)")

    sweep = _command(commands, "sweep", _sweep, "train a grid of settings: one table, one figure, each run resumable")
    _recipe_options(sweep)
    _run_options(sweep)
    sweep.add_argument("--algorithm", metavar="A", help=f"{METHOD_HELP} (the recipe's own by default)")
    sweep.add_argument("--seeds", metavar="0,1,...", help="seeds, for mean ± standard deviation (the recipe's own)")
    sweep.epilog = "example: fedmix sweep digits-skew --set fedmix.eta=0,0.25,0.5,0.75 --rounds 20 --seeds 0,1,2"

    evaluate = _command(
        commands,
        "evaluate",
        _evaluate,
        "every kind of inference of a trained run: for clients that took part, for new ones with labels and without",
    )
    _after_options(evaluate)
    evaluate.add_argument(
        "--vae",
        action=argparse.BooleanOptionalAction,
        help="a generative model on each client, for p(s|x) (default: where that takes minutes at most)",
    )
    evaluate.add_argument(
        "--points",
        type=int,
        default=2000,
        metavar="N",
        help="inputs for p(s|x), drawn at random (default 2000; 0: all)",
    )

    audit = _command(commands, "audit", _audit, "what the server could have learnt of the clients' labels in a run")
    _after_options(audit)

    plan = _command(commands, "plan", _plan, "parameters, bytes, FLOP, memory and time, before anything runs")
    _recipe_options(plan)
    plan.add_argument("--algorithm", metavar="A", help=f"{METHOD_HELP} (the recipe's own by default)")
    plan.add_argument("--workers", type=int, metavar="N", help="clients side by side (default: all cores)")

    split = _command(commands, "split", _split, "draw who holds what: clients by classes, as a table and a picture")
    _recipe_options(split)
    split.add_argument("--seed", type=int, metavar="N", help="of the split (the recipe's own by default)")
    split.add_argument("--out", metavar="FILE", help="the picture: .png, .svg or .pdf (default: a .png under runs/)")
    split.add_argument("--overwrite", action="store_true", help="replace the picture that is in --out")

    recipes = _command(commands, "recipes", _recipes, "list the recipes that come with fedmix")
    recipes.add_argument("--json", action="store_true", help="print JSON")

    data = _command(commands, "data", _data, "list the data sets: what is here, what is missing, where to get it")
    _data_options(data)
    actions = data.add_subparsers(title="actions", metavar="ACTION")
    get = _command(actions, "get", _data_get, "download a data set from its publisher: progress, resume, checksums")
    get.add_argument("name", metavar="NAME", help="a data set of the list that `fedmix data` prints")
    get.add_argument("--mirror", metavar="URL", help="take the publisher's files from here, by their names")
    get.add_argument("--quiet", action="store_true", help="no progress")
    _data_options(get, "where it goes, and is looked for first (default: the user's cache)")
    return parser


def _data_options(
    parser: argparse.ArgumentParser, help: str = "look here first (then in $FEDMIX_DATA and the user's cache)"
) -> None:
    parser.add_argument("--data-dir", metavar="D", default=argparse.SUPPRESS, help=help)
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def _command(commands: Any, name: str, function: Callable[[Any], int], help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(command=function)
    return parser


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe by name, a TOML file, or a run directory")
    parser.add_argument("--rounds", type=int, metavar="N", help="communication rounds")
    parser.add_argument("--scale", metavar="S", help="small: fewer clients, points and rounds and a smaller model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, as in fedmix.eta=0.5; repeatable"
    )
    parser.add_argument(
        "--data-dir", metavar="D", help="where data files are (default: $FEDMIX_DATA, then the user's cache)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _after_options(parser: argparse.ArgumentParser) -> None:
    """Of commands that look at a run that was trained."""
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--clients", type=int, default=0, metavar="N", help="so many clients, drawn at random (all)")
    _engine_options(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    _data_options(parser)


def _engine_options(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--engine", default="local", metavar="E", help=f"local (all cores), serial (a plain loop){more}"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: all cores)")
    parser.add_argument("--device", default="cpu", metavar="D", help="where clients train: cpu, cuda, cuda:N or mps")


def _run_options(parser: argparse.ArgumentParser) -> None:
    _engine_options(parser, ", flower (Ray)")
    parser.add_argument("--out", metavar="DIR", help="where the results go (default: a folder under runs/)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in --out")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _changes(args: Any, **more: Any) -> dict[str, Any]:
    from fedmix.experiment.recipe import parse_changes

    changes = parse_changes(args.set)
    given = {"rounds": args.rounds, **more}
    return changes | {key: value for key, value in given.items() if value is not None}


def _train(args: Any) -> int:
    from fedmix.experiment.recipe import read_recipe

    warm = str(Path(args.warm_start).resolve()) if args.warm_start else None
    recipe = read_recipe(args.recipe, args.algorithm, _changes(args, seed=args.seed, warm_start=warm), args.scale)
    inside = (Path(args.recipe) / "recipe.toml").is_file()
    default = args.recipe if inside else f"runs/{recipe.name}-{recipe.algorithm}-seed{recipe.seed}"
    out = Path(args.out or default)
    summary = _run_one(recipe, out, args)
    if summary is None:
        return 130
    if args.json:
        print(json.dumps(summary))
    else:
        from fedmix.report.text import summary_table

        _print(summary_table(summary))
        print(f"results: {out}")
    return 0


def _run_one(recipe: Any, out: Path, args: Any) -> dict[str, Any] | None:
    """Train one recipe into one directory; None if it was asked to stop on the way."""
    from fedmix.experiment.build import build
    from fedmix.experiment.record import RunDirectory
    from fedmix.experiment.run import Stopped, check, run
    from fedmix.progress import progress

    experiment = build(recipe, data_dir=args.data_dir)
    check(experiment, args.engine, args.workers, args.device)
    directory = RunDirectory.open(out, recipe, args.resume, args.overwrite)
    try:
        small = "" if recipe.scale == "full" else f", scale {recipe.scale}"
        with progress(f"{recipe.algorithm}, seed {recipe.seed}{small}", args.quiet) as watch:
            return run(experiment, directory, args.engine, args.workers, watch, args.device, args.data_dir)
    except Stopped as stopped:
        print(f"fedmix: {stopped}", file=sys.stderr)
        return None
    finally:
        directory.close()


def _compare(args: Any) -> int:
    from fedmix.experiment.files import write_json
    from fedmix.experiment.recipe import read_recipe
    from fedmix.report.text import comparison, comparison_table, q_map

    methods = [name.strip() for name in args.algorithms.split(",") if name.strip()]
    first = read_recipe(args.recipe, methods[0] if methods else None, _changes(args), args.scale)
    seeds = _whole_numbers(args.seeds) if args.seeds else [first.seed]
    recipes = [
        read_recipe(args.recipe, method, _changes(args, seed=seed), args.scale) for method in methods for seed in seeds
    ]
    if not recipes:
        raise SettingError(f"--algorithms must name methods: {METHOD_HELP}. Got {args.algorithms!r} instead.")
    out = Path(args.out or f"runs/compare-{first.name}")
    summaries = []
    for recipe in recipes:
        summary = _run_one(recipe, out / f"{recipe.algorithm}-seed{recipe.seed}", args)
        if summary is None:
            print("fedmix: the methods before it are done; the same command with --resume goes on", file=sys.stderr)
            return 130
        summaries.append(summary)
    rows = comparison(summaries)
    write_json(out / "comparison.json", rows)
    if args.json:
        print(json.dumps(rows))
        return 0
    _print(comparison_table(rows))
    for summary in summaries:
        if "q_zs" in summary and summary["seed"] == seeds[0]:
            _print(q_map(summary))
    print(f"results: {out}")
    return 0


def _sweep(args: Any) -> int:
    from fedmix.experiment.files import write_json
    from fedmix.experiment.recipe import parse_grid, read_recipe
    from fedmix.report.sweep import best, draw_sweep, sweep_rows, sweep_table

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
            print(f"fedmix: {name} ({len(runs) + len(failed) + 1} of {len(todo)})", file=sys.stderr)
        try:
            summary = _run_one(recipe, out / name, args)
        except ClientError as error:  # of this point of the grid alone: a rate that is too large, say
            failed.append(f"{name}: {error}")
            _complain(failed[-1])
            continue
        if summary is None:
            print("fedmix: the runs before it are done; the same command with --resume goes on", file=sys.stderr)
            return 130
        runs.append((settings, summary))
    rows = sweep_rows(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "sweep.json", {"rows": rows, "failed": failed})
    drawn = _draw(draw_sweep, rows, out / "sweep.png") if rows else None
    if args.json:
        print(json.dumps({"rows": rows, "failed": failed, "picture": drawn}))
    elif rows:
        _print(sweep_table(rows))
        print(f"{best(rows)}\nresults: {out}" + (f", {drawn}" if drawn else ""))
    return 2 if failed else 0


def _evaluate(args: Any) -> int:
    from fedmix.experiment.inference import Options, evaluate_run
    from fedmix.progress import stages
    from fedmix.report.evaluation import draw_new_clients, evaluation_table

    options = Options(args.clients, args.engine, args.workers, args.device, args.vae, args.points)
    run = _restored(args)
    with stages(args.quiet) as watch:
        result = evaluate_run(run, options, watch)
    return _tell(args, run.path / "evaluation.json", result, draw_new_clients, "new-clients.png", evaluation_table)


def _audit(args: Any) -> int:
    from fedmix.experiment.audit import audit_run
    from fedmix.experiment.inference import Where
    from fedmix.progress import stages
    from fedmix.report.audit import audit_table, draw_audit

    where = Where(args.clients, args.engine, args.workers, args.device)
    run = _restored(args)
    with stages(args.quiet) as watch:
        result = audit_run(run, where, watch)
    return _tell(args, run.path / "audit.json", result, draw_audit, "audit.png", audit_table)


def _tell(args: Any, file: Path, result: dict[str, Any], draw: Any, picture: str, table: Callable[[Any], Any]) -> int:
    """What was found of a run: into its directory, as a picture, and as JSON or a table."""
    from fedmix.experiment.files import write_json

    write_json(file, result)
    drawn = _draw(draw, result, file.with_name(picture))
    if "json" in args:
        print(json.dumps(result | {"picture": drawn}))
        return 0
    _print(table(result))
    print(f"results: {file}" + (f", {drawn}" if drawn else ""))
    return 0


def _restored(args: Any) -> Any:
    """The run that a command looks at, with its data."""
    from fedmix.experiment.restore import restore
    from fedmix.experiment.run import HERE, check

    run = restore(args.run, data_dir=getattr(args, "data_dir", None))
    check(run.experiment, args.engine, args.workers, args.device, HERE)
    return run


def _draw(draw: Callable[[Any, Path], None], what: Any, picture: Path) -> str | None:
    """Where the picture is; None without Matplotlib."""
    try:
        draw(what, picture)
    except ModuleNotFoundError:
        print("fedmix: no picture: it needs Matplotlib: pip install 'fedmix[plots]'", file=sys.stderr)
        return None
    return str(picture) if picture.exists() else None


def _plan(args: Any) -> int:
    from fedmix.experiment.plan import plan_recipe
    from fedmix.experiment.recipe import read_recipe
    from fedmix.report.text import plan_table

    recipe = read_recipe(args.recipe, args.algorithm, _changes(args), args.scale)
    costs = plan_recipe(recipe, args.data_dir, args.workers)
    if args.json:
        print(json.dumps(costs))
    else:
        _print(plan_table(costs))
    return 0


def _split(args: Any) -> int:
    from fedmix.experiment.federate import build_federation, describe_split
    from fedmix.experiment.recipe import read_recipe
    from fedmix.report.split import draw_split, split_table

    recipe = read_recipe(args.recipe, None, _changes(args, seed=args.seed), args.scale)
    about = {"recipe": recipe.name, "scale": recipe.scale, "seed": recipe.seed}
    split = about | describe_split(build_federation(recipe.data, recipe.seed, args.data_dir))
    picture = Path(args.out or f"runs/split-{recipe.name}-seed{recipe.seed}.png")
    if args.out and picture.exists() and not args.overwrite:
        raise SettingError(f"{picture} is there already. Use --overwrite to replace it, or another --out.")
    drawn: str | None = str(picture)
    try:
        draw_split(split, picture)
    except ModuleNotFoundError:
        if args.out:
            raise SettingError("a picture needs Matplotlib; install it with: pip install 'fedmix[plots]'.") from None
        drawn = None
    if args.json:
        print(json.dumps(split | {"picture": drawn}))
    else:
        _print(split_table(split))
        print(f"picture: {drawn or 'none; it needs Matplotlib: pip install fedmix[plots]'}")
    return 0


def _recipes(args: Any) -> int:
    from fedmix.experiment.recipe import read_recipe, shipped

    rows = []
    for name in shipped():
        recipe = read_recipe(name)
        rows.append(
            {
                "recipe": name,
                "about": recipe.description,
                "clients": recipe.data.clients,
                "rounds": recipe.rounds,
                "side information c": recipe.data.side,
            }
        )
    if args.json:
        print(json.dumps(rows))
        return 0
    from rich.table import Table

    table = Table(caption="fedmix train RECIPE; a TOML file of your own works as well", caption_justify="left")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row.values()))
    _print(table)
    return 0


def _data(args: Any) -> int:
    from fedmix.data.files import folders
    from fedmix.data.sources import survey

    data_dir = getattr(args, "data_dir", None)
    looked = [str(folder) for folder in folders(data_dir)]
    rows = survey(data_dir)
    if "json" in args:
        print(json.dumps({"looked": looked, "sources": rows}))
        return 0
    from rich.table import Table

    table = Table(
        caption=f"looked for in {', '.join(looked)}; change it with --data-dir or FEDMIX_DATA", caption_justify="left"
    )
    for column in ("source", "what it is", "here", "where, or where to get it"):
        table.add_column(column, overflow="fold")
    for row in rows:
        missing = "" if not row["found"] else f"{row['found']} has no {', '.join(row['missing'])}; "
        get = f"fedmix data get {row['source']}, or " if row["get"] else ""
        where = row["found"] if row["ready"] else f"{missing}{get}{row['publisher']}"
        table.add_row(row["source"], row["about"], "yes" if row["ready"] else "no", where)
    _print(table)
    return 0


def _data_get(args: Any) -> int:
    from fedmix.data.download import get
    from fedmix.data.files import cache_folder, intact
    from fedmix.data.sources import DATASETS, NEEDS
    from fedmix.errors import one_of
    from fedmix.progress import downloads

    if args.name == "digits":
        print("digits: embedded, nothing to download")
        return 0
    if args.name not in DATASETS:
        raise SettingError(one_of("a data set", args.name, DATASETS))
    data_dir = getattr(args, "data_dir", None)
    folder = Path(data_dir).expanduser() if data_dir else cache_folder() / "data"
    here: dict[str, str] = {}
    with downloads(args.quiet) as watch:
        for dataset in (*NEEDS.get(args.name, ()), DATASETS[args.name]):
            version, paths, missing = dataset.look(data_dir)
            if missing or not intact(version, paths):
                paths = get(dataset, folder, args.mirror, watch)
            here[dataset.name] = str(paths[0].parent)
    if "json" in args:
        print(json.dumps(here))
    else:
        for name, place in here.items():
            print(f"{name}: {place}")
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


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 110).print(renderable)


if __name__ == "__main__":
    main()
