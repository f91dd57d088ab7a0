"""The judge of a watched run: which steps it judges, and how often it names a fault."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncheck.live.watching.clock import Clock
from syncheck.live.watching.ends import TrainedParameters, covers_all
from syncheck.live.watching.judge import Judge
from syncheck.live.watching.layouts import Layout, Step
from syncheck.live.watching.records import compare_steps, name_optimizer
from syncheck.live.witnesses.rules import make_finding
from syncheck.live.witnesses.witness import Suspicion

RANKS = (0, 1, 2)


class Store:
    """The records by key. late: the records of a key that appear only after it was read once."""

    def __init__(self, records: dict[str, list[dict[str, Any]]], late: dict[str, list[dict[str, Any]]]) -> None:
        self.records, self.late = records, late

    def read(self, key: str) -> list[dict[str, Any]]:
        """Return the records that are there, and let the late ones appear."""
        rows = self.records.get(key, [])
        self.records[key] = rows + self.late.pop(key, [])
        return rows

    def delete(self, key: str) -> None:
        """Remove a key."""
        del self.records[key]


def make_step(optimizer: int, number: int, ranks: tuple[int, ...] = RANKS) -> Any:
    """Return a step of one of several optimizers of a wrapper."""
    clock = SimpleNamespace(name="clock", ranks=ranks, reduces=True, counts_steps=True, unit="reduction")
    layout = SimpleNamespace(key=f"clock/{optimizer}", clock=clock, is_reduced=True, names=["weight"])
    layout.number, layout.optimizers, layout.is_beside = optimizer, 1, False
    layout.posted, layout.most_repeated = number, 0
    layout.parameters, layout.identities = [], []
    key = f"clock/{optimizer}/{number}"
    place = {"number": number, "place": number, "unit": clock.unit}
    return SimpleNamespace(layout=layout, repeated=0, is_end=False, key=key, **place)


def post(*ranks: int, **fields: Any) -> list[dict[str, Any]]:
    """Return the records of ranks that hold the same parameters. fields: further fields."""
    return [{"r": rank, "p": "parameters", **fields} for rank in ranks]


def judge_all(steps: list[Any], store: Store) -> tuple[int, list[tuple[str, int, tuple[int, ...]]]]:
    """Judge while there is something to judge; return the number of judged steps, and code, reduction and ranks."""
    judgements: list[Any] = []
    watcher = SimpleNamespace(steps=steps, witnesses={})
    judge = Judge(watcher, store, judgements.append)  # type: ignore[arg-type]
    while judge._judge_next():
        pass
    findings = []
    for judgement in judgements:
        findings.append((judgement.suspicion.code, judgement.number, judgement.suspicion.ranks))
    return judge.judged["steps"], findings


def test_a_record_that_comes_late_is_judged() -> None:
    """If a rank posts two steps between two looks, the first of them is judged too, and is no skipped step."""
    steps = [make_step(0, 1), make_step(0, 2)]
    store = Store({"clock/0/1": post(0, 1), "clock/0/2": post(*RANKS)}, {"clock/0/1": post(2)})
    assert judge_all(steps, store) == (2, [])
    assert steps == []


@pytest.mark.parametrize(("skipping", "expected"), [((), []), ((1,), [("SYN214", 1, (1,))])])
def test_a_rank_that_trains_nothing_outside_of_the_wrapper_skips_no_step(
    skipping: tuple[int, ...], expected: list[Any]
) -> None:
    """Its optimizer has none outside, as if only other ranks unfroze a layer; a rank that has some tells of a skip."""
    inside, outside, last = make_step(0, 1), make_step(0, 1), make_step(0, 2)
    outside.layout.key, outside.key = "clock/0+", "clock/0+/1"
    outside.layout.is_reduced, outside.layout.is_beside = False, True
    records = {"clock/0/1": post(*RANKS), "clock/0+/1": post(0, 2), "clock/0/2": post(*RANKS)}
    records["clock/0+/1"] += post(*skipping, x="skipped")
    assert judge_all([inside, outside, last], Store(records, {})) == (2, expected)


def test_other_ranks_show_nothing_about_a_slow_rank() -> None:
    """A rank that is late with the step of one wrapper has skipped nothing if the ranks of another wrapper go on."""
    steps = [make_step(0, 1, (0, 1)), make_step(1, 1, (0, 2)), make_step(1, 2, (0, 2))]
    records = {"clock/0/1": post(0), "clock/1/1": post(0, 2), "clock/1/2": post(0, 2)}
    store = Store(records, {})
    assert judge_all(steps, store) == (2, [])
    assert [step.key for step in steps] == ["clock/0/1"]
    store.records["clock/0/1"] += post(1)
    assert judge_all(steps, store) == (1, [])


@pytest.mark.parametrize(
    ("last", "is_printed"),
    [(post(1, 2, o=2), False), (post(1, o=2), True)],
    ids=["all ranks", "some ranks"],
)
def test_a_new_optimizer_is_no_difference_while_ranks_are_behind(last: list[Any], is_printed: bool) -> None:
    """Ranks with the same new optimizer at the same step are alike, although one of them posts this step first."""
    steps = [make_step(0, 1), make_step(1, 2), make_step(0, 3)]
    store = Store({"clock/0/1": post(*RANKS), "clock/1/2": post(0, o=2)}, {})
    lines: list[str] = []
    watcher = SimpleNamespace(steps=steps, witnesses={}, print_line=lines.append)
    judge = Judge(watcher, store, lambda _judgement: None)  # type: ignore[arg-type]
    while judge._judge_next():
        pass
    assert (len(steps), lines) == (2, [])
    # Rank 2 goes on without the optimizer.
    store.records["clock/1/2"] += last
    store.records["clock/0/3"] = [*post(0, 1, o=2), *post(2)]
    while judge._judge_next():
        pass
    assert (len(steps), len(lines)) == (0, is_printed)


def test_records_of_old_steps_are_deleted() -> None:
    """The board keeps the records of the last two steps only, which slow ranks may still read."""
    steps = [make_step(0, number) for number in range(1, 6)]
    store = Store({step.key: post(*RANKS) for step in steps}, {})
    judge_all(steps, store)
    assert list(store.records) == ["clock/0/4", "clock/0/5"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([*post(0, 1), *post(2, x="skipped")], [("SYN214", 2, (2,))]),
        (post(0, 1), [("SYN214", 2, (2,))]),
        ([*post(0, 1), *post(2, x="infinite")], [("SYN216", 2, (2,))]),
        (post(*RANKS, x="skipped"), []),
        (post(*RANKS, x="infinite"), []),
    ],
    ids=["told", "not told", "scaler", "accumulation", "scaler of all"],
)
def test_ranks_that_do_not_step_are_named_once(rows: list[dict[str, Any]], expected: list[Any]) -> None:
    """One rank does not step with one of two optimizers, or no rank does: nothing is said of other steps."""
    steps, records = [], {}
    for number, optimizer in itertools.product(range(1, 5), range(2)):
        step = make_step(optimizer, number)
        steps.append(step)
        records[step.key] = post(*RANKS)
    records["clock/0/2"] = rows
    judged, judgements = judge_all(steps, Store(records, {}))
    assert judgements == expected
    assert judged == (8 if expected else 7)


@pytest.mark.parametrize(
    ("skipping_of_steps", "variants"),
    [
        ([(1,), (0, 2)], ["_REDUCTION", "_TURN"]),
        ([(0, 2), (1,), (0, 2)], ["_REDUCTION", "_TURN", "_TURN"]),
        ([(0, 2), (0, 1), (1, 2)], ["_REDUCTION", "_TURN", "_TURN"]),
        ([(1,), RANKS, (0, 2)], ["_REDUCTION", "_TURN"]),
        ([(1,), (), (0, 2)], ["_REDUCTION", "_REDUCTION"]),
        ([(1,), (1,)], ["_REDUCTION", "_REDUCTION"]),
        ([(1,), (0,)], ["_REDUCTION", "_REDUCTION"]),
    ],
    ids=["late", "early", "one after the other", "accumulation", "a common step", "one rank again", "two skip"],
)
def test_ranks_that_step_in_turn_have_other_counters(
    skipping_of_steps: list[tuple[int, ...]], variants: list[str]
) -> None:
    """A rank that skips a step and takes the next one alone counts in another way; no sentence says fewer steps."""
    steps = [make_step(0, number) for number in range(1, len(skipping_of_steps) + 1)]
    records = {}
    for step, skipping in zip(steps, skipping_of_steps, strict=True):
        stepping = [rank for rank in RANKS if rank not in skipping]
        records[step.key] = [*post(*stepping), *post(*skipping, x="skipped")]
    judgements: list[Any] = []
    watcher = SimpleNamespace(steps=steps, witnesses={})
    judge = Judge(watcher, Store(records, {}), judgements.append)  # type: ignore[arg-type]
    while judge._judge_next():
        pass
    found = [judgement.suspicion for judgement in judgements]
    assert [suspicion.variant for suspicion in found] == variants
    for suspicion in found:
        finding = make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant)
        assert "fewer" not in str(finding.cause)
        assert "counter" in f"{finding.cause} {finding.fix}"


@pytest.mark.parametrize(
    ("fields_of_ranks", "expected"),
    [
        ([{}, {"a": 1}, {}], ("SYN214", (1,), "_EXTRA", "proved")),
        ([{"a": 1}, {}, {"a": 1}], ("SYN214", (1,), "", "proved")),
        ([{}, {"a": 1}], ("SYN214", (1,), "_EXTRA", "proved")),
        ([{}, {"e": 1}, {}], ("SYN410", (1,), "_UNREDUCED", "likely")),
        ([{"a": 1}, {"a": 1}], None),
    ],
    ids=["one again", "the others again", "two ranks", "other gradients", "all again"],
)
def test_ranks_that_step_more_often_are_named_by_their_gradients(
    fields_of_ranks: list[dict[str, int]], expected: Any
) -> None:
    """Steps with the same gradients are a step more; with other gradients, they are likely not reduced."""
    records = {rank: {"r": rank, **fields} for rank, fields in enumerate(fields_of_ranks)}
    found = compare_steps(8, tuple(records), records)
    causes = []
    for suspicion in found:
        finding = make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant)
        causes.append((suspicion.code, suspicion.ranks, suspicion.variant, finding.certainty))
    assert causes == [expected] * (expected is not None)


def test_repeated_steps_are_told_by_their_gradients() -> None:
    """A second step with the same gradients is told as such, one after another backward pass is not, also in place."""
    model = torch.nn.Linear(2, 1)
    clock = Clock("clock", (0, 1))
    layout = Layout(clock, "0", None, list(model.parameters()), ["weight", "bias"], is_reduced=True)

    def step(*, repeated: int, backward: bool = False) -> None:
        if backward:
            model(torch.ones(1, 2)).sum().backward()
        layout.note_gradients(repeated)

    step(repeated=0, backward=True)
    step(repeated=1)
    step(repeated=2)
    assert layout.list_repeated() == {"a": 2}
    clock.ticks += 1
    layout.note_posted(Step(layout))
    step(repeated=1, backward=True)
    model.zero_grad()
    step(repeated=2)
    step(repeated=3, backward=True)
    assert layout.list_repeated() == {"e": 2}
    clock.ticks += 1
    layout.note_posted(Step(layout))
    assert layout.list_repeated() == {}


def test_a_further_step_is_not_at_its_reduction() -> None:
    """The reduction before a step without one was correct, so the place is after it."""
    layout = Layout(Clock("clock", (0, 1)), "0", None, [], [], is_reduced=True)
    layout.clock.unit = "reduction"
    layout.clock.reduces = True
    layout.clock.ticks = 6
    units = [Step(layout).unit]
    layout.posted = 6
    assert [*units, Step(layout).unit] == ["reduction", "further step after reduction"]


@pytest.mark.parametrize(("reduces", "unit"), [(True, "the end, after reduction"), (False, "the end, after step")])
def test_the_end_is_no_further_step(reduces: bool, unit: str) -> None:
    """No step follows the last one, so the place of the end is after it. The last steps may have no reduction."""
    layout = Layout(Clock("clock", (0, 1)), "0", None, [], [], is_reduced=True)
    layout.clock.unit = "reduction" if reduces else "step"
    layout.clock.reduces = reduces
    layout.clock.ticks = layout.posted = 24
    layout.repeated = 2
    end = Step(layout, is_end=True)
    assert (end.unit, end.place) == (unit, 24)


def test_the_end_of_steps_without_a_number_of_reductions() -> None:
    """Within a compiled program no reduction is seen: the end is after the last step, not at the next one."""
    layout = Layout(Clock("clock", (0, 1)), "0", None, [], [], is_reduced=True)
    layout.clock.reduces, layout.clock.unit = True, "reduction"
    for _ in range(3):
        layout.note_posted(Step(layout))
    end = Step(layout, is_end=True)
    assert (end.unit, end.place) == ("the end, after step", 3)


def test_steps_have_numbers_if_no_reduction_is_counted() -> None:
    """Within a compiled program no reduction is seen, and its steps are numbered as without a wrapper."""
    layout = Layout(Clock("clock", (0, 1)), "0", None, [], [], is_reduced=True)
    layout.clock.reduces, layout.clock.unit = True, "wrapper 2 (Linear), reduction"
    places = []
    for _ in range(3):
        step = Step(layout)
        layout.note_posted(step)
        places.append((step.unit, step.place))
    assert places == [("wrapper 2 (Linear), step", number) for number in (1, 2, 3)]


def test_an_incomplete_last_step_waits() -> None:
    """A step that a rank has not posted yet is neither judged nor removed."""
    steps = [make_step(0, 1)]
    assert judge_all(steps, Store({"clock/0/1": post(0, 1)}, {})) == (0, [])
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("looks", "late", "unjudged"),
    [
        (0, {}, ("reduction 2", "reduction 3")),
        (5, {"clock/0/2": post(2)}, ("reduction 3",)),
    ],
    ids=["after an error", "waiting"],
)
def test_the_end_names_the_steps_that_were_not_judged(
    looks: int, late: dict[str, list[dict[str, Any]]], unjudged: tuple[str, ...]
) -> None:
    """At the end, complete steps are judged, late records are waited for, and incomplete steps are listed."""
    steps = [make_step(0, number) for number in (1, 2, 3)]
    records = {"clock/0/1": post(*RANKS), "clock/0/2": post(0, 1), "clock/0/3": post(0)}
    watcher: Any = SimpleNamespace(steps=steps, witnesses={}, is_on=True)
    judge = Judge(watcher, Store(records, late), print)  # type: ignore[arg-type]
    # The script ends before the judge has looked at a step.
    judge._finishing.set()
    judge._most_looks = looks
    judge.start()
    judge.finish(looks, 30)
    assert not judge.is_alive()
    assert judge.list_unjudged() == unjudged


@pytest.mark.parametrize(("ended", "is_early"), [(RANKS, True), ((0, 1), False), ((), False)])
def test_ranks_that_have_ended_are_not_waited_for(ended: tuple[int, ...], is_early: bool) -> None:
    """Only rank 0 has an optimizer: the judge ends as soon as the other ranks have, and keeps who stepped."""
    steps = [make_step(0, 1)]
    store = Store({"clock/0/1": post(0), "ended/0": [{"r": rank} for rank in ended]}, {})
    watcher: Any = SimpleNamespace(steps=steps, witnesses={}, is_on=True)
    judge = Judge(watcher, store, print)  # type: ignore[arg-type]
    judge.ended_key = "ended/0"
    judge.start()
    begin = time.monotonic()
    judge.finish(100, 1.0)
    assert (time.monotonic() - begin < 0.9) == is_early
    assert (judge.list_unjudged(), judge.telling) == (("reduction 1",), {0})


def test_steps_that_all_ranks_posted_are_judged_after_the_deadline() -> None:
    """A question to a rank that has ended takes all the time of the end, and the steps after it are still judged."""
    steps = [make_step(0, number) for number in (1, 2, 3)]
    for step in steps:
        step.layout.posted = 3
    records = {"clock/0/1": post(*RANKS), "clock/0/2": post(*RANKS), "clock/0/3": post(0)}
    watcher: Any = SimpleNamespace(steps=steps, witnesses={}, is_on=True)
    judge = Judge(watcher, Store(records, {}), print)  # type: ignore[arg-type]
    judge._finishing.set()
    judge._most_looks, judge._deadline = 100, time.monotonic()
    judge.start()
    judge.finish(100, 0.0)
    assert judge.list_unjudged() == ("reduction 3",)


@pytest.mark.parametrize(
    ("further", "most_repeated", "expected"),
    [
        ({1: "e"}, 0, [("SYN410", 5, (1,), "_UNREDUCED")]),
        ({1: "a"}, 0, [("SYN214", 5, (1,), "_EXTRA")]),
        # It is the rank of the judge, which went on alone.
        ({0: "e"}, 0, [("SYN410", 5, (0,), "_UNREDUCED")]),
        ({0: "e", 1: "e", 2: "e"}, 0, []),
        # The script takes so many steps after each reduction.
        ({1: "e"}, 2, []),
        ({}, 0, []),
    ],
)
def test_steps_after_the_last_reduction(further: dict[int, str], most_repeated: int, expected: Any) -> None:
    """A rank that goes around the wrapper steps alone, and the others wait in the next reduction."""
    step = make_step(0, 5)
    step.layout.posted, step.layout.most_repeated = 5, most_repeated
    records: dict[str, list[dict[str, Any]]] = {}
    for number in (1, 2):
        rows = [*itertools.chain.from_iterable(post(rank, **{field: number}) for rank, field in further.items())]
        records[f"clock/0/5+{number}"] = rows
    judgements: list[Any] = []
    watcher = SimpleNamespace(steps=[], witnesses={})
    judge = Judge(watcher, Store(records, {}), judgements.append)  # type: ignore[arg-type]
    judge._judge_further_steps(step.layout)
    # A model may end before the judge does.
    judge._judge_further_steps(step.layout)
    assert all("after reduction 5" in str(row.suspicion.facts[0]) for row in judgements)
    found = [(row.suspicion.code, row.number, row.suspicion.ranks, row.suspicion.variant) for row in judgements]
    assert found == expected


def test_a_rank_skips_no_step_of_an_optimizer_that_it_lacks() -> None:
    """Rank 0 has two optimizers for the parameters of the wrapper, the other ranks one: one line, and no finding."""
    store = Store({"clock/0/1": [*post(0, o=2), *post(1, 2)], "clock/1/1": post(0, o=2)}, {})
    steps = [make_step(0, 1), make_step(1, 1)]
    judgements: list[Any] = []
    lines: list[str] = []
    watcher = SimpleNamespace(steps=steps, witnesses={}, print_line=lines.append)
    judge = Judge(watcher, store, judgements.append)  # type: ignore[arg-type]
    while judge._judge_next():
        pass
    assert (judgements, judge.judged["steps"], len(lines)) == ([], 2, 1)


def make_trained(key: str, parameters: list[Any], ranks: tuple[int, ...] = RANKS) -> Any:
    """Return parameters of a wrapper that step together."""
    clock = SimpleNamespace(name="clock", ranks=ranks)
    identities = list(map(id, parameters))
    return SimpleNamespace(key=key, clock=clock, parameters=parameters, identities=identities, is_reduced=True)


def test_a_parameter_that_left_its_optimizer_is_not_equal_at_the_end() -> None:
    """Gradual freezing: the end shows only the parameters of the last step, until the others were compared, too."""
    frozen, weight = torch.ones(1), torch.ones(1)
    both, last = make_trained("clock/0", [frozen, weight]), make_trained("clock/0", [weight])
    trained = TrainedParameters()
    trained.note_step(both)
    trained.note_step(last)
    trained.note_equal_end(last)
    assert not trained.are_equal_at_end
    trained.note_equal_end(both)
    assert trained.are_equal_at_end
    # The model is trained on.
    trained.note_step(last)
    trained.note_equal_end(last)
    assert not trained.are_equal_at_end
    del both.parameters, frozen
    assert trained.are_equal_at_end


@pytest.mark.parametrize(
    ("sets", "is_reduced", "covers"),
    [
        ([RANKS], True, True),
        ([(0, 2), (1,)], True, False),
        ([(0, 2), (1, 3)], True, False),
        # Parts of a model without a wrapper.
        ([(0, 2), (1, 3)], False, True),
        ([(0, 2), (1,)], False, False),
    ],
)
def test_a_rank_that_trains_other_parameters_is_not_compared(
    sets: list[tuple[int, ...]], is_reduced: bool, covers: bool
) -> None:
    """If one rank has taken a parameter out of its optimizer, equal parameters of the other ranks show nothing."""
    layout = make_trained("clock/0", [], (0, 1, 2, 3))
    layout.is_reduced = is_reduced
    assert covers_all(layout, sets) == covers


@pytest.mark.parametrize(("is_lasting", "code"), [(False, "SYN412"), (True, "SYN411")])
def test_parameters_that_differed_before_the_last_step_have_another_cause(is_lasting: bool, code: str) -> None:
    """Rank 1 changed its parameters after the last step: the cause only if the parameters were equal before."""
    step = make_step(0, 8)
    step.is_end = True
    suspicion = Suspicion("SYN411", (1,), (), clusters=((0, 2), (1,)), is_lasting=is_lasting)
    witness = SimpleNamespace(name="parameters", key="w", comparisons=0, compare=lambda *_: [suspicion])
    witness.join_parts = lambda _layout, sets: sets
    judgements: list[Any] = []
    watcher = SimpleNamespace(steps=[step], witnesses={"parameters": witness})
    records = [*post(0, 2, c=0, w=[]), *post(1, c=5, w=[])]
    judge = Judge(watcher, Store({step.key: records}, {}), judgements.append)  # type: ignore[arg-type]
    assert judge._judge_next()
    assert [(found.suspicion.code, found.suspicion.ranks) for found in judgements] == [(code, (1,))]


@pytest.mark.parametrize(
    ("code", "affected", "is_named"),
    [("SYN214", None, True), ("SYN107", ("emb.weight",), True), ("SYN107", (), False), ("SYN410", None, False)],
    ids=["a skipped step", "a learning rate", "a switch of torch", "gradients"],
)
def test_an_optimizer_is_named(code: str, affected: tuple[str, ...] | None, is_named: bool) -> None:
    """A finding about one of several optimizers names its class and its parameters."""

    class SparseAdam:
        pass

    optimizer = SparseAdam()
    layout = Layout(Clock("clock", (0, 1)), "0", optimizer, [], [], is_reduced=True)
    layout.names = ["emb.weight"]
    suspicion = name_optimizer(Suspicion(code, (1,), (), affected=affected), layout)
    named = [fact.parameters for fact in suspicion.facts]
    assert named == [{"kind": "SparseAdam", "names": ("emb.weight",)}] * is_named
