"""How many nodes pay, what a scheduler answers and refuses, and what is kept of a job; by other programs' own words."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from plait.cli import app
from plait.clusters.job import Submitted, cluster_job_name, find_record, keep_record
from plait.clusters.kubernetes import kubernetes_nodes
from plait.clusters.machines import NodeKind, cluster_of_node_kinds, scaled
from plait.clusters.node import NodePlace
from plait.clusters.request import (
    SubmitRequest,
    parse_kind,
    parse_machines,
    parse_options,
    parse_scheduler,
    parse_time_s,
)
from plait.clusters.scaling import NodesForecast, Scaling, pays_sentences, scaling_table
from plait.clusters.slurm import slurm_cluster, slurm_nodes, slurm_seconds, slurm_time
from plait.clusters.ssh import lock_lines, parse_ssh_answer
from plait.clusters.submit import submit_or_show
from plait.clusters.submitted import SYSTEMS, end_job, fetch_job, job_log_lines, job_state_line, missing_run_line
from plait.clusters.target import program_of
from plait.clusters.tools import complaint_text
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.planner.plan import Plan
from plait.screen.terminal import TerminalScreen
from plait.working_folder import WorkingFolder
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe

PROGRAM = "import plait\n"
"""What is sent: programs are not forecast, which would take a second each."""


def rows(*step_s: float) -> tuple[NodesForecast, ...]:
    """Forecasts for 1, 2, 4, … nodes of one device."""
    return tuple(
        NodesForecast(nodes=1 << at, devices=1 << at, peak_flops=float(1 << at), layout=Layout(), step_s=one,
                      run_s=100 * one, price=None)
        for at, one in enumerate(step_s)
    )  # fmt: skip


@pytest.fixture(scope="module")
def some_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return planned(recipe(tmp_path_factory.mktemp("plan"), "train.budget=100 steps"), PLAYS, LAPTOP)


@pytest.mark.parametrize(
    ("step_s", "says"),
    [
        ((8.0, 4.0, 2.0), "all that there are, and all of them pay"),
        ((8.0, 4.4, 3.3), "here more stops paying: 4 would take 25% less time for 1.5 times the device-hours"),
        ((8.0, 9.0), "here more stops paying: 2 would take no less time for 2.2 times the device-hours"),
    ],
)
def test_more_nodes_pay_while_each_does_most_of_its_work(step_s: tuple[float, ...], says: str, some_plan: Plan) -> None:
    there = rows(*step_s)
    scaling = Scaling(plan=some_plan, rows=there, existing=1 << (len(there) - 1))
    assert says in pays_sentences(scaling, scaling.pays)[0]
    assert len({len(line) for line in scaling_table(scaling)}) == 1
    assert scaling_table(scaling)[1].endswith("100%")
    fewer = replace(scaling, existing=1)
    assert fewer.pays == 1 and all("*" in line for line in scaling_table(fewer)[2:])


def test_nodes_are_added_as_they_are_and_unequal_ones_run_out() -> None:
    assert scaled(read_cluster("2x(8xH100)"), 64).n_devices == 512
    unequal = read_cluster("2x(8xA100)+1x(8xH100)+400G")
    assert [island.nodes for island in scaled(unequal, 3).islands] == [2, 1]
    assert [island.device.name for island in scaled(unequal, 1).islands] == ["A100 SXM 80GB"]
    with pytest.raises(PlaitError, match="has 3 nodes; ask for as many or fewer"):
        scaled(unequal, 4)


SINFO = """n1|gpu*|idle|64|gpu:h100:8(S:0-1)
n2|gpu*|mixed|64|gpu:h100:8(S:0-1)
n3|gpu*|down*|64|gpu:h100:8
c1|cpu|idle|128|(null)
"""


def test_what_sinfo_says_becomes_nodes() -> None:
    gpu = NodeKind(device="H100 SXM", per_node=8, cores=64)
    assert slurm_nodes(SINFO, "") == {"n1": gpu, "n2": gpu}
    [processor] = slurm_nodes(SINFO.splitlines()[-1], "cpu").values()
    cluster = cluster_of_node_kinds([gpu, gpu, processor], "all")
    assert [(island.nodes, island.per_node) for island in cluster.islands] == [(2, 8), (1, 1)]
    assert cluster.islands[1].speed == 2.0  # a server of the catalogue has 64 cores


UNEQUAL = """a1|a100|idle|64|gpu:a100:8
a2|a100|idle|64|gpu:a100:8
h1|h100|idle|64|gpu:h100:8
"""


@pytest.mark.parametrize("nodes", [1, 3])
def test_each_of_unequal_partitions_keeps_its_own_nodes(nodes: int, tools: Tools) -> None:
    """In the order in which a person names them, however many nodes each has."""
    tools.add("sinfo", UNEQUAL)
    request = SubmitRequest(target=("play.py",), scheduler="slurm", nodes=nodes, options=("partition=h100+a100",))
    shown: list[str] = []
    submit_or_show(
        request, deed="show", out=None, screen=TerminalScreen(Console(file=io.StringIO())), show=shown.append
    )
    asked = re.findall(r"--partition=(\S+)\n#SBATCH --nodes=(\d)", shown[0])
    assert asked == [("h100", "1"), ("a100", "2")][: 1 if nodes == 1 else 2]


@pytest.fixture
def package(tools: Tools) -> Path:
    """A package of programs in the current folder."""
    folder = Path.cwd() / "pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(PROGRAM)
    return folder


def test_a_module_is_submitted_by_its_name(package: Path, tools: Tools) -> None:
    """Each node runs it in the current folder, with its own arguments."""
    tools.add("sinfo", SINFO)
    found = CliRunner().invoke(
        app, ["submit", "-m", "pkg.train", "--on", "slurm", "--nodes", "2", "--dry-run", "--", "--epochs", "3"]
    )
    assert found.exit_code == 0, found.output
    assert "-- -m pkg.train --epochs 3" in found.output
    assert "--job-name=pkg-train" in found.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-m", "pkg.trian", "--on", "slurm", "--nodes", "2"], "there is no module pkg.trian"),
        (["-m", "pkg.train", "--on", "ssh", "--machines", "a,b"], "--on ssh copies one file, and module pkg.train"),
    ],
)
def test_a_module_that_cannot_be_submitted_is_told(package: Path, words: list[str], says: str) -> None:
    with pytest.raises(PlaitError, match=re.escape(says)):
        CliRunner().invoke(app, ["submit", *words, "--dry-run"], catch_exceptions=False)


def test_a_node_runs_the_module_that_was_submitted(package: Path) -> None:
    own = program_of(["-m", "pkg.train", "--epochs", "3"])
    assert own is not None
    assert (own.program.module, own.program.path, own.arguments) == (
        "pkg.train",
        package / "train.py",
        ("--epochs", "3"),
    )
    assert program_of(["recipe.toml", "run.name=x"]) is None


def test_unlike_nodes_in_one_of_several_partitions_are_said(tools: Tools) -> None:
    tools.add("sinfo", f"{UNEQUAL}h2|h100|idle|64|gpu:h100:4\n")
    with pytest.raises(PlaitError, match="partition h100 has nodes of 2 kinds, and each of several"):
        slurm_cluster("a100+h100")


def test_gpus_of_no_known_kind_are_named() -> None:
    with pytest.raises(PlaitError, match="does not say which GPUs n1 has"):
        slurm_nodes("n1|gpu*|idle|64|gpu:8\n", "")


def test_what_kubectl_says_becomes_nodes() -> None:
    label = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    gpu = {"metadata": {"name": "g", "labels": label}, "status": {"allocatable": {"cpu": "48", "nvidia.com/gpu": "8"}}}
    plain = {"metadata": {"name": "p"}, "status": {"allocatable": {"cpu": "3920m"}}}
    control = {**plain, "spec": {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}}
    assert [kind.per_node for kind in kubernetes_nodes({"items": [gpu, plain, control]})] == [8]
    assert [kind.cores for kind in kubernetes_nodes({"items": [plain, control]})] == [3]


def test_what_a_machine_answers_by_ssh() -> None:
    cards = "".join(f"GPU {number}: NVIDIA L40S (UUID: GPU-{number})\n" for number in range(2))
    found = parse_ssh_answer("ann", f"Welcome!\nplait-check 3.12\nenvironment\n16\n{cards}")
    assert (found.python, found.has_environment, found.cores, len(found.gpus)) == ((3, 12), True, 16, 2)
    assert parse_ssh_answer("ann", "plait-check none\nnothing\n4\n").python is None


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("sbatch: error: invalid partition specified: fast\nsbatch: error: Batch job submission failed: Invalid "
         "partition name specified", "there is no such partition"),
        ("sbatch: error: Memory specification can not be satisfied\nsbatch: error: Batch job submission failed: "
         "Requested node configuration is not available", "no nodes have that much"),
        ('error: resource mapping not found: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"',
         "use --kind job"),
        ("sinfo: fatal: Could not establish a configuration source", "set SLURM_CONF, or describe the machines"),
        ("Error: Command '[...]' returned non-zero exit status 1. ensurepip is not available", "install python3-venv"),
        ("ERROR: No matching distribution found for torch==2.13.0", "name its Python by --with python=PATH"),
        ('Error from server (NotFound): namespaces "train" not found', "kubectl get namespaces"),
        ("", "exit code 3"),
    ],
)  # fmt: skip
def test_the_complaint_of_another_program_is_one_sentence_with_the_mend(said: str, fix: str) -> None:
    told = complaint_text(said, "tool", 3)
    assert fix in told and "\n" not in told and "@@" not in told


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: parse_options(["acount=lab"], SYSTEMS["slurm"].options, "slurm"), "account"),
        (lambda: parse_options(["queue=a"], SYSTEMS["slurm"].options, "slurm"), "slurm has no such option"),
        (lambda: parse_options(["qos"], SYSTEMS["slurm"].options, "slurm"), "has no value"),
        (lambda: parse_options(["qos=a", "qos=b"], SYSTEMS["slurm"].options, "slurm"), "given twice"),
        (lambda: parse_options(["account=$(reboot)"], SYSTEMS["slurm"].options, "slurm"), "unusable characters"),
        (
            lambda: parse_options(["account=a\n#SBATCH --uid=0"], SYSTEMS["slurm"].options, "slurm"),
            "unusable characters",
        ),
        (lambda: parse_options(["constraint=a$(reboot)"], SYSTEMS["slurm"].options, "slurm"), "for example a100&ib"),
        (lambda: parse_options(["cpus=lots"], SYSTEMS["slurm"].options, "slurm"), "for example 16"),
        (lambda: parse_options(["memory=64Gi"], SYSTEMS["slurm"].options, "slurm"), "for example 64G"),
        (lambda: parse_options(["cpus=1\u0663"], SYSTEMS["slurm"].options, "slurm"), "for example 16"),
        (lambda: parse_options(["image=apptainer:"], SYSTEMS["slurm"].options, "slurm"), "apptainer:FILE.sif"),
        (lambda: parse_options(["cpu=abc"], SYSTEMS["kubernetes"].options, "kubernetes"), "for example 16"),
        (lambda: parse_options(["memory=64GB"], SYSTEMS["kubernetes"].options, "kubernetes"), "for example 64Gi"),
        (
            lambda: parse_options(["namespace=My_NS"], SYSTEMS["kubernetes"].options, "kubernetes"),
            "for example research",
        ),
        (
            lambda: parse_options(["queue=Research_Q"], SYSTEMS["kubernetes"].options, "kubernetes"),
            "for example research",
        ),
        (lambda: parse_options(["rdma=hca"], SYSTEMS["kubernetes"].options, "kubernetes"), "rdma/hca_shared_devices_a"),
        (lambda: parse_options(["image=:::"], SYSTEMS["kubernetes"].options, "kubernetes"), "registry.example/plait:1"),
        (lambda: parse_time_s("30:00"), 'write 30:00:00 for hours, or "30 minutes"'),
        (lambda: parse_time_s("00:99:99"), '"8 hours" or 08:00:00'),
        (lambda: parse_time_s("30"), '"8 hours" or 08:00:00'),
        (lambda: parse_time_s("soon"), '"8 hours" or 08:00:00'),
        (lambda: parse_time_s("10 s"), "too short"),
        (lambda: parse_scheduler("pbs"), "slurm, ssh, kubernetes, ray, skypilot or dstack"),
        (lambda: parse_kind("pod"), "jobset, trainjob or job"),
        (lambda: parse_machines("a,,b"), "not the name of a machine"),
        (lambda: parse_machines("-oProxyCommand=reboot"), "not the name of a machine"),
        (lambda: cluster_job_name("…"), "no letter or digit"),
        (lambda: NodePlace(nodes=2), "PLAIT_NODE_RANK is not set"),
        (lambda: NodePlace(nodes=2, rank=1), "PLAIT_LEADER is not set"),
        (lambda: NodePlace(nodes=2, rank=2, leader="a"), "from 0 to 1"),
    ],
)
def test_bad_input_is_one_sentence(call: Callable[[], object], says: str) -> None:
    with pytest.raises(PlaitError) as told:
        call()
    assert says in str(told.value) and "\n" not in str(told.value).replace("\\n", "")


def test_times_and_names_as_schedulers_write_them() -> None:
    assert [slurm_time(parse_time_s(text)) for text in ("90 minutes", "2-02:00:00", "36:00:00")] == [
        "01:30:00", "2-02:00:00", "1-12:00:00",
    ]  # fmt: skip
    assert [parse_time_s(text) for text in ("1-12", "1-12:30", "01:00:30")] == [129600, 131400, 3630]
    assert cluster_job_name("my-run-2") == "my-run-2"
    changed = ["My_Run.2", "my_run.2", "9lives", "a" * 99, "a" * 98, "x" * 45 + "-one", "x" * 45 + "-two"]
    names = [cluster_job_name(text) for text in changed]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z][a-z0-9-]{,38}[a-z0-9]", name) for name in names)
    assert names[0].startswith("my-run-2-") and names[2].startswith("run-9lives-")


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (
            "slurm",
            ("constraint=[rack1|rack2]&ib*2", "image=docker://user@nvcr.io#nvidia/pytorch:24.01-py3", "memory=0"),
        ),
        ("kubernetes", ("image=localhost:5000/a/b_c:1.2@sha256:0a", "cpu=500m", "memory=1.5Ti", "rdma=rdma/hca_a")),
    ],
)
def test_what_schedulers_themselves_take_is_taken(scheduler: str, words: tuple[str, ...]) -> None:
    system = parse_scheduler(scheduler)
    assert len(parse_options(words, SYSTEMS[system].options, system)) == len(words)


def test_the_lock_file_names_all_that_plait_needs_here() -> None:
    names = {line.split("==")[0] for line in lock_lines("plait") if "==" in line}
    assert {"torch", "numpy", "pydantic", "pydantic-core"} <= {name.replace("_", "-") for name in names}
    assert "pytest" not in names and "plait" not in names


class Tools:
    """Programs of other people, played by small ones: they note how they were called, and answer from files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, answer: str, code: int = 0, errors: str = "") -> None:
        (self.folder / f"{name}.answer").write_text(answer)
        (self.folder / f"{name}.errors").write_text(errors)
        program = self.folder / name
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >>"$0.calls"\n'
            f'case "$*" in *stdin*|*--filename*|--parsable) cat >>"$0.input";; esac\n'
            f'cat "$0.answer"; cat "$0.errors" >&2; exit {code}\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    made = Tools(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play.py").write_text(PROGRAM)
    return made


