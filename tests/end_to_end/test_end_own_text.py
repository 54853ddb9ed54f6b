"""A person's own folder: a novel, a table of reviews, and files that cannot be read beside them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.command import Place, some_text
from tests.end_to_end.conftest import RunWarm

MODEL = ("model.layers=1", "model.width=32", "model.heads=2", "train.sequence=16", "train.batch_tokens=64")
ONCE = ("train.budget=2 steps", "train.matmul_backend=default", "train.precision=float32", "layout.replicate=1")


def test_a_folder_of_ones_own_becomes_a_run_that_says_what_it_read(tmp_path: Path, run_warm: RunWarm) -> None:
    place = Place(tmp_path)
    (tmp_path / "play.txt").unlink(missing_ok=True)
    (tmp_path / "novel.txt").write_text(some_text(400))
    reviews = "".join(f'{n},"{line}"\n' for n, line in enumerate(some_text(60, seed=2).splitlines()))
    (tmp_path / "reviews.csv").write_text(f"stars,review\n{reviews}")
    (tmp_path / "report.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "old.txt").write_bytes("Füße ".encode("latin1") * 50)
    (tmp_path / "empty.txt").write_text("")
    new = run_warm(place, "new", "story")
    assert new.code == 0 and "reads    novel.txt (" in new.out and "reviews.csv (2." in new.out, new
    assert all(f"left out {name}, which " in new.out for name in ("report.pdf", "old.txt", "empty.txt")), new.out
    assert "plait data story.toml" in new.out
    plan = run_warm(place, "plan", "story.toml", *MODEL, *ONCE)
    assert plan.code == 0 and "text not prepared yet: about " in plan.out, plan
    named = f"data.files={json.dumps(['novel.txt', 'old.txt', 'report.pdf'])}"
    data = run_warm(place, "data", "story.toml", named)
    assert data.code == 0 and "iconv -f latin1 -t utf-8 old.txt > old-utf8.txt" in data.out, data
    trained = place.run("train", "story.toml", named, *MODEL, *ONCE)
    assert trained.code == 0 and "left out report.pdf, which is a PDF" in trained.out, trained
    reasons = json.loads((tmp_path / "runs" / "story" / "plan.json").read_text())["reasons"]
    assert any(reason.startswith("text left out: old.txt, which is not UTF-8 text at byte 1") for reason in reasons)
    nothing = run_warm(place, "train", "story.toml", 'data.files=["old.txt", "report.pdf"]', "run.name=other")
    assert nothing.code == 2 and "none of the 2 files can be learned from" in nothing.err, nothing
