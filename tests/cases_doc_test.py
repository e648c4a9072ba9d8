# SPDX-License-Identifier: Apache-2.0
"""docs/cases.md and the tests agree: every id has its row, every named test exists, and every test named after an id stands in its row.

usage: cases_doc_test.py SOURCE"""

import pathlib
import re
import sys

IDS = {"H": 9, "S": 9, "N": 8, "Q": 4, "R": 9}

root = pathlib.Path(sys.argv[1])
faults = []

tests = {}  # Suite.Name: file
for path in sorted((root / "tests").rglob("*.cpp")):
    for suite, name in re.findall(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", path.read_text(), re.M):
        tests[f"{suite}.{name}"] = path.name
if len(tests) < 100:
    sys.exit(f"only {len(tests)} tests found under {root}/tests")

text = (root / "docs" / "cases.md").read_text()
rows = {}
for line in text.splitlines():
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    if re.fullmatch(r"\|? ?[HSNQR]\d", cells[0]):
        key = cells[0].lstrip("| ")
        if key in rows:
            faults.append(f"{key}: two rows")
        rows[key] = cells
        if len(cells) != 5 or not all(cells):
            faults.append(f"{key}: {len(cells)} cells; id, input, on the CPU, on CUDA and result are needed")

for letter, count in IDS.items():
    for number in range(1, count + 1):
        if f"{letter}{number}" not in rows:
            faults.append(f"{letter}{number}: no row")
for key in rows:
    if int(key[1:]) > IDS[key[0]]:
        faults.append(f"{key}: an id beyond {key[0]}{IDS[key[0]]}")

# Names in backquotes: of a gtest, of a pytest, of a file.
for name in re.findall(r"`([^`]+)`", text):
    if re.fullmatch(r"[A-Z]\w+\.[A-Z]\w+", name) and name not in tests:
        faults.append(f"`{name}`: no such test")
    if "::" in name:
        file, function = name.split("::")
        path = root / file
        if not path.is_file() or not re.search(rf"^def {function}\(", path.read_text(), re.M):
            faults.append(f"`{name}`: no such test")
    if re.fullmatch(r"(bench|tests|src)/[\w./-]+", name) and not (root / name).exists():
        faults.append(f"`{name}`: no such file")

# A test that is named after an id, on either backend.
for test, file in tests.items():
    match = re.match(r"(\w+)\.([HSNQR]\d)_", test)
    if not match:
        continue
    suite, key = match.groups()
    cell = rows.get(key, [""] * 5)[3 if suite.startswith("Cuda") else 2]
    if f"`{test}`" not in cell:
        faults.append(f"{test} ({file}): not in the row of {key}")

if faults:
    sys.exit("\n".join(faults) + f"\n{len(faults)} faults")
print(f"{len(rows)} ids, {len(tests)} tests")
