"""Figures of the files under benchmarks/results, as the values and short texts that README and guides cite."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab.demands import demands
from benchmarks.lab.journal import read_lines
from benchmarks.lab.report import Verdict, summary, verdict
from benchmarks.lab.unequal import reached

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Figures = Mapping[str, Any]
_PLAIN = {ord(","): "", ord("×"): "x", ord("."): "-"}
"""A case's name as a key that a format string may hold."""


def figures(file: str) -> Figures:
    """All that may be cited of one results file, by name."""
    name = max((name for name in _READERS if file.startswith(name)), key=len)
    return _READERS[name](RESULTS / file)


def _published(path: Path) -> Figures:
    found = json.loads(path.read_text())
    return {**found, "runs": sum(family["rows"] for family in found["families"].values())}


def _time_to_loss(path: Path) -> Figures:
    """By length: the last held-out loss of all seeds, as derived for AdamW and as derived."""
    losses: dict[str, dict[str, list[str]]] = {}
    for row in sorted(json.loads(path.read_text())["rows"], key=lambda row: row["seed"]):
        if row["share"] == 1:
            of_length = losses.setdefault(f"minutes{row['minutes']}", {})
            of_length.setdefault(row["choice"], []).append(f"{row['nats_per_byte'][-1]:.3f}")
    return {length: {choice: ", ".join(all_) for choice, all_ in of.items()} for length, of in losses.items()}


def _foreign_configs(path: Path) -> Figures:
    return json.loads(path.read_text())


def _first_run(path: Path) -> Figures:
    """By case of the benchmark: every row's time over plait's, as it chose ("auto") and at each precision."""
    cases = {name: case for name, case in json.loads(path.read_text()).items() if isinstance(case, dict)}
    cases = {name: case for name, case in cases.items() if "standings" in case}
    found: dict[str, Any] = {}
    for name, case in cases.items():
        over = {base: {row["name"]: _ratio_text(row) for row in rows} for base, rows in case["standings"].items()}
        found[name.translate(_PLAIN)] = {
            "auto": over[case["chosen"]["row"]],
            "float32": over["plait"],
            "bf16": over["plait, bf16"],
            "times": {
                "loop": _times(case, case["chosen"]["row"], "torch loop"),
                "trainer": _times(case, case["chosen"]["row"], "HF Trainer, defaults"),
                "loop in float32": _times(case, "plait", "torch loop"),
                "loop in bf16": _times(case, "plait, bf16", "torch loop, bf16"),
            },
            "share": case["share_of_rate"][case["chosen"]["row"]],
        }
    differences = [
        case["loss_differences"][row]
        for case in cases.values()
        for row in case["loss_differences"]
        if "bf16" not in row
    ]
    return {**found, "loss_difference": f"{max(differences):.0e}".replace("e-0", "e-")}


def _times(case: Figures, base: str, row: str) -> float:
    """The median of a row's time over that of one of plait's rows; not a number where the row was not run."""
    return next((one["ratio"] for one in case["standings"][base] if one["name"] == row), float("nan"))


def _strands(path: Path) -> Figures:
    found = json.loads(path.read_text())
    ratios: dict[str, dict[str, str]] = {}
    for result in found["results"]:
        peer = " beside replicate" if result["peer"] == "plait, replicate" else ""
        ratios.setdefault(result["strand"] + peer, {})[result["model"]] = _ratio_text(result)
    step_s = {name: median(turn["step_s"] for turn in turns) for name, turns in found["turns"]["11M"].items()}
    alone_s = step_s.get("plait, one process, 256", float("nan"))
    return {**ratios, "replicate_over_half": 2 * step_s["plait, replicate, 256"] / alone_s}


def _lab(path: Path) -> Figures:
    lines = read_lines(path)
    verdicts = [verdict(line) for line in lines]
    whole = summary(verdicts)
    narrowest = next(list(one.baselines.values()) for one in verdicts if one.baselines and one.rate == 5e7)
    return {
        **{name: _spread(value) for name, value in asdict(whole).items() if isinstance(value, tuple)},
        "baseline_least": whole.baseline_ratio_least,
        "reached": {one.what: one.reached for one in demands(whole, verdicts)},
        "narrowest": {"least": min(narrowest), "most": max(narrowest)},
        "cases": len(lines),
        "fastest_was_fastest": sum(one.regret == 0 for one in verdicts),
        "minutes": sum(line["took_s"] for line in lines) / 60,
        "over_floor_16": {"1G": _over_floor(verdicts, 1e9), "100M": _over_floor(verdicts, 1e8)},
    }


def _over_floor(verdicts: list[Verdict], rate: float) -> float | None:
    """Of the 11M model with 16 sequences a step on two hosts."""
    return next(one.over_floor for one in verdicts if one.rate == rate and "11M, 16 × 256" in one.case)


