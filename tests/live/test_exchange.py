"""`assert_in_sync` on real gloo ranks: all ranks come to one answer, whatever is wrong on one of them.

Each scenario is a function of (rank, world_size) that runs on every rank; what it returns or raises is sent back. A
planted fault makes the ranks differ, and the same scenario without it must pass.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncheck.live import exchange
from syncheck.testing import assert_in_sync, compare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Finding, Report

    Scenario = Callable[..., Any]

LIMIT = 60  # seconds for all ranks of a scenario; gloo itself waits for 30 minutes


@dataclass
class Outcome:
    """What a scenario did on one rank: returned a value, or raised."""

    value: Any = None
    error: str = ""
    text: str = ""
    report: Report | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        assert self.report is not None
        return self.report.groups[0].findings

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]


def _main(scenario: Scenario, rank: int, world_size: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    outcome = Outcome()
    dist.init_process_group(
        "gloo", f"file://{folder}/store", timeout=timedelta(seconds=LIMIT), rank=rank, world_size=world_size
    )
    try:
        outcome.value = scenario(rank, world_size, *arguments)
        outcome.report = outcome.value if hasattr(outcome.value, "verdict") else None
    except Exception as error:  # noqa: BLE001
        outcome = Outcome(None, type(error).__name__, str(error), getattr(error, "report", None))
    with open(f"{folder}/rank{rank}", "wb") as file:
        pickle.dump(outcome, file)
    # A rank that leaves early closes the connections that the others may still be reading from.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo may abort when the interpreter ends


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[Outcome]]:
    """Run a scenario on several ranks; no process outlives the test."""

    def start(scenario: Scenario, world_size: int = 2, *arguments: Any) -> list[Outcome]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.nn.parallel", "torch._dynamo", "syncheck.live.exchange"])
        given = [(scenario, rank, world_size, str(tmp_path), arguments) for rank in range(world_size)]
        processes = [context.Process(target=_main, args=one) for one in given]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(LIMIT)
            assert [process.exitcode for process in processes] == [0] * world_size, "a rank hung or died"
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
        return [pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(world_size)]

    return start


class Net(nn.Module):
    """A small net, with or without BatchNorm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc(x)))


def trained(rank: int, norm: bool = False, steps: int = 2) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Train on unlike data under plain DDP, so that parameters stay equal and BatchNorm's statistics do not."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(norm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def flip(tensor: torch.Tensor, index: int = 1, bit: int = 0) -> None:
    """Flip one bit of one element."""
    tensor.detach().view(torch.int32).flatten()[index] ^= 1 << bit


def all_raise(outcomes: list[Outcome], error: str = "OutOfSync") -> Outcome:
    """Assert that all ranks raised one error with one text and one report, and return it."""
    assert [outcome.error for outcome in outcomes] == [error] * len(outcomes), outcomes
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def all_pass(outcomes: list[Outcome]) -> Report:
    """Assert that no rank raised and that all have one report, and return it."""
    assert [outcome.text for outcome in outcomes] == [""] * len(outcomes)
    assert all(outcome.report == outcomes[0].report for outcome in outcomes)
    assert outcomes[0].report is not None
    return outcomes[0].report


# --- in sync ---


