"""The choice of GPUs for a rank, with a simulated number of GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from train.errors import RankError, UserError
from train.launch.environment import (
    LaunchOptions,
    RankInfo,
    choose_backend,
    choose_devices,
    describe_idle_gpus,
    make_rank_context,
    read_slurm,
)

ONE_MACHINE = RankInfo(
    rank=1, world_size=2, local_rank=1, local_world_size=2, node=0, init_method="tcp://127.0.0.1:29500"
)
SLURM_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
BY_HAND = replace(ONE_MACHINE, rank=5, world_size=8, local_rank=None, local_world_size=None)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Make torch report the number of GPUs given by the test."""
    number: int = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    return number


def device_names(option: str | None, info: RankInfo | None) -> str:
    """Return the names of the chosen devices as one string."""
    return " ".join(str(device) for device in choose_devices(option, info))


@pytest.mark.parametrize(
    ("gpus", "option", "info", "expected"),
    [
        (2, None, ONE_MACHINE, "cuda:1"),
        (1, None, ONE_MACHINE, ""),
        (0, None, ONE_MACHINE, ""),
        (4, "2,3", ONE_MACHINE, "cuda:3"),
        (4, "3,2", ONE_MACHINE, "cuda:2"),
        (4, "none", ONE_MACHINE, ""),
        (4, None, None, "cuda:0 cuda:1 cuda:2 cuda:3"),
        (4, "1,3", None, "cuda:1 cuda:3"),
        (4, " 1, 3", None, "cuda:1 cuda:3"),
        (4, "none", None, ""),
        (0, None, None, ""),
        (0, "none", ONE_MACHINE, ""),
        (4, None, BY_HAND, "cuda:1"),
        (4, "0,2", BY_HAND, "cuda:2"),
        (4, None, replace(BY_HAND, local_rank=3), "cuda:3"),
        (0, None, replace(BY_HAND, local_rank=3), ""),
        (1, None, replace(ONE_MACHINE, own_gpus=True), "cuda:0"),
    ],
    indirect=["gpus"],
)
def test_each_rank_gets_its_own_gpu(gpus: int, option: str | None, info: RankInfo | None, expected: str) -> None:
    """Ranks of one machine get one GPU each in the order of --gpus, or use the CPU; a single process gets all GPUs."""
    assert device_names(option, info) == expected


@pytest.mark.parametrize(
    ("gpus", "option", "info", "kind", "message"),
    [
        (2, "2", None, RankError, "--gpus 2: this machine has 2 GPUs, 0 to 1; or give --gpus none"),
        (1, "0,1", ONE_MACHINE, RankError, "--gpus 0,1: this machine has 1 GPU; or give --gpus none"),
        (0, "0", None, RankError, "--gpus 0: this machine has no GPUs; or give --gpus none"),
        (4, "1,1", None, UserError, "--gpus 1,1: GPU 1 is repeated"),
        (4, "a", None, UserError, "--gpus a: must be comma-separated numbers like 0,1, or none for the CPU"),
        (4, "0,", None, UserError, "--gpus 0,: must be comma-separated numbers like 0,1, or none for the CPU"),
        (4, "-1", None, UserError, "--gpus -1: must be comma-separated numbers like 0,1, or none for the CPU"),
        (4, "3", ONE_MACHINE, UserError, "--gpus 3: 1 GPU for 2 ranks on this machine; each needs one"),
        (2, None, replace(BY_HAND, local_rank=2), RankError, "--local-rank 2: this machine has 2 GPUs for its ranks"),
    ],
    indirect=["gpus"],
)
def test_invalid_gpus_are_rejected(
    gpus: int, option: str | None, info: RankInfo | None, kind: type[UserError], message: str
) -> None:
    """--gpus is rejected if a GPU is missing, repeated or invalid, or if the ranks outnumber the GPUs."""
    with pytest.raises(UserError) as caught:
        choose_devices(option, info)
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_backend_follows_the_device() -> None:
    """The default is NCCL for GPUs and gloo for CPUs; --backend can select gloo for GPUs, but not NCCL for CPUs."""
    cuda = (torch.device("cuda", 0),)
    assert [choose_backend(None, cuda), choose_backend(None, ()), choose_backend("gloo", cuda)] == [
        "nccl",
        "gloo",
        "gloo",
    ]
    with pytest.raises(UserError, match="--backend nccl needs a GPU for each rank"):
        choose_backend("nccl", ())


@pytest.mark.parametrize("gpus", [4], indirect=True)
def test_context_of_gpus(gpus: int) -> None:
    """A rank's context has its own GPU; a process without a group has all GPUs of --gpus and rejects --backend."""
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ctx = make_rank_context(environment, "ddp", grouped=True, options=LaunchOptions(gpus="0,3"))
    assert (str(ctx.device), ctx.devices, ctx.backend) == ("cuda:3", (ctx.device,), "nccl")
    ctx = make_rank_context({}, "dp", grouped=False, options=LaunchOptions(gpus="3,0"))
    assert (str(ctx.device), len(ctx.devices), ctx.backend) == ("cuda:3", 2, None)
    with pytest.raises(UserError) as caught:
        make_rank_context({}, "single", grouped=False, options=LaunchOptions(gpus="3,0"))
    advice = "use --method dp, or --spawn 2 for a process per GPU"
    assert str(caught.value) == f"--gpus 3,0: --method single uses one GPU; {advice}"
    for gpus_option in (None, "3"):
        ctx = make_rank_context({}, "single", grouped=False, options=LaunchOptions(gpus=gpus_option))
        assert str(ctx.device) == f"cuda:{gpus_option or 0}"
    with pytest.raises(UserError, match="--backend gloo: --method dp has no process group"):
        make_rank_context({}, "dp", grouped=False, options=LaunchOptions(backend="gloo"))


@pytest.mark.parametrize(
    ("gpus", "option", "expected"),
    [
        (1, None, "1 GPU for 2 ranks on this machine: all use the CPU; --gpus none hides this line"),
        (1, "none", ""),
        (0, None, ""),
        (2, None, ""),
    ],
    indirect=["gpus"],
)
def test_idle_gpus_are_reported(gpus: int, option: str | None, expected: str) -> None:
    """Idle GPUs are reported if too few GPUs force the ranks to use the CPU, but not with --gpus none."""
    assert describe_idle_gpus(option, choose_devices(option, ONE_MACHINE), 2) == expected


@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:1"}, True),
        ({"SLURM_NTASKS_PER_GPU": "1"}, True),
        ({"SLURM_NTASKS_PER_GPU": "2"}, False),
    ],
    ids=str,
)
def test_slurm_hides_gpus(variables: dict[str, str], own: bool) -> None:
    """A task has its own GPUs if SLURM hides the GPUs of other tasks, but not if two tasks share a GPU."""
    assert read_slurm({**SLURM_TASK, **variables}, LaunchOptions()).own_gpus is own