def send(request: SubmitRequest) -> str:
    told = io.StringIO()
    screen = TerminalScreen(Console(file=told, width=100))
    submit_or_show(request, deed="send", out=None, screen=screen, show=lambda text: None)
    return told.getvalue()


REQUEST = SubmitRequest(target=("play.py",), scheduler="slurm", cluster="4x(8xH100)", nodes=2)


def test_a_job_goes_to_slurm_once_and_is_found_by_its_name(tools: Tools, tmp_path: Path) -> None:
    tools.add("sbatch", "17\n")
    tools.add("squeue", "PENDING|PartitionTimeLimit\n")
    tools.add("scancel", "")
    told = send(REQUEST)
    assert "sent     play: job 17 of Slurm, PENDING (it waits forever: the partition allows less time" in told
    script = tools.text("sbatch.input")
    assert script.startswith("#!/bin/bash\n") and "#SBATCH --nodes=2\n" in script
    with pytest.raises(PlaitError, match=r"play is job 17 of Slurm already .*plait stop play"):
        send(REQUEST)
    assert "job 17, PENDING" in (job_state_line("play") or "")
    assert end_job("play").startswith("stopped  play") and tools.text("scancel.calls") == "17\n"
    tools.add("squeue", "CANCELLED|None\n")
    assert "job 17" in send(REQUEST)
    assert job_state_line("other") is None


