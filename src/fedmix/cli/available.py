"""Commands that list what there is, recipes and data sets, and download data sets."""

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmix.cli.output import show
from fedmix.errors import SettingError


def recipes(args: Any) -> int:
    from fedmix.settings.reading import read_recipe, shipped

    rows = []
    for name in shipped():
        recipe = read_recipe(name)
        rows.append(
            {
                "recipe": name,
                "about": recipe.description,
                "clients": recipe.data.clients or "all",
                "rounds": recipe.rounds,
                "side information c": recipe.data.side,
            }
        )
    if args.json:
        print(json.dumps(rows))
    else:
        _show_recipes(rows)
    return 0


def settings(args: Any) -> int:
    from fedmix.settings.explain import about_section, find, sections, settings_of

    chosen = {"": find(args.name)} if args.name else {name: settings_of(name) for name in sections()}
    if args.json:
        print(json.dumps([vars(setting) for rows in chosen.values() for setting in rows]))
        return 0
    width = shutil.get_terminal_size().columns
    for section, rows in chosen.items():
        if not args.name:
            title = f"[{section}]" if section else "the recipe itself"
            print(f"{title}: {about_section(section)}\n")
        for setting in rows:
            print(f"  {setting.name} = {setting.default}")
            if setting.meaning:
                print(textwrap.fill(setting.meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
        print()
    print("--set NAME=VALUE on the command line; NAME={...} in Python; a line of [section] in a TOML file")
    return 0


def _show_recipes(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    table = Table(caption="fedmix train RECIPE; a TOML file of your own works as well", caption_justify="left")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row.values()))
    show(table)


def data(args: Any) -> int:
    from fedmix.data.files import folders
    from fedmix.data.sources import survey

    data_dir = getattr(args, "data_dir", None)
    looked = [str(folder) for folder in folders(data_dir)]
    rows = survey(data_dir)
    if "json" in args:
        print(json.dumps({"looked": looked, "sources": rows}))
    else:
        _show_sources(looked, rows)
    return 0


def _show_sources(looked: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    table = Table(
        caption=f"looked for in {', '.join(looked)}; change it with --data-dir or FEDMIX_DATA", caption_justify="left"
    )
    for column in ("source", "what it is", "here", "where, or where to get it"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row["source"], row["about"], "yes" if row["ready"] else "no", _where(row))
    show(table)


def _where(row: Mapping[str, Any]) -> str:
    """Where a data set is, or where to get it."""
    folder: str = row["found"]
    if row["ready"]:
        return folder
    missing = f"{folder} has no {', '.join(row['missing'])}; " if folder else ""
    get = f"fedmix data get {row['source']}, or " if row["get"] else ""
    return f"{missing}{get}{row['publisher']}"


def data_get(args: Any) -> int:
    from fedmix.data.sources import DATASETS
    from fedmix.errors import one_of

    if args.name == "digits":
        print("digits: embedded, nothing to download")
        return 0
    if args.name not in DATASETS:
        raise SettingError(one_of("a data set", args.name, DATASETS))
    folders = _download(args)
    if "json" in args:
        print(json.dumps(folders))
        return 0
    for name, folder in folders.items():
        print(f"{name}: {folder}")
    return 0


def _download(args: Any) -> dict[str, str]:
    """Download a data set and those that it needs, unless they are here; the folder of each."""
    from fedmix.cli.progress import downloads
    from fedmix.data.download import get
    from fedmix.data.files import cache_folder, intact
    from fedmix.data.sources import DATASETS, NEEDS

    data_dir = getattr(args, "data_dir", None)
    target = Path(data_dir).expanduser() if data_dir else cache_folder() / "data"
    folders: dict[str, str] = {}
    with downloads(args.quiet) as watch:
        for dataset in (*NEEDS.get(args.name, ()), DATASETS[args.name]):
            version, paths, missing = dataset.look(data_dir)
            if missing or not intact(version, paths):
                paths = get(dataset, target, args.mirror, watch)
            folders[dataset.name] = str(paths[0].parent)
    return folders
