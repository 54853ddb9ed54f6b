"""Is an impossible share of the peak said to be one?"""

from __future__ import annotations

from plait.report.utilisation import utilisation_text


def test_a_share_beyond_the_peak_says_that_the_peak_was_measured_too_low() -> None:
    assert utilisation_text(0.417) == "42%"
    assert utilisation_text(1.0, "{:.1%}") == "100.0%"
    assert utilisation_text(1.039) == "over 100% of a peak that was measured while the machine was busy"
