// SPDX-License-Identifier: Apache-2.0
// A stage against the rows of one group of four warps, in three steps: scores (Q·K, a slice of tokens a warp), weights (mask, online
// softmax, P to shared memory), values (P·V, a slice of dims a warp). So no warp holds a part of another's sum and Õ is never merged inside
// a block.
//
// Fragments of mma m16n8k16: a lane holds rows lane/4 and lane/4 + 8 of a row tile, columns 2·(lane % 4) and the next one.
#pragma once

#include "cuda/config.cuh"
#include "cuda/rules.cuh"
#include "partial.h"

namespace leanattn::cuda {

// Rows in shared memory are read eight at a time (swizzled), so within a column of chunks a lane's place depends on the lane alone, up to a
// turn by 2·k chunks: kTurns places a lane, computed once, and constants.
template <int kRowChunks>
struct Columns {
  static constexpr int kTurns = kRowChunks % 8 == 0 ? 4 : 2;
  static constexpr int kTurnBytes = kTurns * 32;
  std::uint32_t turn[kTurns];

  // Of `row` and chunk `chunk` (0 or 1) of step k = 0.
  __device__ __forceinline__ Columns(int row, int chunk) {
#pragma unroll
    for (int k = 0; k < kTurns; ++k) turn[k] = ptx::kept(swizzled<kRowChunks>(row, 2 * k + chunk) * 16);
  }
  __device__ __forceinline__ std::uint32_t at(int k) const { return turn[k % kTurns] + k / kTurns * kTurnBytes; }
};

// Byte offsets of a lane, the same for every stage.
template <class C>
struct Places {
  Columns<C::kRowChunks> q;                 // in Q of the group: rows of a row tile as the A operand, step k of 16 dims
  Columns<C::kRowChunks> k;                 // in K: tokens of the warp's first 16 as the B operand, step k of 16 dims
  Columns<C::kTokens / 8> p;                // in P: rows of a row tile as the A operand, step k of 16 tokens
  std::uint32_t v[(C::kDimSteps + 1) / 2];  // in V: the first 16 tokens, transposed as the B operand, two steps of 8 of the warp's dims
  std::uint32_t write_p[C::kParts][2];      // in P: where the lane's weights of row lane/4 go, by part and step of 8 tokens

  __device__ __forceinline__ Places(int warp, int lane)
      : q(lane % 16, lane / 16), k(warp * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2), p(lane % 16, lane / 16) {
#pragma unroll
    for (int n = 0; n < C::kDimSteps; n += 2) {
      v[n / 2] = ptx::kept(swizzled<C::kRowChunks>(lane % 16, min_of(warp * C::kDimSteps + n + lane / 16, C::kRowChunks - 1)) * 16);
    }
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        write_p[part][n] = ptx::kept(swizzled<C::kTokens / 8>(lane / 4, (part * 4 + warp) * 2 + n) * 16 + lane % 4 * 4);
      }
    }
  }
};

// What a consumer warp keeps of a segment.
template <class C>
struct RowState {
  int limit[C::kLaneRows];                      // tokens of the seq that the row sees
  float max[C::kLaneRows];                      // m over all tokens so far, log2 units
  float sum[C::kLaneRows];                      // ℓ over the lane's own tokens, since keep_sums
  float values[C::kRowTiles][C::kDimSteps][4];  // Õ
  std::uint32_t q[C::kQInRegisters ? C::kHeadDim / 16 : 1][4];
  bool has_earlier;  // Shared::earlier holds some of ℓ
};

// No token yet: of a segment, or of a chunk of one.
template <class C>
__device__ __forceinline__ void clear(RowState<C>& state) {
  state.has_earlier = false;
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    state.max[i] = kMinusInfinity;
    state.sum[i] = 0.0f;
  }
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kDimSteps; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) state.values[tile][n][r] = 0.0f;
    }
  }
}

template <class C>
__device__ __forceinline__ void start_segment(RowState<C>& state, const SegmentInfo& info, const Params& p,
                                              const Columns<C::kRowChunks>& q_places, std::uint32_t q_at, Shared<C>& shared, int group,
                                              int warp, int lane) {
  if (has_rules<C>(p)) start_rules<C>(info, p, shared, group, warp, lane);
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    const int packed = info.first_row + group * C::kGroupRows + group_row<C>(i, lane);
    state.limit[i] = p.causal && info.q_len > 1 ? info.kv_len - info.q_len + packed / p.group + 1 : info.kv_len;
  }
  clear<C>(state);
  if constexpr (C::kQInRegisters) {
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 16; ++k) ptx::ldmatrix_x4(state.q[k], q_at + q_places.at(k));
  }
}

// ℓ over all lanes of a row, with what Shared::earlier holds of it.
template <class C>
__device__ __forceinline__ float warp_sum(const RowState<C>& state, int i, const Shared<C>& shared, int group, int warp, int lane) {
  float sum = state.sum[i];
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (state.has_earlier) [[unlikely]] {
    const float2 earlier = shared.earlier[group][warp][group_row<C>(i, lane)];
    if (earlier.y != 0.0f) sum = fmaf(earlier.y, ptx::ex2(earlier.x - state.max[i]), sum);  // m only grows
  }
  return sum;
}

