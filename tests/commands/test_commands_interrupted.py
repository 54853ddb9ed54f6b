"""What a signal in the midst of a command gives: its exit code, and no traceback."""

from __future__ import annotations

import os
import signal as signals

import pytest

from plait import cli
from plait.errors import Interrupted


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_is_no_bug(
    signal: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise Interrupted(signal)

    monkeypatch.setattr(cli, "app", stopped)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == ""


def test_sigterm_in_the_midst_of_a_command_closes_what_is_open_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def stopped(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signals.SIGTERM)
        except Exception:  # as libraries take what they do not know
            pytest.fail("a signal is no error of a library's")
        finally:
            closed.append("the run's folder")

    monkeypatch.setattr(cli, "app", stopped)
    before = signals.signal(signals.SIGTERM, signals.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 143 and closed == ["the run's folder"]
        assert signals.getsignal(signals.SIGTERM) is signals.SIG_DFL
    finally:
        signals.signal(signals.SIGTERM, before)
