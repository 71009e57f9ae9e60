"""Every command with its options."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from fedmix import __version__
from fedmix.cli import available, deployment, results, training
from fedmix.cli.training import METHOD_HELP

EXAMPLES = """examples:
  fedmix recipes                                     what can be trained
  fedmix plan digits-skew                            what it will cost
  fedmix split digits-skew                           who will hold what, as a table and a picture
  fedmix train digits-permutation --out runs/first   train; results in runs/first
  fedmix train runs/first --resume                   go on after an interruption
  fedmix predict runs/first --client 3 --input new.npz   labels and probabilities for new inputs
  fedmix settings training                           what can be set, and what it means
  fedmix evaluate runs/first                         how good it is for old clients, new clients, unknown clients
  fedmix report runs/first                           one page to look at; fedmix watch shows it live
  fedmix audit runs/first                            what the server could have learnt of the clients' labels
  fedmix compare digits-skew --algorithms fedmix,fedavg --seeds 0,1,2
  fedmix train digits-skew --log tensorboard,mlflow,wandb          the same numbers in the tools you use
  fedmix sweep digits-skew --set fedmix.eta=0,0.25,0.5,0.75       accuracy against bytes
  fedmix train digits-skew --set fedmix.experts=8 --set training.client_lr=0.1
  fedmix train cifar10 --scale small                 the paper's experiment in minutes, scaled down
  fedmix data get cifar10                            download a data set from its publisher
  fedmix deploy up digits-skew --local 3 --train     a federation of machines, tried on this one
"""
DEPLOY_EXAMPLES = """examples:
  fedmix deploy up digits-skew --local 3 --train       try it: a server and three sites on this machine, TLS and keys
  fedmix deploy init federation --sites a,b,c --address fedmix.example.org:8000
  fedmix deploy check federation/sites/a               at site a: data, labels, shapes, certificate, server
  fedmix deploy serve federation/sites/a               at site a: takes part until Ctrl-C
  fedmix deploy accept federation/sites/a new.toml     at site a: its owner accepts another recipe
  fedmix deploy run federation                         at the server: train
"""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line. `fedmix --help` lists the commands in the order in which they are added here."""
    parser = Parser(
        prog="fedmix",
        description="Train a federated mixture of experts: K expert models shared by all clients, a private gate on each.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedmix {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _training_commands(commands)
    _commands_after_training(commands)
    _report_commands(commands)
    _commands_before_training(commands)
    _data_commands(commands)
    _deploy_commands(commands)
    _predict_command(commands)
    return parser


# -- commands ----------------------------------------------------------------------------------------------------------


def _training_commands(commands: Any) -> None:
    """fedmix train | compare | sweep."""
    train = _command(commands, "train", training.train, "train one method on one recipe")
    _recipe_options(train)
    _run_options(train)
    _algorithm_option(train)
    train.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="the seed for the split of the data, the first weights, and the order of clients and points",
    )
    train.add_argument("--warm-start", metavar="RUN", help="start from the experts of another run")

    compare = _command(commands, "compare", training.compare, "train several methods, print one table")
    _recipe_options(compare)
    _run_options(compare)
    methods = "fedmix,fedavg,biased-fedavg,local-global"
    compare.add_argument(
        "--algorithms", metavar="A,B,...", default=methods, help=f"methods by name (default: {methods})"
    )
    _seeds_option(compare)

    sweep = _command(
        commands, "sweep", training.sweep, "train a grid of settings: one table, one figure, each run resumable"
    )
    _recipe_options(sweep)
    _run_options(sweep)
    _algorithm_option(sweep)
    _seeds_option(sweep)
    sweep.add_argument(
        "--by",
        default="as-sent",
        metavar="KIND",
        help="choose the best by this accuracy on validation data: as-sent, server or no-identity (%(default)s)",
    )
    sweep.epilog = "example: fedmix sweep digits-skew --set fedmix.eta=0,0.25,0.5,0.75 --rounds 20 --seeds 0,1,2"