// Every so many tokens of a seq ℓ starts again from 0: a sum of millions of stages would drift by parts in a thousand, where stages are
// much alike and rounded the same way.
constexpr std::uint32_t kSumTokens = 1 << 17;

template <class C>
__device__ __forceinline__ void keep_sums(RowState<C>& state, const Stage& stage, Shared<C>& shared, int group, int warp, int lane) {
  const auto begin = static_cast<std::uint32_t>(stage.token_begin);
  if (begin / kSumTokens == (begin + stage.tokens) / kSumTokens) return;
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    const float sum = warp_sum<C>(state, i, shared, group, warp, lane);
    __syncwarp();
    if (lane % 4 == 0) shared.earlier[group][warp][group_row<C>(i, lane)] = make_float2(state.max[i], sum);
    state.sum[i] = 0.0f;
  }
  __syncwarp();
  state.has_earlier = true;
}

// Q·K of 16 tokens: sums[row tile][step of 8 tokens].
template <class C>
__device__ __forceinline__ void scores(float (&sums)[C::kRowTiles][2][4], const RowState<C>& state, const Places<C>& places,
                                       std::uint32_t k_at, std::uint32_t q_at) {
  using E = Element<typename C::T>;
  // Even and odd steps add up apart: half the depth of dependent instructions, and the same sums in every row block.
  float chains[2][C::kRowTiles][2][4] = {};
#pragma unroll
  for (int k = 0; k < C::kHeadDim / 16; ++k) {
    std::uint32_t b[4];
    ptx::ldmatrix_x4(b, k_at + places.k.at(k));
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
      std::uint32_t a[4];
      if constexpr (C::kQInRegisters) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = state.q[k][r];
      } else {
        ptx::ldmatrix_x4(a, q_at + tile * 16 * C::kRowBytes + places.q.at(k));
      }
      E::mma(chains[k % 2][tile][0], a, b[0], b[1]);
      E::mma(chains[k % 2][tile][1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < C::kHalves * 2; ++r) {
        sums[tile][n][r] = chains[0][tile][n][r] + chains[1][tile][n][r];
      }
    }
  }
}

// Online softmax of the warp's tokens, 16 of every 64: m and ℓ in state, P in shared memory. sums: logits in log2 units where rules have
// been applied, else products. All warps of a group take the same m, the largest logit so far; `shrink` is what Õ of before counts on it.
template <class C>
__device__ __forceinline__ void weights(float (&sums)[C::kParts][C::kRowTiles][2][4], float (&shrink)[C::kLaneRows], RowState<C>& state,
                                        const Places<C>& places, const Stage& stage, const Params& p, Shared<C>& shared, int group,
                                        int warp, int lane) {
  using E = Element<typename C::T>;
  unsigned char* const p_at = reinterpret_cast<unsigned char*>(shared.weights[group]);
  const float to_log2 = has_rules<C>(p) && stage.flags & Stage::kRuled ? 1.0f : p.scale_log2;
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    const int tile = i / C::kHalves, half = i % C::kHalves;
    float most = kMinusInfinity;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& logit = sums[part][tile][n][2 * half + j];
          logit *= to_log2;
          if (stage.flags & Stage::kMasked) {
            const int token = part * 64 + warp * 16 + n * 8 + 2 * (lane % 4) + j;  // of the stage: of the seq it might exceed an int
            if (token >= min_of(state.limit[i] - stage.token_begin, stage.tokens)) logit = kMinusInfinity;
          }
          most = fmaxf(most, logit);
        }
      }
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if (lane % 4 == 0) shared.warp_max[group][warp][group_row<C>(i, lane)] = most;
  }
  ptx::named_barrier(1 + group, C::kGroupThreads);
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    const int tile = i / C::kHalves, half = i % C::kHalves, row = group_row<C>(i, lane);
    float max = state.max[i];
#pragma unroll
    for (int from = 0; from < C::kGroupWarps; ++from) max = fmaxf(max, shared.warp_max[group][from][row]);
    const float base = max == kMinusInfinity ? 0.0f : max;
    shrink[i] = ptx::ex2(state.max[i] - base);
    float sum = 0.0f;  // of the stage
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float low = ptx::ex2(sums[part][tile][n][2 * half] - base), high = ptx::ex2(sums[part][tile][n][2 * half + 1] - base);
        sum += low + high;
        *reinterpret_cast<std::uint32_t*>(p_at + places.write_p[part][n] + (row - lane / 4) * C::kTokens * 2) = E::pack(low, high);
      }
    }
    state.sum[i] = fmaf(state.sum[i], shrink[i], sum);
    state.max[i] = max;
  }
}

