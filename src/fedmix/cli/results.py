"""Commands that show results of runs, or data before it is trained on."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedmix.cli.output import picture_of, show
from fedmix.cli.training import changes
from fedmix.errors import SettingError


def evaluate(args: Any) -> int:
    from fedmix import api, schema
    from fedmix.cli.progress import stages
    from fedmix.report.evaluation import draw_new_clients, evaluation_table

    with stages(args.quiet) as watch:
        result = api.evaluate(
            args.run,
            data_dir=getattr(args, "data_dir", None),
            clients=args.clients,
            densities=args.vae,
            points=args.points,
            engine=args.engine,
            workers=args.workers,
            device=args.device,
            watch=watch,
        )
    file = Path(args.run) / schema.EVALUATION
    return _tell(args, file, result, draw_new_clients, schema.NEW_CLIENTS_PICTURE, evaluation_table)


def audit(args: Any) -> int:
    from fedmix import api, schema
    from fedmix.cli.progress import stages
    from fedmix.report.audit import audit_table, draw_audit

    with stages(args.quiet) as watch:
        result = api.audit(
            args.run,
            data_dir=getattr(args, "data_dir", None),
            clients=args.clients,
            engine=args.engine,
            workers=args.workers,
            device=args.device,
            watch=watch,
        )
    return _tell(args, Path(args.run) / schema.AUDIT, result, draw_audit, schema.AUDIT_PICTURE, audit_table)


def _tell(
    args: Any, file: Path, result: Mapping[str, Any], draw: Any, picture: str, table: Callable[[Any], Any]
) -> int:
    """Write what a command found out about a run to its directory, draw it, and print it as JSON or as a table."""
    from fedmix.running.files import write_json

    write_json(file, result)
    drawn = picture_of(draw, result, file.with_name(picture))
    if "json" in args:
        print(json.dumps({**result, "picture": drawn}))
        return 0
    show(table(result))
    and_picture = f", {drawn}" if drawn else ""
    print(f"results: {file}{and_picture}")
    return 0


def split(args: Any) -> int:
    from fedmix.report.split import split_table
    from fedmix.settings.federate import build_federation, describe_split
    from fedmix.settings.reading import read_recipe

    recipe = read_recipe(args.recipe, None, changes(args, seed=args.seed), args.scale)
    about = {"recipe": recipe.name, "scale": recipe.scale, "seed": recipe.seed}
    split = about | describe_split(build_federation(recipe.data, recipe.seed, args.data_dir))
    picture = Path(args.out or f"runs/split-{recipe.name}-seed{recipe.seed}.png")
    if args.out and picture.exists() and not args.overwrite:
        raise SettingError(f"{picture} is there already. Use --overwrite to replace it, or another --out.")
    drawn = _draw_split(split, picture, required=bool(args.out))
    if args.json:
        print(json.dumps(split | {"picture": drawn}))
    else:
        show(split_table(split))
        print(f"picture: {drawn or 'none; it needs Matplotlib: pip install fedmix[plots]'}")
    return 0


def _draw_split(split: Mapping[str, Any], picture: Path, required: bool) -> str | None:
    """Where the picture is; None: there is none without Matplotlib. required: refuse to go on without it."""
    from fedmix.report.split import draw_split

    try:
        draw_split(split, picture)
    except ModuleNotFoundError:
        if required:
            raise SettingError("a picture needs Matplotlib; install it with: pip install 'fedmix[plots]'.") from None
        return None
    return str(picture)


def report(args: Any) -> int:
    from fedmix.report.page import report as page_of
    from fedmix.report.runs import read_runs
    from fedmix.running.files import write_bytes

    out = Path(args.out or Path(args.runs[0]) / "report.html")
    if out.is_dir():
        raise SettingError(f"--out must be a file. {out} is a folder; try {out / 'report.html'}.")
    if args.out and out.exists() and not args.overwrite:
        raise SettingError(f"{out} is there already. Use --overwrite to replace it, or another --out.")
    text = page_of(read_runs(args.runs))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, text.encode())
    print(out)
    return 0


def watch(args: Any) -> int:
    from fedmix.report.live import watch as serve

    if not 0 <= args.port < 65536:
        raise SettingError(f"--port must be from 0 to 65535. Got {args.port} instead.")
    try:
        serve(args.runs, args.port, lambda url: print(f"{url}  (Ctrl-C ends it)", flush=True))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise SettingError(
            f"--port {args.port} cannot be used ({error.strerror}); choose another, or 0 for any."
        ) from error
    return 0


def figures(args: Any) -> int:
    from fedmix.report.runs import read_runs

    folder = Path(args.out)
    if folder.exists() and any(folder.iterdir()) and not args.overwrite:
        raise SettingError(f"{folder} holds files already. Use --overwrite to replace figures in it, or another --out.")
    runs = read_runs(args.runs)
    try:
        from fedmix.report.figures import draw_figures

        for name in draw_figures(runs, folder):
            print(folder / name)
    except ModuleNotFoundError:
        raise SettingError("figures need Matplotlib; install it with: pip install 'fedmix[plots]'.") from None
    return 0


def show_run(args: Any) -> int:
    from fedmix.report.runs import read_runs
    from fedmix.report.show import show as essentials

    for run in read_runs(args.runs):
        show(essentials(run))
    return 0