def test_an_array_s_tasks_are_found_by_its_name(tools: Tools, tmp_path: Path) -> None:
    (tmp_path / "own.sh").write_text("#SBATCH --array=0-1\n")
    tools.add("sbatch", "17\n")
    tools.add("squeue", "COMPLETED|None\nRUNNING|None\n")
    request = replace(REQUEST, options=("lines=own.sh",))
    assert "job 17 of Slurm, COMPLETED, RUNNING" in send(request)
    assert "#SBATCH --output=%x-%A_%a.log\n" in tools.text("sbatch.input")
    with pytest.raises(PlaitError, match=r"play is job 17 of Slurm already \(RUNNING\)"):
        send(request)
    with pytest.raises(PlaitError, match="has printed nothing yet"):
        list(job_log_lines("play"))
    for task in (10, 2):
        (tmp_path / f"play-17_{task}.log").write_text(f"task {task}\n")
    assert list(job_log_lines("play")) == ["==> play-17_2.log <==", "task 2", "==> play-17_10.log <==", "task 10"]
    assert "has not begun" in (missing_run_line("play") or "")
    (tmp_path / "runs" / "play-1").mkdir(parents=True)
    with pytest.raises(PlaitError, match=r"a run of its own: plait status play-1$"):
        fetch_job("play", TerminalScreen(Console(file=io.StringIO())))


