"""Which GPUs a rank computes on, with a machine's GPUs made up."""

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

HERE = RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2, node=0, init_method="tcp://127.0.0.1:29500")
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
BY_HAND = replace(HERE, rank=5, world_size=8, local_rank=None, local_world_size=None)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Let torch count as many GPUs as the test says."""
    number: int = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    return number


def names(option: str | None, place: RankInfo | None) -> str:
    """Write the devices as one string."""
    return " ".join(str(device) for device in choose_devices(option, place))


@pytest.mark.parametrize(
    ("gpus", "option", "place", "expected"),
    [
        (2, None, HERE, "cuda:1"),
        (1, None, HERE, ""),
        (0, None, HERE, ""),
        (4, "2,3", HERE, "cuda:3"),
        (4, "3,2", HERE, "cuda:2"),
        (4, "none", HERE, ""),
        (4, None, None, "cuda:0 cuda:1 cuda:2 cuda:3"),
        (4, "1,3", None, "cuda:1 cuda:3"),
        (4, " 1, 3", None, "cuda:1 cuda:3"),
        (4, "none", None, ""),
        (0, None, None, ""),
        (0, "none", HERE, ""),
        (4, None, BY_HAND, "cuda:1"),
        (4, "0,2", BY_HAND, "cuda:2"),
        (4, None, replace(BY_HAND, local_rank=3), "cuda:3"),
        (0, None, replace(BY_HAND, local_rank=3), ""),
        (1, None, replace(HERE, own_gpus=True), "cuda:0"),
    ],
    indirect=["gpus"],
)
def test_each_rank_has_its_own(gpus: int, option: str | None, place: RankInfo | None, expected: str) -> None:
    """Ranks of one machine get one GPU each, in the order of --gpus; one process gets all; too few mean the CPU."""
    assert names(option, place) == expected


@pytest.mark.parametrize(
    ("gpus", "option", "place", "kind", "message"),
    [
        (2, "2", None, RankError, "--gpus 2: this machine has 2 GPUs, 0 to 1; or give --gpus none"),
        (1, "0,1", HERE, RankError, "--gpus 0,1: this machine has 1 GPU; or give --gpus none"),
        (0, "0", None, RankError, "--gpus 0: this machine has no GPUs; or give --gpus none"),
        (4, "1,1", None, UserError, "--gpus 1,1: GPU 1 is repeated"),
        (4, "a", None, UserError, "--gpus a: must be comma-separated numbers like 0,1, or none for the CPU"),
        (4, "0,", None, UserError, "--gpus 0,: must be comma-separated numbers like 0,1, or none for the CPU"),
        (4, "-1", None, UserError, "--gpus -1: must be comma-separated numbers like 0,1, or none for the CPU"),
        (4, "3", HERE, UserError, "--gpus 3: 1 GPU for 2 ranks on this machine; each needs one"),
        (2, None, replace(BY_HAND, local_rank=2), RankError, "--local-rank 2: this machine has 2 GPUs for its ranks"),
    ],
    indirect=["gpus"],
)
def test_wrong_choice_is_named(
    gpus: int, option: str | None, place: RankInfo | None, kind: type[UserError], message: str
) -> None:
    """A GPU that is not there, one named twice, and too few for the ranks are refused, with what there is."""
    with pytest.raises(UserError) as caught:
        choose_devices(option, place)
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_backend_follows_the_device() -> None:
    """NCCL between GPUs and gloo between CPUs, unless gloo is asked for; NCCL on the CPU is refused."""
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
    """A rank's context holds its own GPU; a process without a group holds all that --gpus names, the first first."""
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ctx = make_rank_context(environment, "ddp", grouped=True, options=LaunchOptions(gpus="0,3"))
    assert (str(ctx.device), ctx.devices, ctx.backend) == ("cuda:3", (ctx.device,), "nccl")
    ctx = make_rank_context({}, "dp", grouped=False, options=LaunchOptions(gpus="3,0"))
    assert (str(ctx.device), len(ctx.devices), ctx.backend) == ("cuda:3", 2, None)
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
def test_idle_gpus_are_said(gpus: int, option: str | None, expected: str) -> None:
    """Ranks that fall back to the CPU beside GPUs say so, unless it was asked for."""
    assert describe_idle_gpus(option, choose_devices(option, HERE), 2) == expected


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
    """Where SLURM shows each task its own GPUs only, the first of these is the task's; two tasks on one share it."""
    assert read_slurm({**TASK, **variables}, LaunchOptions()).own_gpus is own
