"""Flower's ServerApp: a run of fedmix over whatever sites are connected. `fedmix deploy run` submits it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Read what was submitted, and train."""
    from fedmix.deploy.server import Asked, serve

    config = context.run_config
    asked = Asked(
        recipe=str(config["recipe"]),
        out=str(config["out"]),
        data_dir=str(config["data-dir"]) or None,
        wait=float(config["wait"]),
        number=str(context.run_id),
    )
    serve(grid, asked)
