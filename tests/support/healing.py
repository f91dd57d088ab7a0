"""Helpers for tests of `resync`: the bits of a rank, read without syncheck, and a call on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from support.agreement import all_pass, each_rank, on_all
from support.listings import list_fields
from syncheck.live import Resync, check, resync


def bits(*parts: Any) -> dict[str, Any]:
    """Return all tensors and values of modules and stateful objects by name, tensors as bytes."""
    result: dict[str, Any] = {}
    for i, part in enumerate(parts):
        if isinstance(part, torch.nn.Module):
            named = [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]
            result |= {f"{i}.{name}": _plain(tensor) for name, tensor in named}
        else:
            result |= _leaves(f"{i}", part.state_dict())
    return result


def _leaves(name: str, node: Any) -> dict[str, Any]:
    if isinstance(node, dict):
        return {
            key: leaf for position, part in node.items() for key, leaf in _leaves(f"{name}.{position}", part).items()
        }
    if isinstance(node, (list, tuple)):
        return _leaves(name, dict(enumerate(node)))
    return {name: _plain(node) if isinstance(node, torch.Tensor) else node}


def _plain(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    row = (
        tensor.detach().cpu().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )
    return str(tensor.dtype), tuple(tensor.shape), row.numpy().tobytes()


def healed(*parts: Any, bad: tuple[int, ...], source: int, named: bool = False, **options: Any) -> Resync:
    """Resync on all ranks; assert that all equal the source afterwards, and that only the bad ranks differed before.

    bad: the ranks that differ from the source before. named: pass source=. options: of `resync` and `check`.
    """
    before = on_all(bits(*parts))
    assert [rank for rank, contents in enumerate(before) if contents != before[source]] == list(bad)
    done: Any = all_pass(each_rank(resync, *parts, **options, **({"source": source} if named else {})))
    after = on_all(bits(*parts))
    assert all(contents == before[source] for contents in after)
    assert (done.before.verdict, done.after.verdict) == ("out_of_sync", "in_sync")
    assert check(*parts, **options).verdict == "in_sync"
    return done


def untouched(*parts: Any, **options: Any) -> str:
    """Assert that resync raises the same error on all ranks and changes nothing; return the text."""
    before = on_all(bits(*parts))
    outcomes = each_rank(resync, *parts, **options)
    assert list_fields(outcomes, "error") == ["UsageError"] * len(outcomes), outcomes
    assert len(set(list_fields(outcomes, "text"))) == 1
    assert on_all(bits(*parts)) == before
    return outcomes[0].text
