"""Wrapper prefixes and sibling names."""

from __future__ import annotations

from syncheck.tensors.names import normalize, sibling_name


def test_common_prefix_is_removed() -> None:
    """`module.` before every name is removed, also repeatedly, and other wrappers' prefixes at any level."""
    assert normalize(["module.fc.weight", "module.bn.bias"]) == {
        "module.fc.weight": "fc.weight",
        "module.bn.bias": "bn.bias",
    }
    assert normalize(["module.module.w"]) == {"module.module.w": "w"}
    assert normalize(["module._orig_mod.w"]) == {"module._orig_mod.w": "w"}
    assert normalize(["_orig_mod.module.w"]) == {"_orig_mod.module.w": "w"}
    inner = "layers.0._fsdp_wrapped_module.fc.weight"
    assert normalize([inner]) == {inner: "layers.0.fc.weight"}


def test_a_submodule_of_that_name_stays() -> None:
    """`module.` is kept if some names lack it, because it is a submodule."""
    names = ["module.w", "head.w"]
    assert normalize(names) == {name: name for name in names}
    assert normalize(["my_module.w", "x_orig_mod.w"]) == {"my_module.w": "my_module.w", "x_orig_mod.w": "x_orig_mod.w"}


def test_optimizer_follows_its_parameters() -> None:
    """The prefix is removed from the optimizer's names too, which do not keep it on the model's names."""
    names = ["module.fc.weight", "optimizer.module.fc.weight.exp_avg", "optimizer.fc.bias.step"]
    assert list(normalize(names).values()) == ["fc.weight", "optimizer.fc.weight.exp_avg", "optimizer.fc.bias.step"]


def test_rng_states_have_no_prefix() -> None:
    """An RNG state beside a wrapped model does not keep the prefix on the model's names."""
    names = ["module.fc.weight", "rng_state", "rng.cuda.0", "cpu_rng_state"]
    assert list(normalize(names).values()) == ["fc.weight", *names[1:]]


def test_two_names_never_become_one() -> None:
    """If removing a prefix would make two names equal, both are kept."""
    names = ["_orig_mod.w", "w"]
    assert normalize(names) == {name: name for name in names}


def test_normalizing_again_changes_nothing() -> None:
    """Normalized names stay unchanged."""
    once = list(normalize(["module._orig_mod.a.w", "module.a._fsdp_wrapped_module.b"]).values())
    assert list(normalize(once).values()) == once


def test_siblings() -> None:
    """A sibling is in the same module, also at the top level."""
    assert sibling_name("layer.bn.running_var", "weight") == "layer.bn.weight"
    assert sibling_name("running_var", "weight") == "weight"
