// SPDX-License-Identifier: Apache-2.0
// A stage against the 64 rows of one warpgroup (wgmma, compute capability 9.0 alone): every warp has 16 rows, sees all tokens of the stage
// and keeps all dims, so rows never leave their warp and weights stay in registers. K and V come from shared memory once for all rows,
// where four warps of tile.cuh read Q and P again for every 16 tokens.
//
// A lane holds of Q, P, products and Õ what it would hold of an mma m16n8k16 (tile.cuh).
#pragma once

#include "cuda/tile.cuh"

namespace leanattn::cuda {

// Places of tile.cuh, as far as there are any.
template <class C>
struct QPlaces {
  Columns<C::kRowChunks> q;  // in Q of the warp, as there

  __device__ __forceinline__ QPlaces(int, int lane) : q(lane % 16, lane / 16) {}
};

// Tokens or dims that one instruction takes beside 64 rows.
constexpr int kWideColumns = 64;
using WideSums = float[kWideColumns / 8][4];

// Sums of instructions that have been waited for: the compiler takes them for known when they were issued.
template <int kCount>
__device__ __forceinline__ void settle(WideSums (&all)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int n = 0; n < kWideColumns / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) ptx::keep(all[i][n][r]);
    }
  }
}

// A stage's part in what the warp's rows see.
template <class C>
__device__ __forceinline__ void attend_as_warpgroup(RowState<C>& state, const Stage& stage, std::uint32_t k_at, const Params& p, int lane) {
  using E = Element<typename C::T>;
  constexpr int kParts = C::kTokens / kWideColumns, kColumns = C::kHeadDim / kWideColumns;
  constexpr int kColumnBytes = C::kTokens * C::kColumnBytes, kEight = 8 * C::kColumnBytes;  // all tokens, and eight, of a column of 64 dims
  constexpr int kSteps = C::kTokens / kMmaTokens;

  WideSums products[kParts];
  ptx::fence_async_proxy();  // cp.async wrote K and V
  ptx::wgmma_fence();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 16; ++k) {
      const std::uint32_t at = k_at + k / 4 * kColumnBytes + part * kWideColumns * C::kColumnBytes + k % 4 * 32;
      E::template wgmma<false>(products[part], state.q[k], ptx::wgmma_operand(at, 16, kEight), k > 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait();
  settle(products);

  float base[2], shrink[2], more[2] = {};  // more: of ℓ
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = state.max[half];
#pragma unroll
    for (int n = 0; n < C::kTokens / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& logit = products[n / 8][n % 8][2 * half + j];
        logit *= p.scale_log2;
        if (stage.flags & Stage::kMasked) {
          if (n * 8 + 2 * (lane % 4) + j >= min_of(state.limit[half] - stage.token_begin, stage.tokens)) logit = kMinusInfinity;
        }
        max = fmaxf(max, logit);
      }
    }
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
    base[half] = max == kMinusInfinity ? 0.0f : max;
    shrink[half] = ptx::ex2(state.max[half] - base[half]);
    state.max[half] = max;
  }

  // The products of a step are under way while the next one's weights are worked out. Sums of this stage alone, as in tile.cuh.
  WideSums sums[kColumns];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    std::uint32_t weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * k + i / 2, half = i % 2;
      const float* const logits = products[n / 8][n % 8] + 2 * half;
      const float low = ptx::ex2(logits[0] - base[half]), high = ptx::ex2(logits[1] - base[half]);
      more[half] += low + high;
      weights[i] = E::pack(low, high);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const std::uint32_t at = k_at + C::kStageBytes + column * kColumnBytes + k * kMmaTokens * C::kColumnBytes;
      E::template wgmma<true>(sums[column], weights, ptx::wgmma_operand(at, kColumnBytes, kEight), k > 0);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) state.sum[half] = fmaf(state.sum[half], shrink[half], more[half]);
  ptx::wgmma_commit();
  ptx::wgmma_wait();
  settle(sums);
#pragma unroll
  for (int n = 0; n < C::kDimSteps; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) state.values[0][n][r] = fmaf(state.values[0][n][r], shrink[r / 2], sums[n / 8][n % 8][r]);
  }
}

}  // namespace leanattn::cuda
