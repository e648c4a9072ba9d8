# SPDX-License-Identifier: Apache-2.0
"""What options and features cost: lines of `leanattn bench --backend cuda --json` beside the same shapes without them, from one run.

usage: gpu_overheads.py cases TABLE.txt KEY=VALUE...      every case of a table plain, then with each of these
       gpu_overheads.py show LINES.jsonl                  a Markdown table: µs, ÷ floor, and how much longer than the plain case

Times are compared; but a case with a window reads less than the plain one, so there it is ratios to the floor of the own bytes.
"""

import argparse
import json
import math
import pathlib
import statistics

KEYS = ("window", "alibi", "softcap", "sink", "tree", "invariant", "checked")


def plain_of(case):
    return " ".join(word for word in case.split() if word.partition("=")[0] not in KEYS)


def extra_of(case):
    return " ".join(word for word in case.split() if word.partition("=")[0] in KEYS)


def print_cases(table, extras):
    for line in pathlib.Path(table).read_text().splitlines():
        if line and not line.startswith("#"):
            print("\n".join([line, *(f"{line} {extra}" for extra in extras)]))


def show(path):
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    first = lines[0]
    plain = {line["case"]: line for line in lines if not extra_of(line["case"])}
    print(f"{first['device']}, {first['date']}, commit {first['commit']}, `leanattn bench --backend cuda --json`: bfloat16 unless the case")
    print("says so, cold L2, CUDA graphs, each case checked first. Over plain: of the times; with a window, of the times ÷ floor.\n")
    print("| case | µs | ÷ floor | over plain |\n|---|---|---|---|")
    over = {}
    for line in lines:
        extra, cell = extra_of(line["case"]), ""
        base = plain.get(plain_of(line["case"]))
        if extra and base:
            measure = "us" if line["kv_bytes"] == base["kv_bytes"] else "ratio"
            ratio = line[measure] / base[measure]
            over.setdefault(extra, []).append((ratio, line["kv_bytes"], plain_of(line["case"])))
            cell = f"{100 * (ratio - 1):+.1f} %"
        print(f"| {line['case']} | {line['us']:.1f} | {line['ratio']:.3f} | {cell} |" + ("" if line["ok"] else " **wrong**"))
    print("\n| with | cases | geometric mean | worst | from 64 MB on: geometric mean | worst |\n|---|---|---|---|---|---|")
    for extra, all_of_it in over.items():
        cells = []
        for chosen in (all_of_it, [one for one in all_of_it if one[1] >= 64e6]):
            if chosen:
                mean = math.exp(statistics.fmean(math.log(one[0]) for one in chosen))
                worst = max(chosen)
                cells.append(f"{100 * (mean - 1):+.1f} % | {100 * (worst[0] - 1):+.1f} % ({worst[2]})")
            else:
                cells.append(" | ")
        print(f"| {extra} | {len(all_of_it)} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cases = commands.add_parser("cases")
    cases.add_argument("table")
    cases.add_argument("extras", nargs="+")
    commands.add_parser("show").add_argument("lines")
    arguments = parser.parse_args()
    if arguments.command == "cases":
        print_cases(arguments.table, arguments.extras)
    else:
        show(arguments.lines)


if __name__ == "__main__":
    main()