def in_sync(rank: int, world_size: int) -> Any:
    model, optimizer = trained(rank)
    before = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(rank)
    random = torch.get_rng_state()
    sent, gather = [], dist.all_gather_object

    def counted(received: Any, message: Any, group: Any = None) -> None:
        sent.append(len(message))
        gather(received, message, group=group)

    dist.all_gather_object = counted
    report = assert_in_sync(model, optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    return report, sent


def test_ranks_in_sync_pass_and_send_digests_only(run: Any) -> None:
    """DDP ranks with their optimizers pass; two short messages do, and neither model nor random numbers change."""
    outcomes = run(in_sync)
    assert [outcome.text for outcome in outcomes] == ["", ""]
    report, sent = outcomes[0].value
    assert report == outcomes[1].value[0]
    assert report.counts.identical == report.counts.tensors == 4 + 3 * 4
    assert [replica.rank for replica in report.groups[0].replicas] == [0, 1]
    assert len(sent) == 2
    assert sum(sent) < 2000  # the parameters alone are larger with their states


# --- one rank is off ---


def flipped_bit(rank: int, world_size: int, culprit: int) -> Any:
    model, optimizer = trained(rank)
    if rank == culprit:
        flip(model.module.fc.weight, index=6)
    return assert_in_sync(model, optimizer)


def test_a_flipped_bit_raises_on_all_ranks(run: Any) -> None:
    """One bit of one weight on rank 1 of 2 makes both ranks raise one text that says where and by how much."""
    outcome = all_raise(run(flipped_bit, 2, 1))
    assert outcome.codes == ["SYN299", "SYN103"]
    [diff] = outcome.report.groups[0].tensors
    assert (diff.name, diff.mismatched, diff.index, diff.max_ulp) == ("fc.weight", 1, (1, 2), 1)
    assert "rank 1: DistributedDataParallel, AdamW on " in outcome.text
    assert outcome.text.endswith("16 tensors: 15 identical, 0 close, 1 different, 0 not compared")


def test_the_odd_one_of_four_ranks_is_named(run: Any) -> None:
    """With a majority of three the finding names rank 2 alone, and all four ranks raise the same."""
    outcome = all_raise(run(flipped_bit, 4, 2))
    assert outcome.findings[0].ranks == (2,)
    assert "ranks 0, 1, 3 agree; rank 2 apart" in outcome.text


def local_statistics(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    return assert_in_sync(*trained(rank, norm=True), **options)


def test_batchnorm_under_plain_ddp_is_named(run: Any) -> None:
    """Running statistics that drift under plain DDP are SYN201, with DDP's one step of lag known."""
    outcome = all_raise(run(local_statistics, 2, {}))
    assert outcome.codes == ["SYN201", "SYN103"]
    assert "buffers are synchronized once a step" in outcome.text
    assert {diff.kind for diff in outcome.report.groups[0].tensors} == {"bn_mean", "bn_var"}


@pytest.mark.parametrize(
    "excused",
    [{"allow": "SYN201"}, {"only": "params"}, {"rtol": 1.0, "atol": 10.0}, {"exclude": "*.running_*"}],
    ids=str,
)
def test_options_hold_across_ranks(run: Any, excused: dict[str, Any]) -> None:
    """What excuses BatchNorm's drift between files excuses it between ranks."""
    all_pass(run(local_statistics, 2, excused))


def lacking(rank: int, world_size: int) -> Any:
    state = {"w": torch.ones(3), "v": torch.ones(2)} | ({"extra": torch.ones(5), "more": torch.ones(1)} if rank else {})
    return assert_in_sync(state)


def test_a_missing_tensor_does_not_hang(run: Any) -> None:
    """Ranks with other sets of tensors take part in the same messages, and all raise SYN101."""
    outcome = all_raise(run(lacking))
    assert outcome.codes == ["SYN101"]
    assert "2 tensors not on rank 0: extra, more" in outcome.text


def other_dtype(rank: int, world_size: int) -> Any:
    model, _ = trained(rank)
    return assert_in_sync(model.module.bfloat16() if rank == 1 else model.module)


def test_another_dtype_is_named(run: Any) -> None:
    """A rank in another precision is SYN102 on all ranks, with nothing fetched that cannot be compared."""
    outcome = all_raise(run(other_dtype))
    assert outcome.codes == ["SYN102"]
    assert "float32 on rank 0, bfloat16 on rank 1" in outcome.text


def resumed_alone(rank: int, world_size: int) -> Any:
    model, optimizer = trained(rank)
    return assert_in_sync(model, optimizer if rank == 0 else torch.optim.AdamW(model.parameters(), lr=1e-2))


def test_optimizer_state_on_one_rank_only_is_found(run: Any) -> None:
    """Optimizer state that only rank 0 has, as after loading on rank 0 alone, is missing on rank 1."""
    outcome = all_raise(run(resumed_alone))
    assert outcome.codes[0] == "SYN101"
    assert "12 tensors not on rank 1: optimizer." in outcome.text


def learning_rate(rank: int, world_size: int) -> Any:
    model, optimizer = trained(rank)
    optimizer.param_groups[0]["lr"] = 0.5 if rank else 0.25
    return assert_in_sync(model, optimizer)


def test_values_are_compared(run: Any) -> None:
    """Another learning rate on one rank fails though all tensors agree."""
    outcome = all_raise(run(learning_rate))
    assert "0.25 on rank 0, 0.5 on rank 1" in outcome.text


# --- a rank fails ---


class Broken:
    """An object whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("the state was not\nconsolidated")


def broken(rank: int, world_size: int) -> Any:
    model, optimizer = trained(rank)
    return assert_in_sync(model, Broken() if rank == 1 else optimizer)


def test_a_rank_whose_snapshot_fails_tells_the_others(run: Any) -> None:
    """An exception on rank 1 becomes the same error on all ranks, which names the rank; none waits."""
    outcome = all_raise(run(broken, 3), "RankFailed")
    assert outcome.text == "rank 1: RuntimeError: the state was not\\nconsolidated"


class Unreadable(exchange.Held):
    """Bytes that can be hashed, and then no longer read."""

    def __getitem__(self, part: slice) -> bytes:
        raise RuntimeError("device lost")


def late(rank: int, world_size: int, in_judge: bool) -> Any:
    if rank == 1 and in_judge:

        def failing(*_: Any) -> Any:
            raise MemoryError("no room")

        exchange.judge = failing
    elif rank == 1:
        exchange.Held.__getitem__ = Unreadable.__getitem__
    # In the second case nothing differs, so that no message is due after the first one.
    value = 0.0 if in_judge else float(rank)
    return assert_in_sync({"a": torch.full((3,), value), "b": torch.full((3,), value)})


@pytest.mark.parametrize("in_judge, says", [(False, "RuntimeError: device lost"), (True, "MemoryError: no room")])
def test_a_rank_that_fails_in_the_middle_tells_the_others(run: Any, in_judge: bool, says: str) -> None:
    """A rank that fails while the others wait for its bytes, or while it compares, makes all raise its error."""
    assert all_raise(run(late, 3, in_judge), "RankFailed").text == f"rank 1: {says}"


def misused(rank: int, world_size: int, what: str) -> Any:
    state = {"w": torch.ones(1)}
    if what == "a class":
        return assert_in_sync(nn.Linear if rank == 0 else state)
    if what == "a path":
        return assert_in_sync(state, "file.pth")
    if what == "options":
        return assert_in_sync(state, only="params" if rank == 0 else ())
    return assert_in_sync(state, only="weights")


@pytest.mark.parametrize(
    "what, says",
    [
        ("a class", "rank 0: an object of class type cannot be compared; needs a module"),
        ("a path", "a path is not what a rank holds in memory"),
        ("options", "the options are not the same on all ranks"),
        ("an option", "only='weights': needs one of"),
    ],
)
def test_wrong_usage_raises_on_all_ranks(run: Any, what: str, says: str) -> None:
    """A wrong call, even on one rank only, is a UsageError on all."""
    assert all_raise(run(misused, 2, what), "UsageError").text.startswith(says)


# --- groups, kinds of tensors, sizes ---


def subgroups(rank: int, world_size: int, members: list[int]) -> Any:
    group = dist.new_group(members)
    state = {"w": torch.full((2,), 5.0 if rank == 2 else 1.0)}
    return assert_in_sync(state, group=group)


def test_a_subgroup_is_compared_by_its_members_alone(run: Any) -> None:
    """Ranks 0 and 1 agree though rank 2 differs; rank 2 is told that it is no member; nobody is said to be missing."""
    outcomes = run(subgroups, 3, [0, 1])
    report = all_pass(outcomes[:2])
    assert not [note for note in report.groups[0].notes if "took part" in note]
    assert outcomes[2].error == "UsageError"
    assert "rank 2 is not in the process group" in outcomes[2].text


def test_ranks_of_a_subgroup_are_those_of_the_world(run: Any) -> None:
    """In the group of ranks 1 and 2 the report speaks of ranks 1 and 2."""
    outcome = all_raise(run(subgroups, 3, [2, 1])[1:])
    assert outcome.report.groups[0].ranks == (1, 2)


def alone(rank: int, world_size: int, chosen: bool | None) -> Any:
    return assert_in_sync({"w": torch.ones(1)}, across_ranks=chosen)


@pytest.mark.parametrize("chosen, says", [(None, "in a process group of one rank"), (True, "a single rank")])
def test_a_group_of_one_rank_never_passes(run: Any, chosen: bool | None, says: str) -> None:
    """With one rank there is nothing to compare with: that is an error and no pass."""
    [outcome] = run(alone, 1, chosen)
    assert outcome.error == "UsageError"
    assert says in outcome.text


def within(rank: int, world_size: int) -> Any:
    return assert_in_sync({"w": torch.ones(1)}, {"w": torch.full((1,), 1.0 + rank)}, across_ranks=False)


def test_things_of_one_rank_can_be_compared_in_a_group(run: Any) -> None:
    """With across_ranks=False each rank compares for itself: rank 0 passes while rank 1 raises."""
    assert [outcome.error for outcome in run(within)] == ["", "OutOfSync"]


def dtensors(rank: int, world_size: int, fault: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (world_size,))
    local = torch.arange(8.0)
    if fault and rank == 1:
        flip(local)
    state = {
        "replicated": DTensor.from_local(local, mesh, [Replicate()], run_check=False),
        "sharded": DTensor.from_local(torch.full((4,), float(rank)), mesh, [Shard(0)], run_check=False),
        "partial": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False),
    }
    return assert_in_sync(state)


def test_replicated_dtensors_are_compared_and_shards_counted(run: Any) -> None:
    """A replicated DTensor is compared by its local tensor; shards and partial sums are not compared and say so."""
    report = all_pass(run(dtensors, 2, False))
    assert (report.counts.identical, report.counts.not_compared) == (1, 2)
    assert {diff.reason for diff in report.groups[0].tensors} == {"sharded"}
    details = {diff.name: diff.detail for diff in report.groups[0].tensors}
    assert details["sharded"].endswith("this rank's shard only")
    assert details["partial"].endswith("this rank's partial sum only")


def test_a_differing_replicated_dtensor_is_found(run: Any) -> None:
    """A flipped bit in one rank's copy of a replicated DTensor fails."""
    outcome = all_raise(run(dtensors, 2, True))
    assert outcome.findings[0].tensors == ("replicated",)


def fully_sharded(rank: int, world_size: int, version: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model: Any = Net(norm=True)
    if version == 1:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.full((4, 4), 1.0)).sum().backward()
        optimizer.step()
    return compare(model, optimizer)


@pytest.mark.parametrize("version", [1, 2])
def test_fully_sharded_parameters_are_counted_as_sharded(run: Any, version: int) -> None:
    """Under FSDP1 and FSDP2 parameters and their states are not replicas; the buffers are, and are compared."""
    report = all_pass(run(fully_sharded, 2, version))
    kinds = report.groups[0].kinds
    assert report.verdict == "in_sync"
    assert (kinds["parameter"].not_compared, kinds["optimizer"].not_compared) == (6, 6)
    assert kinds["bn_mean"].identical == 1
    assert {diff.reason for diff in report.groups[0].tensors} == {"sharded"}


def windowed(rank: int, world_size: int) -> Any:
    exchange.WINDOW = 4096
    big = torch.arange(600_000.0)
    wide = torch.arange(3000.0).reshape(30, 100).t()
    if rank == 1:
        big[-1] += 64
        big[7] += 8
        wide[99, 29] -= 1
    if rank == 2:
        big[300_000] += 1
    return assert_in_sync({"big": big, "wide": wide, "same": torch.ones(5)})


def test_large_tensors_are_fetched_a_window_at_a_time(run: Any) -> None:
    """Differences in the first, a middle and the last window are all measured, whatever the strides."""
    outcome = all_raise(run(windowed, 3))
    big, wide = outcome.report.groups[0].tensors
    assert (big.mismatched, big.max_abs, big.index, big.clusters) == (3, 64.0, (599_999,), ((0,), (1,), (2,)))
    assert (wide.mismatched, wide.index, wide.minority) == (1, (99, 29), (1,))


def wrapped_on_one(rank: int, world_size: int, fault: bool) -> Any:
    model, _ = trained(rank)
    if fault and rank == 1:
        flip(model.module.head.bias)
    return assert_in_sync(model if rank == 0 else model.module)


@pytest.mark.parametrize("fault", [False, True])
def test_a_wrapper_on_one_rank_only_is_no_difference(run: Any, fault: bool) -> None:
    """Names are compared unwrapped: DDP on rank 0 and the bare module on rank 1 agree, and a fault is still found."""
    outcomes = run(wrapped_on_one, 2, fault)
    if not fault:
        assert all_pass(outcomes).counts.identical == 4
    else:
        assert all_raise(outcomes).findings[0].tensors == ("head.bias",)


def signs(rank: int, world_size: int) -> Any:
    return assert_in_sync({"w": torch.tensor([0.0 if rank else -0.0, float("nan")]), "n": torch.tensor(float("nan"))})


def test_values_that_are_equal_in_other_bits_pass(run: Any) -> None:
    """0.0 and -0.0 are equal, and a NaN of the same bits is identical, as between files."""
    counts = all_pass(run(signs)).counts
    assert (counts.equal, counts.identical) == (1, 1)
