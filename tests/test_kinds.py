"""What each tensor is, and how sure that is."""

from __future__ import annotations

import pytest

from syncheck.kinds import KINDS, kinds_of, selector
from syncheck.snapshots import Metadata

BN = {"bn.running_mean": (4,), "bn.running_var": (4,), "bn.num_batches_tracked": ()}


@pytest.mark.parametrize(
    "name, kind",
    [
        ("fc.weight", "parameter"),
        ("attn.rotary.inv_freq", "buffer"),
        ("embeddings.position_ids", "buffer"),
        ("rng", "rng"),
        ("powersgd.error_dict.0", "rng"),
        ("cuda_rng_state", "rng"),
        ("random_states.torch", "rng"),
        ("scaler._scale", "scaler"),
        ("ema.fc.weight", "ema"),
        ("optimizer.fc.weight.exp_avg", "optimizer"),
        ("optimizer.fc.weight.step", "optimizer_step"),
        ("encoder.step.weight", "parameter"),
        ("drawing.weight", "parameter"),
        ("schema.weight", "parameter"),
    ],
)
def test_well_known_names(name: str, kind: str) -> None:
    """A name that libraries use for one thing is that thing, and one that only looks alike is not."""
    shape = () if name.endswith("step") else (3,)
    assert kinds_of({name: shape}, None)[0] == {name: kind}
    assert kind in KINDS


def test_batchnorm_by_siblings() -> None:
    """Running statistics are known by their siblings; a parameter that is merely called so is none."""
    assert list(kinds_of(BN, None)[0].values()) == ["bn_mean", "bn_var", "bn_count"]
    assert kinds_of({"x.running_mean": (4,)}, None)[0] == {"x.running_mean": "parameter"}
    assert list(kinds_of({"running_mean": (4,), "running_var": (4,)}, None)[0].values()) == ["bn_mean", "bn_var"]


def test_metadata_is_believed_over_names() -> None:
    """Recorded buffer names decide, in both directions, and nothing is guessed."""
    shapes = {"a": (2,), "x.inv_freq": (2,)} | BN
    kinds, guessed = kinds_of(shapes, Metadata(buffers=("a", *BN)), ["x.*"])
    assert (kinds["a"], kinds["x.inv_freq"], guessed) == ("buffer", "parameter", False)
    assert kinds["bn.running_mean"] == "bn_mean"


def test_a_submodule_may_have_the_name_of_a_helper() -> None:
    """What is known to be a parameter or buffer is that, though it is called as an optimizer, scaler or generator."""
    names = [f"{of}.weight" for of in ("rng", "random_state", "ema", "scaler", "optimizer")]
    shapes = dict.fromkeys(names, (2,))
    assert set(kinds_of(shapes, Metadata(buffers=tuple(names)))[0].values()) == {"buffer"}
    assert set(kinds_of(shapes, Metadata(buffers=(), optimizer_parameters=tuple(names)))[0].values()) == {"parameter"}
    assert set(kinds_of(shapes, None, parameters=names)[0].values()) == {"parameter"}


@pytest.mark.parametrize(("dtype", "kind"), [("uint8", "rng"), ("uint32", "rng"), ("float32", "parameter")])
def test_the_state_of_a_generator_has_no_floats(dtype: str, kind: str) -> None:
    """A tensor of floats below `rng` is a layer's; one of bytes or words is the state of a generator."""
    assert kinds_of({"rng.torch": (5,)}, None, dtypes={"rng.torch": dtype})[0] == {"rng.torch": kind}


def test_the_optimizer_tells_parameters() -> None:
    """What the optimizer trains is a parameter, whatever its name; with all covered nothing is guessed."""
    shapes = {"x.inv_freq": (2,), "optimizer.x.inv_freq.exp_avg": (2,)}
    assert kinds_of(shapes, None) == (
        {"x.inv_freq": "parameter", "optimizer.x.inv_freq.exp_avg": "optimizer"},
        False,
    )
    assert kinds_of(shapes | {"fc.weight": (2,)}, None)[1] is True


def test_globs_name_buffers() -> None:
    """--buffers GLOB makes buffers of names that the file says nothing about."""
    assert kinds_of({"a.table": (2,), "a.weight": (2,)}, None, ["*.table"])[0] == {
        "a.table": "buffer",
        "a.weight": "parameter",
    }


def test_selector() -> None:
    """--only, --include and --exclude must all let a tensor through; globs match whole names, case and all."""
    wanted = selector(frozenset({"buffer"}), ["a.*"], ["*.b"])
    assert wanted("a.c", "buffer")
    assert not wanted("a.c", "parameter")
    assert not wanted("b.a.c", "buffer")
    assert not wanted("a.b", "buffer")
    assert not wanted("A.c", "buffer")
    assert selector(frozenset(), [], [])("anything", "parameter")
