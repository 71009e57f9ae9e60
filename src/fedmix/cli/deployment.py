"""Commands for a federation of machines: folders, processes, a run over them, predictions at a site."""

import csv
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from fedmix.cli.output import names_in, say, show, show_summary, told_unless
from fedmix.cli.training import changes
from fedmix.errors import RunError, SettingError


def _recipe(args: Any, name: str) -> Any:
    from fedmix.settings.reading import read_recipe

    return read_recipe(name, getattr(args, "algorithm", None), changes(args, seed=args.seed), args.scale)


def init(args: Any) -> int:
    from fedmix.deploy.folder import init as make
    from fedmix.engines.flower import flwr
    from fedmix.settings.reading import read_recipe

    flwr()
    sites = names_in(args.sites)
    files = make(Path(args.folder), sites, args.address, read_recipe(args.recipe) if args.recipe else None)
    if args.json:
        print(json.dumps({"folder": args.folder, "files": files}))
    else:
        print(f"{args.folder}: a server and {len(sites)} sites; what to do with them is in {args.folder}/README.md")
    return 0


def check(args: Any) -> int:
    from fedmix.deploy.check import check as look

    rows = look(Path(args.folder))
    wrong = [row for row in rows if not row["ok"]]
    if args.json:
        print(json.dumps(rows))
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for column in ("check", "", "found"):
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(row["check"], "ok" if row["ok"] else "WRONG", Text(row["found"]))
        show(table)
    if wrong:
        say(f"error: {len(wrong)} of {len(rows)} checks failed; the first is {wrong[0]['check']}")
        return 2
    return 0


def accept(args: Any) -> int:
    from fedmix.deploy import acceptance
    from fedmix.deploy.folder import read_site

    folder = Path(args.folder)
    read_site(folder)
    if args.recipe:
        acceptance.accept(folder, _recipe(args, args.recipe))
    rows: list[dict[str, Any]] = [
        {
            "digest": digest,
            "name": recipe.name,
            "algorithm": recipe.algorithm,
            "rounds": recipe.rounds,
            "imports": acceptance.names_in_recipe(recipe),
        }
        for digest, recipe in acceptance.accepted_recipes(folder).items()
    ]
    if args.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        imported = f"; imports {', '.join(row['imports'])}" if row["imports"] else ""
        print(f"{row['digest'][:12]}  {row['name']}, {row['algorithm']}, {row['rounds']} rounds{imported}")
    say(f"{folder} takes part in runs of these recipes, and of no others")
    return 0


def serve(args: Any) -> int:
    from fedmix.deploy import serve as serving

    folder = Path(args.folder)
    if args.show:
        environment, commands = serving.commands(folder)
        for key, value in environment.items():
            print(f"export {key}={shlex.quote(value)}")
        for command in commands:
            print(shlex.join(command))
        return 0
    serving.serve(folder, say, args.wait)
    return 0


def run(args: Any) -> int:
    from fedmix.deploy.acceptance import agreed_recipe
    from fedmix.deploy.folder import read_server, server_folder
    from fedmix.engines.flower import flwr

    flwr()
    folder = server_folder(Path(args.folder))
    read_server(folder)
    if not args.recipe:
        agreed_recipe(folder)
    recipe = _recipe(args, args.recipe or str(folder / "recipe.toml"))
    out = Path(args.out) if args.out else _default_out(folder, recipe)
    return _run(args, folder, recipe, out)


def _run(args: Any, folder: Path, recipe: Any, out: Path) -> int:
    from fedmix.cli.progress import progress
    from fedmix.deploy.submit import Submission
    from fedmix.running.loggers import check_tools, logging_to

    quiet, tools = args.quiet, check_tools(args.log)
    title = f"{recipe.algorithm}, seed {recipe.seed}"
    with progress(title, quiet) as bar, logging_to(tools, out, recipe, say, bar, told_unless(quiet)) as told:
        submission = Submission(folder, recipe, out, args.data_dir, args.wait, told, told_unless(quiet))
        try:
            summary = submission.train(args.resume, args.overwrite)
        except KeyboardInterrupt:
            say(f"stopped. Go on with the same command and --resume; what is done is in {out}")
            return 130
    show_summary(summary, out, args.json)
    return 0


def up(args: Any) -> int:
    from fedmix.deploy import local
    from fedmix.deploy.serve import told_to_stop
    from fedmix.engines.flower import flwr

    flwr()
    folder = Path(args.out)
    there = (folder / "server" / "server.toml").is_file()
    if args.local < 1:
        raise SettingError(f"--local must be 1 or more. Got {args.local} instead.")
    recipe = _recipe(args, args.recipe)
    if not there:
        local.prepare(folder, args.local, recipe, args.data_dir)
    elif len(list((folder / "sites").iterdir())) != args.local:
        raise SettingError(f"{folder} holds another number of sites than --local {args.local}; choose another --out.")
    else:
        local.agree(folder, recipe)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: everything is stopped
    with local.up(folder, say) as running:
        if args.train:
            return _run(args, folder / "server", recipe, _default_out(folder / "server", recipe))
        say(f"{args.local} sites are connected; logs in {folder / 'logs'}")
        say(f"train with: fedmix deploy run {folder}. Ctrl-C ends server and sites")
        with told_to_stop() as stop:
            while not stop.wait(0.5):
                for name, own in running.items():
                    if own.trouble:
                        raise RunError(f"{name}: {own.trouble}")
    return 0


def _default_out(folder: Path, recipe: Any) -> Path:
    from fedmix.settings.reading import folder_of_run

    return folder / "runs" / folder_of_run(recipe, f"{recipe.name}-")


def predict(args: Any) -> int:
    from fedmix.deploy.predict import predict_site

    out = Path(args.out) if args.out else None
    if out and out.suffix not in (".csv", ".npz"):
        raise SettingError(f"--out must be a .csv or .npz file. Got {args.out!r} instead.")
    if out and out.exists() and not args.overwrite:
        raise SettingError(f"{out} is there already. Use --overwrite to replace it, or another --out.")
    found = predict_site(Path(args.site), Path(args.input), args.client, args.run, args.x, args.y)
    if out:
        _write_predictions(out, found)
    if args.json:
        print(json.dumps(found))
        return 0
    if not out:
        _rows(sys.stdout, found)
    good = f", accuracy {100 * found['accuracy']:.1f} % of those with labels" if "accuracy" in found else ""
    words = f"client {found['client']}, round {found['round']}: {len(found['predictions']):,} predictions{good}"
    say(words + (f"; {out}" if out else ""))
    return 0


def _rows(file: Any, found: dict[str, Any]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["label", *(f"p({name})" for name in found["labels"])])
    for label, row in zip(found["predictions"], found["probabilities"], strict=True):
        writer.writerow([label, *row])


def _write_predictions(path: Path, found: dict[str, Any]) -> None:
    import numpy as np

    part = path.with_name(path.name + ".part")
    if path.suffix == ".csv":
        with open(part, "w", newline="") as file:
            _rows(file, found)
    else:
        with open(part, "wb") as binary:
            np.savez(
                binary,
                label=np.array(found["predictions"]),
                p=np.array(found["probabilities"], dtype=np.float32),
                labels=np.array(found["labels"]),
            )
    os.replace(part, path)