// P·V of the warp's dims, over all tokens of the stage: those that it lacks have weight 0 and V 0.
template <class C>
__device__ __forceinline__ void values(RowState<C>& state, const float (&shrink)[C::kLaneRows], const Places<C>& places, std::uint32_t v_at,
                                       const Shared<C>& shared, int group) {
  using E = Element<typename C::T>;
  constexpr int kSteps = C::kTokens / kMmaTokens, kChains = kSteps > 4 ? 2 : 1;  // as in scores
  constexpr int kAtOnce = kChains == 1 ? C::kRowTiles : 1;                       // row tiles: registers do not hold two chains of both
  const std::uint32_t p_at = ptx::shared_address(shared.weights[group]);
#pragma unroll
  for (int first = 0; first < C::kRowTiles; first += kAtOnce) {
    // Of this stage alone: the matrix units round sums towards 0, and Õ of a long context would drift that way.
    float sums[kChains][kAtOnce][C::kDimSteps][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      std::uint32_t a[kAtOnce][4];
#pragma unroll
      for (int tile = 0; tile < kAtOnce; ++tile) {
        ptx::ldmatrix_x4(a[tile], p_at + (first + tile) * 16 * C::kTokens * 2 + places.p.at(k));
      }
#pragma unroll
      for (int n = 0; n < C::kDimSteps; n += 2) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_at + k * kMmaTokens * C::kRowBytes + places.v[n / 2]);
#pragma unroll
        for (int tile = 0; tile < kAtOnce; ++tile) {
          auto& chain = sums[k % kChains][tile];
          E::mma(chain[n], a[tile], b[0], b[1]);
          if (n + 1 < C::kDimSteps) E::mma(chain[n + 1 < C::kDimSteps ? n + 1 : n], a[tile], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kAtOnce; ++tile) {
#pragma unroll
      for (int n = 0; n < C::kDimSteps; ++n) {
#pragma unroll
        for (int j = 0; j < 2 * C::kHalves; ++j) {
          const float sum = kChains == 1 ? sums[0][tile][n][j] : sums[0][tile][n][j] + sums[kChains - 1][tile][n][j];
          float& value = state.values[first + tile][n][j];
          value = fmaf(value, shrink[(first + tile) * C::kHalves + j / 2], sum);
        }
      }
    }
  }
}

// A stage's part in what the group's rows see.
template <class C>
__device__ __forceinline__ void attend(RowState<C>& state, const Places<C>& places, const Stage& stage, const SegmentInfo& info,
                                       std::uint32_t k_at, std::uint32_t q_at, const Params& p, Shared<C>& shared, int group, int warp,
                                       int lane) {
  float sums[C::kParts][C::kRowTiles][2][4];
#pragma unroll
  for (int part = 0; part < C::kParts; ++part) scores<C>(sums[part], state, places, k_at + part * 64 * C::kRowBytes, q_at);
  if (has_rules<C>(p) && stage.flags & Stage::kRuled) apply_rules<C>(sums, stage, info, p, shared, group, warp, lane);
  float shrink[C::kLaneRows];
  weights<C>(sums, shrink, state, places, stage, p, shared, group, warp, lane);
  ptx::named_barrier(1 + group, C::kGroupThreads);
  values<C>(state, shrink, places, k_at + C::kStageBytes, shared, group);
}

// (m, ℓ) of the segment's rows, the same in every warp of the group. Õ of a row without a key becomes 0: it is not where another row of
// the seq sees a V that is not finite.
template <class C>
__device__ __forceinline__ void finish_rows(RowPartial (&rows)[C::kLaneRows], RowState<C>& state, Shared<C>& shared, int group, int warp,
                                            int lane) {
  bool empty = false;
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) {
    const float sum = warp_sum<C>(state, i, shared, group, warp, lane);
    rows[i] = {state.max[i], sum};
    if (C::kGroupWarps > 1 && lane % 4 == 0) shared.warp_sums[group][warp][group_row<C>(i, lane)] = sum;
  }
  if constexpr (C::kGroupWarps > 1) {
    ptx::named_barrier(1 + group, C::kGroupThreads);
#pragma unroll
    for (int i = 0; i < C::kLaneRows; ++i) {
      rows[i].sum = 0.0f;
#pragma unroll
      for (int from = 0; from < C::kGroupWarps; ++from) rows[i].sum += shared.warp_sums[group][from][group_row<C>(i, lane)];
    }
  }
#pragma unroll
  for (int i = 0; i < C::kLaneRows; ++i) empty |= rows[i].sum == 0.0f;
  if (__any_sync(~0u, empty)) [[unlikely]] {
#pragma unroll
    for (int i = 0; i < C::kLaneRows; ++i) {
      const int tile = i / C::kHalves, half = i % C::kHalves;
#pragma unroll
      for (int n = 0; n < C::kDimSteps; ++n) {
        if (rows[i].sum == 0.0f) state.values[tile][n][2 * half] = state.values[tile][n][2 * half + 1] = 0.0f;
      }
    }
  }
}

}  // namespace leanattn::cuda
