"""DataParallel and ThreadReplicas: the inputs and modes of each replica, and its recorded buffers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from support.listings import list_fields
from support.states import copy_values, list_differing, pick
from torch import nn

from train.methods.replica_threads import GpuReplicas, ReplicaBuffers, ThreadReplicas, keep_modes, replicate
from train.models import build_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    States = list[dict[str, Tensor]]
    Build = Callable[[nn.Module, ReplicaBuffers], nn.Module]


def train_replicas(build: Build, replicas: int, before: nn.Module | None = None) -> States:
    """Train resnet8 for 20 steps, after a layer, and return the state of each replica."""
    torch.manual_seed(0)
    model, buffers = build_model("resnet8", 1, 10, 4), ReplicaBuffers(replicas)
    model = model if before is None else nn.Sequential(before, model)
    wrapper, sgd = build(model, buffers), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        F.cross_entropy(wrapper(torch.randn(14, 1, 8, 8)), torch.randint(10, (14,))).backward()
        sgd.step()
        sgd.zero_grad()
    return buffers.states(model)


def are_equal(a: States, b: States) -> bool:
    """Return whether both have bitwise equal tensors, with the same names in the same order."""
    for state, expected in zip(a, b, strict=True):
        if list(state) != list(expected) or list_differing(state, expected):
            return False
    return True


class Probe(nn.Module):
    """A linear layer that records its first sample, number of samples, thread, autocast and gradient modes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor
        self.records: list[tuple[float, int, str, bool, torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, 3], with the sample's index first. Raises ValueError if the first index is negative."""
        self.calls += 1
        if x[0, 0] < 0:
            raise ValueError(f"sample {x[0, 0]:g}")
        y: Tensor = self.linear(x)
        modes = torch.is_autocast_enabled("cpu"), y.dtype, y.requires_grad
        self.records.append((x[0, 0].item(), len(x), threading.current_thread().name, *modes))
        return y


def count_calls(states: States) -> list[float]:
    """Return the number of forwards of each replica of a probe."""
    return [state["calls"].item() for state in states]


def numbered(samples: int) -> Tensor:
    """Return samples that start with their index."""
    return torch.arange(float(samples))[:, None] * torch.tensor([1.0, 0.1, 0.01])


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", range(1, 10))
def test_shares_are_contiguous(samples: int, replicas: int) -> None:
    """Replicas get contiguous shares of ceil(N / replicas) samples, or fewer at the end; outputs keep their order."""
    probe, buffers = Probe(), ReplicaBuffers(replicas)
    y = ThreadReplicas(probe, buffers)(numbered(samples))
    size = -(-samples // replicas)
    starts = list(range(0, samples, size))
    expected = [(start, min(size, samples - start)) for start in starts]
    assert sorted(list_fields(probe.records, 0, 1)) == expected
    torch.testing.assert_close(y, probe.linear(numbered(samples)))
    # A replica without samples has the module's buffers from before the forward.
    used = [1.0] * len(starts) + [0.0] * (replicas - len(starts))
    assert count_calls(buffers.states(probe)) == used
    assert len(set(list_fields(probe.records, 2))) == len(starts)


def test_each_forward_starts_from_the_first_replica() -> None:
    """Each forward copies the replicas from the first replica, so an idle replica misses only one update."""
    probe, buffers = Probe(), ReplicaBuffers(4)
    wrapper, calls = ThreadReplicas(probe, buffers), []
    for samples in (4, 3, 2, 4):
        wrapper(numbered(samples))
        calls.append(count_calls(buffers.states(probe)))
    assert calls == [[1, 1, 1, 1], [2, 2, 2, 1], [3, 3, 2, 2], [4, 4, 4, 4]]
    assert probe.calls.item() == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_compute_in_the_callers_precision(dtype: torch.dtype) -> None:
    """Each replica has the caller's autocast mode and dtype, although a new thread has autocast off with bfloat16."""
    probe = Probe()
    wrapper = ThreadReplicas(probe, ReplicaBuffers(2))
    with torch.autocast("cpu", dtype):
        assert wrapper(numbered(4)).dtype == dtype
    assert list_fields(probe.records, 3, 4, 5) == [(True, dtype, True)] * 2
    assert wrapper(numbered(4)).dtype == torch.float32


def test_replicas_inherit_grad_modes() -> None:
    """no_grad and inference_mode apply to the replicas only in the caller's block, in training and evaluation mode."""
    wrapper = ThreadReplicas(probe := Probe(), ReplicaBuffers(2))
    for training in (True, False):
        wrapper.train(training)
        for off in (torch.no_grad, torch.inference_mode):
            wrapper(numbered(4))
            with off():
                y = wrapper(numbered(4))
            assert list_fields(probe.records[-4:], -1) == [True, True, False, False]
            assert y.is_inference() == (off is torch.inference_mode)


class OrderedLinear(nn.Module):
    """Lets the first replica convert its weight before the second, while both are within autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turns, self.end = nn.Linear(3, 2, bias=False), threading.Event(), threading.Barrier(2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [1, 3]. The replica with the sample that starts with 0 goes first."""
        if x[0, 0] > 0:
            assert self.turns.wait(10)
        y: Tensor = self.linear(x)
        self.turns.set()
        self.end.wait(10)
        return y


def test_replicas_share_no_converted_weight() -> None:
    """The gradients of two bfloat16 replicas are added in float32, although all threads share autocast's cache."""
    layer, x = OrderedLinear(), torch.tensor([[0.0, 256.0, 0.0], [1.0, 1.0, 1.0]])
    with torch.autocast("cpu", torch.bfloat16), ThreadPoolExecutor(2) as threads:
        y = torch.cat(list(threads.map(partial(keep_modes("cpu"), layer), x.split(1))))
    y.float().sum().backward()
    assert layer.linear.weight.grad is not None
    assert layer.linear.weight.grad[0].tolist() == [1.0, 257.0, 1.0]  # bfloat16 cannot represent 257


def test_an_exception_reaches_the_caller() -> None:
    """The first failed replica's exception is raised with its traceback and number; recorded buffers stay unchanged."""
    probe, buffers = Probe(), ReplicaBuffers(3)
    wrapper, x = ThreadReplicas(probe, buffers), numbered(3)
    wrapper(x)
    with pytest.raises(ValueError, match="sample -1") as caught:
        wrapper(x * torch.tensor([[1.0], [-1.0], [-1.0]]))
    assert caught.value.__notes__ == ["in replica 1 of 3"]
    assert caught.traceback[-1].name == "forward"
    assert count_calls(buffers.states(probe))[1:] == [1, 1]
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
def test_training_is_reproducible(replicas: int) -> None:
    """Two runs with dropout end bitwise equal, even with four uneven shares; replicas have different buffers."""
    first = train_replicas(ThreadReplicas, replicas, nn.Dropout(0.5))
    again = train_replicas(ThreadReplicas, replicas, nn.Dropout(0.5))
    assert are_equal(first, again)
    assert not are_equal(first[:1], first[1:2])


def test_evaluation_keeps_recorded_buffers() -> None:
    """A forward in eval mode returns the module's own output, and keeps the recorded buffers of the replicas."""
    model, buffers = build_model("resnet8", 1, 10, 4), ReplicaBuffers(2)
    wrapper = ThreadReplicas(model, buffers)
    wrapper(x := torch.randn(14, 1, 8, 8))
    before = [copy_values(state) for state in buffers.states(model)]
    assert not are_equal(before[:1], before[1:])
    wrapper.eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapper(x), model(x))
    assert are_equal(buffers.states(model), before)


def test_replicas_mirror_their_module() -> None:
    """A replica has the module's current ties, missing biases, training modes, frozen and replaced parameters."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[2].weight = model[0].weight
    model[3].running_mean = model[1].running_mean
    model.append(model[0])
    model[1].eval()
    model[2].bias.requires_grad_(False)
    model[3].weight = nn.Parameter(torch.full((3,), 2.0))
    twin = replicate(model, own_buffers=True)
    assert all(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    assert (twin[4] is twin[0], twin[0].bias, twin[0] is model[0]) == (True, None, False)
    assert list_fields(twin, "training") == [True, False, True, True, True]
    assert twin[3].running_mean is twin[1].running_mean is not model[1].running_mean
    assert are_equal([twin.state_dict()], [model.state_dict()])
    ThreadReplicas(model, ReplicaBuffers(2))(torch.randn(8, 3)).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == list_fields(model.parameters(), "requires_grad")


def copies(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Tensor]]:
    """Imitate torch's broadcast to GPUs: buffers are not copied on the first, and all copies propagate gradients."""
    result = []
    for device in devices:
        if detach and not device:
            result.append(list(tensors))
        else:
            result.append([tensor.clone() for tensor in tensors])
    return result


def in_threads(calls: Sequence[Any], inputs: Sequence[Any], kwargs: Any, devices: Sequence[int]) -> list[Any]:
    """Run replicas in threads with the modes of torch's parallel_apply, without its streams, which need a GPU."""
    outputs: dict[int, Any] = {}
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def work(index: int) -> None:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=autocast):
            outputs[index] = calls[index](*inputs[index])

    for index in devices:
        worker = threading.Thread(target=work, args=(index,))
        worker.start()
        worker.join()
    return list(pick(outputs, devices).values())


