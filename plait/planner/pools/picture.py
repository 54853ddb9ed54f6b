"""Time against cost of all priced choices of a pool, as a figure of the plan's page."""

from __future__ import annotations

from plait.planner.pools.answer import PoolAnswer
from plait.planner.pools.choice import DAY_S, PoolChoice, frontier
from plait.planner.pools.choice_words import choice_text
from plait.planner.report.figures import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Axis,
    Drawing,
    LegendKey,
    Picture,
    chart_html,
    curve_html,
    curves_html,
    dot_html,
    line_html,
    ratio_axis,
    star_html,
)

HOUR_S = 3600.0
MARGIN = 1.08
"""The axes extend beyond the outermost choices by this factor."""
MOST_DOTS = 400


def picture_of_choices(answer: PoolAnswer) -> Picture:
    """Every priced choice by time and cost; without prices, by time and number of devices."""
    caption = (
        "Each dot is a selection of the pool's machines with its best layout; the line joins those that no other beats "
        f"in both. {answer.sentence}."
    )
    return Picture(title="Time against money", caption=caption, drawing=_drawing(answer))


def _drawing(answer: PoolAnswer) -> Drawing:
    best = answer.best
    beyond = sorted(answer.explored, key=lambda one: one.wall_s * _second(one) / (best.wall_s * _second(best)))
    shown = [*answer.choices, *[one for one in beyond if one not in answer.choices][:MOST_DOTS]]
    unit_s, unit = (DAY_S, "days") if best.wall_s >= DAY_S else (HOUR_S, "hours")
    x = _axis(f"{unit} of the whole run", [one.wall_s / unit_s for one in shown])
    words = "devices" if best.cost is None else f"cost in {answer.pool.currency}"
    y = _axis(words, [_second(one) for one in shown])

    def place(one: PoolChoice) -> tuple[float, float]:
        return x.share(one.wall_s / unit_s), y.share(_second(one))

    colours = {"on demand": BLUE, "spot": ORANGE}
    dots = [dot_html(*place(one), colours[one.purchase], choice_text(one)) for one in shown if one is not best]
    curve = curve_html([place(one) for one in frontier(shown)], GREY, width=2)
    deadline_s = answer.aims.deadline_s
    deadline = ""
    if deadline_s is not None and x.least <= deadline_s / unit_s <= x.most:
        deadline = line_html(x.share(deadline_s / unit_s), "deadline")
    star = star_html(*place(best), RED, choice_text(best))
    purchases = dict.fromkeys(one.purchase for one in shown)
    return Drawing(
        html=chart_html(x, y, f"{curves_html([curve])}{deadline}{''.join(dots)}{star}"),
        legend=(
            *(LegendKey(colour=colours[purchase], words=purchase) for purchase in purchases),
            LegendKey(colour=RED, words="recommended"),
        ),
    )


def _second(choice: PoolChoice) -> float:
    """Cost, or the number of devices if it is unknown; never 0, because the axis is logarithmic."""
    return choice.selection.n_devices if choice.cost is None else max(choice.cost, 1e-6)


def _axis(words: str, values: list[float]) -> Axis:
    return ratio_axis(words, min(values) / MARGIN, max(values) * MARGIN)