def _commands_after_training(commands: Any) -> None:
    """fedmix evaluate | audit."""
    evaluate = _command(
        commands,
        "evaluate",
        results.evaluate,
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

    audit = _command(
        commands, "audit", results.audit, "what the server could have learnt of the clients' labels in a run"
    )
    _after_options(audit)


def _report_commands(commands: Any) -> None:
    """fedmix report | watch | figures | show."""
    report = _command(commands, "report", results.report, "one self-contained HTML page of one run or several")
    _runs_option(report)
    report.add_argument("--out", metavar="FILE", help="the page (default: report.html in the first RUN or folder)")
    report.add_argument("--overwrite", action="store_true", help="replace the page that is in --out")

    watch = _command(
        commands,
        "watch",
        results.watch,
        "the page of fedmix report, live in a browser on this machine, while a run goes on",
    )
    _runs_option(watch)
    watch.add_argument(
        "--port", type=int, default=8765, metavar="N", help="a port of this machine; 0: any that is free (%(default)s)"
    )

    figures = _command(commands, "figures", results.figures, "every figure as SVG and PNG fit for a paper, and tables")
    _runs_option(figures)
    figures.add_argument("--out", required=True, metavar="DIR", help="the folder for the figures and tables")
    figures.add_argument("--overwrite", action="store_true", help="replace figures that are there")

    show = _command(
        commands, "show", results.show_run, "the essentials of a run on the terminal: sparklines, who uses what"
    )
    _runs_option(show)


def _commands_before_training(commands: Any) -> None:
    """fedmix plan | split."""
    plan = _command(commands, "plan", training.plan, "parameters, bytes, FLOP, memory and time, before anything runs")
    _recipe_options(plan)
    _algorithm_option(plan)
    plan.add_argument(
        "--workers", type=int, metavar="N", help="how many clients train side by side (default: all cores)"
    )
    plan.add_argument(
        "--shared",
        action="store_true",
        help="compare what it costs when FedMix's experts share nothing, more and more layers, or all but the output layer",
    )

    split = _command(
        commands, "split", results.split, "draw who holds what: clients by classes, as a table and a picture"
    )
    _recipe_options(split)
    split.add_argument("--seed", type=int, metavar="N", help="the seed for the split (default: the recipe's)")
    split.add_argument("--out", metavar="FILE", help="the picture: .png, .svg or .pdf (default: a .png under runs/)")
    split.add_argument("--overwrite", action="store_true", help="replace the picture that is in --out")


def _data_commands(commands: Any) -> None:
    """fedmix settings | recipes | data | data get."""
    settings = _command(
        commands, "settings", available.settings, "explain the settings of a recipe: all of them, a section, or one"
    )
    settings.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="NAME",
        help="a section (training), a setting (fedmix.eta), or its last part",
    )
    settings.add_argument("--json", action="store_true", help="print JSON")

    recipes = _command(commands, "recipes", available.recipes, "list the recipes that come with fedmix")
    recipes.add_argument("--json", action="store_true", help="print JSON")

    data = _command(
        commands, "data", available.data, "list the data sets: what is here, what is missing, where to get it"
    )
    _data_options(data)
    actions = data.add_subparsers(title="actions", metavar="ACTION")
    get = _command(
        actions, "get", available.data_get, "download a data set from its publisher: progress, resume, checksums"
    )
    get.add_argument("name", metavar="NAME", help="a data set of the list that `fedmix data` prints")
    get.add_argument("--mirror", metavar="URL", help="take the publisher's files from here, by their names")
    _quiet_option(get)
    _data_options(get, "where the data set goes, and is looked for first (default: the user's cache)")


