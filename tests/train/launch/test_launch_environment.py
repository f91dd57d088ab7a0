"""The rank of a process, read from its environment and its options, without starting a process."""

from __future__ import annotations

from argparse import Namespace
from itertools import product
from typing import Any

import pytest

from train.errors import RankError, UserError
from train.launch import spawn
from train.launch.environment import (
    LaunchOptions,
    choose_slurm_port,
    count_slurm_tasks,
    find_launcher,
    is_group_requested,
    make_rank_context,
    prints_for_all_ranks,
)
from train.options import build_parser, settings_from

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
# Variables set by SLURM 22.05 for the second task on the first of two nodes.
STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "first",
    "SLURM_JOB_NODELIST": "first",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
BATCH_SHELL = {key: value for key, value in STEP.items() if "STEP" not in key} | {"SLURM_PROCID": "0"}
ONE_TASK = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
BY_HAND: dict[str, Any] = {"rank": 1, "world_size": 2, "init_method": "file:///shared/f"}


def change(environment: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    """Set variables; None removes a variable."""
    return {key: value for key, value in {**environment, **changes}.items() if value is not None}


def test_reads_torchrun() -> None:
    """torchrun's variables determine the context; without GPUs the backend is gloo."""
    ctx = make_rank_context(TORCHRUN, "ddp", grouped=True)
    assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.is_main) == (3, 4, 1, False)
    assert (ctx.local_world_size, ctx.node, ctx.init_method) == (2, 1, "tcp://127.0.0.1:29500")
    assert ctx.backend == ("nccl" if ctx.device.type == "cuda" else "gloo")


def test_reads_options_by_hand() -> None:
    """The options determine the context; --ip and --port become a tcp:// address, with IPv6 in brackets."""
    ctx = make_rank_context({}, "ddp", grouped=True, options=LaunchOptions(**BY_HAND))
    assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.init_method) == (1, 2, 1, "file:///shared/f")
    for ip, expected in (("10.0.0.1", "tcp://10.0.0.1:29500"), ("::1", "tcp://[::1]:29500")):
        options = LaunchOptions(rank=0, world_size=2, ip=ip, port=29500)
        assert make_rank_context({}, "ddp", grouped=True, options=options).init_method == expected
        options = LaunchOptions(rank=0, world_size=2, init_method=expected)
        assert make_rank_context({}, "ddp", grouped=True, options=options).init_method == expected


def test_reads_slurm() -> None:
    """The world size is the number of tasks of the step, not of the job; the port depends on the job and the step."""
    ctx = make_rank_context(STEP, "ddp", grouped=True)
    assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.node) == (1, 3, 1, 2, 0)
    assert ctx.init_method == "tcp://first:20672"


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({"SLURM_STEP_ID": "1"}, {}, "tcp://first:20673"),
        ({"SLURM_JOB_ID": "99999999"}, {}, "tcp://first:23984"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, {}, "tcp://10.0.0.1:1234"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, {"ip": "10.0.0.2", "port": 99}, "tcp://10.0.0.2:99"),
        ({}, {"port": 99}, "tcp://first:99"),
        ({"SLURM_STEP_NODELIST": None}, {"port": 99}, "tcp://first:99"),
    ],
    ids=str,
)
def test_precedence_of_slurm_addresses(changes: dict[str, str | None], options: dict[str, Any], expected: str) -> None:
    """--ip and --port override MASTER_ADDR and MASTER_PORT, and all of these override SLURM's variables."""
    ctx = make_rank_context(change(STEP, changes), "ddp", grouped=True, options=LaunchOptions(**options))
    assert ctx.init_method == expected


