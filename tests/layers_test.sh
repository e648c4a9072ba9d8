#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a compiler does not check: includes point one way, each special thing has one place, every file has its licence line and its size.
# usage: layers_test.sh SOURCE
set -euo pipefail
export LC_ALL=C.UTF-8
cd "$1"

faults=0
fault() { printf '%s\n' "$@"; faults=$((faults + 1)); }

list() { find "$@" -type f 2>/dev/null | sort; }
mapfile -t code < <(list include src tools tests examples bench python | grep -E '\.(h|hpp|cpp|c|cu|cuh|py)$')
mapfile -t scripts < <(list cmake tests tools bench python | grep -E '(\.cmake|\.sh|\.in|CMakeLists\.txt)$')
scripts+=(CMakeLists.txt dev .ci/run)
((${#code[@]} > 10)) || { echo "no source files under $1"; exit 1; }

# --- Includes. A file may include what is no higher than itself; reference, cpu and cuda are on one level and never see each other.
level_of() {
  case $1 in
    include/leanattn/export.h | include/leanattn/chunks.h | include/leanattn/schedule.h | src/partial.h) echo 0 ;;
    src/attention.*) echo 3 ;;
    include/leanattn/leanattn.h | src/capi.*) echo 4 ;;
    src/cuda/variants.h) echo 0 ;;
    src/reference* | src/cpu/* | src/cuda/*) echo 2 ;;
    include/* | src/*) echo 1 ;;
    tools/* | examples/* | bench/* | python/*) echo 5 ;;
    *) echo 6 ;;
  esac
}
peer_of() {
  case $1 in
    src/cpu/*) echo cpu ;;
    src/cuda/variants.h) ;;
    src/cuda/*) echo cuda ;;
    src/reference*) echo reference ;;
  esac
}
while IFS=: read -r file line text; do
  name=$(sed -E 's/.*#[ ]*include[ ]*["<]([^">]*)[">].*/\1/' <<<"$text")
  target=
  for candidate in "$(dirname "$file")/$name" "include/$name" "src/$name" "$name"; do
    [[ -f $candidate ]] && { target=$candidate; break; }
  done
  [[ -n $target ]] || continue
  from=$(level_of "$file") to=$(level_of "$target") from_peer=$(peer_of "$file") to_peer=$(peer_of "$target")
  ((to <= from)) || fault "$file:$line: includes $target, which is above it"
  if [[ -n $to_peer && $file == src/* && $from_peer != "$to_peer" ]]; then
    fault "$file:$line: includes $target; $to_peer is reached through backend.h or from tools and tests"
  fi
  [[ $file != include/* || $target == include/* ]] || fault "$file:$line: a public header includes $target"
done < <(grep -nE '^[ ]*#[ ]*include' "${code[@]}")
for file in include/leanattn/chunks.h include/leanattn/schedule.h src/partial.h; do
  ! grep -nE '^[ ]*#[ ]*include' "$file" | grep -v '"leanattn/chunks.h"' || fault "$file: includes nothing, so that every compiler takes it"
done

# --- One place each.
only_in() {  # WHAT PATTERN PLACES(regex): no code outside the places matches the pattern
  local hits
  hits=$(grep -nE "$2" "${code[@]}" | grep -vE "^($3)" || true)
  [[ -z $hits ]] || fault "$1 outside its place ($3):" "$hits"
}
only_in 'inline assembly' '(^|[^[:alnum:]_.])(asm|__asm__?)([[:space:]]*\(|[[:space:]]+volatile)' 'src/cuda/ptx\.cuh|tools/floor_cuda\.cu'
only_in 'SIMD' '#[ ]*include[ ]*[<"]([a-z0-9]*intrin\.h|arm_(neon|sve)\.h|hwy/)|_mm[0-9]*_[a-z]' 'src/cpu/|tools/floor_read\.cpp'
only_in 'an environment variable' '[^_[:alnum:]]getenv[ ]*\(' 'src/attention\.cpp|tests/'
only_in 'torch' '#[ ]*include[ ]*[<"](torch|ATen|c10)/' 'python/'
only_in 'importing torch' '^(import|from) torch' 'python/leanattn/(ops|hf|_hf_cache|_hf_fused)\.py|python/tests/|bench/|examples/'
# A kernel that a call overlaps with (programmatic launch) may have written what these would read.
only_in 'a load for read-only data' '__ldg[ ]*\(|ld\.global\.nc' 'tools/|tests/'
places='tools/|tests/|examples/|bench/|python/|include/leanattn/leanattn\.h'
only_in 'output or exit' '(^|[^_[:alnum:]])(printf|puts|abort|exit|std::(cout|cerr))[ ]*(\(|<<)' "$places"

# --- Each file.
for file in "${code[@]}" "${scripts[@]}"; do
  head -n 2 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || fault "$file: no SPDX line on top"
  lines=$(wc -l <"$file")
  ((lines <= 450)) || fault "$file: $lines lines; at most 450, two nouns share this room"
done
while read -r file; do
  case $file in
    src/*) grep -qwF "$file" CMakeLists.txt cmake/cuda.cmake || fault "$file: not in CMakeLists.txt, so it is not built" ;;
    *) grep -qw "$(basename "$file" .cpp)" tests/CMakeLists.txt || fault "$file: not in tests/CMakeLists.txt, so it does not run" ;;
  esac
done < <(list src tests | grep -E '^src/.*\.cpp$|_test\.cpp$')
for file in "${code[@]}"; do
  [[ $file != *.h && $file != *.cuh || $file == *-inl.h ]] || grep -qE '^#(pragma once|ifndef LEANATTN_.*_H_)' "$file" ||
    fault "$file: no include guard"
done
hits=$(grep -nE '^.{141,}' "${code[@]}" "${scripts[@]}" || true)
[[ -z $hits ]] || fault "lines of more than 140 columns:" "$(cut -c 1-160 <<<"$hits")"
hits=$(grep -nwE 'T[O]DO|F[I]XME|X[X]X' "${code[@]}" "${scripts[@]}" || true)
[[ -z $hits ]] || fault "unfinished:" "$hits"
# Brackets keep these patterns from finding themselves.
mapfile -t text < <(list README.md DESIGN.md CONTRIBUTING.md CHANGELOG.md CMakePresets.json pyproject.toml docs bench python |
  grep -vE '\.(png|svg|gz|so)$|__pycache__')
hits=$(grep -nE '/[w]ork/|/[r]oot/|/[h]ome/|[p]ypi\.org|[p]ythonhosted|[d]ebian\.org|[u]buntu\.com' \
  "${code[@]}" "${scripts[@]}" "${text[@]}" || true)
[[ -z $hits ]] || fault "a machine's path or a registry's host:" "$hits"

((faults == 0)) || { echo "$faults faults"; exit 1; }
echo "${#code[@]} source files and ${#scripts[@]} scripts in order"
