"""plait's version, and the line that installs a version from its wheel: the one home of both."""

from __future__ import annotations

__version__ = "0.2.0"
"""pyproject.toml reads it from here."""


def wheel_install_line(version: str, torch: str = "") -> str:
    """The command that installs a version of plait from its wheel, which lies in the current folder.

    uv takes the build of torch that the machine's driver can run, and the CPU build where there is no driver. `torch`
    is the version that another host of the run has; where it is empty, uv takes the newest.
    """
    same_torch = f" --with torch=={torch}" if torch else ""
    return f"uv tool install --force --torch-backend auto{same_torch} ./plait-{version}-py3-none-any.whl"
