"""Who holds a run up, on made-up times as processors really have them: noise, odd steps, slow drifts, from seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from plait.report.steadiness import LAG_STEPS, LEAST_USUAL_VALUES, WINDOW_STEPS, Series
from plait.report.straggler import RankTimes, Watch
from plait.report.straggler_words import FindingKind, StragglerFinding, begin_words
from tests.matrix import few_fast

TWO, FOUR, PAIRS = ("a", "b"), ("a", "b", "c", "d"), ("a", "a", "b", "b")
WITHIN_STEPS = 20
BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A run whose ranks' steps vary by a lognormal factor; one in a hundred takes 2 to 3 times as long."""

    seed: int
    steps: int
    hosts: tuple[str, ...] = TWO
    speeds: tuple[float, ...] = ()
    noise: float = 0.07
    compute_s: float = 0.080
    message_s: float = 0.010
    data_s: float = 0.0001
    drift: float = 0.10
    """How far a rank's speed wanders, over hundreds of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Ranks whose devices or data are slow in the steps from `first` up to `end`, or messages that are."""

    kind: FindingKind
    ranks: tuple[int, ...]
    first: int
    end: int
    factor: float


@dataclass(slots=True)
class Course:
    """What the ranks did, without waits: [steps, ranks], and [steps, 1] of messages."""

    compute_s: np.ndarray
    data_s: np.ndarray
    message_s: np.ndarray

    def times(self, index: int) -> list[RankTimes]:
        """Of one step: whoever is done waits for the last one, and then all wait for the messages."""
        busy = self.compute_s[index] + self.data_s[index]
        wait = busy.max() - busy + self.message_s[index]
        rows = zip(self.compute_s[index].tolist(), wait.tolist(), self.data_s[index].tolist(), strict=True)
        return [RankTimes(rank=r, compute_s=c, wait_s=w, data_s=d) for r, (c, w, d) in enumerate(rows)]


def course(world: World, *troubles: Trouble) -> Course:
    random, count = np.random.default_rng(world.seed), len(world.hosts)
    shape, steps = (world.steps, count), np.arange(world.steps)[:, None]
    wander = 1 + world.drift * np.sin(random.uniform(0, 6, count) + 6 * steps / random.uniform(300, 900, count))
    odd = np.where(random.random(shape) < 0.01, random.uniform(2, 3, shape), 1.0)
    made = Course(
        compute_s=world.compute_s / np.array(world.speeds or [1.0] * count)
        * wander * odd * random.lognormal(0, world.noise, shape),
        data_s=np.where(random.random(shape) < 0.01, random.uniform(0, 0.1, shape), world.data_s),
        message_s=world.message_s * random.lognormal(0, 3 * world.noise, (world.steps, 1)),
    )  # fmt: skip
    for trouble in troubles:
        here = slice(trouble.first - 1, trouble.end - 1)
        if trouble.kind == "device":
            made.compute_s[here, list(trouble.ranks)] *= trouble.factor
        elif trouble.kind == "data":
            made.data_s[here, list(trouble.ranks)] += (trouble.factor - 1) * (world.compute_s + world.message_s)
        else:
            made.message_s[here] += (trouble.factor - 1) * (world.compute_s + world.message_s)
    return made


def told(world: World, *troubles: Trouble) -> list[tuple[int, StragglerFinding]]:
    """All that a watch says of a run, each with the step after which it says it."""
    return told_of(course(world, *troubles), world.hosts)


def told_of(made: Course, hosts: tuple[str, ...]) -> list[tuple[int, StragglerFinding]]:
    watch, found = Watch(hosts, shares="fixed"), []
    for index in range(len(made.compute_s)):
        finding = watch.observe(index + 1, made.times(index), [BATCH] * len(hosts))
        if finding is not None:
            found.append((index + 1, finding))
    return found


