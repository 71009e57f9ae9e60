"""Run directories of older versions: read with their names translated, and with a note."""

import json

import pytest
from conftest import fedmix, small_experiment

from fedmix import schema
from fedmix.errors import RunError
from fedmix.report.runs import read_run
from fedmix.running.directory import RunDirectory
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.schema import judged_rounds


@pytest.fixture
def trained(tmp_path):
    experiment = small_experiment("fedmix", **{"rounds": 4, "evaluation.every": 1})
    directory = RunDirectory.open(tmp_path / "run", experiment.recipe, resume=False, overwrite=False)
    run(experiment, directory, Where("serial"))
    directory.close()
    return tmp_path / "run"


def as_version_2(folder):
    """The same run as the version before wrote it."""
    lines = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        validation = line["accuracy"]["validation"]
        names = {"local": "as_sent", "server": "server", "global": "no_identity"}
        lines.append(line | {"accuracy": {old: validation[new] for old, new in names.items()}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((folder / "summary.json").read_text())
    names = {"local": "fine_tuned", "server": "server", "global": "no_identity"}
    accuracy, scores = summary.pop("accuracy")["test"], summary.pop("scores")["test"]
    of_clients = summary.pop("of_clients")["test"]
    del summary["measured"]
    summary |= {
        "accuracy": {old: accuracy[new] for old, new in names.items()},
        "scores": {old: scores[new] for old, new in names.items()},
        "accuracy_of_clients": {"local": of_clients["fine_tuned"], "server": of_clients["server"]},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"schema": 2}))


def test_older_files_give_the_same_figures_under_the_new_names_and_a_note(trained):
    now, lines = schema.read_summary(trained), schema.read_metrics(trained)
    assert read_run(trained).notes == []
    as_version_2(trained)
    before = schema.read_summary(trained)
    for line, of_before in zip(lines, schema.read_metrics(trained), strict=True):
        assert of_before["accuracy"]["validation"] == line["accuracy"]["validation"]
        assert of_before | {"accuracy": None} == line | {"accuracy": None}
    assert before["accuracy"]["test"] == now["accuracy"]["test"]
    assert before["of_clients"]["test"] == now["of_clients"]["test"]
    assert before["scores"] == now["scores"]
    for kind in ("as_sent", "server"):
        assert before["accuracy"]["validation"][kind]["mean"] == pytest.approx(
            now["accuracy"]["validation"][kind]["mean"], abs=1e-5
        )
    assert read_run(trained).notes == [schema.OLDER]
    shown = fedmix("show", str(trained))
    assert shown.returncode == 0
    assert "files are of an older fedmix" in " ".join(shown.stdout.split())
    assert fedmix("report", str(trained)).returncode == 0
    assert "files are of an older fedmix" in (trained / "report.html").read_text()


def test_an_older_evaluation_has_the_names_of_today():
    row = {"accuracy": {"mean": 0.5}}
    older = {"local": row, "proxy": row, "server": row, "counts": row, "global": {}, "seed": 0}
    older["new_clients"] = {"labelled": [{"points": 5, "finetuned": row, "counts": row}], "unlabelled": {}}
    modern = schema.modern_evaluation(older)
    assert set(modern) == {"fine_tuned", "as_sent", "server", "label_counts", "no_identity", "seed", "new_clients"}
    assert set(modern["new_clients"]["labelled"][0]) == {"points", "fine_tuned", "label_counts"}
    assert schema.modern_evaluation(modern) == modern


def test_a_kept_run_may_name_another_one_with_the_same_data(trained):
    whole = schema.read_federation(trained)
    beside = trained.parent / "beside"
    beside.mkdir()
    (beside / "federation.json").write_text('{"same_as": "../run"}')
    (beside / "recipe.toml").write_text((trained / "recipe.toml").read_text())
    assert schema.read_federation(beside) == whole
    assert read_run(beside).federation["clients"] == whole["clients"]
    (beside / "federation.json").write_text('{"same_as": "../nowhere"}')
    with pytest.raises(RunError, match="must describe the run's data"):
        schema.read_federation(beside)


def test_a_run_is_judged_by_its_last_ten_evaluations_in_its_last_fifth():
    assert judged_rounds(range(10, 2001, 10), 2000) == list(range(1910, 2001, 10))
    assert judged_rounds([20, 40, 60, 80, 100], 100) == [100]
    assert judged_rounds([10, 20, 30, 40, 50, 60, 70, 80, 90, 100], 100) == [90, 100]
    assert judged_rounds([5], 20) == [5]  # the run goes on: as far as it has come
    assert judged_rounds([], 20) == []
