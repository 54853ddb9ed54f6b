"""How long `import plait`, its first function, and `plait --help` take, beside Python's own start.

python -m benchmarks.startup
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.pairing import alternate, compare

ROUNDS = 15
COMMANDS = {
    "python": ["-c", "pass"],
    "import plait": ["-c", "import plait"],
    "plait.load_recipe": ["-c", "import plait; plait.load_recipe"],
    "plait --help": ["-m", "plait", "--help"],
}


def main() -> None:
    """Print the median seconds of each, and its ratio to Python's own start in the same round."""
    turns = alternate(list(COMMANDS), ROUNDS, _seconds)
    for one in compare(turns, "python"):
        print(f"{one.name:20} {one.median_s:.3f} s  {one.ratio:.2f} times python, least {min(turns[one.name]):.3f} s")


def _seconds(name: str) -> float:
    began_s = time.monotonic()
    subprocess.run([sys.executable, *COMMANDS[name]], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began_s


if __name__ == "__main__":
    main()