@pytest.mark.parametrize(
    ("hosts", "speeds"), [(TWO, ()), (FOUR, ()), (PAIRS, ()), (TWO, (1, 0.4)), (FOUR, (1, 1, 0.5, 0.25))]
)
@pytest.mark.parametrize("noise", [0.05, 0.10])
def test_a_healthy_run_accuses_nobody(hosts, speeds, noise):
    steps = 1000
    accused = told(World(seed=11, steps=steps, hosts=hosts, speeds=speeds, noise=noise))
    assert not accused, accused[0][1].sentence


@pytest.mark.parametrize("factor", few_fast([2.0, 3.3], 2.0))
@pytest.mark.parametrize("kind", ["device", "link", "data"])
def test_who_holds_a_run_up_is_named_in_time(kind, factor):
    """40 trials of each kind and degree, in which the noise, the place and the step differ; 95 % must be right."""
    wrong = []
    for seed in range(40):
        random = np.random.default_rng(1000 + seed)
        hosts = (TWO, FOUR)[seed % 2]
        first = int(random.integers(40, 120))
        trouble = Trouble(
            kind=kind, ranks=(int(random.integers(len(hosts))),), first=first, end=first + 60, factor=factor
        )
        world = World(seed=seed, steps=first + 100, hosts=hosts, noise=random.uniform(0.05, 0.10))
        found = told(world, trouble)
        if not right(found, trouble, hosts):
            wrong.append((seed, trouble, [(step, one.sentence) for step, one in found]))
    assert len(wrong) <= 2, wrong


def right(found: list[tuple[int, StragglerFinding]], trouble: Trouble, hosts: tuple[str, ...]) -> bool:
    """Whether it was told once, of the right kind, rank and step, soon enough, and that it was over."""
    if [finding.phase for _, finding in found] != ["begins", "ends"]:
        return False
    (told_at, begun), (over_at, ended) = found
    ranks = trouble.ranks if trouble.kind != "link" else (0, 1) if len(hosts) == 2 else ()
    return (
        begun.kind == ended.kind == trouble.kind
        and begun.ranks == ended.ranks == ranks
        and trouble.first <= told_at <= trouble.first + WITHIN_STEPS
        and abs(begun.since_step - trouble.first) <= 2
        and trouble.end <= over_at <= trouble.end + 2 * WITHIN_STEPS
        and (trouble.kind != "device" or 0.75 < begun.factor / trouble.factor < 1.33)
    )


def test_what_slows_down_everybody_accuses_nobody():
    world = World(seed=1, steps=300, hosts=FOUR)
    assert not told(world, Trouble(kind="device", ranks=(0, 1, 2, 3), first=100, end=200, factor=2))


def test_a_peer_that_gets_faster_accuses_nobody():
    world = World(seed=2, steps=300)
    assert not told(world, Trouble(kind="device", ranks=(1,), first=100, end=400, factor=0.4))


def test_a_few_odd_steps_in_a_row_accuse_nobody():
    world = World(seed=3, steps=300)
    assert not told(world, Trouble(kind="device", ranks=(1,), first=100, end=105, factor=3))


@pytest.mark.parametrize(("hosts", "slow"), [(PAIRS, (2, 3)), (("a", "b", "b", "b"), (1, 2, 3))])
def test_all_ranks_of_a_host_are_named_together(hosts, slow):
    world = World(seed=4, steps=200, hosts=hosts)
    found = told(world, Trouble(kind="device", ranks=slow, first=80, end=300, factor=2.5))
    assert [(finding.ranks, finding.host) for _, finding in found] == [(slow, "b")]
    assert " and 3 (host b) compute 2." in found[0][1].sentence


def test_ranks_on_one_host_are_compared_with_each_other():
    world = World(seed=5, steps=200, hosts=("here", "here", "here"))
    found = told(world, Trouble(kind="device", ranks=(2,), first=80, end=300, factor=2.5))
    assert [finding.ranks for _, finding in found] == [(2,)]
    assert found[0][1].sentence.startswith("rank 2 computes 2.")


