#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks, sanitizes and times the CUDA backend on this machine's GPU, from binaries that were built anywhere (./dev carry). Run it in the
# root of the source tree. usage: bench/gpu.sh FOLDER [STAGE...]
# The folder gets STAGE.log and JSON lines. Stages, in this order by default:
#
#   check      golden and odd cases in float16 and bfloat16, every policy; the GPU tests that were carried along
#   python     the Python package on the GPU: its tests, and what a call costs (python-overhead.jsonl); needs NumPy, PyTorch, pytest,
#              hypothesis and ml_dtypes here
#   sanitize   compute-sanitizer's memcheck, racecheck and synccheck over small shapes, memcheck over odd ones
#   table      the cases of bench/table.txt, and the peers of .ruler/peers.py where that folder is: h200-table.jsonl
#   variants   the same cases with programmatic launch: h200-variants.jsonl
#   more       the cases of bench/gpu_more.txt, with peers: h200-more.jsonl
#   limits     what ragged batches, pages, several query tokens and extremes cost beside what they may: h200-limits.jsonl, h200-limits.md
#   options    the cases of bench/table.txt with batch_invariant and with check_data beside the plain ones: h200-options.jsonl, .md
#   features   the cases of bench/gpu_features.txt: h200-features.jsonl, .md
#   timeline   when the kernel's blocks come to which point, on a few cases: h200-timeline.jsonl, a line a block. Needs a binary of its own
#              (./dev carry timeline)
#
# Every stage runs even when one before it failed; the exit code says whether all went well. STAGE_SECONDS (480) ends a stage.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -ge 1 ]] || { sed -n '3,20p' "${BASH_SOURCE[0]}" | cut -c 3-; exit 2; }

