"""The witnesses of batches, random numbers and settings: what they see, and what they take for no fault."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Subset, TensorDataset

from syncheck.diagnose.syn107_settings_differ import Text
from syncheck.live.watching.clock import Clock
from syncheck.live.watching.watcher import Watcher
from syncheck.live.witnesses.batches import BatchWitness
from syncheck.live.witnesses.identity import identify_dataset
from syncheck.live.witnesses.rng import RngWitness
from syncheck.live.witnesses.rules import make_finding
from syncheck.live.witnesses.settings import SettingsWitness, doubt_settings, refer_to_scales
from syncheck.live.witnesses.witness import Suspicion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LAYOUT: Any = SimpleNamespace(key="clock/0", clock=SimpleNamespace(reduces=True), find_replicas=lambda _rank: (0, 1))
RANKS = (0, 1)
SAMPLES = 96
DATA = TensorDataset(torch.arange(SAMPLES * 4.0).reshape(SAMPLES, 4))


@pytest.fixture
def witnesses(monkeypatch: pytest.MonkeyPatch) -> list[BatchWitness]:
    """Return a witness for each rank; the loader of a rank is watched by its own one."""
    import torch.utils.data.dataloader as loading

    for owner, name in (
        (loading.DataLoader, "__iter__"),
        (loading._BaseDataLoaderIter, "_next_index"),
        (loading._BaseDataLoaderIter, "__next__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return [BatchWitness() for _ in RANKS]


def watch_training(
    witnesses: list[BatchWitness],
    make_sampler: Callable[[int], Any],
    *,
    epochs: int = 2,
    dataset: Callable[[int], Any] = lambda _rank: DATA,
    change: Callable[[torch.Tensor, int], torch.Tensor] = lambda batch, _rank: batch,
    begin_epoch: Callable[[Any, int], None] = lambda _sampler, _epoch: None,
) -> list[tuple[str, tuple[int, ...]]]:
    """Return code and ranks of the first finding of each kind in a training with a loader on each rank.

    change: of a batch, before it enters the model.
    """
    judging = BatchWitness()
    model = torch.nn.Linear(4, 1)
    # One process plays all ranks, so each batch goes to the witness of its rank.
    current = [0]
    witnesses[0].install(lambda work, *arguments: getattr(witnesses[current[0]], work.__name__)(*arguments))
    samplers = [make_sampler(rank) for rank in RANKS]
    loaders = [DataLoader(dataset(rank), 8, sampler=samplers[rank]) for rank in RANKS]
    findings: dict[str, tuple[int, ...]] = {}
    for epoch in range(epochs):
        iterators = []
        for rank in RANKS:
            current[0] = rank
            begin_epoch(samplers[rank], epoch)
            iterators.append(iter(loaders[rank]))
        for step in itertools.count():
            observations: dict[int, Any] = {}
            for rank in RANKS:
                current[0] = rank
                batch = next(iterators[rank], None)
                if batch is not None:
                    witnesses[rank].see_forward(model, (change(batch[0], rank),))
                    observations[rank] = witnesses[rank].observe(f"{epoch}/{step}", LAYOUT)
            if len(observations) < len(RANKS):
                break
            for suspicion in judging.judge(LAYOUT, observations, dict):
                findings.setdefault(suspicion.code, suspicion.ranks)
    return sorted(findings.items())


def make_distributed(rank: int) -> Any:
    """Return the sampler of a correct script."""
    return DistributedSampler(DATA, num_replicas=len(RANKS), rank=rank)


def make_shuffling(rank: int, *, replacement: bool = False) -> Any:
    """Return a sampler that shuffles the whole dataset, with the seed of the rank."""
    generator = torch.Generator().manual_seed(rank)
    return RandomSampler(DATA, replacement=replacement, generator=generator)


def set_epoch(sampler: Any, epoch: int) -> None:
    """Begin an epoch as a correct script does."""
    sampler.set_epoch(epoch)


def add_noise(batch: torch.Tensor, rank: int) -> torch.Tensor:
    """Augment a batch, on each rank in another way."""
    return batch + torch.randn(batch.shape, generator=torch.Generator().manual_seed(rank))


def test_correct_training_has_no_finding(witnesses: list[BatchWitness]) -> None:
    """DistributedSampler with set_epoch."""
    assert watch_training(witnesses, make_distributed, begin_epoch=set_epoch) == []


def test_padding_is_no_duplicate(witnesses: list[BatchWitness]) -> None:
    """A sampler repeats the first samples if the ranks do not divide their number."""
    odd = TensorDataset(torch.arange(4.0 * 33).reshape(33, 4))
    findings = watch_training(
        witnesses,
        lambda rank: DistributedSampler(odd, num_replicas=2, rank=rank),
        dataset=lambda _rank: odd,
        begin_epoch=set_epoch,
    )
    assert findings == []


def test_equal_batches_are_named(witnesses: list[BatchWitness]) -> None:
    """All ranks shuffle with one seed."""
    findings = watch_training(witnesses, lambda _rank: make_shuffling(0))
    assert dict(findings)["SYN401"] == RANKS


def test_common_samples_are_named(witnesses: list[BatchWitness]) -> None:
    """Each rank shuffles the whole dataset with its own seed; augmentation does not hide it."""
    assert watch_training(witnesses, make_shuffling, change=add_noise) == [("SYN402", RANKS)]


def test_ranks_that_draw_together_share_samples_by_design(witnesses: list[BatchWitness]) -> None:
    """Context-parallel ranks draw the same samples in the same order, and train on different parts of them."""
    assert watch_training(witnesses, lambda _rank: make_shuffling(0), change=add_noise) == []


def test_draws_with_replacement_are_no_fault(witnesses: list[BatchWitness]) -> None:
    """A rank that draws samples twice has no epochs in which each sample comes once."""
    assert watch_training(witnesses, lambda rank: make_shuffling(rank, replacement=True), epochs=3) == []


def test_a_repeated_order_is_named(witnesses: list[BatchWitness]) -> None:
    """`set_epoch` is not called; an order of ascending indices is no random one."""
    assert watch_training(witnesses, make_distributed) == [("SYN403", RANKS)]


def test_an_ascending_order_may_repeat(witnesses: list[BatchWitness]) -> None:
    """Without shuffling, every epoch has one order."""
    findings = watch_training(
        witnesses, lambda rank: DistributedSampler(DATA, num_replicas=2, rank=rank, shuffle=False)
    )
    assert findings == []


def test_parts_of_a_dataset_have_their_own_indices(witnesses: list[BatchWitness]) -> None:
    """Each rank holds a part of the data and draws indices from 0 on, as its peers do."""
    half = SAMPLES // 2
    parts = [Subset(DATA, range(rank * half, (rank + 1) * half)) for rank in RANKS]
    findings = watch_training(
        witnesses,
        lambda rank: RandomSampler(parts[rank], generator=torch.Generator().manual_seed(rank)),
        dataset=lambda rank: parts[rank],
    )
    assert findings == []


@pytest.mark.parametrize("batch", [torch.zeros(8, 4), torch.arange(4.0)], ids=["constant", "small"])
def test_inputs_that_are_equal_by_chance_are_no_fault(witnesses: list[BatchWitness], batch: torch.Tensor) -> None:
    """Constant and tiny inputs are equal on all ranks of many programs."""
    assert watch_training(witnesses, make_distributed, change=lambda *_: batch, begin_epoch=set_epoch) == []


class Files(Dataset[int]):
    """A dataset of files, as many are written."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)


