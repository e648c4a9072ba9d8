// SPDX-License-Identifier: Apache-2.0
// bfloat16 on AMX tile registers (tile_amx.h), where K lies in memory as operand A wants it; and whether this machine has them. Subnormal
// inputs count as zero.
#include "src/cpu/tile_amx.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace leanattn::cpu {
namespace {

constexpr std::size_t row_copy_bytes(int head_dim) { return static_cast<std::size_t>(head_dim) * 16 * sizeof(Element); }

struct Scratch {
  std::byte* pairs;    // V of one head: [head_dim_v / 16, 16 pairs of tokens, 16 dims, 2]
  std::byte* rows[2];  // [16, head_dim] K rows of one head that do not lie at one distance, or are too few

  explicit Scratch(const Tile& tile) {
    pairs = tile.extra + kWeightTermsBytes;
    rows[0] = pairs + tile.head_dim_v / 16 * kTileBytes;
    rows[1] = rows[0] + row_copy_bytes(tile.head_dim);
  }
};

std::size_t extra_bytes(int head_dim, int head_dim_v) {
  return kWeightTermsBytes + static_cast<std::size_t>(head_dim_v) / 16 * kTileBytes + 2 * row_copy_bytes(head_dim);
}

// --- Step 1: scores ---

// 16 rows of K at one distance: where they begin and how far they are apart.
struct KRows {
  const std::byte* at;
  std::int64_t stride;
};

// Rows first … first + 15 of one head, as they lie or, where they are fewer or scattered, copied together.
LEANATTN_AMX KRows k_rows(const Tile& tile, const std::byte* k, int first, std::byte* copy) {
  const std::int64_t* offsets = tile.k_offsets + first;
  const int count = std::min(16, tile.tokens - first);
  const std::int64_t stride = count > 1 ? offsets[1] - offsets[0] : 0;
  bool even = count == 16;
  for (int i = 1; i < count; ++i) even &= offsets[i] - offsets[i - 1] == stride;
  if (even) return {k + offsets[0], stride};
  const std::size_t bytes = static_cast<std::size_t>(tile.head_dim) * sizeof(Element);
  for (int i = 0; i < 16; ++i) {
    std::byte* to = copy + static_cast<std::size_t>(i) * bytes;
    i < count ? std::memcpy(to, k + offsets[i], bytes) : std::memset(to, 0, bytes);
  }
  return {copy, static_cast<std::int64_t>(bytes)};
}

// Both blocks of 16 tokens at once: a product waits 52 cycles for the one before it in the same register.
LEANATTN_AMX void head_scores(const Tile& tile, int head, LineStream& lines_v) {
  const Scratch scratch(tile);
  const int block_rows = tile.block_rows;
  const std::byte* k = tile.k + head * tile.k_head_bytes;
  const std::byte* q = tile.q + head * tile.q_head_bytes;
  float* weights = tile.weights + head * weights_stride(block_rows);
  const int q_bytes = 16 * block_rows * 4;  // of one Q tile
  const bool two = tile.tokens > 16;
  const KRows rows0 = k_rows(tile, k, 0, scratch.rows[0]);
  const KRows rows1 = two ? k_rows(tile, k, 16, scratch.rows[1]) : rows0;
  _tile_zero(0);
  _tile_zero(1);
  for (int dim = 0; dim < tile.head_dim; dim += 32) {
    _tile_loadd(4, q + dim / 32 * q_bytes, block_rows * 4);
    fetch(lines_v, 6);
    _tile_loadd(5, rows0.at + static_cast<std::size_t>(dim) * sizeof(Element), rows0.stride);
    fetch(lines_v, 6);
    _tile_dpbf16ps(0, 5, 4);
    if (!two) continue;
    fetch(lines_v, 6);
    _tile_loadd(6, rows1.at + static_cast<std::size_t>(dim) * sizeof(Element), rows1.stride);
    fetch(lines_v, 6);
    _tile_dpbf16ps(1, 6, 4);
  }
  _tile_stored(0, weights, block_rows * 4);
  if (two) _tile_stored(1, weights + 16 * block_rows, block_rows * 4);
}

// --- Step 3: values ---

// Interleaves each two tokens of one head's V; zero past the last token.
LEANATTN_AMX void pair_values(const Tile& tile, const std::byte* v, const Scratch& scratch, LineStream& next_k) {
  alignas(64) static constexpr std::uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int pair = 0; pair < kAmxTokens / 2; ++pair) {
    // Past the end: masked loads, which read nothing.
    const int even_token = std::min(2 * pair, tile.tokens - 1), odd_token = std::min(2 * pair + 1, tile.tokens - 1);
    const __mmask32 has_even = 2 * pair < tile.tokens ? ~0u : 0u, has_odd = 2 * pair + 1 < tile.tokens ? ~0u : 0u;
    const std::byte* even = v + tile.v_offsets[even_token];
    const std::byte* odd = v + tile.v_offsets[odd_token];
    std::byte* to = scratch.pairs + pair * 64;
    for (int dim = 0; dim < tile.head_dim_v; dim += 32, to += 2 * kTileBytes) {
      const __m512i x = _mm512_maskz_loadu_epi16(has_even, even + dim * 2);
      const __m512i y = _mm512_maskz_loadu_epi16(has_odd, odd + dim * 2);
      next_k.fetch();
      _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(to + kTileBytes, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

LEANATTN_AMX void head_values(const Tile& tile, int head, const float* factors, LineStream& next_k) {
  const Scratch scratch(tile);
  float* values = tile.values + static_cast<std::int64_t>(head) * tile.head_rows * tile.value_stride;
  const std::byte* weights = weight_terms(tile, head);
  pair_values(tile, tile.v + head * tile.v_head_bytes, scratch, next_k);
  scale_values(tile, values, factors);
  const std::int64_t row_bytes = tile.value_stride * static_cast<std::int64_t>(sizeof(float));
  _tile_loadd(4, weights, 64);
  _tile_loadd(5, weights + kTileBytes, 64);
  for (int dim = 0; dim < tile.head_dim_v; dim += 32) {
    const std::byte* v = scratch.pairs + dim / 16 * kTileBytes;
    _tile_loadd(0, values + dim, row_bytes);
    _tile_loadd(1, values + dim + 16, row_bytes);
    fetch(next_k, 4);
    _tile_loadd(6, v, 64);
    fetch(next_k, 4);
    _tile_loadd(7, v + kTileBytes, 64);
    fetch(next_k, 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    fetch(next_k, 4);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, values + dim, row_bytes);
    _tile_stored(1, values + dim + 16, row_bytes);
  }
}

// --- The tile ---

// [head_dim / 32, 16 pairs of dims, block_rows, 2] bfloat16, zero in padding rows.
void pack_q(const QBlock& block, void* packed) {
  Element* out = static_cast<Element*>(packed);
  for (int pair = 0; pair < block.head_dim / 2; ++pair) {
    for (int r = 0; r < block.block_rows; ++r) {
      for (int i = 0; i < 2; ++i) {
        *out++ = r < block.rows ? static_cast<const Element*>(block.q)[block.row_offsets[r] + 2 * pair + i] : Element{0};
      }
    }
  }
}

// bfloat16_from_float of numeric.h, 16 at a time: the processor's own conversion would flush subnormal numbers.
LEANATTN_AMX void store_row(const float* values, float factor, int head_dim_v, void* o) {
  const __m512 scale = _mm512_set1_ps(factor);
  for (int dim = 0; dim < head_dim_v; dim += 16) {
    const __m512 value = _mm512_mul_ps(scale, _mm512_load_ps(values + dim));
    const __m512i raw = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(raw, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i bits = _mm512_mask_or_epi32(rounded, is_nan, raw, _mm512_set1_epi32(0x400000));
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<Element*>(o) + dim), halves);
  }
}

constexpr TileKernel kBFloat16 = {
    kAmxTokens, 16, false, amx_block_rows, amx_padded_dims, extra_bytes, pack_q, run_amx_tile<head_scores, head_values>, store_row};

const TileKernel* select(DType kv_dtype, int head_dim, int head_dim_v, int rows) {
  // Up to four rows the vector units keep up with memory, and lose nothing to padding.
  constexpr int kFewRows = 4;
  if (head_dim % 32 == 0 && head_dim_v % 32 == 0 && rows > kFewRows) {
    if (kv_dtype == DType::kBFloat16) return &kBFloat16;
    if (kv_dtype == DType::kFloat16) return &kAmxFloat16;
  }
  return highway_kernels().front().select(kv_dtype, head_dim, head_dim_v, rows);
}

// The processor has AMX for bfloat16, and the system lets this process use it: Linux asks for a request (arch_prctl) before the first use.
bool amx_usable() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile)) return false;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  if (!(eax & kAvx512Bf16)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const IsaKernels* amx_kernels() {
  static const IsaKernels kernels = {"AVX3+AMX", select};
  static const bool usable = avx3_weights_step() && amx_usable();
  return usable ? &kernels : nullptr;
}

}  // namespace leanattn::cpu

#else

namespace leanattn::cpu {
const IsaKernels* amx_kernels() { return nullptr; }
}  // namespace leanattn::cpu

#endif
