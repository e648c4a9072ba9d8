// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "inputs.h"
#include "numeric.h"
#include "tests/fuzz/owned.h"

namespace leanattn::fuzz {
namespace {

// No merge that a description like this could ask for may begin: something is wrong with it, or it has no rows.
void describe_merge(Bytes& bytes) {
  leanattn_merge_problem merge;
  leanattn_merge_problem_init(&merge);
  merge.shards = 2, merge.head_dim_v = 64;
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (int changes = bytes.below(6); changes > 0; --changes) {
    switch (bytes.below(6)) {
      case 0: merge.shards = bytes.of<std::int32_t>({0, -1, 1, 2147483647, -2147483647}); break;
      case 1: merge.rows = bytes.of<std::int64_t>({1, -1, kMost, kMost / 2, kMost / 512, -kMost}); break;
      case 2: merge.head_dim_v = bytes.of<std::int32_t>({0, -1, 1, 100000, 2147483647, -2147483647}); break;
      case 3: merge.dtype = bytes.of<leanattn_dtype>({0, 1, 2, 3, -1}); break;
      case 4: merge.lse_base = bytes.of<leanattn_lse_base>({0, 1, 2, -1}); break;
      default: merge.shard_lse = reinterpret_cast<const float*>(static_cast<std::uintptr_t>(64 + bytes.below(4)));
    }
  }
  const leanattn_status status = leanattn_merge(&merge);
  answered(status, "leanattn_merge");
  promise(status == LEANATTN_OK || status == LEANATTN_INVALID_ARGUMENT, "leanattn_merge answers " + std::to_string(status));
  promise(status != LEANATTN_OK || merge.rows == 0, "leanattn_merge takes " + std::to_string(merge.rows) + " rows of nothing");
}

}  // namespace

void merge(Bytes& bytes) {
  if (bytes.one_in(2)) return describe_merge(bytes);
  leanattn_merge_problem merge;
  leanattn_merge_problem_init(&merge);
  merge.shards = 1 + bytes.below(7);
  merge.rows = bytes.below(9);
  merge.head_dim_v = bytes.of({1, 64, 7, 255, 256, 257, 600});
  merge.dtype = bytes.below(3);
  merge.lse_base = bytes.below(2);
  const auto dtype = static_cast<DType>(merge.dtype);
  const std::int64_t parts = merge.shards * merge.rows;
  const Exact shard_o(static_cast<std::size_t>(parts * merge.head_dim_v) * dtype_bytes(dtype), 0);
  const Exact shard_lse(static_cast<std::size_t>(parts) * sizeof(float), 0);
  const Exact o(static_cast<std::size_t>(merge.rows * merge.head_dim_v) * dtype_bytes(dtype), kCanaryByte);
  const Exact lse(static_cast<std::size_t>(merge.rows) * sizeof(float), kCanaryByte);
  for (std::int64_t part = 0; part < parts; ++part) {
    const bool empty = bytes.one_in(4);
    for (int i = 0; i < merge.head_dim_v; ++i) {  // nobody looks at an empty shard's O
      const std::int64_t at = part * merge.head_dim_v + i;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      store_from_float(shard_o.data(), dtype, at, empty ? nan : input_uniform(3, Input::kV, static_cast<std::uint64_t>(at)));
    }
    shard_lse.as<float>()[part] =
        empty ? -std::numeric_limits<float>::infinity() : bytes.of({0.0f, 3.0f, -5.0f, 80.0f, 1e4f, -1e30f, 3e38f});
  }
  merge.shard_o = shard_o.data(), merge.shard_lse = shard_lse.as<float>(), merge.o = o.data();
  if (!bytes.one_in(3)) merge.lse = lse.as<float>();
  const leanattn_status status = leanattn_merge(&merge);
  promise(status == LEANATTN_OK, "a small merge is refused: " + answered(status, "leanattn_merge"));
  for (std::int64_t row = 0; row < merge.rows; ++row) {
    bool any = false;
    for (std::int64_t shard = 0; shard < merge.shards; ++shard) any = any || std::isfinite(shard_lse.as<float>()[shard * merge.rows + row]);
    for (int i = 0; i < merge.head_dim_v; ++i) {
      const float value = load_as_float(o.data(), dtype, row * merge.head_dim_v + i);
      promise(any ? std::abs(value) <= 1.0f + 0x1p-6f : value == 0.0f, "row " + std::to_string(row) + ": O is " + std::to_string(value));
    }
    if (!merge.lse) continue;
    promise(any ? std::isfinite(merge.lse[row]) : merge.lse[row] == -std::numeric_limits<float>::infinity(),
            "row " + std::to_string(row) + ": LSE is " + std::to_string(merge.lse[row]));
  }
}

void struct_sizes(Bytes& bytes) {
  const auto size =
      static_cast<std::size_t>(bytes.one_in(3) ? bytes.raw(2) : bytes.raw(1) + (bytes.one_in(2) ? sizeof(leanattn_problem) - 64 : 0));
  const int which = bytes.below(3);
  const Exact memory(size, kCanaryByte);
  leanattn_status status = LEANATTN_OK;
  if (which == 0) status = leanattn_problem_init_sized(memory.as<leanattn_problem>(), size);
  if (which == 1) status = leanattn_options_init_sized(memory.as<leanattn_options>(), size);
  if (which == 2) status = leanattn_merge_problem_init_sized(memory.as<leanattn_merge_problem>(), size);
  answered(status, "leanattn_*_init_sized");
  const std::span<const std::byte> all(memory.data(), size);
  if (status != LEANATTN_OK) {
    promise(std::all_of(all.begin(), all.end(), [](std::byte b) { return b == std::byte{kCanaryByte}; }), "a refused struct is written");
    return;
  }
  // A newer caller's extra members count once they are set.
  const bool extra = size > 8 && bytes.one_in(2);
  if (extra) memory.data()[size - 1] = std::byte{1};
  leanattn_problem empty;
  leanattn_problem_init(&empty);
  empty.q_heads = empty.kv_heads = 1, empty.head_dim = 64;
  std::size_t needed = 0;
  if (which == 0) status = leanattn_validate(memory.as<leanattn_problem>(), nullptr);
  if (which == 1) status = leanattn_workspace_bytes(&empty, memory.as<leanattn_options>(), &needed);
  if (which == 2) status = leanattn_merge(memory.as<leanattn_merge_problem>());
  answered(status, "a call with a struct of another size");
  promise(status != LEANATTN_INTERNAL && status != LEANATTN_INVALID_DATA, "a struct of another size answers " + std::to_string(status));
}

}  // namespace leanattn::fuzz