def test_datasets_are_known_by_their_content() -> None:
    """Equal content is one dataset in two objects; another path, part, tensor or class is another one."""
    assert identify_dataset(Files(["a", "b"])) == identify_dataset(Files(["a", "b"]))
    different = [Files(["a", "b"]), Files(["a", "c"]), Subset(DATA, [0, 1]), Subset(DATA, [0, 2]), DATA]
    different.append(TensorDataset(DATA.tensors[0] + 1))
    assert len({identify_dataset(dataset) for dataset in different}) == len(different)


@pytest.mark.parametrize(
    ("seeds", "dropout", "expected"),
    [((0, 0), 0.5, [("SYN404", RANKS)]), ((0, 1), 0.5, []), ((0, 0), 0.0, [])],
    ids=["equal", "different", "nothing drawn"],
)
def test_equal_random_numbers_are_named(seeds: tuple[int, int], dropout: float, expected: list[Any]) -> None:
    """Ranks that draw equal masks; equal seeds of which nothing is drawn are no finding. Nothing is drawn by us."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(dropout))
    observations = {}
    for rank in RANKS:
        witness = RngWitness()
        torch.manual_seed(seeds[rank])
        witness.see_forward(model, ())
        model(torch.ones(2, 4))
        state = torch.get_rng_state()
        witness.see_output(model)
        assert torch.equal(state, torch.get_rng_state())
        observation = witness.observe("step", LAYOUT)
        if observation is not None:
            observations[rank] = observation
    findings = [(suspicion.code, suspicion.ranks) for suspicion in RngWitness().judge(LAYOUT, observations, dict)]
    assert findings == expected


def change_rate(layout: Any) -> None:
    """Another learning rate."""
    layout.optimizer.param_groups[0]["lr"] = 0.5


def change_mode(layout: Any) -> None:
    """A module in evaluation mode."""
    layout.model[1].eval()


def change_momentum(layout: Any) -> None:
    """Another momentum of BatchNorm."""
    layout.model[1].momentum = 0.5


def change_scale(layout: Any) -> None:
    """Another scale."""
    layout.scaler.load_state_dict({**layout.scaler.state_dict(), "scale": 2.0})


def change_growth(layout: Any) -> None:
    """A scale that grows sooner."""
    layout.scaler.set_growth_interval(3)


def count_steps(layout: Any) -> None:
    """A scaler that was restored from another step; its scale is equal."""
    layout.scaler.load_state_dict({**layout.scaler.state_dict(), "_growth_tracker": 5})


def fuse(layout: Any) -> None:
    """Choose another implementation."""
    layout.optimizer.param_groups[0]["fused"] = True


def name_group(layout: Any) -> None:
    """Keys of the script, which no step reads."""
    layout.optimizer.param_groups[0].update(name="of one rank", initial_lr=1.0)


def change_undeclared(layout: Any) -> None:
    """An option of an optimizer that declares none, as some do."""
    layout.optimizer.param_groups[0]["momentum"] = 0.5


def add_group(layout: Any) -> None:
    """A further group, as for a layer that is unfrozen later."""
    layout.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})


def freeze(layout: Any) -> None:
    """A frozen parameter."""
    layout.model[0].weight.requires_grad_(False)


def change_all(layout: Any) -> None:
    """Settings of several kinds."""
    for change in (fuse, change_momentum, change_rate, change_scale):
        change(layout)


def change_class(layout: Any) -> None:
    """Another class of optimizer, with other options and without some implementations."""
    layout.optimizer = torch.optim.SGD(layout.model.parameters(), lr=1e-3, weight_decay=1e-2)


def change_to_rmsprop(layout: Any) -> None:
    """A class with other implementations, and another implementation."""
    layout.optimizer = torch.optim.RMSprop(layout.model.parameters(), lr=1e-3, weight_decay=1e-2, foreach=True)


def keep(_layout: Any) -> None:
    """No change."""


def make_settings_layout() -> Any:
    """Return the layout of one rank, with its model, optimizer and scaler."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return SimpleNamespace(
        key="clock/0",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        scaler=torch.amp.GradScaler("cpu"),
        parameters=list(model.parameters()),
        names=[name for name, _ in model.named_parameters()],
        list_modules=lambda: list(model.named_modules()),
    )


