# SPDX-License-Identifier: Apache-2.0
"""`python -m leanattn`: info, as text or with --json."""

import argparse
import json

from ._info import info, info_text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m leanattn", description="Version, backends, instruction sets, threads and GPU")
    parser.add_argument("command", nargs="?", choices=["info"], default="info")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    print(json.dumps(info()) if parser.parse_args().json else info_text())


if __name__ == "__main__":
    main()