def _deploy_commands(commands: Any) -> None:
    """fedmix deploy init | check | accept | serve | run | up."""
    deploy = commands.add_parser(
        "deploy",
        help="a federation of machines, on Flower: keys, checks, processes, a run over them",
        description="A federation of machines, on Flower. docs/deploy.md leads from nothing to three sites.",
        epilog=DEPLOY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = deploy.add_subparsers(title="actions", required=True, metavar="ACTION")
    _folder_actions(actions)
    _process_actions(actions)


def _folder_actions(actions: Any) -> None:
    """fedmix deploy init | check | accept."""
    init = _command(actions, "init", deployment.init, "write certificates, keys, settings and start commands")
    init.add_argument("folder", metavar="DIR", help="a new folder; what to do with its parts is in its README.md")
    init.add_argument("--sites", required=True, metavar="A,B,...", help="names of the sites")
    init.add_argument(
        "--address",
        default="localhost:8000",
        metavar="HOST:PORT",
        help="where sites will find the server (%(default)s)",
    )
    init.add_argument(
        "--recipe", metavar="R", help="for trying out: a recipe with data of its own, of which each site gets a part"
    )
    init.add_argument("--json", action="store_true", help="print JSON")

    check = _command(actions, "check", deployment.check, "say what is wrong with a folder before anything is trained")
    check.add_argument("folder", metavar="DIR", help="the folder of a site or of the server")
    check.add_argument("--json", action="store_true", help="print JSON")

    accept = _command(
        actions,
        "accept",
        deployment.accept,
        "at a site: accept a recipe that the server may train, or list those accepted",
    )
    accept.add_argument("folder", metavar="DIR", help="the site's folder")
    accept.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file or a shipped recipe; without it, list")
    _algorithm_option(accept)
    accept.add_argument("--seed", type=int, metavar="N", help="the seed of the runs that are accepted")
    _recipe_changes(accept)


def _process_actions(actions: Any) -> None:
    """fedmix deploy serve | run | up."""
    serve = _command(actions, "serve", deployment.serve, "start the server or a site, until Ctrl-C")
    serve.add_argument("folder", metavar="DIR", help="the folder of a site or of the server")
    serve.add_argument(
        "--wait",
        type=float,
        default=120,
        metavar="S",
        help="how many seconds a site waits for a server that does not let it in yet (%(default)s)",
    )
    serve.add_argument("--show", action="store_true", help="print the Flower commands instead of starting them")

    run = _command(actions, "run", deployment.run, "train over the connected sites; on the server's machine")
    run.add_argument("folder", metavar="DIR", help="the server's folder, or the one around it")
    run.add_argument("--recipe", metavar="R", help="a recipe to train instead of the folder's recipe.toml")
    run.add_argument("--out", metavar="DIR", help="where the results go (default: a folder under the server's runs/)")
    _recipe_changes(run)
    _submission_options(run)

    up = _command(
        actions, "up", deployment.up, "server and sites on this machine alone, with TLS and keys, until Ctrl-C"
    )
    up.add_argument(
        "recipe", nargs="?", default="digits-skew", metavar="RECIPE", help="a recipe with data of its own (%(default)s)"
    )
    up.add_argument(
        "--local", type=int, required=True, metavar="N", help="how many sites; the data is dealt out among them"
    )
    up.add_argument("--out", default="runs/federation", metavar="DIR", help="the folder for all of it (%(default)s)")
    up.add_argument("--train", action="store_true", help="train the recipe, then stop everything")
    _recipe_changes(up)
    _submission_options(up)


def _predict_command(commands: Any) -> None:
    """fedmix predict."""
    predict = _command(
        commands,
        "predict",
        deployment.predict,
        "predictions for new inputs with a client's own gate: of a run on this machine, or at a site of a deployment",
    )
    predict.add_argument("trained", nargs="?", metavar="RUN", help="a run directory")
    predict.add_argument("--site", metavar="DIR", help="the folder of a site, in place of RUN")
    predict.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="new inputs: .npz (array x), or .csv of a table, encoded as in training",
    )
    predict.add_argument(
        "--client",
        metavar="NAME",
        help="whose predictions; without it those for somebody who is none of the clients of RUN",
    )
    predict.add_argument("--round", default="last", metavar="R", help="of RUN: last, best or a number (%(default)s)")
    predict.add_argument("--run", metavar="ID", help="one of the site's runs/ (default: the newest)")
    predict.add_argument("--x", default="x", metavar="NAME", help="the array of inputs (%(default)s)")
    predict.add_argument("--y", default="y", metavar="NAME", help="the array of labels, if there is one (%(default)s)")
    predict.add_argument("--out", metavar="FILE", help="a .csv or .npz (default: a CSV to standard output)")
    predict.add_argument("--overwrite", action="store_true", help="replace the file that is in --out")
    predict.add_argument("--json", action="store_true", help="print JSON")


