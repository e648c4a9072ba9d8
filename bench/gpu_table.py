# SPDX-License-Identifier: Apache-2.0
"""Lines of `leanattn bench --backend cuda --json` beside those of the peers: one line a case, and tables from them.

usage: gpu_table.py merge LEANATTN.jsonl [PEERS.jsonl]       one merged line a case, behind a line about the machine
       gpu_table.py show MERGED.jsonl [--every-case]          README tables in Markdown
       gpu_table.py variants VARIANTS.jsonl MERGED.jsonl      other launches and paths of the same cases, beside the merged table's own

A merged line holds what the peers' line holds (case, MB, floor_us, a time in µs and an error each) and leanattn (µs), leanattn_error,
leanattn_floor_us (measured turn by turn with leanattn, where floor_us is the peers' own) and how leanattn ran. Errors are relative norms.
"""

import argparse
import json
import math
import pathlib
import statistics

PEERS = {
    "fa2_split": "FlashDecoding (FA2 split)",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa3_varlen": "FlashAttention-3 varlen",
    "flashinfer": "FlashInfer",
    "flashinfer_tc": "FlashInfer, tensor cores",
    "xqa": "XQA",
}
CLASSES = ("small", "mid", "large", "ragged")
CLASS_TEXT = {"small": "under 64 MB", "mid": "64 to 600 MB", "large": "above 600 MB", "ragged": "ragged"}


def lines_of(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.strip()]


def class_of(row):
    if row["case"].startswith("ragged"):
        return "ragged"
    return "small" if row["MB"] < 64 else "mid" if row["MB"] <= 600 else "large"


def best_peer(row):
    """Name and time of the fastest peer that ran the case, or None."""
    times = {name: row[name] for name in PEERS if name in row}
    return min(times.items(), key=lambda item: item[1]) if times else None


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def merge(ours_path, peers_path):
    ours = lines_of(ours_path)
    peers = lines_of(peers_path) if peers_path and pathlib.Path(peers_path).exists() else []
    machine = next((line for line in peers if "case" not in line), {})
    by_case = {line["case"]: line for line in peers if "case" in line}
    first = ours[0]
    machine = {"device": first["device"], **machine, "leanattn_commit": first["commit"], "date": first["date"]}
    print(json.dumps(machine, ensure_ascii=False))
    for line in ours:
        if not line["ok"]:
            print(json.dumps({"case": line["name"], "MB": line["MB"], "leanattn_wrong": line.get("message", "")}, ensure_ascii=False))
            continue
        row = {"case": line["name"], "MB": line["MB"], "floor_us": line["floor_us"], **by_case.pop(line["name"], {})}
        row |= {
            "leanattn": line["leanattn"],
            "leanattn_error": line["leanattn_error"],
            "leanattn_error_over_tolerance": round(line["error_over_tolerance"], 4),
            "leanattn_p10": line["p10_us"],
            "leanattn_p90": line["p90_us"],
            "leanattn_floor_us": line["floor_us"],
            "leanattn_over_floor": line["ratio"],
            "leanattn_case": line["case"],
        }
        row |= {"leanattn_" + key: line[key] for key in ("policy", "cuda_path", "workers", "programmatic_launch")}
        print(json.dumps(row, ensure_ascii=False))
    for name in by_case:
        raise SystemExit(f"gpu_table.py: the peers have a case that leanattn has not: {name}")


def spread(values, worst, digits=2):
    """Geometric mean and, in brackets, the worst."""
    return f"{geometric_mean(values):.{digits}f} ({worst(values):.{digits}f})" if values else ""


def worst_line(rows, value, worst):
    row = worst(rows, key=value)
    return f"{row['case']} at {value(row):.3f}"


def over_floor(row):
    return row["leanattn"] / row["floor_us"]


def peer_over_ours(row):
    return best_peer(row)[1] / row["leanattn"]