@pytest.fixture
def data_parallel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Build:
    """torch's DataParallel on the CPU, with torch's forward and replicate, and with imitated copies and threads."""
    # Functions in torch.nn.parallel hide these modules of the same names.
    data_parallel = import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(data_parallel, "_get_available_device_type", lambda: None)
    monkeypatch.setattr(data_parallel, "parallel_apply", in_threads)
    monkeypatch.setattr(import_module("torch.nn.parallel.replicate"), "_broadcast_coalesced_reshape", copies)

    def scatter(inputs: Any, kwargs: Any, devices: Sequence[int]) -> Any:
        shares = list(zip(inputs[0].chunk(len(devices)), strict=True))
        return shares, [{}] * len(shares)

    def build(module: nn.Module, buffers: ReplicaBuffers) -> GpuReplicas:
        wrapper = GpuReplicas(module, (), buffers)
        wrapper.src_device_obj, wrapper.device_ids = torch.device("cpu"), list(range(buffers.count))
        wrapper.output_device, wrapper.scatter = 0, scatter
        wrapper.gather = lambda outputs, device: torch.cat(outputs)
        return wrapper

    return build


def test_thread_replicas_equal_data_parallel(data_parallel_on_cpu: Build) -> None:
    """After 20 steps, ThreadReplicas and torch's DataParallel have bitwise equal parameters and buffers."""
    assert are_equal(train_replicas(data_parallel_on_cpu, 2), train_replicas(ThreadReplicas, 2))