def test_slurm_ports_are_distinct_and_in_range() -> None:
    """Neighboring jobs and steps get different ports, all from 20000 to 31999."""
    ports = [
        choose_slurm_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job, step in product(range(700, 1400), range(16))
    ]
    assert (min(ports), max(ports), len(set(ports[:12_000]))) == (20_000, 31_999, len(ports[:12_000]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2(x3),1", [2, 2, 2, 1, None]), ("4", [4, None]), ("1,3(x2)", [1, 3, 3, None]), ("", [None])],
)
def test_slurm_counts_tasks_per_node(text: str, expected: list[int | None]) -> None:
    """SLURM's short form for tasks per node is expanded; the count of an unlisted node is None."""
    counts = [count_slurm_tasks({"SLURM_STEP_TASKS_PER_NODE": text}, node) for node in range(len(expected))]
    assert counts == expected


def test_group_of_one_task() -> None:
    """In a step of one task, a method with a process group uses a local address."""
    ctx = make_rank_context({**ONE_TASK, "SLURM_STEP_NODELIST": "n[1-2]"}, "ddp", grouped=True)
    assert (ctx.world_size, ctx.backend is None, ctx.init_method) == (1, False, "tcp://127.0.0.1:20672")


def test_single_needs_no_launcher() -> None:
    """--method single has no process group, both without a launcher and under a launcher of one process."""
    one_rank = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for environment in ({}, one_rank, {"RANK": "0", "WORLD_SIZE": "1"}, ONE_TASK, BATCH_SHELL):
        ctx = make_rank_context(environment, "single", grouped=False)
        assert (ctx.world_size, ctx.backend) == (1, None)


@pytest.mark.parametrize(
    ("environment", "args", "expected"),
    [
        ({}, {}, False),
        ({"RANK": "0"}, {}, True),
        (TORCHRUN, {}, True),
        ({}, {"spawn": 2}, True),
        ({}, BY_HAND, True),
        (STEP, {}, True),
        (ONE_TASK, {}, False),
        (BATCH_SHELL, {}, False),
        ({**TORCHRUN, **ONE_TASK}, {}, True),
        (STEP, {"port": 1234}, True),
        (ONE_TASK, {"spawn": 2}, True),
    ],
    ids=str,
)
def test_launchers_that_request_a_group(environment: dict[str, str], args: dict[str, Any], expected: bool) -> None:
    """torchrun, --spawn, ranks by hand and srun with several tasks request a group; a batch script's shell does not."""
    assert is_group_requested(environment, Namespace(**args)) == expected
    if not args:
        assert is_group_requested(environment) == expected


def test_precedence_of_launchers() -> None:
    """torchrun's variables, and the options for starting by hand, take precedence over SLURM's variables."""
    ctx = make_rank_context({**STEP, **TORCHRUN}, "ddp", grouped=True)
    assert (ctx.rank, ctx.init_method) == (3, "tcp://127.0.0.1:29500")
    ctx = make_rank_context(STEP, "ddp", grouped=True, options=LaunchOptions(**BY_HAND))
    assert (ctx.world_size, ctx.init_method) == (2, "file:///shared/f")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "x"}, "RANK is 'x', not a number"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2', not a number"),
        ({"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"GROUP_RANK": "?"}, "GROUP_RANK is '\\?'"),
    ],
    ids=str,
)
def test_invalid_variables_are_named(changes: dict[str, str | None], message: str) -> None:
    """A rank with a missing or invalid variable raises an error that names the variable."""
    with pytest.raises(RankError, match=message):
        make_rank_context(change(TORCHRUN, changes), "ddp", grouped=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 with SLURM_STEP_NUM_TASKS=3"),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS is 'x', not a number: start with 'srun --ntasks 2"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None}, "SLURM_STEP_NODELIST is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x', not a number"),
        ({"MASTER_PORT": "0"}, "port 0: "),
        (
            {"SLURM_STEP_NODELIST": "n[1-2]", "PATH": "/nowhere"},
            "scontrol show hostnames n\\[1-2\\]' failed .*MASTER_ADDR",
        ),
    ],
    ids=str,
)
def test_invalid_slurm_variables_are_named(changes: dict[str, str | None], message: str) -> None:
    """The error names a missing or invalid variable of SLURM, or the scontrol command that failed."""
    with pytest.raises(UserError, match=message):
        make_rank_context(change(STEP, changes), "ddp", grouped=True)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (TORCHRUN, {"spawn": 2}, "--spawn under a launcher that has set RANK or WORLD_SIZE: "),
        (TORCHRUN, {"rank": 0}, "--rank under a launcher that has set RANK or WORLD_SIZE: "),
        (TORCHRUN, {"local_rank": 0}, "--local-rank 0 with LOCAL_RANK=1: drop the option"),
        (STEP, {"local_rank": 0}, "--local-rank 0 with SLURM_LOCALID=1: drop the option"),
        ({}, {"rank": 0}, "--rank without --world-size: "),
        ({}, {"world_size": 2}, "--world-size without --rank: "),
        ({}, {"init_method": "file:///f"}, "--init-method without --rank: "),
        ({}, {"port": 1}, "--port without --rank: "),
        ({}, {"local_rank": 0}, "--local-rank without --rank: "),
        (
            {},
            {"rank": 0, "world_size": 2},
            "--rank 0 without a rendezvous address: ",
        ),
        ({}, {"rank": 0, "world_size": 2, "ip": "::1"}, "--rank 0 without a rendezvous address: "),
        ({}, {**BY_HAND, "port": 1}, "--init-method and --port both "),
        ({}, {**BY_HAND, "rank": 2}, "--rank 2: must be 0 to 1 "),
        ({}, {**BY_HAND, "rank": -1}, "--rank -1: must be 0 to 1 "),
        ({}, {**BY_HAND, "world_size": 0}, "--world-size 0: "),
        ({}, {**BY_HAND, "local_rank": 2}, "--local-rank 2: must be 0 to 1 "),
        ({}, {"rank": 0, "world_size": 2, "ip": "::1", "port": 70000}, "port 70000: "),
        ({}, {**BY_HAND, "init_method": "tcp://h:70000"}, "--init-method tcp://h:70000: Port out of range 0-65535"),
        (
            {},
            {**BY_HAND, "init_method": "tcp://h"},
            "--init-method tcp://h: must be file:///PATH, ",
        ),
        ({}, {**BY_HAND, "init_method": "file://shared/f"}, "--init-method file://shared/f: must be file:///PATH, "),
        (
            {},
            {**BY_HAND, "init_method": "/shared/f"},
            "--init-method /shared/f: must be file:///PATH, ",
        ),
        ({}, {**BY_HAND, "init_method": "env://"}, "--init-method env://: must be file:///PATH, "),
        ({}, {"backend": "nccl", **BY_HAND, "gpus": "none"}, "--backend nccl needs a GPU for each rank"),
    ],
    ids=str,
)
def test_contradictory_options_are_rejected(environment: dict[str, str], options: dict[str, Any], message: str) -> None:
    """Options that are incomplete, invalid, or contradict the launcher or each other are rejected by name."""
    with pytest.raises(UserError) as caught:
        make_rank_context(environment, "ddp", grouped=True, options=LaunchOptions(**options))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({}, {"spawn": 0}, "--spawn 0: "),
        ({}, {"spawn": 2, "rank": 0}, "--spawn and --rank: "),
        ({}, {"spawn": 2, "port": 1}, "--spawn and --port: "),
        (TORCHRUN, {"spawn": 2}, "--spawn under a launcher that has set RANK or WORLD_SIZE: "),
        (STEP, {"spawn": 2}, "--spawn under srun, "),
    ],
    ids=str,
)
def test_spawn_rejects_other_launchers(environment: dict[str, str], options: dict[str, Any], message: str) -> None:
    """--spawn cannot be combined with another launcher of several processes, but works in a single SLURM task."""
    with pytest.raises(UserError) as caught:
        spawn.check_options(environment, LaunchOptions(**options))
    assert str(caught.value).startswith(message)
    spawn.check_options(ONE_TASK, LaunchOptions(spawn=2))


