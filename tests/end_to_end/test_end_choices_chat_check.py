"""Multiple choice, chat and the check of a machine, each by the commands that a person gives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

import plait
from tests.end_to_end.command import Place, ended
from tests.end_to_end.conftest import RunWarm

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def questions() -> str:
    words = ("Kalo", "Mitor", "Renus", "Wyga", "Denka", "Lomi")
    asked = [
        {"question": f"{one} {two}", "choices": [three, "Qxz"], "answer": 0}
        for one in words
        for two in words[:2]
        for three in ("ka", "lomi")
    ]
    return "".join(json.dumps(one) + "\n" for one in asked)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicate", "tensor and pipeline"])
def test_choices_are_asked_in_the_run_and_by_eval(
    place: Place, run_warm: RunWarm, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one process eval gives what the run's ranks gave together, whatever they split."""
    monkeypatch.chdir(place.folder)
    (place.folder / "choices.jsonl").write_text(questions())
    name = f"asked-{layout[:4]}"
    axes = {"replicate": (), "tensor and pipeline": ("layout.replicate=1", "layout.tensor=2", "layout.pipeline=2")}
    told = place.train(name, "report.choices=choices.jsonl", *axes[layout], "--no-check")
    assert told.code == 0, told.err
    assert "of choices right" in told.out
    evaluations = [line for line in place.lines(name) if "eval_loss" in line]
    assert len(evaluations) == 2 and all(0 <= line["choices_accuracy"] <= 1 for line in evaluations)
    receipt = json.loads((place.path(name) / "receipt.json").read_text())
    keys = ("choices_accuracy", "choices_accuracy_per_byte")
    assert [receipt[key] for key in keys] == [evaluations[-1][key] for key in keys]
    asked = run_warm(place, "eval", name, "--choices", "choices.jsonl")
    assert asked.code == 0, asked.err
    values = json.loads(asked.out)
    assert values["questions"] == 24 and [values[key] for key in keys] == [receipt[key] for key in keys]
    assert values["choices_accuracy"] > 0.5  # no word of the text has the letters of "Qxz"
    assert plait.evaluate(name, choices="choices.jsonl") == values


def test_choices_that_cannot_be_asked_are_refused_before_training(place: Place, run_warm: RunWarm) -> None:
    missing = run_warm(place, "train", "tiny.toml", "run.name=never", "report.choices=none.jsonl")
    assert missing.code == 2 and "there is no file of choices" in missing.sentence()
    assert not place.path("never").exists() or not (place.path("never") / "plan.json").exists()


@pytest.mark.slow
def test_chat_answers_each_line_by_the_template(
    place: Place, reference: Callable[[int], str], run_warm: RunWarm
) -> None:
    place.copy_run(reference(2), "talker")
    refused = run_warm(place, "chat", "talker")
    assert refused.code == 2 and "has no chat template" in refused.sentence()
    (place.path("talker") / "chat_template.jinja").write_text(TEMPLATE)
    lines = place.folder / "lines.txt"
    lines.write_text("Kalo mi\n\nRen tor\n/quit\nnever read\n")
    texts = []
    for _ in range(2):
        with lines.open() as typed:
            talk = ended(place.start("chat", "talker", "--tokens", "8", stdin=typed))
        assert talk.code == 0 and not talk.err, talk
        texts.append(talk.out)
    assert texts[0] == texts[1] and texts[0].count("\n") >= 2
    (place.path("talker") / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with lines.open() as typed:
        unsafe = ended(place.start("chat", "talker", stdin=typed))
    assert unsafe.code == 2 and "refuses these messages" in unsafe.sentence()


@pytest.mark.slow
def test_a_check_says_within_a_minute_whether_this_machine_can_train(place: Place) -> None:
    began = time.monotonic()
    told = place.run("probe", "--check")
    assert told.code == 0 and not told.err, told
    words = [line.split()[0] for line in told.out.splitlines()]
    assert words == ["devices", "links", "sums", "memory", "disk", "software", "verdict"]
    assert told.out.endswith("verdict  ready to train\n")
    assert time.monotonic() - began < 60
    hidden = ended(place.start("probe", "--check", "tiny.toml", "run.devices=0"))
    assert hidden.code == 1 and "verdict  not ready: " in hidden.out and not hidden.err
    place.assert_nobody_left()