def show(path, every_case):
    machine, *rows = lines_of(path)
    wrong = [row for row in rows if "leanattn_wrong" in row]
    rows = [row for row in rows if "leanattn" in row]
    print(f"{machine['device']}, commit {machine['leanattn_commit']}, {machine['date']}"
          + (f", PyTorch {machine['torch']}, cuDNN {machine['cudnn']}" if "torch" in machine else "") + f"; {len(rows)} cases.\n")
    for row in wrong:
        print(f"**Wrong: {row['case']}: {row['leanattn_wrong']}**\n")
    if not rows:
        return
    print("| K and V | cases | best peer ÷ leanattn, geometric mean (least) | leanattn ÷ floor, geometric mean (worst) |")
    print("|---|---|---|---|")
    remarks = []
    for name in CLASSES:
        of_class = [row for row in rows if class_of(row) == name]
        if not of_class:
            continue
        compared = [row for row in of_class if best_peer(row)]
        print(f"| {CLASS_TEXT[name]} | {len(of_class)} | {spread([peer_over_ours(r) for r in compared], min)} "
              f"| {spread([over_floor(r) for r in of_class], max, 3)} |")
        remark = f"{CLASS_TEXT[name]}: furthest from the floor {worst_line(of_class, over_floor, max)}"
        if compared:
            remark += f", least against the best peer {worst_line(compared, peer_over_ours, min)}"
        remarks.append(remark)
    print("\n" + "\n".join(f"- {remark}" for remark in remarks))
    floors = geometric_mean([row["leanattn_floor_us"] / row["floor_us"] for row in rows])
    print(f"- leanattn's own floor, measured in turn with it, is {floors:.3f} × the floor of this table (geometric mean)")
    slower = [row for row in rows if best_peer(row) and peer_over_ours(row) < 1 / 1.02]
    for row in slower:
        print(f"- slower than {PEERS[best_peer(row)[0]]} by more than 2 %: {row['case']}, {peer_over_ours(row):.3f}")
    if every_case:
        show_cases(rows)


def show_cases(rows):
    names = [name for name in PEERS if any(name in row for row in rows)]
    columns = ["batch × length, q heads / kv heads, head_dim", "KV MB", "floor µs", "leanattn µs", "÷ floor", "best peer ÷ leanattn"]
    print("\n| " + " | ".join(columns + [PEERS[name] for name in names]) + " |")
    print("|---|---|---|---|---|---|" + "---|" * len(names))
    for row in rows:
        peer = best_peer(row)
        cells = [row["case"], f"{row['MB']:,.1f}", f"{row['floor_us']:.2f}", f"**{row['leanattn']:.2f}**",
                 f"{over_floor(row):.3f}", f"{peer[1] / row['leanattn']:.2f}" if peer else ""]
        print("| " + " | ".join(cells + [f"{row[n]:.2f}" if n in row else "" for n in names]) + " |")


def variants(path, merged_path):
    base = {row["leanattn_case"]: row for row in lines_of(merged_path) if "leanattn" in row}
    groups = {}
    for line in lines_of(path):
        label = line["cuda_path"] + (", programmatic launch" if line["programmatic_launch"] else "")
        groups.setdefault(label, []).append(line)
    print("| | K and V | ÷ floor, geometric mean (worst) | ÷ time of the table, geometric mean (worst) |")
    print("|---|---|---|---|")
    for label, lines in groups.items():
        for name in CLASSES:
            chosen = [line for line in lines if line["ok"] and class_of({"case": line["name"], "MB": line["MB"]}) == name]
            if not chosen:
                continue
            of_table = [line["leanattn"] / base[line["case"]]["leanattn"] for line in chosen if line["case"] in base]
            of_floor = [line["us"] / line["floor_us"] for line in chosen]
            print(f"| {label} | {CLASS_TEXT[name]} | {spread(of_floor, max, 3)} | {spread(of_table, max, 3)} |")
        for line in lines:
            if not line["ok"]:
                print(f"\n**Wrong: {label}: {line['case']}: {line.get('message', '')}**\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("merge")
    one.add_argument("leanattn")
    one.add_argument("peers", nargs="?")
    one = commands.add_parser("show")
    one.add_argument("merged")
    one.add_argument("--every-case", action="store_true")
    one = commands.add_parser("variants")
    one.add_argument("variants")
    one.add_argument("merged")
    args = parser.parse_args()
    if args.command == "merge":
        merge(args.leanattn, args.peers)
    elif args.command == "show":
        show(args.merged, args.every_case)
    else:
        variants(args.variants, args.merged)


if __name__ == "__main__":
    main()
