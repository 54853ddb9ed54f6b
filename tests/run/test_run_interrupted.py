"""What a signal in the midst of a command gives: its exit code, and no traceback."""

from __future__ import annotations

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
