// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "numeric.h"
#include "problem_view.h"
#include "reference.h"
#include "tests/fuzz/owned.h"

namespace leanattn::fuzz {
namespace {

bool is_canary(std::byte b) { return b == std::byte{kCanaryByte}; }

void untouched(const Owned& own, const char* when) {
  for (const Exact* memory : {&own.o, &own.lse}) {
    const std::span<const std::byte> all(memory->data(), memory->bytes());
    promise(std::all_of(all.begin(), all.end(), is_canary), std::string("outputs are written ") + when);
  }
}

// An element of an array becomes anything. An offset behind the last row is the caller's lie about its memory, so it stays.
void spoil(Bytes& bytes, Exact& array, bool offsets) {
  const auto count = static_cast<int>(array.bytes() / sizeof(std::int32_t));
  if (count == 0) return;
  const std::int32_t value =
      bytes.one_in(2)
          ? static_cast<std::int32_t>(bytes.raw(4))
          : bytes.of<std::int32_t>({-1, 0, 1, 2, 300, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()});
  std::int32_t* const elements = array.as<std::int32_t>();
  const std::int32_t last = elements[count - 1];
  elements[bytes.below(count)] = value;
  if (offsets) elements[count - 1] = std::min(elements[count - 1], last);
}

// O and LSE of every row: numbers, in the range that weights between 0 and 1 allow; the bytes between rows as they were.
void expect_sane(const Owned& own) {
  const Problem& p = own.problem;
  const float most = own.largest_v * (1.0f + 0x1p-6f);
  std::vector<std::byte> image(own.o.data(), own.o.data() + own.o.bytes());
  const std::size_t row_bytes = static_cast<std::size_t>(head_dim_v(p)) * dtype_bytes(p.q_dtype);
  for (int seq = 0; seq < p.batch; ++seq) {
    for (int token = 0; token < own.q_lens[static_cast<std::size_t>(seq)]; ++token) {
      for (int head = 0; head < p.q_heads; ++head) {
        const std::string row = "seq " + std::to_string(seq) + ", token " + std::to_string(token) + ", q_head " + std::to_string(head);
        const std::int64_t at = q_row_offset(p, p.o, seq, token, head);
        for (int i = 0; i < head_dim_v(p); ++i) {
          const float value = load_as_float(p.o.data, p.q_dtype, at + i);
          promise(std::abs(value) <= most, row + ": O is " + std::to_string(value) + ", |V| at most " + std::to_string(own.largest_v));
        }
        std::fill_n(image.begin() + at * static_cast<std::int64_t>(dtype_bytes(p.q_dtype)), row_bytes, std::byte{kCanaryByte});
        if (!p.lse) continue;
        const float lse = p.lse[(seq_q_begin(p, seq) + token) * p.q_heads + head];
        promise(std::isfinite(lse) || lse == -std::numeric_limits<float>::infinity(), row + ": LSE is " + std::to_string(lse));
      }
    }
  }
  promise(std::all_of(image.begin(), image.end(), is_canary), "O is written between its rows");
}

// Wrong, not unlucky: a token too many or too few is many tolerances away. The random tests hold results to one.
void expect_right(const Owned& own) {
  constexpr double kManyTolerances = 16.0;
  const Problem& p = own.problem;
  const Comparison comparison = compare(p, compute_reference(p, {.kv_heads_per_seq = 1, .threads = 1}));
  for (const Worst* worst : {&comparison.o, &comparison.lse}) {
    promise(worst->ratio <= kManyTolerances, (worst == &comparison.o ? "o of seq " : "lse of seq ") + std::to_string(worst->seq) +
                                                 ", token " + std::to_string(worst->token) + ", q_head " + std::to_string(worst->q_head) +
                                                 ": error " + std::to_string(worst->error) + ", tolerance " +
                                                 std::to_string(worst->tolerance));
  }
}

}  // namespace

void decode(Bytes& bytes) {
  Owned own(bytes);
  const leanattn_options options = draw_options(bytes);
  const bool spoiled = bytes.one_in(3);
  if (spoiled) {
    for (int changes = 1 + bytes.below(3); changes > 0; --changes) {
      Exact* const arrays[] = {&own.lens, &own.block_table, &own.cu_seqlens_q, &own.cu_seqlens_kv};
      const int which = bytes.below(4);
      spoil(bytes, *arrays[which], which >= 2);
    }
  }
  const leanattn_problem p = own.c();
  std::size_t needed = 0;
  const leanattn_status sized = leanattn_workspace_bytes(&p, &options, &needed);
  promise(sized == LEANATTN_OK, "a small problem is refused: " + answered(sized, "leanattn_workspace_bytes"));
  constexpr std::size_t kMostWorkspace = std::size_t{32}
                                         << 20;  // a ragged batch without kv_capacity with a thousand splits needs gigabytes
  if (needed > kMostWorkspace) return;
  const leanattn_status checked = leanattn_check_data(&p);
  const std::string why = answered(checked, "leanattn_check_data");
  promise(spoiled || checked == LEANATTN_OK, "right data are refused: " + why);

  const std::size_t misaligned = static_cast<std::size_t>(bytes.below(16));
  const Exact workspace(needed + misaligned, kNanByte);
  std::byte* const start = needed == 0 ? nullptr : workspace.data() + misaligned;
  const leanattn_status done = leanattn_decode(&p, &options, start, needed);
  const std::string said = answered(done, "leanattn_decode");
  promise(done == checked && said == why, "leanattn_check_data says \"" + why + "\", leanattn_decode \"" + said + "\"");
  if (done != LEANATTN_OK) return untouched(own, "after an error");
  if (spoiled) return;  // other lengths that are in range: values there are NaN, or none
  expect_sane(own);
  if (bytes.one_in(4)) expect_right(own);
  if (needed == 0) return;
  own.reset_outputs();
  answered(leanattn_decode(&p, &options, start, needed - 1), "leanattn_decode one byte short");
  untouched(own, "by a call whose workspace is one byte short");
}

}  // namespace leanattn::fuzz
