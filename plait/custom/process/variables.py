"""Variables of the environment by which plait's launcher speaks to the workers of a program."""

from __future__ import annotations

RENDEZVOUS = "PLAIT_RENDEZVOUS"
"""Where the workers meet, as in `parallel.mesh.open_store`; their numbers are in torchrun's variables."""
PROGRAM_VARIABLE = "PLAIT_PROGRAM"
"""The path of the program file on the worker's own host: no message names a path or carries code."""
MODULE_VARIABLE = "PLAIT_PROGRAM_MODULE"
"""The name of the module that the program is, where its user named a module and not a file."""