PARTITIONS = """short*|9:00|n/a
long|infinite|n/a
easy|7-00:00:00|6:00
tiny|2:00|n/a
"""
"""As `sinfo -o %P|%l|%L` writes them: the longest time, and that of a job which asks for none."""


@pytest.mark.parametrize(
    ("partition", "seconds"), [("", 135), ("long", 300), ("easy", 90), ("long,easy", 90), ("short", 135)]
)
def test_a_run_saves_in_a_quarter_of_a_partitions_short_time(partition: str, seconds: int, tools: Tools) -> None:
    """A grace of 5 min would leave 4 of MaxTime 9 min, and 1 of DefaultTime 6 min."""
    tools.add("sinfo", PARTITIONS)
    tools.add("sbatch", "17\n")
    tools.add("squeue", "RUNNING|None\n")
    options = (f"partition={partition}",) if partition else ()
    said = send(replace(REQUEST, options=options))
    assert f"#SBATCH --signal=USR1@{seconds} " in tools.text("sbatch.input")
    assert (f"grace    {seconds} s in place of 300 s" in said) == (seconds < 300)


def test_a_time_that_is_asked_for_counts_whatever_the_partition_gives_by_itself(tools: Tools) -> None:
    tools.add("sinfo", PARTITIONS)
    tools.add("sbatch", "17\n")
    tools.add("squeue", "RUNNING|None\n")
    send(replace(REQUEST, options=("partition=easy",), time="2 hours"))
    assert "USR1@300 " in tools.text("sbatch.input") and "sinfo" not in {
        path.stem for path in tools.folder.glob("*.calls")
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("partition=tiny",), "partition tiny ends a job after 2 min .* --time, or name another partition"),
        (("partition=easy", "grace=4 minutes"), 'ends a job after 6 min .* before the 240 s .*"grace=1 minute"'),
    ],
)
def test_a_partition_that_leaves_no_time_to_train_is_refused(options: tuple[str, ...], says: str, tools: Tools) -> None:
    tools.add("sinfo", PARTITIONS)
    with pytest.raises(PlaitError, match=says):
        send(replace(REQUEST, options=options))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30:00", 1800), ("2:00:00", 7200), ("1-12:00:00", 129600), ("0:30", 30), ("infinite", None), ("n/a", None)],
)
def test_a_time_as_sinfo_writes_it(text: str, seconds: int | None) -> None:
    assert slurm_seconds(text) == seconds


