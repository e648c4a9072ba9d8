// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <limits>
#include <string>

#include "tests/fuzz/fuzz.h"

namespace leanattn::fuzz {
namespace {

constexpr std::int32_t kMost32 = std::numeric_limits<std::int32_t>::max(), kLeast32 = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kMost64 = std::numeric_limits<std::int64_t>::max(), kLeast64 = std::numeric_limits<std::int64_t>::min();

std::int32_t number32(Bytes& bytes) {
  switch (bytes.below(4)) {
    case 0: return bytes.below(20);
    case 1: return 8 * bytes.below(40);
    case 2:
      return bytes.of<std::int32_t>({-1,      -2,          -8,           31,          33,      36,       63,          65,
                                     100,     127,         255,          257,         264,     1023,     1024,        1025,
                                     4096,    32768,       65535,        65536,       65537,   1 << 20,  1 << 24,     1 << 28,
                                     1 << 30, kMost32 / 2, kMost32 - 15, kMost32 - 1, kMost32, kLeast32, kLeast32 + 1});
    default: return static_cast<std::int32_t>(bytes.raw(4));
  }
}

std::int64_t number64(Bytes& bytes) {
  switch (bytes.below(4)) {
    case 0: return number32(bytes);
    case 1: return std::int64_t{1} << bytes.below(63);
    case 2:
      return bytes.of<std::int64_t>({std::int64_t{1} << 31, (std::int64_t{1} << 32) + 1, kMost64, kMost64 - 1, kMost64 / 2, kMost64 / 3,
                                     kMost64 / 4, kMost64 / 8, kMost64 / 512, kLeast64, kLeast64 + 1, -64});
    default: return static_cast<std::int64_t>(bytes.raw(8));
  }
}

float number_f(Bytes& bytes) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  if (bytes.one_in(3)) {
    const auto bits = static_cast<std::uint32_t>(bytes.raw(4));
    float value = 0.0f;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  return bytes.of({0.0f, -0.0f, 0.125f, 30.0f, -1.0f, 1e-45f, 3e38f, kNan, -kNan, kInf, -kInf});
}

// An address in the first page of memory: whoever follows it is seen. Aligned to 64 bytes most of the time.
template <class Element>
Element* nowhere(Bytes& bytes) {
  const int kind = bytes.below(8);
  if (kind == 7) return nullptr;
  const std::uintptr_t address = 64 * (1 + static_cast<std::uintptr_t>(bytes.below(32))) + (kind == 6 ? 1 + bytes.below(15) : 0);
  return reinterpret_cast<Element*>(address);
}

void never(void*, std::int32_t, void (*)(void*, std::int32_t), void*) { throw Broken("a refused call runs its executor"); }

const char* name(Bytes& bytes) {
  static const std::string long_name(3000, 'x');
  return bytes.of<const char*>({nullptr, "", "AVX2", "AVX3", "SSE4", "SCALAR", "portable", "Z80", "%s%n{}", "\xff\xfe", long_name.c_str()});
}

template <class Element>
Element* somewhere() {
  return reinterpret_cast<Element*>(std::uintptr_t{4032});
}

leanattn_problem right_problem(Bytes& bytes) {
  leanattn_problem p;
  leanattn_problem_init(&p);
  p.batch = 3, p.q_heads = 8, p.kv_heads = 2, p.head_dim = 64, p.q_len = 2;
  p.q_dtype = p.kv_dtype = bytes.below(3);
  p.q = {somewhere<const void>(), 1024, 512, 64};
  p.o = {somewhere<void>(), 1024, 512, 64};
  p.k = {somewhere<const void>(), 1280, 128, 64};
  p.v = p.k;
  p.lse = somewhere<float>();
  p.kv_lens = somewhere<const std::int32_t>();
  p.kv_layout = bytes.below(3);
  p.kv_capacity = p.kv_layout == LEANATTN_KV_PAGED ? 0 : 10;
  p.page_size = 4, p.num_pages = 9, p.max_pages = 3;
  p.cu_seqlens_kv = somewhere<const std::int32_t>();
  p.block_table = somewhere<const std::int32_t>();
  return p;
}

void change_view(Bytes& bytes, leanattn_kv_view& view) {
  switch (bytes.below(4)) {
    case 0: view.outer_stride = number64(bytes); break;
    case 1: view.token_stride = number64(bytes); break;
    case 2: view.head_stride = number64(bytes); break;
    default: view.data = nowhere<const void>(bytes);
  }
}

template <class View>
void change_rows(Bytes& bytes, View& view) {
  switch (bytes.below(4)) {
    case 0: view.seq_stride = number64(bytes); break;
    case 1: view.token_stride = number64(bytes); break;
    case 2: view.head_stride = number64(bytes); break;
    default: view.data = nowhere<std::byte>(bytes);
  }
}

void change(Bytes& bytes, leanattn_problem& p) {
  switch (bytes.below(36)) {
    case 0: p.batch = number32(bytes); break;
    case 1: p.q_heads = number32(bytes); break;
    case 2: p.kv_heads = number32(bytes); break;
    case 3: p.q_heads = p.kv_heads = number32(bytes); break;
    case 4: p.head_dim = number32(bytes); break;
    case 5: p.head_dim_v = number32(bytes); break;
    case 6: p.q_len = number32(bytes); break;
    case 7: p.q_dtype = number32(bytes); break;
    case 8: p.kv_dtype = number32(bytes); break;
    case 9: p.q_dtype = p.kv_dtype = bytes.below(4); break;
    case 10: change_rows(bytes, p.q); break;
    case 11:
    case 12: change_rows(bytes, p.o); break;
    case 13:
    case 14: change_view(bytes, p.k); break;
    case 15:
    case 16: change_view(bytes, p.v); break;
    case 17: p.lse = nowhere<float>(bytes); break;
    case 18: p.cu_seqlens_q = nowhere<const std::int32_t>(bytes); break;
    case 19: p.kv_lens = nowhere<const std::int32_t>(bytes); break;
    case 20: p.kv_layout = bytes.one_in(4) ? number32(bytes) : bytes.below(3); break;
    case 21: p.kv_capacity = number64(bytes); break;
    case 22: p.cu_seqlens_kv = nowhere<const std::int32_t>(bytes); break;
    case 23: p.page_size = number32(bytes); break;
    case 24: p.num_pages = number32(bytes); break;
    case 25: p.max_pages = number32(bytes); break;
    case 26: p.block_table = nowhere<const std::int32_t>(bytes); break;
    case 27: p.block_table_stride = number64(bytes); break;
    case 28: p.causal = number32(bytes); break;
    case 29: p.window_left = number32(bytes); break;
    case 30: p.tree_mask = nowhere<const std::uint64_t>(bytes); break;
    case 31: p.scale = number_f(bytes); break;
    case 32: p.softcap = number_f(bytes); break;
    case 33: p.alibi_slopes = nowhere<const float>(bytes); break;
    case 34: p.sinks = nowhere<const float>(bytes); break;
    default: p.lse_base = number32(bytes);
  }
}

void change(Bytes& bytes, leanattn_options& options) {
  switch (bytes.below(12)) {
    case 0: options.backend = bytes.one_in(4) ? number32(bytes) : bytes.below(3); break;
    case 1: options.policy = bytes.one_in(4) ? number32(bytes) : bytes.below(3); break;
    case 2: options.splits = number32(bytes); break;
    case 3: options.policy = LEANATTN_FLASHDECODING, options.splits = number32(bytes); break;
    case 4: options.head_order = bytes.one_in(4) ? number32(bytes) : bytes.below(3); break;
    case 5: options.batch_invariant = number32(bytes); break;
    case 6: options.workers = number32(bytes); break;
    case 7: options.executor.run = bytes.one_in(2) ? nullptr : never; break;
    case 8: options.cpu_isa = name(bytes); break;
    case 9: options.stream = nowhere<void>(bytes); break;
    case 10: options.programmatic_launch = number32(bytes); break;
    default: options.cuda_path = name(bytes);
  }
}

}  // namespace

void describe(Bytes& bytes) {
  leanattn_problem p = right_problem(bytes);
  leanattn_options options;
  leanattn_options_init(&options);
  for (int changes = bytes.below(12); changes > 0; --changes) {
    if (bytes.one_in(4)) {
      change(bytes, options);
    } else {
      change(bytes, p);
    }
  }
  const leanattn_status valid = leanattn_validate(&p, &options);
  const std::string why = answered(valid, "leanattn_validate");
  promise(valid <= LEANATTN_UNSUPPORTED, "leanattn_validate answers " + std::to_string(valid));

  constexpr std::size_t kUntouched = 0x5a5a5a5a5a5a5a5a;
  std::size_t needed = kUntouched, again = kUntouched;
  const leanattn_status sized = leanattn_workspace_bytes(&p, &options, &needed);
  const std::string why_not_sized = answered(sized, "leanattn_workspace_bytes");
  promise(sized <= LEANATTN_UNSUPPORTED, "leanattn_workspace_bytes answers " + std::to_string(sized));
  promise(leanattn_workspace_bytes(&p, &options, &again) == sized && again == needed, "leanattn_workspace_bytes answers differently");
  if (valid != LEANATTN_OK) {
    promise(sized == valid && why_not_sized == why,
            "leanattn_validate says \"" + why + "\", leanattn_workspace_bytes \"" + why_not_sized + "\"");
  }
  promise((sized == LEANATTN_OK) != (needed == kUntouched), "leanattn_workspace_bytes writes its result, and only then");
  promise(sized != LEANATTN_OK || needed < std::size_t{1} << 63, "a workspace of " + std::to_string(needed) + " bytes");

  if (sized == LEANATTN_OK && needed == 0) return;  // a call without a workspace would go on to the lengths
  const leanattn_status without = leanattn_decode(&p, &options, nullptr, 0);
  answered(without, "leanattn_decode without a workspace");
  promise(without == (sized == LEANATTN_OK ? LEANATTN_WORKSPACE_TOO_SMALL : sized), "leanattn_decode answers " + std::to_string(without));
  if (sized != LEANATTN_OK) return;
  const leanattn_status short_of_one = leanattn_decode(&p, &options, somewhere<void>(), needed - 1);
  answered(short_of_one, "leanattn_decode one byte short");
  promise(short_of_one == LEANATTN_WORKSPACE_TOO_SMALL, "leanattn_decode takes a workspace one byte short");
}

}  // namespace leanattn::fuzz
