"""Model FLOPs utilisation (MFU) in words: a share of a measured peak may exceed it, and then says so."""

from __future__ import annotations


def utilisation_text(mfu: float, form: str = "{:.0%}") -> str:
    """A share of the arithmetic peak; beyond all of it the peak was measured too low, which is said in its place."""
    return form.format(mfu) if mfu <= 1 else "over 100% of a peak that was measured while the machine was busy"


def both_utilisations_text(full: float | None, causal: float | None) -> str:
    """MFU with all of attention counted and with causal attention; the second alone where only the first, which counts
    scores that a causal model skips, exceeds the peak. Empty where the peak is unknown."""
    if full is None or causal is None:
        return "" if full is None else utilisation_text(full, "{:.1%}")
    if full > 1 and causal <= 1:
        return f"{causal:.1%} with causal attention"
    return utilisation_text(full, "{:.1%}") + (f" ({causal:.1%} with causal attention)" if full <= 1 else "")