def judge_settings(change: Callable[[Any], None], prepare: Callable[[Any], None] = keep) -> list[Any]:
    """Return what the witness of settings suspects if one of three ranks makes a change.

    prepare: changes all ranks before.
    """
    observations = {}
    details: dict[int, Mapping[str, str]] = {}
    layout: Any = None
    for rank in range(3):
        layout = make_settings_layout()
        prepare(layout)
        if rank == 1:
            change(layout)
        witness = SettingsWitness()
        observations[rank] = witness.observe("step", layout)
        details[rank] = witness.tell("step")
    return SettingsWitness().judge(layout, observations, lambda: details)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (change_rate, [("param_groups.0.lr", Text.CAUSE)]),
        (change_mode, [("modules in evaluation mode", Text.CAUSE_MODES)]),
        (change_momentum, [("momentum of BatchNorm", Text.CAUSE_STATISTICS)]),
        (change_scale, [("scaler.scale", Text.CAUSE_SCALER)]),
        (change_growth, [("scaler.growth_interval", Text.CAUSE_SCALER)]),
        (freeze, [("frozen parameters", Text.CAUSE_GRADIENTS)]),
        (fuse, [("param_groups.0.fused", Text.CAUSE_ROUNDING)]),
        (
            change_all,
            [
                ("param_groups.0.lr", Text.CAUSE),
                ("scaler.scale", Text.CAUSE_SCALER),
                ("momentum of BatchNorm", Text.CAUSE_STATISTICS),
                ("param_groups.0.fused", Text.CAUSE_ROUNDING),
            ],
        ),
        (add_group, [("param_groups.1", Text.CAUSE)]),
        (change_class, [("class of the optimizer", Text.CAUSE)]),
        (change_to_rmsprop, [("class of the optimizer", Text.CAUSE)]),
        (count_steps, []),
        (name_group, []),
        (keep, []),
    ],
)
def test_settings_that_differ_are_named(change: Callable[[Any], None], expected: list[tuple[str, Text]]) -> None:
    """One of three ranks has other settings; each kind of setting has its cause."""
    named = []
    for suspicion in judge_settings(change):
        finding = make_finding(suspicion.code, suspicion.ranks, suspicion.facts, variant=suspicion.variant)
        assert len(finding.facts) == 1
        named.append((finding.code, finding.ranks, finding.facts[0].parameters["name"], finding.cause.code))
    assert named == [("SYN107", (1,), name, cause) for name, cause in expected]


