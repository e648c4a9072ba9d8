# SPDX-License-Identifier: Apache-2.0
"""The ratios of bench/gpu_limits.py, from made-up lines. usage: bench_limits_test.py BENCH_FOLDER"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile

bench = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(bench))
import gpu_limits  # noqa: E402

CASES = """# words
#! per_byte 1.05 ragged
4 8 1 128 100
- 8 1 128 200,100
#! time 1.03 pages
1 8 1 128 64
1 8 1 128 64 page=16
1 8 1 128 64 page=1
#! no_cliff 1.10 batches
1 8 1 64 10
2 8 1 64 10
3 8 1 64 10
#! floor_10us 1.30 many
9 8 1 64 1
#! paths 1.25 portable
1 8 1 64 7
"""
# us, kv_bytes, floor_us by case
NUMBERS = [(10, 400, 1), (9, 300, 1), (20, 64, 1), (20.4, 64, 1), (30, 64, 1), (10, 10, 1), (18, 20, 1), (33, 30, 1), (26, 9, 10),
           (5, 7, 1)]
NAMES = ["4x100 8/1 d128", "ragged n2 sum300 max200 8/1 d128"] + ["1x64 8/1 d128"] * 3 + ["x 8/1 d64"] * 5


def lines(**more):
    return [{"case": f"{i}", "name": name, "us": us, "kv_bytes": size, "floor_us": floor, "ok": True, "cuda_path": "fast", "device": "d",
             "commit": "c", "date": "t", **more} for i, (name, (us, size, floor)) in enumerate(zip(NAMES, NUMBERS))]


folder = tempfile.TemporaryDirectory()


def written(name, rows):
    path = pathlib.Path(folder.name) / name
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def shown(rows, *others):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = gpu_limits.show(written("cases.txt", CASES), written("lines.jsonl", rows), others)
    table = [[cell.strip() for cell in line.split("|")] for line in out.getvalue().splitlines() if line.startswith("|")][2:]
    return code, [(cells[2], cells[3], cells[5]) for cells in table], out.getvalue()


def refuses(rows, cases=CASES):
    try:
        gpu_limits.show(written("cases.txt", cases), written("lines.jsonl", rows), [])
    except SystemExit as stop:
        return str(stop)
    raise AssertionError("nothing was refused")


code, table, text = shown(lines())
assert code == 0
assert table == [
    ("- 8 1 128 200,100", "1.200", "**not met**"),  # 9/300 ÷ 10/400
    ("1 8 1 128 64 page=16", "1.020", "met"),
    ("1 8 1 128 64 page=1", "1.500", "**not met**"),
    ("3 8 1 64 10", "1.222", "**not met**"),  # 33/30 ÷ 18/20, the best before
    ("9 8 1 64 1", "1.300", "met"),  # 26 ÷ (10 + 10)
    ("", "", "not run"),  # one path
], table
assert "2 of 5 limits met" in text, text

other = written("other.jsonl", [{**lines()[9], "us": 6.5, "cuda_path": "slow"}])
code, table, text = shown(lines(), other)
assert table[-1] == ("1 8 1 64 7", "1.300", "**not met**"), table

wrong = lines()
wrong[3] |= {"ok": False, "message": "o of seq 0"}
code, table, text = shown(wrong)
assert code == 1 and "Wrong" in text and "o of seq 0" in text, text

assert "9 lines for 10 cases" in refuses(lines()[:-1])
swapped = lines()
swapped[0], swapped[9] = swapped[9], swapped[0]
assert "was expected" in refuses(swapped)
assert "kind magic" in refuses(lines(), "#! magic 1 x\n")

# The file itself: every block has what its kind compares.
blocks = gpu_limits.read_blocks(bench / "gpu_limits.txt")
assert {block.kind for block in blocks} == set(gpu_limits.KINDS)
for block in blocks:
    assert len(block.cases) >= (1 if block.kind in ("floor_10us", "paths") else 2) and block.limit > 1.0, block
