#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The README's C++ and C blocks are examples/decode.cpp and examples/decode.c, byte for byte but for the SPDX line. usage: SOURCE
set -euo pipefail
cd "$1"
for language in cpp c; do
  block=$(awk -v fence="\`\`\`$language" '$0 == fence { inside = 1; next } /^```/ { if (inside) exit } inside' README.md)
  file=$(tail -n +2 "examples/decode.$language")
  if [[ -z $block || $block != "$file" ]]; then
    diff <(printf '%s\n' "$block") <(printf '%s\n' "$file") || true
    echo "README.md: the $language block is not examples/decode.$language"
    exit 1
  fi
done
