# SPDX-License-Identifier: Apache-2.0
"""_core.pyi says what the module has: the same names, and arguments of the same names in the same order."""

import ast
import pathlib
import re

import pytest

import leanattn
from leanattn import _core

STUB = ast.parse((pathlib.Path(leanattn.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))
FUNCTIONS = [node for node in STUB.body if isinstance(node, ast.FunctionDef)]
METHODS = [
    (item.name, node)
    for item in STUB.body
    if isinstance(item, ast.ClassDef)
    for node in item.body
    if isinstance(node, ast.FunctionDef) and not node.decorator_list
]


def stub_arguments(function):
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    return [name for name in names if name != "self"]


def module_arguments(function):
    """Out of the signature that nanobind writes on top of the docstring; *args and unnamed ones do not count."""
    signature = function.__doc__.splitlines()[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    return [name for name in re.findall(r"(?:^|, )([a-z_0-9]+): ", inside) if name != "self" and not name.startswith("arg")]


def test_no_name_is_missing():
    stub = {node.name for node in STUB.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert stub == {name for name in dir(_core) if not name.startswith("_")}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda node: node.name)
def test_function(function):
    assert module_arguments(getattr(_core, function.name)) == stub_arguments(function)


@pytest.mark.parametrize(("owner", "function"), METHODS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_method(owner, function):
    assert module_arguments(getattr(getattr(_core, owner), function.name)) == stub_arguments(function)