def test_the_secret_reaches_kubernetes_by_standard_input_alone(tools: Tools, tmp_path: Path) -> None:
    tools.add("kubectl", "")
    words = ("image=registry.example/plait:1", "namespace=train")
    told = send(
        SubmitRequest(target=("play.py",), scheduler="kubernetes", cluster="4x(8xH100)", nodes=2, options=words)
    )
    assert "sent     play: a jobset in Kubernetes" in told
    secret, manifests = tools.text("kubectl.input").split("# Made by plait submit.")
    assert len(secret.replace("-", "")) == 28 and secret not in manifests + told + tools.text("kubectl.calls")
    assert "create secret generic play-join --from-file=secret=/dev/stdin --namespace train" in tools.text(
        "kubectl.calls"
    )
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or file.name == "kubectl.input" or secret not in file.read_text(errors="replace"), (
            file
        )


def test_a_record_that_is_damaged_is_said(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    keep_record(Submitted(name="a", label="a", scheduler="ssh", machines=("x", "y")), working)
    assert find_record("a", working).machines == ("x", "y")
    (tmp_path / ".plait" / "submitted" / "a.json").write_text("{")
    with pytest.raises(PlaitError, match="is damaged"):
        find_record("a", working)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (SubmitRequest(target=("play.py",), scheduler="ssh"), "--machines a,b,c"),
        (SubmitRequest(target=("play.py",), scheduler="slurm", machines=("a",)), "itself chooses the machines"),
        (SubmitRequest(target=("play.py",), scheduler="ssh", machines=("a", "a")), "twice"),
        (SubmitRequest(target=("play.py",), scheduler="ssh", machines=("a", "b"), nodes=3), "name more"),
        (SubmitRequest(target=("play.py",), scheduler="slurm", cluster="2x(8xH100)", gpus=9), "ask for fewer"),
        (SubmitRequest(target=("play.py",), scheduler="slurm", cluster="2xserver", gpus=1), "has no GPUs"),
        (
            SubmitRequest(target=("play.py",), scheduler="slurm", cluster="2x(8xH100)", nodes=2, time="9 minutes"),
            "leaves no time",
        ),
        (SubmitRequest(target=("play.py",), scheduler="kubernetes", cluster="2x(8xH100)"), "install/Containerfile"),
        (SubmitRequest(target=("none.toml",), scheduler="slurm", cluster="2x(8xH100)"), "there is no recipe"),
        (SubmitRequest(target=("none.py",), scheduler="slurm", cluster="2x(8xH100)"), "is no file"),
        (SubmitRequest(target=("play.py",), scheduler="slurm", cluster="2x(8xH100)"), "say how many nodes"),
        (SubmitRequest(target=("play.py",), scheduler="slurm", cluster="2x(8xH100)", kind="job"), "leave it out"),
        (
            SubmitRequest(
                target=("play.py",), scheduler="kubernetes", cluster="2x(8xMI300X)", nodes=2, options=("image=a:1",)
            ),
            "ask for NVIDIA GPUs",
        ),
        (
            SubmitRequest(target=("play.py",), scheduler="slurm", cluster="2x(8xTPU v4)", nodes=2),
            "on paper",
        ),
    ],
)
def test_what_cannot_be_sent_is_one_sentence(request_: SubmitRequest, says: str, tools: Tools) -> None:
    with pytest.raises(PlaitError, match=says):
        send(request_)
    assert not (Path(".plait") / "submitted").exists() and os.environ["PATH"].startswith(str(tools.folder))


def test_a_job_without_a_run_here_is_no_error(tools: Tools, tmp_path: Path) -> None:
    """plait status of one that waits, or that failed before it began: its scheduler's word, and where to look."""
    tools.add("sbatch", "17\n")
    tools.add("squeue", "PENDING|Priority\n")
    send(REQUEST)
    shown = CliRunner().invoke(app, ["status", "play"])
    assert shown.exit_code == 0, shown
    assert shown.stdout.splitlines() == [
        "job      play on slurm: job 17, PENDING (others are before it)",
        "status   it has not begun to train; plait logs play says how far it is, or why it ended",
    ]
