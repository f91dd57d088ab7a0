"""The modifiers of a method: precision, communication, refusals, and the tensors of each rank."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.listings import list_codes, list_fields, list_rank_files
from support.scenarios import NEEDS_FSDP, SMALL, differing, fsdp, load, run, tensors, trained, whole_state
from support.states import are_equal, find_largest_difference
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import syncheck
from train.data import load_data
from train.errors import UserError
from train.launch import RankContext
from train.methods import METHODS, MODIFIERS, assign_mesh
from train.methods.ddp import Ddp
from train.models import build_model
from train.models.convnet import ConvNet
from train.schedule import compute_lr_scale, set_learning_rate
from train.settings import check
from train.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.testing import Rank
    from train.settings import Settings

CONVNET = replace(SMALL, model="convnet", save_per_rank=False)


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[torch.dtype]]:
    """Record the dtypes of the first layer's output and weight at each training forward."""
    dtypes: dict[str, set[torch.dtype]] = {"activation": set(), "weight": set()}
    forward = ConvNet.forward

    def record_dtypes(self: ConvNet, x: Tensor) -> Tensor:
        if self.training:
            dtypes["activation"].add(self.conv1(x).dtype)
            dtypes["weight"].add(self.conv1.weight.dtype)
        return forward(self, x)

    monkeypatch.setattr(ConvNet, "forward", record_dtypes)
    return dtypes


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "zero", fsdp("fsdp")])
@pytest.mark.parametrize(
    ("amp", "dtype"), [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)], ids=str
)
def test_amp_computes_in_its_precision(
    ctx: RankContext, dtypes: dict[str, set[torch.dtype]], method: str, amp: str, dtype: torch.dtype
) -> None:
    """Layers compute in the requested precision, while weights and optimizer state stay in float32."""
    job = trained(ctx, replace(CONVNET, method=method, amp=amp))
    assert dtypes == {"activation": {dtype}, "weight": {torch.float32}}
    states = job.method.list_replicas(job.trainer.optimizer)[0].optimizer.state_dict()["state"].values()
    for state in states:
        assert set(list_fields(filter(torch.is_tensor, state.values()), "dtype")) == {torch.float32}
    assert job.trainer.scaler.is_enabled() is (amp == "fp16")


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["fsdp", "replicate"])
def test_mp_policy_gathers_bfloat16(
    ctx: RankContext, syncheck_rank: Rank, dtypes: dict[str, set[torch.dtype]], method: str
) -> None:
    """With --mp-policy, layers have weights in bfloat16, files have float32, and replicas are in sync.

    Under fsdp, this model without buffers leaves syncheck nothing to compare. The model ends as with --amp bf16, within
    the rounding of bfloat16. BatchNorm is refused.
    """
    settings = replace(CONVNET, method=method, mp_policy=True, save_per_rank=True, out=syncheck_rank.shared)
    job = trained(ctx, settings)
    assert dtypes == {"activation": {torch.bfloat16}, "weight": {torch.bfloat16}}
    mine, amp = whole_state(job), whole_state(trained(ctx, replace(settings, mp_policy=False, amp="bf16")))
    assert find_largest_difference(amp, mine) < 1e-3  # measured: 0
    paths = list_rank_files(settings.out, f"{method}-mp-bf16_rank{{}}.pth", 2)
    assert set(list_fields(tensors(paths[0]).values(), "dtype")) == {torch.float32}
    (group,) = syncheck.compare(*paths).groups
    assert group.verdict == ("in_sync" if method == "replicate" else "undecided")
    assert (group.counts.not_compared == 0) is (method == "replicate")
    with pytest.raises(UserError, match="--mp-policy: not with BatchNorm"):
        run(ctx, replace(settings, model="resnet8"))


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "zero", fsdp("fsdp")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """With fp16, if a gradient overflows on rank 1 alone, all ranks skip the step and halve their scales.

    The checkpoints contain the state of the scaler, equal on all ranks.
    """
    backward = METHODS[method].backward
    calls = []

    def overflow(self: Any, loss: Tensor) -> None:
        calls.append(loss)
        backward(self, loss * float("inf") if len(calls) == 3 and ctx.rank == 1 else loss)

    monkeypatch.setattr(METHODS[method], "backward", overflow)
    settings = replace(CONVNET, method=method, amp="fp16", optimizer="adamw", save_per_rank=True)
    settings = replace(settings, out=syncheck_rank.shared)
    run(ctx, settings)
    for path in list_rank_files(settings.out, f"{settings.run}_rank{{}}.pth", 2):
        content = load(path)
        assert content["scaler"]["scale"] == 32768.0
        assert list_steps(content["optimizer"]) == {5.0}  # of 6
    report = syncheck.compare(settings.out)
    assert report.groups[0].counts.different == 0