@pytest.mark.parametrize(
    ("seed", "factor", "noise"), [(6, 3.0, 0.07), (21, 1.7, 0.10), (22, 1.7, 0.10), (23, 1.7, 0.10)]
)
def test_a_slow_device_is_not_blamed_on_the_link_or_the_data_that_it_slows_down_with_it(seed, factor, noise):
    made = course(
        World(seed=seed, steps=250, noise=noise), Trouble(kind="device", ranks=(1,), first=80, end=180, factor=factor)
    )
    made.message_s[79:179] *= 4
    made.data_s[79:179, 1] += 0.05
    assert [(finding.kind, finding.phase) for _, finding in told_of(made, TWO)] == [
        ("device", "begins"), ("device", "ends"),
    ]  # fmt: skip


def test_a_link_that_becomes_slow_while_a_device_is_slow_is_told_as_well():
    world = World(seed=7, steps=300)
    device = Trouble(kind="device", ranks=(1,), first=60, end=400, factor=3)
    found = told(world, device, Trouble(kind="link", ranks=(), first=160, end=400, factor=2.5))
    assert [finding.kind for _, finding in found] == ["device", "link"]
    assert 160 <= found[1][0] <= 180


def test_data_that_are_late_everywhere_name_all_ranks():
    world = World(seed=8, steps=150, hosts=TWO)
    found = told(world, Trouble(kind="data", ranks=(0, 1), first=80, end=300, factor=2))
    assert [(finding.kind, finding.ranks, finding.host) for _, finding in found] == [("data", (0, 1), None)]


def test_one_device_alone_is_told_of_its_data_only():
    world = World(seed=9, steps=300, hosts=("here",))
    slow = Trouble(kind="device", ranks=(0,), first=80, end=150, factor=3)
    found = told(world, slow, Trouble(kind="data", ranks=(0,), first=200, end=400, factor=2))
    assert [(finding.kind, finding.ranks) for _, finding in found] == [("data", (0,))]


@pytest.mark.parametrize("cost_of_a_change", [0.7, 1.0, 1.6])
def test_a_change_of_shares_is_no_trouble_and_ends_none(cost_of_a_change):
    """Seconds per sequence may depend on how many there are; what was slow stays slow until it is fast again."""
    hosts, made = (
        TWO,
        course(World(seed=10, steps=400), Trouble(kind="device", ranks=(1,), first=150, end=300, factor=3)),
    )
    watch, found = Watch(hosts, shares="balanced"), []
    for index in range(400):
        sequences = [16, 16] if index < 80 else [12, 20] if index < 200 else [24, 8]
        made.compute_s[index] *= np.array(sequences) / 16
        if index >= 200:
            made.compute_s[index, 1] *= cost_of_a_change
        finding = watch.observe(index + 1, made.times(index), sequences)
        if finding:
            found.append((index + 1, finding.kind, finding.phase, finding.ranks))
    (began, *what), (ended, *end) = found
    assert what == ["device", "begins", (1,)] and end == ["device", "ends", (1,)]
    assert 150 <= began <= 170 and 300 <= ended <= 340


def linked(world: World, trouble: Trouble, links_s: list[float]) -> list[StragglerFinding]:
    """What is told where timed messages are brought whenever the watch asks for them."""
    watch, made, found = Watch(world.hosts, shares="fixed"), course(world, trouble), []
    asked = False
    for index in range(world.steps):
        times = made.times(index)
        if asked:
            times = [replace(time, link_s=link_s) for time, link_s in zip(times, links_s, strict=True)]
        finding = watch.observe(index + 1, times, [BATCH] * len(world.hosts))
        asked = watch.asks_for_links
        found += [finding] if finding else []
    return found


