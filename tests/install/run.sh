#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the build into a fresh prefix, moves the prefix, and builds and runs a C++ and a C consumer against it: CMake package and
# pkg-config, static and shared. usage: run.sh SOURCE BUILD CMAKE CC CXX
set -euo pipefail
source_dir=$1 build_dir=$2 cmake=$3 cc=$4 cxx=$5
work=$(mktemp -d "$build_dir/install_consumers.XXXXXX")
trap 'rm -rf "$work"' EXIT

runs=0
expect_output() {  # NAME COMMAND...
  local name=$1 output
  shift
  output=$("$@")
  [[ $output == *"O[0] = 2.000"* ]] || { echo "$name: unexpected output: $output"; exit 1; }
  echo "ok: $name"
  runs=$((runs + 1))
}

"$cmake" --install "$build_dir" --prefix "$work/staging" >/dev/null
mv "$work/staging" "$work/prefix"  # nothing may remember where it was installed
prefix=$work/prefix
pc_dir=$(dirname "$(find "$prefix" -name leanattn.pc)")
lib_dir=$(dirname "$pc_dir")

consume_cmake() {  # COMPONENT LANGUAGES
  local build=$work/$1-${2//;/-}
  "$cmake" -S "$source_dir/tests/install" -B "$build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" \
    -DCMAKE_CXX_COMPILER="$cxx" -DCONSUMER_COMPONENT="$1" -DCONSUMER_LANGUAGES="$2" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  "$cmake" --build "$build" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  [[ $2 != *CXX* ]] || expect_output "cmake $1 C++" "$build/decode_cpp"
  expect_output "cmake $1 C (languages $2)" "$build/decode_c"
}
consume_cmake static "C;CXX"
consume_cmake shared "C;CXX"
consume_cmake shared "C"

# A component that there is none of is named. CMake breaks the lines of what it says.
if said=$("$cmake" -S "$source_dir/tests/install" -B "$work/unknown" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" \
  -DCMAKE_CXX_COMPILER="$cxx" -DCONSUMER_COMPONENT=unknown 2>&1) ||
  [[ $(tr -s ' \n' ' ' <<<"$said") != *'leanattn has no component "unknown": there are static and shared'* ]]; then
  printf 'component unknown:\n%s\n' "$said"
  exit 1
fi
echo "ok: cmake unknown component"

consume_pkg_config() {  # MODULE RUN_PATH
  local flags
  flags=$(PKG_CONFIG_PATH=$pc_dir pkg-config --cflags --libs "$1")
  # shellcheck disable=SC2086
  "$cxx" -std=c++20 "$source_dir/examples/decode.cpp" -o "$work/$1_cpp" $flags
  # shellcheck disable=SC2086
  "$cc" -std=c11 "$source_dir/examples/decode.c" -o "$work/$1_c" $flags
  expect_output "pkg-config $1 C++" env LD_LIBRARY_PATH="$2" "$work/$1_cpp"
  expect_output "pkg-config $1 C" env LD_LIBRARY_PATH="$2" "$work/$1_c"
}
consume_pkg_config leanattn-static ""
consume_pkg_config leanattn "$lib_dir"

# The shared library's own functions are the public ones and nothing else.
functions='workspace_bytes|initialize_workspace|decode|merge|cpu_isas|cuda_paths|version|backend_available|validate|check_data'
functions+='|data_fault_sentence'
public="leanattn_[a-z_]+|leanattn::(Error::|($functions)(\\[abi:cxx11\\])?\\().*"
strays=$(nm -D --defined-only --demangle "$lib_dir/libleanattn.so" | awk '$2 == "T"' | grep -vE " T ($public)\$" || true)
[[ -z $strays ]] || { printf 'exported, but not public:\n%s\n' "$strays"; exit 1; }
[[ -f $(find "$prefix" -name LICENSE) ]] || { echo "no LICENSE installed"; exit 1; }
[[ ! -e $prefix/bin/leanattn ]] || "$prefix/bin/leanattn" info >/dev/null
echo "$runs consumers ran"
