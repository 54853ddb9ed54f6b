"""plait from Python: the command's values, one sentence for wrong arguments, nothing in the current folder."""

from __future__ import annotations

import json
import pydoc
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from typer.testing import CliRunner

import plait
from plait.cli import app
from plait.commands.plan import WHY_HINT
from plait.commands.python_call import as_command, in_call_words, screen_for
from plait.errors import Interrupted, PlaitError, RunFailed
from plait.machines.cluster import cluster_from_json, read_cluster
from plait.planner.derive.intervals import with_raised_budget
from plait.recipe.load import load_recipe
from plait.run_folder import run_folder
from plait.working_folder import WorkingFolder
from tests.end_to_end.command import some_text
from tests.matrix import few_fast

RECIPE: Mapping[str, Any] = {
    "data": {"files": "play.txt"},
    "model": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 300},
    "train": {"sequence": 16, "batch_tokens": 112, "budget": "12 steps"},
    "layout": {"replicate": 2},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A current folder with a text, and in "work" a run of two workers that was trained from another place."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "play.txt").write_text(some_text(400))
    (folder / "work").mkdir()
    recipe = {**RECIPE, "data": {"files": folder / "play.txt"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plait.train(recipe, folder=folder / "work", progress="off")
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def command(*arguments: str) -> str:
    """What the command prints, run in the folder of the runs."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_the_values_are_those_of_the_commands(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = place / "work"
    run, recipe = plait.Run("play", folder="work"), plait.load_recipe(RECIPE)
    one = ["layout.replicate=1", "layout.tensor=2"]
    facts = plait.prepare_data(recipe, folder=work)  # before the plan, which says whether the text is prepared
    plan, verdict = plait.plan(recipe, cluster="2xH100", folder=work), plait.verify(recipe, one, folder=work)
    cluster = plait.probe(workers=1, threads=1, folder=work)
    losses, text = plait.evaluate("play", folder=work), plait.sample("play", "Ka", tokens=8, folder=work)
    monkeypatch.chdir(work)
    file = str(run.path / "recipe.toml")
    assert command("plan", file, "--cluster", "2xH100", "--json", "plan.json") == f"{plan}\n{WHY_HINT}\n"
    assert json.loads(Path("plan.json").read_text()) == json.loads(json.dumps(plan.values))
    assert (plan.layout, plan.step_s, plan.mfu) == tuple(plan.values[key] for key in ("layout", "step_s", "mfu"))
    assert command("verify", file, *one, "--json", "verify.json").splitlines()[-1] == str(verdict).splitlines()[-1]
    told = json.loads(Path("verify.json").read_text())
    assert told["ok"] is verdict.ok is True and max(told["max_grad_rel_err"], verdict.max_grad_rel_err) < 1e-10
    assert str(cluster) in command("probe", "--workers", "1", "--threads", "1", "--out", "cluster.json")
    told_cluster = cluster_from_json(Path("cluster.json").read_text(), "cluster.json")
    assert told_cluster.measured == cluster.measured and told_cluster.name == cluster.name
    assert f"{facts}\n" in command("data", file)
    assert command("eval", "play") == f"{losses}\n" and json.loads(str(losses)) == losses
    short = plait.evaluate("play", sequence=8)
    assert command("eval", "play", "--sequence", "8") == f"{short}\n" != f"{losses}\n"
    assert command("sample", "play", "--prompt", "Ka", "--tokens", "8") == f"{text}\n"
    assert str(run.recipe) == (run.path / "recipe.toml").read_text() == str(plait.load_recipe(file))
    receipt = plait.train(file)
    assert str(receipt) in command("train", file, "--verbose")
    assert receipt == run.receipt and plait.runs()[0].name == run.name == "play"
    values = json.loads((run.path / "receipt.json").read_text())
    values.pop("sha256", None)
    assert {key: getattr(receipt, key) for key in values if hasattr(receipt, key)}.keys() >= asdict(receipt).keys()


def test_a_run_shows_its_files(place: Path) -> None:
    run = plait.Run("play", folder="work")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    rows = run.metrics("list")
    assert [row["loss"] for row in rows] == [line["loss"] for line in lines if "loss" in line]
    assert rows[-1]["eval_loss"] == run.receipt.eval_loss  # type: ignore[union-attr]
    assert list(run.metrics("frame")["loss"]) == [row["loss"] for row in rows]
    assert [path.name for path in run.checkpoints] == ["step-12"]
    assert run.recipe.train.budget == "12 steps" and run.plan.job.steps == 12
    assert run.plan.job.corpus.startswith(".plait/data/"), "it holds where the folder is moved"


def test_nothing_lies_in_the_current_folder(place: Path) -> None:
    assert sorted(path.name for path in place.iterdir()) == ["play.txt", "work"]


def test_a_plan_shows_itself_in_a_notebook_and_on_a_page(tmp_path: Path) -> None:
    plan = plait.plan(RECIPE, cluster="2xH100")
    html = plan._repr_html_()
    assert "2xH100" in html and plan.why[0].split("<")[0][:20] in html and "<script" not in html
    assert plan.to_html(tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_a_plan_for_a_pool_has_its_choices(tmp_path: Path) -> None:
    recipe = {"data": {"files": "play.txt"}, "model": {"size": "125M"}, "train": {"budget": "1B tokens"}}
    overrides = {"plan.objective": "fastest"}
    plan = plait.plan(recipe, overrides, pool="4xA100-40GB+2xT4", folder=tmp_path)
    assert plan.recommended is not None and plan.recommended in plan.choices
    assert plan.recommended["step_s"] == plan.step_s and plan.values["objective"] == "fastest"
    assert str(plan).startswith("pool     4xA100-40GB+2xT4: 6 devices\ntake     ")
    assert "take     " in plan._repr_html_() and "<script" not in plan._repr_html_()
    assert "Which machines of 4xA100-40GB+2xT4" in plan.to_html(tmp_path / "pool.html").read_text()
    file = tmp_path / "pool.toml"
    file.write_text('[[device]]\nname = "A100-40GB"\ncount = 4\n[[device]]\nname = "T4"\ncount = 2\n')
    named = plait.plan(recipe, overrides, pool=file, folder=tmp_path)
    assert named.recommended is not None and named.recommended["devices"] == plan.recommended["devices"]
    assert plait.plan(RECIPE, cluster="2xH100").choices == () and plait.plan(RECIPE, cluster="2xH100").machines == ""


def test_every_value_shows_itself(place: Path) -> None:
    run = plait.Run("play", folder="work")
    end = str(run).splitlines()
    assert end[0].startswith("done     12 steps, 1.34K tokens in ")
    following = end.index('next     plait.sample("play")')
    assert end[following + 1] == '         plait.evaluate("play")'
    pieces = plait.sample("play", "Ka", tokens=8, folder="work")
    assert next(pieces) == "Ka" and str(pieces).startswith("Ka") and str(pieces) == str(pieces) and list(pieces) == []
    wide = "2x(8xA100)+400G"
    described = read_cluster(wide)
    assert str(described) == f"{wide}: 2 × (8 × A100 SXM 80GB), joined by {described.between.name}"
    values = (run, run.receipt, pieces, described, plait.evaluate("play", folder="work"))
    for value in values:
        html = value._repr_html_()  # type: ignore[union-attr]
        assert html.startswith("<") and "<script" not in html and len(html) > 15


def test_a_job_shows_what_would_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import plait\n")
    job = plait.submit(
        "own.py", ["--epochs", "3"], on="slurm", cluster="4x(8xH100)", nodes=2, deed="show", progress="off",
        options={"partition": "gpu", "time": "2 hours"},
    )  # fmt: skip
    assert job.name == "own" and "#SBATCH --partition=gpu" in str(job) and "own.py --epochs 3" in job.text
    typed = command(
        "submit", "--on", "slurm", "--cluster", "4x(8xH100)", "--nodes", "2", "--with", "partition=gpu", "--time",
        "2 hours", "--dry-run", "--", "own.py", "--epochs", "3",
    )  # fmt: skip
    assert typed.endswith(job.text)
    assert list(tmp_path.iterdir()) == [tmp_path / "own.py"]


def test_a_run_on_its_way_says_where_it_stands(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "work" / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "play" / "receipt.json").unlink()
    told = str(plait.Run("play", folder=tmp_path))
    assert told.startswith(f"run      {tmp_path}/runs/play: step 12 of 12, loss ")


@pytest.mark.slow
def test_a_continued_run_has_no_receipt_until_its_new_end(place: Path, tmp_path: Path) -> None:
    """receipt.json on disk is still that of the first 12 steps while the run is on its way to 16."""
    shutil.copytree(place / "work", tmp_path / "work")
    begun, run = run_folder("play", WorkingFolder(tmp_path / "work")), plait.Run("play", folder=tmp_path / "work")
    assert run.receipt is not None and run.receipt.steps == 12
    longer = load_recipe(begun.recipe, ["train.budget=16 steps"])
    begun.save_config_and_plan(longer, with_raised_budget(longer, begun.saved_plan()))
    assert json.loads((run.path / "receipt.json").read_text())["steps"] == 12
    assert run.receipt is None and run.account.state == "stopped"
    assert str(run).startswith(f"run      {tmp_path}/work/runs/play: step 12 of 16, loss ")
    ended = plait.train(begun.recipe, ["train.budget=16 steps"], folder=tmp_path / "work", progress="off")
    assert run.receipt == ended and ended.steps == len(run.metrics("list")) == 16


def test_every_function_has_a_command_or_is_about_values() -> None:
    """A new function or command needs a line here, and its place in the comparison above."""
    commands = {(info.name or info.callback.__name__) for info in app.registered_commands if info.callback}
    with_command = {
        "train",
        "join",
        "plan",
        "verify",
        "probe",
        "sample",
        "chat",
        "export",
        "run",
        "runs",
        "check",
        "submit",
    } & set(plait.__all__)
    named_otherwise = {"evaluate": "eval", "prepare_data": "data", "compare_runs": "compare", "write_report": "report"}
    about_values = {"load_recipe"}
    within_programs = {"spread", "broadcast", "all_reduce", "rank", "size", "convert_batch_norm"}
    functions = {name for name in plait.__all__ if isinstance(getattr(plait, name), FunctionType)}
    assert functions == with_command | named_otherwise.keys() | about_values | within_programs
    # plait new writes a file for people, status is Run.account, people look at pages and at a drill, and remove asks.
    by_hand = {"new", "status", "watch", "timeline", "drill", "remove"}
    of_clusters = {"logs", "stop", "fetch", "node"}
    assert commands == with_command | set(named_otherwise.values()) | by_hand | of_clusters


CALLS = (
    (
        "stopped after step 3 of 9, saved; the same command goes on",
        "stopped after step 3 of 9, saved; the same call goes on",
    ),
    ("run      runs/a, saved; --why gives the reasons", "run      runs/a, saved; Run.plan.reasons has the reasons"),
    (
        "next     plait sample 'my run'\n         plait eval 'my run'",
        'next     plait.sample("my run")\n         plait.evaluate("my run")',
    ),
    ("close them and give plait probe --again", "close them and give plait.probe(again=True)"),
    ("as made before (--replan makes a new one)", "as made before (plait train --replan makes a new one)"),
    ("go on with plait train --replan", "go on with plait train --replan"),
    ("--workers 9 are more than 2", "workers = 9 are more than 2"),
    ("choose it by --address", "choose it by address="),
    ("name a file for it by --secret-file", "name a file for it by secret_file="),
    (
        "type:\n plait join 1.2.3.4:5\n with --secret-file and a copy of s",
        "type:\n plait join 1.2.3.4:5\n with --secret-file and a copy of s",
    ),
)


@pytest.mark.parametrize(("said", "in_python"), CALLS)
def test_a_call_is_spoken_of_as_a_call(said: str, in_python: str) -> None:
    assert in_call_words(said) == in_python


def test_sentences_and_notes_speak_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match="run the same call again"), as_command():
        raise RunFailed("a worker died; run the same command again")
    with pytest.raises(Interrupted, match="the same call goes on") as stopped, as_command():
        raise Interrupted("SIGINT", "saved; the same command goes on")
    assert stopped.value.signal == "SIGINT"
    screen = screen_for("lines")
    screen.print("the same command")
    steps = screen.steps(2)
    steps.note("stop, and give the same command")
    steps.close()
    assert capsys.readouterr().out == "the same call\nstop, and give the same call\n"


DEEP: dict[str, Any] = {}
DEEP["data"] = DEEP
WRONG: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: plait.load_recipe(3), r"recipe = 3 is not usable"),  # type: ignore[arg-type]
    (lambda: plait.load_recipe({1: {}}), r"not"),  # type: ignore[dict-item]
    (lambda: plait.load_recipe(DEEP), r"nested too deeply"),
    (lambda: plait.load_recipe("\0.toml"), r"is no path"),
    (lambda: plait.plan(RECIPE, ["a." * 5000 + "b=1"]), r"nested too deeply"),
    (lambda: plait.plan(RECIPE, cluster="2xH100@" + "9" * 500 + "G"), r"no link is as fast"),
    (lambda: plait.plan(RECIPE, folder="a" * 5000), r"is no folder"),
    (lambda: plait.Run("\0"), r"there is no run"),
    (lambda: plait.load_recipe({**RECIPE, "trian": {}}), r"trian is not a key of the recipe; did you mean train\?"),
    (lambda: plait.load_recipe(RECIPE, 3), r"overrides = 3 is not usable; give a dict"),  # type: ignore[arg-type]
    (lambda: plait.load_recipe(RECIPE, {"budget": "1 step"}), r"budget is not a key .* did you mean train.budget\?"),
    (lambda: plait.load_recipe(RECIPE, {3: 4}), r"write the keys of a recipe as texts"),  # type: ignore[dict-item]
    (lambda: plait.train(RECIPE, budget="1 step"), r'write overrides=\{"train.budget": …\}'),  # type: ignore[call-arg]
    (lambda: plait.sample("play", max_tokens=9), r"takes no max_tokens; did you mean tokens\?"),  # type: ignore[call-arg]
    (lambda: plait.export("play", "x", gguf=True), r"it takes run, to, dtype, what, folder"),  # type: ignore[call-arg]
    (lambda: plait.load_recipe({**RECIPE, "model": {"layers": object()}}), r"model.layers is not usable"),
    (lambda: plait.plan(RECIPE, cluster=8), r"cluster = 8 is not usable"),  # type: ignore[arg-type]
    (lambda: plait.plan(RECIPE, cluster="8xH1000"), r"H1000"),
    (lambda: plait.plan(RECIPE, cluster="8xH100", pool="8xH100"), r"pool= and cluster= both name machines"),
    (lambda: plait.plan(RECIPE, pool=8), r"pool = 8 is not usable; give a path"),  # type: ignore[arg-type]
    (lambda: plait.plan(RECIPE, pool="none.toml"), r"cannot read the pool none.toml"),
    (lambda: plait.plan(RECIPE, pool="4xT4", availability="seed:1"), r"availability= is for spot machines"),
    (lambda: plait.plan(RECIPE, availability="seed:1"), r"name one with pool="),
    (lambda: plait.plan(RECIPE, pool="4xT4", objective="fastest"), r"takes no objective"),  # type: ignore[call-arg]
    (lambda: plait.plan(RECIPE, cluster="2xH100", folder="nowhere"), r'folder = "nowhere" is no folder'),
    (lambda: plait.train(RECIPE, hosts="2"), r"hosts = '2' is not usable; give a whole number"),  # type: ignore[arg-type]
    (lambda: plait.train(RECIPE, hosts=0), r"hosts = 0 is too small"),
    (lambda: plait.train(RECIPE, progress="bar"), r'give "auto", "lines" or "off"'),  # type: ignore[arg-type]
    (lambda: plait.train(RECIPE, ["optimizer.lr=3.0"], folder="work"), r"optimizer.lr was"),
    (lambda: plait.join("nowhere"), r'"nowhere" is not HOST:PORT'),
    (lambda: plait.sample("play", tokens=0, folder="work"), r"tokens = 0 is too small"),
    (lambda: plait.evaluate("play", sequence=1, folder="work"), r"sequence = 1 is too small; give 2 or more"),
    (lambda: plait.sample("nobody", folder="work"), r'there is no run "nobody"'),
    (lambda: plait.evaluate("play", 3, folder="work"), r"files = 3 is not usable; give a list of texts"),  # type: ignore[arg-type]
    (lambda: plait.Run("work"), r'there is no run "work"'),
    (lambda: plait.probe(workers=True), r"workers = True is not usable"),
    (
        lambda: plait.submit("a.py", on="pbs"),
        r'on = .pbs. is not usable; give "slurm", "ssh", "kubernetes", "ray", "skyp',
    ),  # type: ignore[arg-type]
    (lambda: plait.submit("a.py", on="ssh", options={"machines": 3}), r"machines = 3 is .* give a list of texts"),
    (lambda: plait.submit("a.py", "--epochs 3", on="slurm"), r"give a list of texts, one for each argument"),
    (lambda: plait.submit("a.py", on="ssh", options={"machines": ["-oProxy"]}), r"not the name of a machine"),
    (lambda: plait.submit("a.py", on="slurm", options={"gpus": "8"}), r"gpus = '8' is not usable"),
    (lambda: plait.submit("a.py", on="slurm", nodes=0), r"nodes = 0 is too small"),
    (lambda: plait.submit("a.py", on="slurm", options=["a=b"]), r"options = .* give a dict"),  # type: ignore[arg-type]
    (lambda: plait.SubmittedJob(name="nobody").state, r'no job "nobody" was submitted'),
)


@pytest.mark.parametrize("name", plait.__all__)
def test_every_public_function_says_what_to_write_for_an_unknown_keyword(name: str) -> None:
    with pytest.raises(PlaitError, match=rf"plait\.{name} takes no zzz; it takes "):
        getattr(plait, name)(zzz=1)


@pytest.mark.parametrize(("call", "sentence"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_argument_is_one_sentence(place: Path, call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence) as refused:
        call()
    assert refused.value._render_traceback_() == [f"plait: {refused.value}"]
    assert sorted(path.name for path in place.iterdir()) == ["play.txt", "work"]


def test_a_run_at_work_is_refused(place: Path) -> None:
    import fcntl

    with (place / "work" / "runs" / "play" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PlaitError, match="another plait is training in"):
            plait.train(RECIPE, folder="work")


def test_the_name_of_a_dict_is_that_of_its_first_text() -> None:
    assert plait.load_recipe(RECIPE).run.name == "play"
    assert plait.load_recipe({"data": {"files": ["hf:someone/Tiny Texts", "play.txt"]}}).run.name == "tiny-texts"
    assert plait.load_recipe({**RECIPE, "run": {"name": "own"}}, ["run.name=other"]).run.name == "other"


def test_every_public_name_is_there_and_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide-python.md").read_text()
    types = {"CheckReport", "Cluster", "PlannedRun", "Receipt", "Verdict"}
    assert all(getattr(plait, name) is not None for name in dir(plait)) and set(plait.__all__) < set(dir(plait))
    named = [name for name in dir(plait) if name != "__version__" and name not in types]
    assert [name for name in named if f"plait.{name}" not in guide] == []


def test_the_package_shows_its_public_names_alone_and_a_short_help_with_an_example() -> None:
    assert [name for name in dir(plait) if name.startswith("_")] == ["__version__"]
    homes = {getattr(plait, name).__module__.partition(".")[0] for name in dir(plait) if name != "__version__"}
    assert homes == {"plait"}
    told = pydoc.plain(pydoc.render_doc(plait)).splitlines()
    assert len(told) < 200
    shown = [line.strip() for line in told[:14]]
    assert 'plait.train("first.toml", {"train.budget": "4 minutes"})' in shown


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.budget=9 steps", "model.layers=3", "data.files=play.txt"],
        {"train.budget": "9 steps", "model.layers": 3, "data.files": Path("play.txt")},
        {"train": {"budget": "9 steps"}, "model": {"layers": 3}},
    ],
)
def test_overrides_are_a_list_or_a_dict(overrides: Any) -> None:
    loaded = plait.load_recipe(RECIPE, overrides)
    assert (loaded.train.budget, loaded.model.layers, loaded.model.width) == ("9 steps", 3, 32)
    assert plait.load_recipe(RECIPE, "train.budget=9 steps").train.budget == "9 steps"


@pytest.mark.parametrize("kind", few_fast(["a path", "a text", "paths"], "a path"))
def test_files_are_a_list_or_a_single_one(place: Path, kind: str) -> None:
    (place / "work" / "other.txt").write_text(some_text(60))
    file = place / "work" / "other.txt"
    files = {"a path": file, "a text": str(file), "paths": [file]}[kind]
    assert plait.evaluate("play", files, folder="work") == plait.evaluate("play", [str(file)], folder="work")
    file.unlink()