def _lab_quick(path: Path) -> Figures:
    verdicts = [verdict(line) for line in read_lines(path)]
    whole = summary(verdicts)
    return {
        "cases": len(verdicts),
        "fastest_was_fastest": sum(one.regret == 0 for one in verdicts),
        "regret": _spread(whole.regret),
        "step_error": _spread(whole.step_error),
        "bias": 100 * (whole.step_bias or 0.0),
    }


def _unequal(path: Path) -> Figures:
    """By trial: each contender's share of the sum of the hosts' own speeds, and of the other ideal where one is."""
    found: dict[str, Any] = {}
    for line in read_lines(path, "name"):
        other = next(iter(line["of"].values()), float("nan"))
        rate = "unlimited" if line["rate"] == "unshaped" else "at 1 Gbit/s"
        name = f"{len(line['cores'])} hosts {rate} {line['name'].rsplit(', ')[-1]}"
        found[name] = {**{name: round(100 * share) for name, share in reached(line).items()}, "other": other}
    return found


def _speedup(path: Path) -> Figures:
    """By the number of hosts: times the speed of one, and the least and greatest of the rounds."""
    return {
        f"{line['hosts']} hosts": {
            "speedup": line["speedup"],
            "least": min(line.get("rounds", [line["speedup"]])),
            "most": max(line.get("rounds", [line["speedup"]])),
        }
        for line in read_lines(path, "hosts")
    }


def _straggler(path: Path) -> Figures:
    series = json.loads(path.read_text())["series"]
    trials = [trial for one in series for trial in one["trials"]]
    return {
        "trials": len(trials),
        "right": sum(trial["verdict"] == "right" for trial in trials),
        "latest_steps": max(trial["after_steps"] for trial in trials),
        "healthy_steps": sum(one["healthy_steps"] for one in series),
        "false_alarms": sum(len(one["false_alarms"]) for one in series),
    }


def _slowdown(path: Path) -> Figures:
    difference = json.loads(path.read_text())["largest relative difference of a loss"]
    return {"loss_difference": f"{difference:.1e}".replace("e-0", "e-")}


def _watching(path: Path) -> Figures:
    return {model: one["spent"] for model, one in json.loads(path.read_text())["models"].items()}


def _spread_programs(path: Path) -> Figures:
    """By program and contender: time of a step over plait's, in the layout that stands beside it."""
    found: dict[str, dict[str, str]] = {}
    for case, rows in json.loads(path.read_text())["results"].items():
        if case.endswith("step_s"):
            found.setdefault(case.partition(",")[0], {}).update({row["name"]: _ratio_text(row) for row in rows})
    return found