def test_an_optimizer_without_declared_options_is_compared_by_all_keys() -> None:
    """The groups of an optimizer of the script may be all that states its options."""
    (suspicion,) = judge_settings(change_undeclared, lambda layout: layout.optimizer.defaults.clear())
    assert suspicion.facts[0].parameters["name"] == "param_groups.0.momentum"


def test_the_model_itself_has_a_name() -> None:
    """The root of the modules has an empty one."""
    (suspicion,) = judge_settings(lambda layout: layout.model.eval())
    assert suspicion.facts[0].parameters["values"] == {0: "none", 1: "the model, 0, 1", 2: "none"}


@pytest.mark.parametrize(
    ("reduces", "code", "variant"),
    [(False, "SYN214", "_UNCOUNTED"), (False, "SYN410", "_UNCOUNTED"), (False, "SYN401", ""), (True, "SYN410", "")],
)
def test_settings_of_other_steps_are_doubtful(reduces: bool, code: str, variant: str) -> None:
    """Without a wrapper, a rank that has skipped a step has the learning rate of an earlier step."""
    layout: Any = SimpleNamespace(numbers_steps=reduces)
    doubted = doubt_settings([Suspicion(code, (1,), ()), *judge_settings(change_rate)], layout)
    assert [(suspicion.code, suspicion.variant) for suspicion in doubted] == [(code, ""), ("SYN107", variant)]


@pytest.mark.parametrize("is_cuda", [True, False])
def test_switches_of_cudnn_count_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch, is_cuda: bool) -> None:
    """A script may set them on one rank, whatever device it trains on."""

    def place(layout: Any) -> None:
        layout.parameters = [SimpleNamespace(is_cuda=is_cuda, requires_grad=True) for _ in layout.names]
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)

    def switch(_layout: Any) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    names = [suspicion.facts[0].parameters["name"] for suspicion in judge_settings(switch, place)]
    assert names == ["torch.backends.cudnn.benchmark"] * is_cuda