def test_launcher_must_fit_the_method() -> None:
    """ddp without a launcher is rejected with a command to use; single and dp are rejected under several processes."""
    with pytest.raises(UserError, match="--method ddp needs a launcher: start with 'torchrun --nproc-per-node 2"):
        make_rank_context({}, "ddp", grouped=True)
    with pytest.raises(UserError, match="--method single is one process, the launcher started 4"):
        make_rank_context(TORCHRUN, "single", grouped=False)
    with pytest.raises(UserError, match="--method dp is one process, the launcher started 3"):
        make_rank_context(STEP, "dp", grouped=False)


@pytest.mark.parametrize(
    ("environment", "args", "expected"),
    [
        ({}, {}, True),
        (TORCHRUN, {}, False),
        ({**TORCHRUN, "RANK": "0"}, {}, True),
        (STEP, {}, False),
        ({**STEP, "SLURM_PROCID": "0"}, {}, True),
        ({}, BY_HAND, True),
        (STEP, BY_HAND, True),
    ],
    ids=str,
)
def test_rank_zero_prints_for_all_ranks(environment: dict[str, str], args: dict[str, Any], expected: bool) -> None:
    """Rank 0 prints the messages common to all ranks, except if each rank was started in its own shell."""
    assert prints_for_all_ranks(environment, Namespace(**args)) == expected