def _real_model(path: Path) -> Figures:
    found = json.loads(path.read_text())
    return {"kilobytes": found["bytes"] // 1000, "difference": f"{found['difference']:.0e}".replace("e-0", "e-")}


def _expert_speed(path: Path) -> Figures:
    """Of each comparison its ratio, by the first word of what is compared."""
    outcomes = json.loads(path.read_text())["outcomes"]
    return {
        one["what"].split()[0]: f"{one['ratio']:.2f} ({one['least']:.2f} … {one['greatest']:.2f})" for one in outcomes
    }


def _own_program_hosts(path: Path) -> Figures:
    """By number of hosts: in percent of all alone, and times one of them."""
    rows = json.loads(path.read_text())["rows"]
    return {
        f"{kind}{len(row['cores'])}": {"share": 100 * share, "times": share * len(row["cores"])}
        for row in rows
        for kind, share in row["reached"].items()
    }


def _many_agents(path: Path) -> Figures:
    """Of all rounds the slowest."""
    found = json.loads(path.read_text())
    rounds = found["rounds"]
    slowest = {key: max(one[key] for one in rounds) for key in ("joined_s", "reached_s", "running_s", "ended_s")}
    return {"agents": found["agents"], "told_s": max(max(one["told_s"]) for one in rounds), **slowest}


def _submit_start(path: Path) -> Figures:
    found = json.loads(path.read_text())
    return {"beyond_s": found["beyond_s"], "rounds": len(found["rounds"])}


def _precision_seeds(path: Path) -> Figures:
    """Of each recipe: steps, and the difference in percent of bf16's held-out loss that is farthest from zero."""
    pairs = json.loads(path.read_text())["pairs"]
    recipes = {
        recipe: [one for one in pairs if one["recipe"] == recipe]
        for recipe in dict.fromkeys(pair["recipe"] for pair in pairs)
    }
    return {
        recipe: {
            "seeds": len(found),
            "steps": found[0]["steps"],
            "most": max(100 * abs(one["difference"]) for one in found),
        }
        for recipe, found in recipes.items()
    }


def _expert_balance(path: Path) -> Figures:
    """Over all seeds: the greatest loads, and by how many percent the loss with the bias is below the others."""
    seeds = json.loads(path.read_text())["seeds"]
    below = {name: [100 * (1 - one["loss"] / one[name]) for one in seeds] for name in ("loss_without", "loss_of_dense")}
    return {
        "seeds": len(seeds),
        "hold": sum(one["holds"] for one in seeds),
        "load": max(one["load"] for one in seeds),
        "least without": min(one["load_without"] for one in seeds),
        "most without": max(one["load_without"] for one in seeds),
        "below": {name: {"least": min(shares), "most": max(shares)} for name, shares in below.items()},
    }


def _standings(path: Path) -> Figures:
    """Of a benchmark that keeps its own table: seconds, and shares in percent."""
    standings = json.loads(path.read_text())["standings"]
    return {
        name: {
            **one,
            **{f"{key} in percent": 100 * one[key] for key in ("stall_p95_of_a_step",) if one.get(key) is not None},
        }
        for name, one in standings.items()
    }


def _recovery_cost(path: Path) -> Figures:
    """By model: what it costs in all, in percent."""
    models = json.loads(path.read_text())["models"]
    return {name: {"share": 100 * one["share"], "step_ms": 1e3 * one["step_s"]} for name, one in models.items()}


def _finetune_speed(path: Path) -> Figures:
    """By kind of comparison: speed over TRL's, and peak memory over TRL's."""
    found = json.loads(path.read_text())["results"]
    return {
        kind: {what: _median_text(one[f"{what}_ratios"]) for what in ("speed", "memory")} for kind, one in found.items()
    }


def _median_text(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"


def _ratio_text(ratio: Mapping[str, float]) -> str:
    return f"{ratio['ratio']:.2f} ({ratio['least_ratio']:.2f} … {ratio['greatest_ratio']:.2f})"


def _spread(shares: tuple[float, ...]) -> dict[str, float]:
    """In percent."""
    return {name: 100 * share for name, share in zip(("median", "p90", "worst"), shares, strict=True)}


def _faults(path: Path) -> Figures:
    """The bars that were run, by their names ("A5"), and of A1 all layouts together."""
    bars = json.loads(path.read_text())["bars"]
    layouts = list(bars.get("A1", {}).values())
    if not layouts:
        return bars
    counts = {key: sum(one[key] for one in layouts) for key in ("runs", "kills", "equal")}
    worst = {key: max(one[key] for one in layouts) for key in ("back_after_s_p95", "steps_lost_most")}
    return {**bars, "A1 all": {"layouts": len(layouts), **counts, **worst}}


def _one_gpu(path: Path) -> Figures:
    """By size and program: milliseconds of a step, that time over plait's, MFU, and the most memory."""
    found = json.loads(path.read_text())
    sizes = {name: size for name, size in found.items() if isinstance(size, dict) and "turns" in size}
    return {
        name: {program: _gpu_row(turns, size["turns"]["plait"]) for program, turns in size["turns"].items()}
        for name, size in sizes.items()
    }


def _gpu_experiment(path: Path) -> Figures:
    """By row: milliseconds of a step, and how many times as long it takes as replayed."""
    took = {row["name"]: row["step_s"] for row in json.loads(path.read_text())["rows"] if "step_s" in row}
    return {
        name.translate(_PLAIN): {"ms": step_s * 1e3, "times": step_s / took.get(f"{name}, replayed", step_s)}
        for name, step_s in took.items()
    }


def _gpu_row(turns: list[dict[str, float]], of_plait: list[dict[str, float]]) -> Figures:
    one, plait = turns[len(turns) // 2], of_plait[len(of_plait) // 2]
    return {
        **one,
        "ms": one["step_s"] * 1e3,
        "ratio": one["step_s"] / plait["step_s"],
        "gib": one["peak_bytes"] / 2**30,
    }


def _rent(path: Path) -> Figures:
    return json.loads(path.read_text())


_READERS: dict[str, Callable[[Path], Figures]] = {
    "published": _published,
    "foreign-configs": _foreign_configs,
    "time-to-loss": _time_to_loss,
    "first-run": _first_run,
    "one-gpu": _one_gpu,
    "gpu-experiment": _gpu_experiment,
    "strands": _strands,
    "spread": _spread_programs,
    "finetune-speed": _finetune_speed,
    "expert-speed": _expert_speed,
    "own-program-hosts": _own_program_hosts,
    "real-model": _real_model,
    "many-agents": _many_agents,
    "submit-start": _submit_start,
    "lab": _lab,
    "lab-2026-11-25-quick": _lab_quick,
    "unequal": _unequal,
    "speedup": _speedup,
    "straggler": _straggler,
    "slowdown": _slowdown,
    "watching": _watching,
    "faults": _faults,
    "expert-balance": _expert_balance,
    "precision-seeds": _precision_seeds,
    "recovery-time": _standings,
    "save-stall": _standings,
    "recovery-cost": _recovery_cost,
    "rent": _rent,
}