@pytest.mark.parametrize(
    ("change", "variant", "expected"),
    [
        (change_scale, "_SCALED", [("SYN107", "_SCALER"), ("SYN410", "_SCALER")]),
        (change_scale, "", [("SYN107", "_SCALER"), ("SYN410", "_SCALER")]),
        (change_scale, "_MISSING", [("SYN107", "_SCALER"), ("SYN410", "_MISSING")]),
        (change_growth, "_SCALED", [("SYN410", "_SCALED"), ("SYN107", "_SCALER")]),
        (change_rate, "_SCALED", [("SYN410", "_SCALED"), ("SYN107", "")]),
    ],
)
def test_gradients_divided_by_other_scales_have_them_as_their_cause(
    change: Callable[[Any], None], variant: str, expected: list[tuple[str, str]]
) -> None:
    """Other settings of the same step, and another growth with equal scales, leave the cause of the gradients alone."""
    gradients = Suspicion("SYN410", (1,), (), ("0.weight",), variant)
    found = refer_to_scales([gradients, *judge_settings(change)])
    assert [(suspicion.code, suspicion.variant) for suspicion in found] == expected
    # Equal gradients are divided by the other scale, too: all parameters differ after the step.
    affected = {suspicion.affected for suspicion in found if suspicion.variant == "_SCALER" and suspicion.affected}
    names = tuple(make_settings_layout().names)
    assert affected <= {names}


def test_a_step_has_the_scaler_that_takes_it() -> None:
    """A step of the script without the scaler has none, also after a step that failed within it."""

    class Scaler(torch.amp.GradScaler):
        """A scaler that no other test uses."""

    watcher = Watcher({}, print, lambda *_: None)
    layout = make_settings_layout()
    layout.clock = Clock("steps", RANKS)
    layout.note_optimizer = layout.note_gradients = lambda *_: None
    scalers: list[Any] = []
    watcher.find_layouts = lambda _optimizer: [layout]  # type: ignore[method-assign]
    watcher._observe = lambda layout: scalers.append(layout.scaler)  # type: ignore[method-assign]
    watcher.last_steps = SimpleNamespace(note_before_step=lambda *_: None, note_step=lambda: None)  # type: ignore[assignment]
    watcher._scalers.install(Scaler)
    layout.optimizer.register_step_pre_hook(watcher._before_step)
    scaler = Scaler("cpu")
    scaler.scale(layout.model(torch.ones(2, 4)).sum()).backward()
    scaler.step(layout.optimizer)
    with pytest.raises(RuntimeError, match="step"):
        scaler.step(layout.optimizer)
    layout.optimizer.step()
    assert scalers == [scaler, None]


@pytest.mark.parametrize(
    ("reduces", "sharded", "sets", "expected"),
    [
        (True, [], [], [(0, 1, 2)]),
        (False, [0], [], [(0, 1, 2)]),
        (False, [], [], []),
        (False, [], [(0, 2)], [(0, 2)]),
    ],
)
def test_without_a_wrapper_only_copies_have_equal_settings(
    reduces: bool, sharded: list[int], sets: list[Any], expected: list[Any]
) -> None:
    """Ranks of an ensemble have settings of their own, until they have shown to be copies."""
    clock = SimpleNamespace(reduces=reduces)
    layout = SimpleNamespace(key="steps/0", clock=clock, sharded=sharded, parameters=[torch.ones(1)])
    witness = SettingsWitness()
    witness.leader = SimpleNamespace(learned={"steps/0/copies": SimpleNamespace(sets=sets)})
    assert list(witness.list_sets(layout, dict.fromkeys(range(3)))) == expected


def test_settings_of_a_layout_without_parameters_are_not_compared() -> None:
    """The inputs of tensor-parallel ranks belong to a layout without parameters, and ranks show no copies there."""
    layout = SimpleNamespace(key="inputs", clock=SimpleNamespace(reduces=False), parameters=[], sharded=[])
    assert not SettingsWitness().list_sets(layout, {0: "a", 1: "b"})
