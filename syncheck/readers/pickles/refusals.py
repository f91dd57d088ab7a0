"""Names in a pickle whose only use is to execute code. The whole file is refused.

Nothing is executed in any case, because no name is imported. The refusal warns of a file that other programs would
execute.
"""

from __future__ import annotations

import re

# Top-level modules without classes of tensors, numbers or configurations.
_MODULES = (
    "_ctypes _frozen_importlib _imp _pickle _posixsubprocess _socket _thread _winapi asyncio bdb cPickle "
    "cloudpickle code codeop commands ctypes dill ftplib http imp importlib joblib marshal mmap msvcrt multiprocessing "
    "nt os pdb pickle pickletools pip pkgutil platform posix profile pty pydoc requests runpy shelve shutil signal "
    "smtplib socket ssl subprocess sys tempfile threading timeit trace urllib venv webbrowser winreg"
)
_BUILTINS = (
    "__build_class__ __import__ apply breakpoint classmethod compile delattr eval exec execfile exit file "
    "globals help input locals memoryview open print quit raw_input reload setattr staticmethod super vars"
)
_NAMES = "types.CodeType types.FunctionType operator.attrgetter operator.methodcaller"
_PREFIXES = "torch.hub torch.utils.cpp_extension torch.utils.bottleneck numpy.testing numpy.f2py"
# Attributes of functions and classes that lead to the interpreter, also below the name of a method.
_INTERPRETER = "__builtins__ __code__ __globals__ __subclasses__"
# Special methods that programs store as callbacks. A lookup of any other special name leads to the interpreter.
_CALLBACKS = "call contains getitem len setitem"


def _either(names: str) -> str:
    """Return a pattern of names that are separated by blanks."""
    return names.replace(".", r"\.").replace(" ", "|")


_CODE = rf"(?:{_either(_MODULES)})\.[^.]|builtins\.(?:{_either(_BUILTINS)})\.|(?:{_either(_NAMES)})\."
# The patterns match names with a dot at the end.
_GLOBAL = rf"{_CODE}|(?:{_either(_PREFIXES)})\."
# A module for code execution can also be reached as an attribute of another module: torch.serialization.os.
_BELOW = rf"\.(?:{_CODE}|(?:{_either(_INTERPRETER)})\.)"
_SPECIAL = rf"__(?!(?:{_either(_CALLBACKS)})__$).*__"
# Names of modules in pickles of Python 2 protocols.
_ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg", "__builtins__": "builtins"}


def rename_module(module: str) -> str:
    """Return the name of a module in Python 3."""
    return _ALIASES.get(module, module)


def is_refused(module: str, name: str) -> bool:
    """Whether the only use of a global in a checkpoint is to execute code.

    module, name: as in the pickle. A name with dots is a nested class, a method, or a path through modules.
    """
    path, inner_path = f"{module}.{name}.", f".{name}."
    by_module = re.match(_GLOBAL, path)
    # Only the name: a package may have a module with the name of a refused module.
    by_name = re.search(_BELOW, inner_path)
    return bool(by_module or by_name)


def is_refused_attribute(owner: str, name: str) -> bool:
    """Whether a lookup with getattr leads to code execution. owner: the full name of a class, or of an object's."""
    module, _, last = owner.rpartition(".")
    is_special = re.fullmatch(_SPECIAL, name) is not None
    is_code = is_refused(module, f"{last}.{name}")
    return is_special or is_code
