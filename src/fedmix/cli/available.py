"""What there is: recipes, data sets, and how to get them."""

import json
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
    show(table)
    return 0


def data(args: Any) -> int:
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
    show(table)
    return 0


def data_get(args: Any) -> int:
    from fedmix.cli.progress import downloads
    from fedmix.data.download import get
    from fedmix.data.files import cache_folder, intact
    from fedmix.data.sources import DATASETS, NEEDS
    from fedmix.errors import one_of

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