@pytest.mark.parametrize(
    ("links_s", "ranks", "host", "words"),
    [
        ([0.001, 0.009, 0.008, 0.001], (1,), "b", "messages over the network link of rank 1 (host b)"),
        ([0.009, 0.001, 0.001, 0.008], (3,), "d", "messages over the network link of rank 3 (host d)"),
        ([0.001, 0.001, 0.009, 0.001], (1, 2), None, "messages between host b and host c"),
        ([0.001, 0.001, 0.001, 0.001], (), None, "messages between ranks"),
        ([0.009, 0.001, 0.008, 0.001], (), None, "messages between ranks"),
    ],
)
def test_timed_messages_name_the_link(links_s, ranks, host, words):
    world = World(seed=12, steps=150, hosts=FOUR)
    (found,) = linked(world, Trouble(kind="link", ranks=(), first=80, end=300, factor=2), links_s)
    assert (found.kind, found.ranks, found.host) == ("link", ranks, host)
    assert found.sentence.startswith(words)


@pytest.mark.parametrize(
    ("hosts", "links_s", "ranks", "words"),
    [
        # Within a host messages are ten times as fast: that says nothing of any cable.
        (("a", "b", "b", "b"), [0.02, 0.01, 0.001, 0.001], (0, 3), "messages between host a and host b"),
        (("a", "b", "b", "c"), [0.01, 0.01, 0.001, 0.03], (2, 3), "messages between host b and host c"),
        (("a", "b", "b", "c"), [0.09, 0.01, 0.001, 0.09], (3,), "messages over the network link of rank 3 (host c)"),
    ],
)
def test_links_between_hosts_are_not_compared_with_those_inside(hosts, links_s, ranks, words):
    world = World(seed=12, steps=150, hosts=hosts)
    (found,) = linked(world, Trouble(kind="link", ranks=(), first=80, end=300, factor=2), links_s)
    assert (found.kind, found.ranks) == ("link", ranks) and found.sentence.startswith(words)


def test_nobody_asks_for_timed_messages_without_need():
    watch, made = Watch(FOUR, shares="fixed"), course(World(seed=13, steps=300, hosts=FOUR))
    asked = 0
    for index in range(300):
        watch.observe(index + 1, made.times(index), [BATCH] * 4)
        asked += watch.asks_for_links
    assert asked <= 3


QUIET = World(seed=14, steps=260, noise=0.0, drift=0.0)
DEVICE = "rank 1 (host b) computes 2.6 times slower than before step 80: its share could fall with [balance] every = "


def test_the_sentences():
    def sentences(kind: FindingKind) -> list[str]:
        found = told(QUIET, Trouble(kind=kind, ranks=(1,), first=80, end=160, factor=2.6))
        return [finding.sentence for _, finding in found]

    assert sentences("device") == [
        DEVICE + '"50 steps"; check whether another program runs there',
        "rank 1 (host b) computes as fast as before step 80 again (step 168)",
    ]
    assert sentences("data") == [
        "rank 1 (host b) waits for data since step 80, as long as 1.6 usual steps: balance cannot help; a faster disk "
        "would, or the prepared data on a disk of that machine",
        "rank 1 (host b) gets its data as fast as before step 80 again (step 168)",
    ]
    assert sentences("link") == [
        "messages between host a and host b make every step 2.6 times as long since step 80, and no rank computes "
        "slower: balance cannot help; a layout that sends less would (a pipeline: see `plait plan`), or a faster "
        "network link",
        "messages between host a and host b are as fast as before step 80 again (step 168)",
    ]


def test_a_series_learns_what_is_usual_and_not_what_it_is_told_to_hold():
    series = Series()
    for step in range(LAG_STEPS + LEAST_USUAL_VALUES):
        series.add(step, 1.0)
    assert series.ready and series.level == series.now == 1.0
    for step in range(100):
        series.add(step, 3.0, "hold")
    assert (series.level, series.rise) == (1.0, 2.0)


