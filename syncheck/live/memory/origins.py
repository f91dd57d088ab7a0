"""Which classes of modules and objects have attributes to read, by the package that defines them.

The attributes of torch's own modules and wrappers, and the objects of trainers, loggers and process groups, differ
between ranks by design. Attributes count only if somebody wrote them for the model.
"""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# Packages whose modules wrap a model, and whose objects run it.
_FRAMEWORKS = frozenset(
    "torch accelerate deepspeed lightning lightning_fabric pytorch_lightning fairscale horovod ray".split()
)
# Packages of objects that write logs or show progress.
_TOOLS = frozenset("aim comet_ml loguru mlflow neptune rich tensorboard tensorboardX tqdm triton wandb".split())
# torch's layers: their numbers, like the probability of Dropout, belong to the model.
_LAYERS = "torch.nn.modules."
# Objects of torch that hold tensors or numbers of the model.
_READ_OF_TORCH = ("torch.distributions.", "torch.optim.", "torch.amp.", "torch.nn.utils.rnn")
# Modules of the standard library whose objects hold values of the program.
_READ_OF_LIBRARY = frozenset("argparse builtins collections fractions functools queue types weakref".split())
_UNREAD_PACKAGES = (_FRAMEWORKS | _TOOLS | sys.stdlib_module_names) - _READ_OF_LIBRARY
# The names under which wrappers of torch hold the module of the user.
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")


@lru_cache(maxsize=1024)
def list_packages(kind: type) -> frozenset[str]:
    """Return the packages of the classes that a class is derived from, without Python's own."""
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return frozenset(packages - {"abc", "builtins", "typing", "collections"})


def is_read(module: Any) -> bool:
    """Whether the attributes of a module are read: a class outside of frameworks, or a class of torch's layers.

    Frameworks derive classes from the user's, as FSDP2 does, so any class outside of frameworks is sufficient.
    """
    kind: Any = type(module)
    return not reads_only_values(module) or kind.__module__.startswith(_LAYERS)


def reads_only_values(module: Any) -> bool:
    """Whether only numbers, texts and tensors are read, as for torch's layers."""
    kind: Any = type(module)
    return list_packages(kind) <= _FRAMEWORKS


def is_unread_class(kind: type) -> bool:
    """Whether the objects of a class differ between ranks by design, or cannot hold a part of the model."""
    # The generators of numpy are states of random numbers.
    if kind.__module__.startswith("numpy.random"):
        return True

    # torch is a framework, and some of its objects hold values of the model.
    if f"{kind.__module__}.".startswith(_READ_OF_TORCH):
        return False

    package, _, _ = kind.__module__.partition(".")
    return package in _UNREAD_PACKAGES


@cache
def list_internal_names() -> frozenset[str]:
    """Return the attributes that torch sets in each module, like `training` and hooks."""
    torch: Any = sys.modules["torch"]
    return frozenset(vars(torch.nn.Module())) | {"_trainer", "_fabric", "_compiled_call_impl"}


def find_plain_path(path: str, modules: Mapping[str, Any]) -> str:
    """Return the path of a module without the wrappers around it.

    modules: all modules of the root, by path.
    """
    plain_segments: list[str] = []
    parent = ""
    for segment in path.split("."):
        # A module of the user may have a submodule with such a name.
        is_wrapped = segment in _WRAPPED and not is_read(modules[parent])
        if not is_wrapped:
            plain_segments.append(segment)

        parent = f"{parent}.{segment}".removeprefix(".")

    return ".".join(plain_segments)