def list_steps(optimizer: dict[str, Any]) -> set[float]:
    """Return the numbers of steps in the state dict of an optimizer."""
    return {state["step"].item() for state in optimizer["state"].values()}


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=2)
def test_an_overflow_in_one_shard_skips_the_step_on_all(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FSDP, an infinite gradient in a shard of rank 1 makes rank 0 skip the step too."""
    backward = METHODS["fsdp"].backward
    calls = []

    def overflow(self: Any, loss: Tensor) -> None:
        backward(self, loss)
        calls.append(loss)
        if len(calls) == 3 and ctx.rank == 1:
            next(self.module.parameters()).grad.to_local().view(-1)[0] = float("inf")

    monkeypatch.setattr(METHODS["fsdp"], "backward", overflow)
    job = trained(ctx, replace(CONVNET, method="fsdp", amp="fp16", optimizer="adamw"))
    steps = list_steps(job.trainer.optimizer.state_dict())
    assert ctx.gather((steps, job.trainer.scaler.get_scale())) == [({5.0}, 32768.0)] * 2


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "zero", "localsgd"])
def test_accumulation_sends_gradients_once_per_step(
    ctx: RankContext, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Three micro-batches cost as many all-reduces as one batch, and three times as many without no_sync."""
    messages: list[int] = []

    def count_bucket(_: object, bucket: Any) -> Any:
        messages.append(bucket.index())
        return allreduce_hook(None, bucket)

    # DDP inspects the annotations, and annotations in this file are strings.
    count_bucket.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    wrap = Ddp.wrap

    def wrap_with_hook(self: Ddp, model: nn.Module) -> nn.Module:
        wrapper = wrap(self, model)
        self.wrapper.register_comm_hook(None, count_bucket)
        return wrapper

    monkeypatch.setattr(Ddp, "wrap", wrap_with_hook)
    if method == "localsgd":  # DDP accepts only one hook, so replace the hook of localsgd
        monkeypatch.setattr(Ddp, "wrap", wrap)
        monkeypatch.setattr("train.methods.localsgd.post_localSGD_hook", count_bucket)
    counts = []
    for accumulate in (1, 3):
        messages.clear()
        trained(ctx, replace(CONVNET, method=method, accumulate=accumulate))
        counts.append(len(messages))
    assert counts[0] == counts[1] >= 6
    monkeypatch.setattr(Trainer, "run", disable_no_sync(Trainer.run))
    messages.clear()
    trained(ctx, replace(CONVNET, method=method, accumulate=3))
    assert len(messages) == 3 * counts[0]


def disable_no_sync(run_step: Any) -> Any:
    """Wrap `Trainer.run` so that the method synchronizes gradients in every micro-batch."""
    from contextlib import nullcontext

    def run_synced(self: Trainer, *arguments: Any) -> None:
        self.method.no_sync = nullcontext  # type: ignore[method-assign,assignment]
        run_step(self, *arguments)

    return run_synced


@pytest.mark.slow
@NEEDS_FSDP
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # CommDebugMode creates views
@pytest.mark.syncheck(ranks=2)
def test_fsdp_accumulation_sends_gradients_once_per_step(ctx: RankContext) -> None:
    """Under FSDP, three micro-batches cost as many reduce-scatters as one batch."""
    from torch.distributed.tensor.debug import CommDebugMode

    counts = []
    for accumulate in (1, 3):
        with CommDebugMode() as mode:
            trained(ctx, replace(CONVNET, method="fsdp", accumulate=accumulate))
        counts.append(sum(count for name, count in mode.get_comm_counts().items() if "reduce_scatter" in str(name)))
    assert counts[0] == counts[1] == 6  # one group of parameters, six steps


class Unused(ConvNet):
    """A network with a layer that no forward uses."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spare = nn.Linear(2, 2)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", "zero", "localsgd"])
def test_find_unused_allows_unused_parameters(ctx: RankContext, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """An unused parameter fails DDP at the second step; with --find-unused, the run completes with equal ranks."""
    monkeypatch.setattr("train.task.build_from_settings", lambda *_, **__: Unused(1, 10, 4))
    settings = replace(CONVNET, method=method)
    with pytest.raises(RuntimeError, match="finished reduction"):
        trained(ctx, settings)
    job = trained(ctx, replace(settings, find_unused=True))
    spare = job.method.module.get_parameter("spare.weight")
    assert are_equal(ctx.gather(spare), [spare, spare])


@pytest.mark.syncheck(ranks=2)
def test_zero_partitions_the_optimizer(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Each parameter's optimizer state is in exactly one rank's file, by name, and syncheck reports it as sharded."""
    settings = replace(SMALL, method="zero", optimizer="adamw", lr=0.005, sync_bn=True, out=syncheck_rank.shared)
    run(ctx, settings)
    paths = list_rank_files(settings.out, "zero-syncbn_rank{}.pth", 2)
    names = []
    for path in paths:
        content = load(path)
        assert content["syncheck"]["optimizer_sharded"] is True
        own_parameters = content["syncheck"]["optimizer_parameters"]
        for index, state in content["optimizer"]["state"].items():
            assert state["exp_avg"].shape == content["model"][own_parameters[index]].shape
        assert len(content["optimizer"]["state"]) == len(own_parameters) > 0
        names.append(set(own_parameters))
    assert names[0].isdisjoint(names[1])
    assert names[0] | names[1] == {name for name in load(paths[0])["model"] if name.endswith(("weight", "bias"))}
    (group,) = syncheck.compare(settings.out).groups
    assert (group.verdict, list_codes(group.findings)) == ("in_sync", ["SYN104"])
    assert group.counts.not_compared == 3 * 23
    assert set(list_fields(group.tensors, "reason")) == {"sharded"}


@pytest.mark.syncheck(ranks=2)
def test_localsgd_agrees_when_averaged(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Parameters are equal only in the warm-up and after each fourth step; files record the last averaged step."""
    out = syncheck_rank.shared
    run(ctx, replace(SMALL, method="localsgd", model="convnet", width=None, max_steps=14, save_every=1, out=out))
    agree, last = [], []
    for step in range(1, 15):
        pair = list_rank_files(out / "history" / "localsgd" / f"step_{step}", "rank_{}.pth", 2)
        if not any(not name.startswith("optimizer.") for name in differing(*pair)):
            agree.append(step)
        averaging = load(pair[1])["syncheck"]["averaging"]
        assert (averaging["period"], averaging["warmup_steps"]) == (4, 4)
        last.append(averaging["last_step"])
    assert agree == [1, 2, 3, 4, 8, 12]
    assert last == [0] * 7 + [8] * 4 + [12] * 3


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("steps", [9, 8], ids=["averaged", "between"])
def test_localsgd_equals_training_by_hand(ctx: RankContext, steps: int) -> None:
    """With uneven shares, localsgd ends within rounding of models trained by plain SGD and averaged by hand."""
    settings = replace(CONVNET, method="localsgd", average_every=3, shuffle=False, max_steps=steps, batch_size=35)
    actual = trained(ctx, settings).method.module.state_dict()
    expected = train_local_sgd_by_hand(settings, ctx.world_size)[ctx.rank].state_dict()
    assert find_largest_difference(expected, actual) < 5e-6


def zip_parameters(models: list[nn.Module]) -> Iterable[tuple[nn.Parameter, ...]]:
    """Return the copies of each parameter."""
    return zip(*(model.parameters() for model in models), strict=True)


def train_local_sgd_by_hand(settings: Settings, ranks: int) -> list[nn.Module]:
    """Train one model per rank in this process: N steps together, then alone, with an average after each N-th step."""
    torch.manual_seed(settings.seed)
    first = build_model(settings.model, 1, 10, settings.width)
    models = [deepcopy(first) for _ in range(ranks)]
    jobs = [
        torch.optim.SGD(m.parameters(), momentum=settings.momentum, weight_decay=settings.weight_decay) for m in models
    ]
    every, size, (x, y) = settings.average_every, settings.batch_size, load_data("digits", None, None).train[:]
    for step in range(settings.max_steps):
        for rank, model in enumerate(models):
            samples = slice(step * size + rank, (step + 1) * size, ranks)
            loss = F.cross_entropy(model(x[samples]), y[samples], reduction="sum") / size
            (loss * ranks).backward()
        if step < every:
            for replicas in zip_parameters(models):
                mean = torch.stack(list_fields(replicas, "grad")).mean(0)
                for p in replicas:
                    p.grad = mean.clone()
        for job in jobs:
            set_learning_rate(job, settings.lr * compute_lr_scale(step, settings.max_steps))
            job.step()
            job.zero_grad()
        if step >= every and (step + 1) % every == 0:
            for replicas in zip_parameters(models):
                mean = torch.stack(list_fields(replicas, "data")).mean(0)
                for p in replicas:
                    p.data.copy_(mean)
    return models


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=2)
def test_fsdp_files_hold_shards(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Each rank's file holds its rows of every parameter and the mesh; syncheck reports the tensors as sharded."""
    settings = replace(SMALL, method="fsdp", sync_bn=True, out=syncheck_rank.shared)
    job = trained(ctx, settings)
    first, second = map(tensors, list_rank_files(settings.out, "fsdp-syncbn_rank{}.pth", 2))
    for name, parameter in job.method.module.named_parameters():
        parts = first[name].to_local(), second[name].to_local()
        assert torch.cat(parts).equal(parameter.full_tensor())  # type: ignore[operator]
        assert parts[0].shape != parameter.shape
    (group,) = syncheck.compare(settings.out).groups
    assert group.verdict == "in_sync"
    assert group.evidence.metadata.mesh == {"shard": 0}
    assert set(list_fields(group.tensors, "reason")) == {"sharded"}
    assert group.counts.not_compared == 2 * 23


def test_refusals_name_options_that_exist() -> None:
    """Methods refuse only options in the table of modifiers, each with a reason of at least five words."""
    for method in METHODS.values():
        assert set(method.refuses) <= set(MODIFIERS)
        assert all(len(reason.split()) > 4 for reason in method.refuses.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"static_graph": True, "accumulate": 2}, "--static-graph: not with --accumulate: no_sync"),
        ({"method": "fsdp", "mp_policy": True, "amp": "bf16"}, "--mp-policy: not with --amp bf16: both"),
        ({"method": "fsdp", "reshard_after_forward": "0"}, "--reshard-after-forward 0: must be true, false, or a"),
        ({"method": "diloco", "outer_momentum": 1.0}, "--outer-momentum 1.0: must be at least 0 and below 1"),
    ],
    ids=["static graph", "mp policy", "reshard", "outer momentum"],
)
def test_options_of_a_method_are_checked(changes: dict[str, Any], message: str) -> None:
    """Values and combinations that cannot work are refused before the processes connect."""
    with pytest.raises(UserError, match=message):
        check(replace(SMALL, **changes), 2)


@NEEDS_FSDP
def test_the_group_of_reshard_must_divide_the_ranks() -> None:
    """FSDP cannot keep a shard of three ranks on four ranks."""
    settings = replace(SMALL, method="fsdp", reshard_after_forward="3")
    with pytest.raises(UserError, match="--reshard-after-forward 3: must divide 4"):
        METHODS["fsdp"](settings, assign_mesh(settings, RankContext(0, 4, backend="gloo")))


@pytest.mark.parametrize("method", ["fsdp", "hsdp"])
def test_fsdp_reports_an_old_torch(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """If torch cannot shard on CPUs, the error names the installed and the required version."""
    monkeypatch.setattr("train.methods.fsdp.ON_CPU", False)
    settings = replace(SMALL, method=method)
    with pytest.raises(UserError, match=rf"--method {method}: torch \S+ shards on GPUs only; use 2.7"):
        METHODS[method](settings, assign_mesh(settings, RankContext(0, 4, backend="gloo")))