def test_a_share_of_one_sequence_cannot_fall_and_a_pipeline_is_not_advised_to_become_one():
    begin = partial(begin_words, ranks=[0, 1], hosts=TWO, since=80, factor=2.6)
    assert "cannot fall below one sequence" in begin("device", shares="least").sentence
    for piped in ("recut", "uncut", "stages"):
        told = begin("link", shares=piped, others=True).sentence
        assert told.endswith("since step 80: balance cannot help; a faster network link would")
    assert "it should get fewer layers at the next rebalancing" in begin("device", shares="recut").sentence
    assert 'fewer layers with [balance] every = "50 steps"' in begin("device", shares="uncut").sentence
    trouble = Trouble(kind="device", ranks=(1,), first=80, end=160, factor=2.6)
    watch, made, found = Watch(TWO, shares="balanced"), course(QUIET, trouble), []
    for index in range(120):
        found.append(watch.observe(index + 1, made.times(index), [BATCH, 1]))
    [finding] = [one for one in found if one]
    assert "its share cannot fall below one sequence" in finding.sentence


def test_who_recovers_while_levels_settle_after_a_change_of_shares_is_told_to_have_recovered():
    trouble = Trouble(kind="device", ranks=(1,), first=80, end=103, factor=2.6)
    watch, made, found = Watch(TWO, shares="balanced"), course(QUIET, trouble), []
    made.compute_s[100:, 1] /= 2
    for index in range(160):
        sequences = [BATCH, BATCH if index < 100 else BATCH // 2]
        if (one := watch.observe(index + 1, made.times(index), sequences)) is not None:
            found.append((index + 1, one.phase))
    assert [phase for _, phase in found] == ["begins", "ends"] and found[1][0] < 103 + 2 * WINDOW_STEPS, found


@pytest.mark.parametrize(("keep", "rise"), [("rise", 2.0), ("nothing", 0.0)])
def test_a_series_takes_a_new_level_where_one_is_expected(keep, rise):
    series = Series()
    for step in range(LAG_STEPS + LEAST_USUAL_VALUES):
        series.add(step, 1.0)
    for step in range(WINDOW_STEPS):
        series.add(step, 3.0, "hold")
    series.change_expected(keep)
    for step in range(WINDOW_STEPS):
        assert not series.ready
        series.add(step, 7.0, "hold")
    assert series.ready and (series.rise, series.level) == (rise, 7.0 - rise)


def test_a_rise_that_goes_while_the_level_settles_leaves_the_level_where_it_was():
    series = Series()
    for step in range(LAG_STEPS + LEAST_USUAL_VALUES):
        series.add(step, 1.0)
    for step in range(WINDOW_STEPS):
        series.add(step, 3.0, "hold")
    series.change_expected("rise")
    for step in range(WINDOW_STEPS):
        series.add(step, 1.5, "hold")
    assert series.ready and (series.rise, series.level) == (0.5, 1.0)


def test_an_odd_step_before_the_onset_is_not_where_it_began():
    series = Series()
    for step in range(LAG_STEPS + LEAST_USUAL_VALUES):
        series.add(step, 1.0)
    first = LAG_STEPS + LEAST_USUAL_VALUES + 4
    for step, value in enumerate([50.0, 1.0, 1.0, 1.0, *[2.0] * 7], start=first - 4):
        series.add(step, value)
    assert series.since() == first


def test_a_series_forgets_an_episode():
    series = Series()
    for step, value in enumerate([3.0] * WINDOW_STEPS + [1.0] * (WINDOW_STEPS // 2)):
        series.add(step, value)
    assert series.now == 3.0
    series.forget_recent()
    series.add(99, 1.0)
    assert series.now == 1.0


def test_ranks_of_one_machine_are_told_nothing_of_cables():
    begin = partial(begin_words, "link", since=80, factor=1.5, shares="fixed")
    here, there = begin([2], ("here",) * 4).sentence, begin([2], FOUR).sentence
    assert here.startswith("messages to and from rank 2 make every step") and "network" not in here
    assert there.startswith("messages over the network link of rank 2 (host c) make every step") and there.endswith(
        "or a faster network link"
    )
