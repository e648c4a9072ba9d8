# SPDX-License-Identifier: Apache-2.0
"""Runs a notebook as Jupyter would, without Jupyter: `python python/tests/notebook.py FILE` runs it and writes its outputs into it."""

import ast
import contextlib
import io
import json
import pathlib
import sys


def _shown(value):
    """The last expression of a cell as an output of the notebook format."""
    data = {"text/plain": repr(value).splitlines(True)}
    if hasattr(value, "_repr_svg_"):
        data["image/svg+xml"] = value._repr_svg_().splitlines(True)
    return {"output_type": "display_data", "metadata": {}, "data": data}


def execute(path):
    """The notebook as a dict, its cells run in order in one namespace, with their outputs."""
    notebook = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), f"{path}, cell {number}")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        printed, outputs = io.StringIO(), []
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"{path}, cell {number}", "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), f"{path}, cell {number}", "eval"), names)
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
        if value is not None:
            outputs.append(_shown(value))
        cell["outputs"] = outputs
    return notebook


if __name__ == "__main__":
    done = json.dumps(execute(sys.argv[1]), indent=1, ensure_ascii=False)
    pathlib.Path(sys.argv[1]).write_text(done + "\n", encoding="utf-8")