@pytest.mark.parametrize(
    ("environment", "options", "name"),
    [
        (TORCHRUN, {}, "torchrun"),
        (STEP, {}, "slurm"),
        ({}, BY_HAND, "by_hand"),
        ({}, {**BY_HAND, "local_world_size": 2}, "spawn"),
        ({}, {}, "alone"),
    ],
)
def test_launcher_is_identified(environment: dict[str, str], options: dict[str, Any], name: str) -> None:
    """`find_launcher` returns the launcher that started the processes."""
    assert find_launcher(environment, LaunchOptions(**options)) == name


ONE = change(TORCHRUN, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"})
ELASTIC = {**ONE, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_RANK": "0", "HOME": "/"}


@pytest.mark.parametrize(
    ("line", "changes", "gpus", "ranks"),
    [
        ("--save-per-rank", {}, 0, 2),
        ("--save-every 5 --sync-bn --resume", {}, 0, 2),
        ("--save-best", {}, 1, 2),
        ("--save-per-rank", {}, 8, 8),
        ("--save-per-rank --gpus none", {}, 8, 2),
        ("--save-per-rank --gpus 0,2,3", {}, 8, 3),
        ("--save-per-rank --backend nccl", {}, 4, 4),
        ("--save-per-rank --local-rank 0", {}, 0, 2),
        ("--save-per-rank", ONE_TASK, 0, 2),
        ("--spawn 1 --save-per-rank", {}, 0, 1),
        ("--spawn 3 --method zero", {}, 0, 3),
        # These cases keep one rank.
        ("", {}, 0, None),
        ("--checkpoint-every 1", {}, 8, None),
        ("--save-per-rank --method ddp", {}, 8, None),
        ("--save-per-rank --method single", {}, 0, None),
        ("--save-per-rank --gpus 3", {}, 8, None),
        ("--save-per-rank --backend nccl", {}, 1, None),
        ("--save-per-rank --rank 0 --world-size 1", {}, 0, None),
        ("--save-per-rank --local-rank 1", {}, 0, None),
        ("--save-per-rank", {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}, 8, None),
        ("--save-per-rank", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 8, None),
        ("--save-per-rank", {"TORCHELASTIC_RUN_ID": None}, 8, None),
        ("--save-per-rank", STEP, 8, None),
    ],
)
def test_torchrun_with_one_process(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    changes: dict[str, str | None],
    gpus: int,
    ranks: int | None,
) -> None:
    """If files per rank are requested, torchrun's single process implies --spawn, unless options select one rank."""
    monkeypatch.setattr("train.launch.environment.count_gpus", lambda: gpus)
    environment, args = change(ELASTIC, changes), build_parser().parse_args(line.split())
    before = dict(environment)
    spawn.replace_torchrun(environment, args, saves=settings_from(args).save_per_rank)
    assert args.spawn == ranks
    assert capsys.readouterr().err.count("\n") == (ranks is not None and "--spawn" not in line)
    if ranks is None:
        assert environment == before
    else:
        spawn.check_options(environment, LaunchOptions.from_args(args))
        assert {name for name in environment if not name.startswith("SLURM_")} == {"HOME"}
