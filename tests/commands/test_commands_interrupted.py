"""What a signal in the midst of a command gives: its exit code, and no traceback."""

from __future__ import annotations

import os
import signal as signals
import subprocess
import sys
from pathlib import Path

import pytest

from plait import cli
from plait.commands.train import continuing_command
from plait.errors import Interrupted, StopSignal
from plait.hosts.joining import ONE_HOST, HostsRequest
from plait.process_exit import exit_code_of


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_is_no_bug(
    signal: StopSignal, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise Interrupted(signal)

    monkeypatch.setattr(cli, "app", stopped)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == f"plait: stopped by {'Ctrl-C' if signal == 'SIGINT' else signal}\n"


@pytest.mark.parametrize(
    ("signal", "slurm", "code"),
    [("SIGUSR1", "17", 75), ("SIGTERM", "17", 75), ("SIGUSR1", "", 143), ("SIGTERM", "", 143), ("SIGINT", "17", 130)],
)
def test_below_slurm_a_scheduler_s_signal_asks_for_another_turn(
    signal: StopSignal, slurm: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", slurm)
    assert exit_code_of(signal) == code


def test_a_stopped_run_names_the_whole_command_that_goes_on_with_it() -> None:
    recipe = Path("my recipes/first.toml")
    alone = continuing_command(recipe, ["train.budget=1 hour", "model.size=10M"], ONE_HOST, "new layouts")
    assert alone == "plait train 'my recipes/first.toml' 'train.budget=1 hour' model.size=10M"
    hosts = HostsRequest(n_hosts=2, address="10.0.0.1", port=24717, secret_file=Path("secret.txt"))
    several = "plait train a.toml --no-check --hosts 2 --address 10.0.0.1 --port 24717 --secret-file secret.txt"
    assert continuing_command(Path("a.toml"), [], hosts, "never") == several


@pytest.mark.parametrize("number", [signals.SIGTERM, signals.SIGINT, signals.SIGHUP])
def test_a_signal_in_the_midst_of_a_command_closes_what_is_open_and_goes(
    monkeypatch: pytest.MonkeyPatch, number: signals.Signals
) -> None:
    """Also where it arrives twice, as from `timeout`, which signals its command and then their group."""
    closed: list[str] = []

    def stopped(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), number)
        except Exception:  # as libraries take what they do not know
            pytest.fail("a signal is no error of a library's")
        finally:
            os.kill(os.getpid(), number)
            closed.append("the run's folder")

    monkeypatch.setattr(cli, "app", stopped)
    usual = signals.default_int_handler if number == signals.SIGINT else signals.SIG_DFL
    before = signals.signal(number, usual)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 128 + number and closed == ["the run's folder"]
        assert signals.getsignal(number) is usual
    finally:
        signals.signal(number, before)


ENDS_UNDER_FIRE = """
import atexit, os, signal, sys
from plait import cli
from plait.commands.train import continuing_command

class Errors:
    def write(self, text):
        os.kill(os.getpid(), signal.SIGINT)  # another request, while the sentence is written
        return sys.__stderr__.write(text)
    def flush(self):
        sys.__stderr__.flush()
    def isatty(self):
        return False

def stopped(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)

sys.stderr, cli.app = Errors(), stopped
atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # a repetition, in the last moments of the process
cli.main()
"""


def test_signals_at_the_very_end_of_a_command_change_neither_its_sentence_nor_its_code() -> None:
    run = subprocess.run([sys.executable, "-c", ENDS_UNDER_FIRE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (143, "", "plait: stopped by SIGTERM\n")