@pytest.mark.parametrize("samples", [8, 3])
def test_data_parallel_replicas_are_recorded(data_parallel_on_cpu: Build, samples: int) -> None:
    """States have the module's names and current parameters; replicas without samples have the earlier buffers."""
    probe, buffers = Probe(), ReplicaBuffers(4)
    wrapper = data_parallel_on_cpu(probe, buffers)
    wrapper(numbered(samples)).sum().backward()
    with torch.no_grad():
        probe.linear.weight += probe.linear.weight.grad
    states = buffers.states(probe)
    assert [list(state) for state in states] == [["calls", "linear.weight", "linear.bias"]] * 4
    assert all(state["linear.weight"].data_ptr() == probe.linear.weight.data_ptr() for state in states)
    assert count_calls(states) == [1.0] * min(samples, 4) + [0.0] * max(0, 4 - samples)


def test_data_parallel_replicas_compute_in_the_callers_precision(data_parallel_on_cpu: Build) -> None:
    """Each replica has the caller's autocast dtype and no_grad, although torch passes no dtype to its threads."""
    probe = Probe()
    wrapper = data_parallel_on_cpu(probe, ReplicaBuffers(2))
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        wrapper(numbered(4))
    assert list_fields(probe.records, 3, 4, 5) == [(True, torch.float16, False)] * 2
