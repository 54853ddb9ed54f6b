"""What the page's server answers, and to whom: nothing without the token, to another name, or for another page."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from plait.machines.catalog import find_device_by_driver_name
from plait.page.app import page_app
from plait.page.watched_runs import WatchedRuns
from plait.report.metrics import read_metrics
from plait.report.rank_times_file import RankTimesFile
from plait.report.samples_file import SampleReport
from plait.report.shares_file import SharesLine, append_shares
from plait.run_files.bottleneck import bottleneck_of
from plait.run_folder import RunFolder, RunTotals, lock_run_folder
from plait.working_folder import WorkingFolder
from tests.report.test_report_metrics import eval_report, step_report
from tests.run_files.written_runs import STEPS, fail, write_rank_times, written_run

TOKEN = "a-token-of-this-test"
ADDRESSES = ("/", "/watch.js", "/watch.css", "/icon.svg", "/api/runs", "/api/runs/first", "/api/runs/none", "/what")


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return WorkingFolder()


@pytest.fixture
def folder(working: WorkingFolder) -> RunFolder:
    return written_run(working, "first", steps_done=40)


@pytest.fixture
def page(working: WorkingFolder) -> Iterator[TestClient]:
    runs = WatchedRuns(working)
    client = TestClient(page_app(runs, TOKEN), base_url="http://127.0.0.1:8427")
    client.headers["Authorization"] = f"Bearer {TOKEN}"
    yield client
    runs.close()


def stranger(page: TestClient, address: str, **headers: str) -> tuple[int, str]:
    """What somebody gets without the token in the header."""
    client = TestClient(page.app, base_url="http://127.0.0.1:8427", headers=headers)
    answer = client.get(address)
    return answer.status_code, answer.text


def test_each_run_has_its_row(page: TestClient, folder: RunFolder, working: WorkingFolder) -> None:
    written_run(working, "second")
    rows = {row["name"]: row for row in page.get("/api/runs").json()}
    assert {name: row["state"] for name, row in rows.items()} == {"first": "stopped", "second": "finished"}
    assert {"name", "state", "step", "steps", "loss", "tokens_per_s", "updated", "command"} <= rows["first"].keys()
    assert (rows["first"]["step"], rows["first"]["steps"]) == (40, STEPS)
    assert rows["first"]["command"] == "plait train runs/first/recipe.toml"


def test_samples_are_the_first_and_the_newest(page: TestClient, folder: RunFolder) -> None:
    assert page.get("/api/runs/first").json()["samples"] == []
    lines = [SampleReport(step=step, prompt="Now", text=f" {step}").to_line() for step in range(0, 300, 10)]
    folder.samples.write_text("\n".join(lines) + '\n{"step": 300')
    shown = page.get("/api/runs/first").json()["samples"]
    assert [one["step"] for one in shown] == [0, *range(110, 300, 10)]
    assert shown[1] == {"step": 110, "prompt": "Now", "text": " 110"}
    folder.samples.write_text("damaged\n")
    view = page.get("/api/runs/first").json()
    assert view["samples"] == [] and any("samples.jsonl:1" in one for one in view["problems"])


def test_a_run_is_what_its_files_say(page: TestClient, folder: RunFolder) -> None:
    view = page.get("/api/runs/first").json()
    steps, [evaluation] = read_metrics(folder.metrics)
    columns = view["metrics"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in view["metrics"]["rows"]]
    for row, report in zip(rows, steps, strict=True):
        assert (row["last"], row["tokens"], row["loss"]) == (report.step, report.tokens, report.loss)
        assert (row["step_s"], row["mfu"], row["lr"]) == (report.step_s, report.mfu, report.lr)
    [shown] = view["metrics"]["evaluations"]
    assert (shown["step"], shown["eval_loss"]) == (evaluation.step, evaluation.eval_loss)
    plan = folder.saved_plan()
    assert view["plan"]["steps"] == plan.job.steps and view["plan"]["reasons"] == list(plan.reasons)
    assert view["plan"]["warnings"] == list(plan.warnings)
    assert plan.forecast is not None and plan.forecast.items is not None
    assert view["forecast"]["step_s"] == plan.forecast.step_s
    assert view["forecast"]["items"] == plan.forecast.items.measurable_items()
    assert view["bottleneck"] is None
    assert view["step"] == 40 and view["eta_s"] == pytest.approx((STEPS - 40) * 0.05)
    assert (view["state"], view["incidents"], view["ranks"], view["problems"]) == ("stopped", [], None, [])


def test_only_what_is_new_is_sent(page: TestClient, folder: RunFolder) -> None:
    page.get("/api/runs/first")
    with folder.metrics.open("a") as file:
        file.write(step_report(41).to_line() + eval_report(41).to_line() + step_report(42).to_line()[:30])
    metrics = page.get("/api/runs/first?after=40").json()["metrics"]
    assert metrics["after"] == 40 and [row[1] for row in metrics["rows"]] == [41]
    assert [one["step"] for one in metrics["evaluations"]] == [40, 41], "that of step 40 may be new as well"
    with folder.metrics.open("a") as file:
        file.write(step_report(42).to_line()[30:])
    assert [row[1] for row in page.get("/api/runs/first?after=41").json()["metrics"]["rows"]] == [42]


def test_an_evaluation_that_is_written_after_its_step_was_sent_is_not_lost(page: TestClient, folder: RunFolder) -> None:
    folder.metrics.write_text(step_report(1).to_line())
    assert page.get("/api/runs/first").json()["metrics"]["evaluations"] == []
    with folder.metrics.open("a") as file:
        file.write(eval_report(1).to_line())
    assert [one["step"] for one in page.get("/api/runs/first?after=1").json()["metrics"]["evaluations"]] == [1]


def test_two_pages_on_one_run_get_the_same(page: TestClient, folder: RunFolder) -> None:
    one, two = (page.get("/api/runs/first").json() for _ in range(2))
    assert one == two
    with folder.metrics.open("a") as file:
        file.write(step_report(41).to_line())
    one, two = (page.get("/api/runs/first?after=40").json() for _ in range(2))
    assert one == two and len(one["metrics"]["rows"]) == 1


def test_times_of_ranks_are_the_mean_of_the_last_lines(page: TestClient, folder: RunFolder) -> None:
    clock = iter(range(0, 10_000, 10))
    file = RankTimesFile(folder.rank_times, 2, clock=lambda: float(next(clock)))
    file.add(1, [[(9.0, 9.0, 9.0, 9.0)]] * 2)
    for step in range(2, 41):
        file.add(step, [[(0.03, 0.01, 0.0, 0.0)], [(0.01, 0.03, 0.001, 0.0)]])
    view = page.get("/api/runs/first").json()
    assert view["ranks"]["compute_s"] == pytest.approx([0.03, 0.01]) and view["ranks"]["step"] == 40
    assert view["items"] == pytest.approx({"compute_s": 0.03, "waiting_s": 0.01, "optimizer_s": 0.01, "data_s": 0.0})


def test_what_limits_a_run_is_the_value_that_its_receipt_has(page: TestClient, folder: RunFolder) -> None:
    write_rank_times(folder, steps=40, compute_s=0.02, data_s=0.02)
    shown = page.get("/api/runs/first").json()["bottleneck"]
    assert shown.keys() == {"cause", "share", "sentence", "remedies"}
    assert (shown["cause"], shown["share"]) == ("data", pytest.approx(0.4))
    assert [one.keys() for one in shown["remedies"]] == [{"change", "gain", "setting", "factor"}]
    found = bottleneck_of(folder)
    assert found is not None and found.sentence == shown["sentence"]
    assert [one.gain for one in found.remedies] == [one["gain"] for one in shown["remedies"]]


def test_incidents_shares_and_memory(page: TestClient, folder: RunFolder) -> None:
    fail(folder, generation=1, step=40)
    shares = SharesLine(step=20, shares=(5, 3), reason="host b is slow", speeds=(2.0, 1.0))
    append_shares(folder.shares, shares)
    folder.write_totals(RunTotals(wall_s=90.0, peak_tensor_bytes=(1 << 20,), peak_rss_bytes=(1 << 28,)))
    view = page.get("/api/runs/first").json()
    assert view["state"] == "failed" and view["incidents"][0]["sentence"] == "rank 0 was killed by SIGKILL"
    assert view["shares"][0]["shares"] == [5, 3] and view["memory"]["process_bytes"] == [1 << 28]
    assert view["trained_s"] == 90.0


def test_the_state_follows_a_run_that_begins_to_train(page: TestClient, folder: RunFolder) -> None:
    assert page.get("/api/runs/first").json()["state"] == "stopped"
    with lock_run_folder(folder):
        assert page.get("/api/runs/first").json()["state"] == "training"
        assert page.get("/api/runs").json()[0]["state"] == "training"
    assert page.get("/api/runs/first").json()["state"] == "stopped"


def test_a_run_that_went_back_to_a_checkpoint_has_another_version(page: TestClient, folder: RunFolder) -> None:
    before = page.get("/api/runs/first").json()["metrics"]["version"]
    folder.prepare_resume_at(30)
    after = page.get("/api/runs/first?after=40").json()["metrics"]
    assert after["version"] != before and after["rows"] == []
    assert len(page.get("/api/runs/first?after=0").json()["metrics"]["rows"]) == 30


def test_a_run_that_is_deleted_while_it_is_watched(page: TestClient, folder: RunFolder) -> None:
    assert page.get("/api/runs/first").status_code == 200
    shutil.rmtree(folder.path)
    answer = page.get("/api/runs/first?after=40")
    assert answer.status_code == 404 and "deleted" in answer.json()["error"]
    assert page.get("/api/runs").json() == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("plan.json", '{"format": 2}'),
        ("plan.json", "{"),
        ("receipt.json", "[]"),
        ("incidents.jsonl", "{}\n"),
        ("shares.jsonl", "what\n"),
        ("so-far.json", "{"),
        ("metrics.jsonl", "what\n"),
        ("rank-times.jsonl", '{"step": 3}\n'),
    ],
)
def test_a_damaged_or_older_file_hides_nothing_else(page: TestClient, folder: RunFolder, file: str, text: str) -> None:
    (folder.path / file).write_text(text)
    view = page.get("/api/runs/first").json()
    assert (file == "metrics.jsonl") == (view["metrics"]["rows"] == [])
    assert (file == "plan.json") == (view["plan"] is None)
    assert len(view["problems"]) == (file != "rank-times.jsonl") and all("\n" not in one for one in view["problems"])


def test_a_run_half_written_and_a_pipe_in_place_of_a_file(page: TestClient, working: WorkingFolder) -> None:
    half = RunFolder(working.runs / "half")
    half.path.mkdir(parents=True)
    (half.path / "recipe.toml").touch()
    os.mkfifo(half.metrics)
    os.mkfifo(half.incidents)
    view = page.get("/api/runs/half").json()
    assert view["plan"] is None and len(view["problems"]) == 2 and "a named pipe" in "".join(view["problems"])


def test_numbers_that_are_none_are_null(page: TestClient, folder: RunFolder) -> None:
    folder.metrics.write_text(replace(step_report(1), loss=float("nan"), step_s=float("inf")).to_line())
    text = page.get("/api/runs/first").text
    assert "NaN" not in text and "Infinity" not in text and json.loads(text)["step"] == 1


@pytest.mark.parametrize("address", ADDRESSES)
def test_without_the_token_every_address_says_the_same(page: TestClient, folder: RunFolder, address: str) -> None:
    for given in ("", "?token=", "?token=guess", f"?token={TOKEN}x", f"?token={TOKEN[:-1]}", "?token=%C3%A9"):
        assert stranger(page, address + given) == (403, "This page needs the whole address that plait printed.\n")
    assert stranger(page, address, Authorization="Bearer guess")[0] == 403
    assert stranger(page, f"{address}?token={TOKEN}")[0] in (200, 404)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8427", "localhost.", "[::2]:80", "", "a@localhost"]
)
def test_another_name_that_points_here_gets_nothing(page: TestClient, folder: RunFolder, host: str) -> None:
    for address in ADDRESSES:
        answer = page.get(address, headers={"Host": host})
        assert answer.status_code == 421 and "first" not in answer.text
    for own in ("localhost:9000", "127.0.0.1:9000", "[::1]:8427", "localhost"):
        assert page.get("/api/runs", headers={"Host": own}).status_code == 200, "also by a port that ssh forwards"


def test_another_page_gets_nothing_and_a_person_who_follows_a_link_does(page: TestClient, folder: RunFolder) -> None:
    for site in ("cross-site", "same-site"):
        for mode in ("cors", "no-cors", "navigate"):
            headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Origin": "http://evil.example"}
            for address in ADDRESSES:
                answer = page.get(address, headers=headers)
                assert answer.status_code == (200 if (mode, address) == ("navigate", "/") else 403)
                assert not any(name.startswith("access-control") for name in answer.headers)
    assert page.get("/api/runs", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fsecret",
        "%2e%2e%2fsecret",
        "first%2f..%2ffirst",
        "first%00",
        "/etc",
        "secret",
        "a" * 5000,
    ],
)
def test_no_name_leads_out_of_the_runs(page: TestClient, folder: RunFolder, working: WorkingFolder, name: str) -> None:
    outside = written_run(WorkingFolder(working.path / "elsewhere"), "secret")
    shutil.copytree(outside.path, working.path / "secret")
    assert page.get(f"/api/runs/{name}").status_code == 404


def test_a_link_below_runs_is_followed_only_to_a_folder_of_a_run(page: TestClient, folder: RunFolder) -> None:
    (folder.path.parent / "other").symlink_to("/etc")
    assert [row["name"] for row in page.get("/api/runs").json()] == ["first"]
    assert page.get("/api/runs/other").status_code == 404


@pytest.mark.parametrize("after", ["-1", "1.5", "x", "", "9" * 16, "٣"])
def test_a_step_that_is_none_is_refused(page: TestClient, folder: RunFolder, after: str) -> None:
    assert page.get("/api/runs/first", params={"after": after}).status_code == 400


def test_nothing_can_be_written_framed_or_loaded_from_elsewhere(page: TestClient, folder: RunFolder) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert page.request(method, "/api/runs/first").status_code == 405
    for address in ADDRESSES:
        headers = page.get(address).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
        assert headers["x-frame-options"] == "DENY" and headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store" and "server" not in headers
    for address in ("/", "/watch.js", "/watch.css"):
        text = page.get(address).text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text


def test_names_cannot_become_marks(working: WorkingFolder) -> None:
    evil = '"><script>alert(1)</script>'
    text = (
        TestClient(page_app(WatchedRuns(working), TOKEN, [evil]), base_url="http://localhost")
        .get(f"/?token={TOKEN}")
        .text
    )
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_a_run_elsewhere_is_known_by_its_folders_name(working: WorkingFolder, tmp_path: Path) -> None:
    other = written_run(WorkingFolder(tmp_path / "elsewhere"), "old", steps_done=7)
    runs = WatchedRuns(working, [other.path])
    assert [row["name"] for row in runs.list()] == ["old"]
    view = runs.view("old")
    assert view is not None and view["step"] == 7
    runs.close()


def test_a_look_at_a_long_run_costs_what_one_at_a_short_run_does(working: WorkingFolder, folder: RunFolder) -> None:
    """Of the processor's time: a page that looks every two seconds takes 0.15 % of one core at the bound."""
    with folder.metrics.open("a") as file:
        file.writelines(step_report(step).to_line() for step in range(41, 100_001))
    runs, looks, spent_s = WatchedRuns(working), 100, 0.0
    runs.view("first")
    for step in range(100_001, 100_001 + looks):
        with folder.metrics.open("a") as file:
            file.write(step_report(step).to_line())
        began = time.process_time()
        view = runs.view("first", after=step - 1)
        spent_s += time.process_time() - began
        assert view is not None and len(view["metrics"]["rows"]) == 1
    assert spent_s / looks < 0.003
    runs.close()


def test_money_and_memory_are_those_of_the_gpus(page: TestClient, working: WorkingFolder) -> None:
    machine = {"device": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30, "versions": {}}
    written_run(working, "gpu", device="cuda", fingerprint=machine)
    plan = page.get("/api/runs/gpu").json()["plan"]
    assert plan["device"] == "cuda" and plan["memory_bytes"] == 80 << 30
    assert plan["price_per_hour"] == find_device_price("NVIDIA H100 80GB HBM3") > 0
    written_run(working, "cpu")
    assert page.get("/api/runs/cpu").json()["plan"]["price_per_hour"] is None


def find_device_price(name: str) -> float:
    device = find_device_by_driver_name(name)
    assert device is not None and device.price_per_hour is not None
    return device.price_per_hour
