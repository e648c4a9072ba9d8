# SPDX-License-Identifier: Apache-2.0
"""Ratios between the cases of one run of `leanattn bench --backend cuda --json --cases bench/gpu_limits.txt`, beside their limits.

usage: gpu_limits.py show CASES LINES.jsonl [PATHS.jsonl...]   a Markdown table
       gpu_limits.py cases CASES KIND                           the cases of the blocks of a kind, one a line

PATHS hold the cases of the blocks of kind paths, run on another kernel path each. CASES says what the kinds are. The exit code is 1
where a case was wrong or is missing; a limit that is not met is only said.
"""

import json
import pathlib
import sys
from typing import NamedTuple

KINDS = ("per_byte", "time", "no_cliff", "floor_10us", "paths")


class Block(NamedTuple):
    kind: str
    limit: float
    words: str
    cases: list


class Ratio(NamedTuple):
    block: Block
    case: str
    value: float
    how: str  # the numbers that it is made of


def read_blocks(path):
    blocks = []
    for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#!"):
            kind, limit, words = line[2:].split(maxsplit=2)
            if kind not in KINDS:
                sys.exit(f"{path}:{number}: kind {kind}: expected one of {', '.join(KINDS)}")
            blocks.append(Block(kind, float(limit), words, []))
            continue
        case = line.split("#")[0].strip()
        if case and not blocks:
            sys.exit(f"{path}:{number}: a case before the first block")
        if case:
            blocks[-1].cases.append(case)
    return blocks


def read_lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def match(cases, lines, path):
    """The line of each case; bench writes them in the order of the cases."""
    if len(cases) != len(lines):
        sys.exit(f"{path}: {len(lines)} lines for {len(cases)} cases")
    for case, line in zip(cases, lines):
        heads, name = case.split()[1:4], line["name"].split()
        if name[-2:] != [f"{heads[0]}/{heads[1]}", f"d{heads[2]}"]:
            sys.exit(f"{path}: a line of {line['name']} where {case} was expected")
    return lines


def per_byte(line):
    return line["us"] / line["kv_bytes"]


def of_pair(block, lines):
    first = lines[0]
    for case, line in zip(block.cases[1:], lines[1:]):
        how = f"{line['us']:.2f} ÷ {first['us']:.2f} µs"
        if block.kind == "per_byte":
            yield Ratio(block, case, per_byte(line) / per_byte(first), f"{how}, {line['kv_bytes'] / first['kv_bytes']:.4f} × the bytes")
        else:
            yield Ratio(block, case, line["us"] / first["us"], how)


def of_cliff(block, lines):
    for i in range(1, len(lines)):
        best = min(lines[:i], key=per_byte)
        value = per_byte(lines[i]) / per_byte(best)
        best_case = block.cases[lines.index(best)]
        yield Ratio(block, block.cases[i], value, f"{lines[i]['us']:.2f} µs; {best_case}: {best['us']:.2f} µs; worst of {len(lines) - 1}")


def of_floor(block, lines):
    for case, line in zip(block.cases, lines):
        yield Ratio(block, case, line["us"] / (line["floor_us"] + 10.0), f"{line['us']:.2f} ÷ ({line['floor_us']:.2f} + 10) µs")


def of_paths(block, lines, other_lines):
    for case, line in zip(block.cases, lines):
        for other in other_lines:
            if other["case"] == line["case"]:
                yield Ratio(block, case, other["us"] / line["us"],
                            f"{other['cuda_path']} {other['us']:.2f} ÷ {line['cuda_path']} {line['us']:.2f} µs")


def ratios_of(block, lines, other_lines):
    if block.kind in ("per_byte", "time"):
        return list(of_pair(block, lines))
    if block.kind == "no_cliff":
        return list(of_cliff(block, lines))
    return list(of_floor(block, lines) if block.kind == "floor_10us" else of_paths(block, lines, other_lines))


def show(cases_path, lines_path, other_paths):
    blocks = read_blocks(cases_path)
    lines = match([case for block in blocks for case in block.cases], read_lines(lines_path), lines_path)
    other_lines = [line for path in other_paths for line in read_lines(path)]
    wrong = [line for line in lines + other_lines if not line["ok"]]
    print(f"{lines[0]['device']}, commit {lines[0]['commit']}, {lines[0]['date']}; {len(lines)} cases.\n")
    for line in wrong:
        print(f"**Wrong: {line['case']}: {line.get('message', '')}**\n")
    print("| what | case | ratio | limit | | of |")
    print("|---|---|---|---|---|---|")
    met = count = at = 0
    for block in blocks:
        ratios = ratios_of(block, lines[at : at + len(block.cases)], other_lines)
        at += len(block.cases)
        if not ratios:
            print(f"| {block.words} | | | {block.limit:.2f} | not run | there is one path, {lines[0]['cuda_path']} |")
        if block.kind == "no_cliff":  # of a long series the worst says it all
            ratios = [max(ratios, key=lambda ratio: ratio.value)]
        for ratio in ratios:
            good = ratio.value <= block.limit
            met, count = met + good, count + 1
            verdict = "met" if good else "**not met**"
            print(f"| {block.words} | {ratio.case} | {ratio.value:.3f} | {block.limit:.2f} | {verdict} | {ratio.how} |")
    print(f"\n{met} of {count} limits met.")
    return 1 if wrong else 0


def main():
    arguments = sys.argv[1:]
    if len(arguments) >= 3 and arguments[0] == "show":
        sys.exit(show(arguments[1], arguments[2], arguments[3:]))
    if len(arguments) == 3 and arguments[0] == "cases":
        cases = [case for block in read_blocks(arguments[1]) if block.kind == arguments[2] for case in block.cases]
        print("\n".join(cases))
        return
    sys.exit(__doc__)


if __name__ == "__main__":
    main()