mkdir -p "$1" && out=$(cd "$1" && pwd)
shift
stages=("$@")
((${#stages[@]})) || stages=(check python sanitize table variants more limits options features timeline)

for bin in build/carry build/cuda/tools; do
  [[ -x $bin/leanattn ]] && break
done
leanattn=$PWD/$bin/leanattn
[[ -x $leanattn ]] || { echo "gpu.sh: neither build/carry/leanattn nor build/cuda/tools/leanattn is here" >&2; exit 2; }
export LD_LIBRARY_PATH=$PWD/build/carry${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
small=bench/gpu_small.txt

# Runs a command, shows its last lines, keeps all of it in the stage's log.
logged() {  # NAME COMMAND...
  local name=$1 start=$SECONDS rc=0 log=$scratch/log
  shift
  "$@" >"$log" 2>&1 || rc=$?
  tail -n 3 "$log"
  printf -- '-- %s: exit code %d after %d s\n' "$name" "$rc" $((SECONDS - start))
  { printf '\n---- %s: %s\n' "$name" "$*"; cat "$log"; printf -- '-- exit code %d\n' "$rc"; } >>"$out/$stage.log"
  return "$rc"
}

paths() { "$leanattn" info --json | python3 -c 'import json, sys; print(*json.load(sys.stdin)["gpu"]["cuda_paths"])'; }

stage_check() {
  local rc=0 path all test
  logged info "$leanattn" info || return
  all=$(paths) || return
  logged check "$leanattn" check --backend cuda --dtype bf16 --dtype f16 || rc=1
  logged check-table "$leanattn" check --backend cuda --cases "$small" --dtype bf16 --dtype f16 || rc=1
  for path in $all; do
    logged "check-odd-$path" "$leanattn" check --backend cuda --cuda-path "$path" --cases bench/gpu_odd.txt || rc=1
    logged "check-$path" "$leanattn" check --backend cuda --cuda-path "$path" --dtype bf16 --policy lean --policy fa2 \
      --policy flashdecoding --policy flashdecoding:5 || rc=1
  done
  logged check-workers "$leanattn" check --backend cuda --dtype f16 --workers 7 || rc=1
  logged check-pdl "$leanattn" check --backend cuda --dtype bf16 --pdl || rc=1
  for test in build/carry/*_test build/carry/*_tests; do
    [[ -x $test ]] || continue
    logged "$(basename "$test")" "$test" --gtest_brief=1 || rc=1
  done
  return "$rc"
}

stage_python() {
  local rc=0 device
  [[ -d build/carry/python ]] || { echo "-- no build/carry/python: ./dev carry says why"; return 1; }
  export PYTHONPATH=$PWD/build/carry/python XLA_PYTHON_CLIENT_PREALLOCATE=false
  logged info-python python3 -m leanattn || return
  logged pytest-cuda python3 -m pytest python/tests/test_cuda.py python/tests/test_hf_cuda.py || rc=1
  logged pytest python3 -m pytest python/tests --ignore=python/tests/test_cuda.py --ignore-glob='*/test_hf*' || rc=1
  rm -f "$out/python-overhead.jsonl"
  for device in cuda cpu; do
    logged "overhead-$device" python3 bench/python_overhead.py --device "$device" --output "$out/python-overhead.jsonl" || rc=1
  done
  return "$rc"
}

stage_sanitize() {
  local tool path all options rc=0
  all=$(paths) || return
  command -v compute-sanitizer >/dev/null || { echo "-- no compute-sanitizer here"; return 1; }
  for tool in memcheck racecheck synccheck; do
    for path in $all; do
      options=()
      [[ $tool == synccheck ]] && options=(--num-cuda-barriers 65536)  # more mbarriers than it has room for by itself
      logged "sanitize-$tool-$path" timeout 78 compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 9 "$leanattn" check \
        --backend cuda --cuda-path "$path" --cases "$small" || rc=1
      [[ $tool == memcheck ]] || continue
      logged "sanitize-$tool-odd-$path" timeout 78 compute-sanitizer --tool "$tool" --error-exitcode 9 "$leanattn" check --backend cuda \
        --cuda-path "$path" --cases bench/gpu_odd.txt || rc=1
    done
  done
  return "$rc"
}

# The peers' own lines, where peers.py and its wheels are here (see README.md in its folder).
peers() {  # CASES LINES
  local ruler=.ruler wheels
  [[ -f $ruler/peers.py ]] || { echo "-- no $ruler/peers.py: floor and ours alone"; return 0; }
  mapfile -t wheels < <(find .whl "$ruler" -type f -name '*.whl' 2>/dev/null)
  if ((${#wheels[@]})) && [[ ! -d /tmp/site ]]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "${wheels[@]}" || return
  fi
  PYTHONPATH=/tmp/site FLASHINFER_WORKSPACE_BASE=/tmp python3 "$ruler/peers.py" "$1" --out "$2"
}

timed() {  # NAME CASES
  local name=$1 cases=$2 rc=0
  "$leanattn" bench --backend cuda --json --cases "$cases" >"$scratch/leanattn.jsonl" 2>"$scratch/bench.log" || rc=1
  tail -n 2 "$scratch/bench.log"
  cat "$scratch/leanattn.jsonl" "$scratch/bench.log" >>"$out/$stage.log"
  logged "$name: peers" peers "$cases" "$scratch/peers.jsonl" || rc=1
  python3 bench/gpu_table.py merge "$scratch/leanattn.jsonl" "$scratch/peers.jsonl" >"$out/$name.jsonl" || return
  python3 bench/gpu_table.py show --every-case "$out/$name.jsonl" | tee -a "$out/$stage.log"
  return "$rc"
}

stage_table() { timed h200-table bench/table.txt; }
stage_more() { timed h200-more bench/gpu_more.txt; }

stage_variants() {
  local rc=0 lines=$out/h200-variants.jsonl
  "$leanattn" bench --backend cuda --json --pdl --cases bench/table.txt >"$lines" || rc=1
  python3 bench/gpu_table.py variants "$lines" "$out/h200-table.jsonl" | tee -a "$out/$stage.log"
  return "$rc"
}

stage_limits() {
  local rc=0 path all lines=$out/h200-limits.jsonl others=()
  all=$(paths) || return
  "$leanattn" bench --backend cuda --json --cases bench/gpu_limits.txt >"$lines" || rc=1
  python3 bench/gpu_limits.py cases bench/gpu_limits.txt paths >"$scratch/paths.txt"
  for path in $(cut -s -d ' ' -f 2- <<<"$all"); do
    others+=("$out/h200-limits-$path.jsonl")
    "$leanattn" bench --backend cuda --json --cuda-path "$path" --cases "$scratch/paths.txt" >"${others[-1]}" || rc=1
  done
  python3 bench/gpu_limits.py show bench/gpu_limits.txt "$lines" "${others[@]}" >"$out/h200-limits.md" || rc=1
  tee -a "$out/$stage.log" <"$out/h200-limits.md"
  return "$rc"
}

overheads() {  # NAME CASES
  local rc=0
  "$leanattn" bench --backend cuda --json --cases "$2" >"$out/$1.jsonl" || rc=1
  { echo "# CUDA: $1"; echo; python3 bench/gpu_overheads.py show "$out/$1.jsonl"; } >"$out/$1.md" || rc=1
  tee -a "$out/$stage.log" <"$out/$1.md"
  return "$rc"
}

stage_options() {
  python3 bench/gpu_overheads.py cases bench/table.txt invariant=1 checked=1 >"$scratch/options.txt" || return
  overheads h200-options "$scratch/options.txt"
}

stage_features() { overheads h200-features bench/gpu_features.txt; }

stage_timeline() {
  local binary
  for binary in build/carry/leanattn_timeline build/timeline/tools/leanattn; do
    [[ -x $binary ]] && break
  done
  [[ -x $binary ]] || { echo "-- no build/carry/leanattn_timeline here (./dev carry timeline)"; return 1; }
  "$binary" timeline --cases bench/gpu_timeline.txt --blocks "$out/h200-timeline.jsonl" | tee -a "$out/$stage.log"
}

summary=() failed=0
for stage in "${stages[@]}"; do
  declare -F "stage_$stage" >/dev/null && continue
  echo "gpu.sh: stage '$stage': expected check, python, sanitize, table, variants, more, limits, options, features or timeline" >&2
  exit 2
done
export -f logged paths peers timed overheads stage_check stage_python stage_sanitize stage_table stage_variants stage_more stage_limits \
  stage_options stage_features stage_timeline
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export out leanattn small scratch stage
for stage in "${stages[@]}"; do
  start=$SECONDS
  rm -f "$out/$stage.log" "$scratch"/*
  printf '\n==== %s\n' "$stage"
  if timeout "${STAGE_SECONDS:-480}" bash -uo pipefail -c "stage_$stage"; then result=ok; else result=FAILED failed=1; fi
  summary+=("$(printf '%-8s %4d s  %s' "$result" $((SECONDS - start)) "$stage")")
done
printf '\n==== summary\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