# -- options that several commands have --------------------------------------------------------------------------------


def _submission_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that train over sites."""
    _algorithm_option(parser)
    parser.add_argument(
        "--seed", type=int, metavar="N", help="the seed for the first weights and the order of clients and points"
    )
    parser.add_argument(
        "--wait", type=float, default=600, metavar="S", help="how many seconds sites have to connect (%(default)s)"
    )
    _log_option(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last round")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is there")
    _quiet_option(parser)


def _data_options(
    parser: argparse.ArgumentParser,
    help: str = "a folder to look in first (then in $FEDMIX_DATA and the user's cache)",
) -> None:
    # Both `fedmix data` and `fedmix data get` have these. A default of the latter would hide what the former was given.
    parser.add_argument("--data-dir", metavar="D", default=argparse.SUPPRESS, help=help)
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def _command(commands: Any, name: str, function: Callable[[Any], int], help: str) -> argparse.ArgumentParser:
    """A command that calls `function`; its help is also its description, as a sentence."""
    description = help[0].upper() + help[1:] + "."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
    parser.set_defaults(command=function)
    return parser


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that take a recipe."""
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe by name, a TOML file, or a run directory")
    _recipe_changes(parser)


def _recipe_changes(parser: argparse.ArgumentParser) -> None:
    """Options that change a recipe."""
    parser.add_argument("--rounds", type=int, metavar="N", help="how many communication rounds there are")
    parser.add_argument(
        "--scale",
        metavar="S",
        help="small: fewer clients, points and rounds, and a smaller model, where a recipe has it",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, as in fedmix.eta=0.5; repeatable"
    )
    parser.add_argument(
        "--data-dir", metavar="D", help="where data files are (default: $FEDMIX_DATA, then the user's cache)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _after_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that look at a run that was trained."""
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--clients", type=int, default=0, metavar="N", help="look at this many clients, drawn at random (all)"
    )
    _engine_options(parser)
    _quiet_option(parser)
    _data_options(parser)


def _algorithm_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithm", metavar="A", help=f"{METHOD_HELP} (default: the recipe's)")


def _seeds_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", metavar="0,1,...", help="seeds with which everything is repeated (default: the recipe's)"
    )


def _quiet_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _runs_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or folders that hold some")


def _engine_options(parser: argparse.ArgumentParser, more_engines: str = "") -> None:
    parser.add_argument(
        "--engine",
        default="local",
        metavar="E",
        help=f"what runs the clients: local (all cores), serial (a plain loop){more_engines}",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="how many worker processes (default: all cores)")
    parser.add_argument("--device", default="cpu", metavar="D", help="where clients train: cpu, cuda, cuda:N or mps")


def _log_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log", default="", metavar="A,B,...", help="send the numbers of each round to tensorboard, mlflow or wandb"
    )


def _run_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that train on this machine."""
    _engine_options(parser, ", flower (Ray)")
    _log_option(parser)
    parser.add_argument("--out", metavar="DIR", help="where the results go (default: a folder under runs/)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in --out")
    _quiet_option(parser)
