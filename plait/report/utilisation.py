"""Model FLOPs utilisation (MFU) in words: a share of a measured peak may exceed it, and then says so."""

from __future__ import annotations


def utilisation_text(mfu: float, form: str = "{:.0%}") -> str:
    """A share of the arithmetic peak; beyond all of it the peak was measured too low, which is said in its place."""
    return form.format(mfu) if mfu <= 1 else "over 100% of a peak that was measured while the machine was busy"
