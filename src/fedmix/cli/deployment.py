"""Commands for a federation of machines: folders, processes, a run over them, predictions at a site."""

import csv
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmix.cli.output import names_in, say, say_unless, show, show_summary
from fedmix.cli.training import changes
from fedmix.errors import RunError, SettingError


def _recipe(args: Any, name: str) -> Any:
    """A recipe with the changes that the flags make."""
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
        _show_checks(rows)
    if wrong:
        say(f"error: {len(wrong)} of {len(rows)} checks failed; the first is {wrong[0]['check']}")
        return 2
    return 0


def _show_checks(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row["check"], "ok" if row["ok"] else "WRONG", Text(row["found"]))
    show(table)


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

    tools = check_tools(args.log)
    hint = say_unless(args.quiet)
    title = f"{recipe.algorithm}, seed {recipe.seed}"
    with progress(title, args.quiet) as bar, logging_to(tools, out, recipe, say, bar, hint) as watch:
        submission = Submission(folder, recipe, out, args.data_dir, args.wait, watch, hint)
        try:
            summary = submission.train(args.resume, args.overwrite)
        except KeyboardInterrupt:
            say(f"stopped. Go on with the same command and --resume; what is done is in {out}")
            return 130
    show_summary(summary, out, args.json)
    return 0


def up(args: Any) -> int:
    from fedmix.deploy import local
    from fedmix.engines.flower import flwr

    flwr()
    folder = Path(args.out)
    if args.local < 1:
        raise SettingError(f"--local must be 1 or more. Got {args.local} instead.")
    recipe = _recipe(args, args.recipe)
    _prepare(args, folder, recipe)
    # SIGTERM is taken for Ctrl-C, so that everything is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with local.up(folder, say) as running:
        if args.train:
            return _run(args, folder / "server", recipe, _default_out(folder / "server", recipe))
        say(f"{args.local} sites are connected; logs in {folder / 'logs'}")
        say(f"train with: fedmix deploy run {folder}. Ctrl-C ends server and sites")
        _wait_for_ctrl_c(running)
    return 0


def _prepare(args: Any, folder: Path, recipe: Any) -> None:
    """A new federation, or the one that is in the folder, with this recipe."""
    from fedmix.deploy import local

    if not (folder / "server" / "server.toml").is_file():
        local.prepare(folder, args.local, recipe, args.data_dir)
        return
    sites = list((folder / "sites").iterdir())
    if len(sites) != args.local:
        raise SettingError(f"{folder} holds another number of sites than --local {args.local}; choose another --out.")
    local.agree(folder, recipe)


def _wait_for_ctrl_c(running: Mapping[str, Any]) -> None:
    """Wait until somebody asks to stop. A server or site that is in trouble ends it."""
    from fedmix.deploy.serve import told_to_stop

    with told_to_stop() as stop:
        while not stop.wait(0.5):
            for name, member in running.items():
                if member.trouble:
                    raise RunError(f"{name}: {member.trouble}")


def _default_out(folder: Path, recipe: Any) -> Path:
    from fedmix.settings.reading import folder_of_run

    return folder / "runs" / folder_of_run(recipe, f"{recipe.name}-")


def predict(args: Any) -> int:
    from fedmix.deploy.predict import predict_site

    if bool(args.site) == bool(args.trained):
        raise SettingError("predict needs a run directory, or --site DIR, and not both.")
    out = _file_for_predictions(args) if args.out else None
    if args.trained:
        from fedmix.api import predict_with

        at = int(args.round) if args.round.isdecimal() else args.round
        result = predict_with(args.trained, args.input, args.client, at, args.x, args.y)
    else:
        result = predict_site(Path(args.site), Path(args.input), args.client, args.run, args.x, args.y)
    if out:
        _write_predictions(out, result)
    if args.json:
        print(json.dumps(result))
        return 0
    if not out:
        _write_rows(sys.stdout, result)
    and_file = f"; {out}" if out else ""
    say(f"{_words_on_predictions(result)}{and_file}")
    return 0


def _file_for_predictions(args: Any) -> Path:
    out = Path(args.out)
    if out.suffix not in (".csv", ".npz"):
        raise SettingError(f"--out must be a .csv or .npz file. Got {args.out!r} instead.")
    if out.exists() and not args.overwrite:
        raise SettingError(f"{out} is there already. Use --overwrite to replace it, or another --out.")
    return out


def _words_on_predictions(result: Mapping[str, Any]) -> str:
    who = f"client {result['client']}" if result["client"] else "somebody who is none of the clients"
    words = f"{who}, round {result['round']}: {len(result['predictions']):,} predictions"
    if "accuracy" not in result:
        return words
    return f"{words}, accuracy {100 * result['accuracy']:.1f} % of those with labels"


def _write_rows(file: Any, result: Mapping[str, Any]) -> None:
    """Predictions as CSV: the label of each input, then the probability of each label."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["label", *(f"p({name})" for name in result["labels"])])
    for label, row in zip(result["predictions"], result["probabilities"], strict=True):
        writer.writerow([label, *row])


def _write_predictions(path: Path, result: Mapping[str, Any]) -> None:
    """Predictions to a file, which is whole or not there at all."""
    import numpy as np

    part = path.with_name(path.name + ".part")
    if path.suffix == ".csv":
        with open(part, "w", newline="") as file:
            _write_rows(file, result)
    else:
        with open(part, "wb") as binary:
            np.savez(
                binary,
                label=np.array(result["predictions"]),
                p=np.array(result["probabilities"], dtype=np.float32),
                labels=np.array(result["labels"]),
            )
    os.replace(part, path)
