// SPDX-License-Identifier: Apache-2.0
// Masks and logit rules beyond causal: soft-cap, ALiBi, window, tree. Products of a stage become logits in log2 units; −inf where the row
// does not see the token. Only stages with Stage::kRuled come here (plain_tokens in load.cuh); the end of the seq and causal are masked
// in `weights`.
#pragma once

#include "cuda/config.cuh"
#include "numeric.h"
#include "partial.h"

namespace leanattn::cuda {

// Row of the group that lane row i (row tile · kHalves + half) stands for.
template <class C>
__device__ __forceinline__ int group_row(int i, int lane) {
  return i / C::kHalves * 16 + i % C::kHalves * 8 + lane / 4;
}

// At the start of a segment: what the rules need to know of the group's rows, a copy for each warp.
template <class C>
__device__ __forceinline__ void start_rules(const SegmentInfo& info, const Params& p, Shared<C>& shared, int group, int warp, int lane) {
  for (int row = lane; row < C::kGroupRows; row += kWarp) {
    // Rows past the last stand in for it: they must not address a tree row.
    const int packed = min_of(info.first_row + group * C::kGroupRows + row, info.q_len * p.group - 1);
    const int token = packed / p.group, head = packed - token * p.group;
    RowRule& rule = shared.row_rules[group][warp][row];
    rule.position = info.kv_len - info.q_len + token;
    rule.slope_log2 = p.alibi_slopes != nullptr ? p.alibi_slopes[info.q_head + head] * kLog2E : 0.0f;
  }
  __syncwarp();
}

// tanh to 2^-22 of its value: a polynomial near 0, where 1 − 2 ÷ (e^2x + 1) would lose bits.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  constexpr float kNear = 0.6f;
  const float square = x * x;
  float near = fmaf(-0.006276390f, square, 0.021116216f);
  near = fmaf(near, square, -0.053875137f);
  near = fmaf(near, square, 0.133329242f);
  near = fmaf(near, square, -0.333333313f);
  near = fmaf(near * square, x, x);
  const float far = fmaf(-2.0f, ptx::reciprocal(ptx::ex2(fabsf(x) * (2.0f * kLog2E)) + 1.0f), 1.0f);
  return fabsf(x) < kNear ? near : copysignf(far, x);
}

// sums: Q·K of the warp's tokens, 16 of every 64. Each rule is one uniform branch over all of them.
template <class C>
__device__ __forceinline__ void apply_rules(float (&sums)[C::kParts][C::kRowTiles][2][4], const Stage& stage, const SegmentInfo& info,
                                            const Params& p, const Shared<C>& shared, int group, int warp, int lane) {
  const RowRule* const rules = shared.row_rules[group][warp];
  const int first = warp * 16 + 2 * (lane % 4);  // the lane's first token of the stage
  // change(product or logit, offset) for each of lane row i's tokens first + offset; offsets are constants
  const auto for_each = [&](int i, const auto& change) {
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) change(sums[part][i / C::kHalves][n][2 * (i % C::kHalves) + j], part * 64 + n * 8 + j);
      }
    }
  };
  // Tokens from the lane's first one to the position of its row.
  const auto ahead = [&](const RowRule& rule) { return rule.position - stage.token_begin - first; };
  if (p.softcap_log2 > 0.0f) {
#pragma unroll
    for (int i = 0; i < C::kLaneRows; ++i) {
      for_each(i, [&](float& logit, int) { logit = p.softcap_log2 * hyperbolic_tangent(logit * p.softcap_scale); });
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kLaneRows; ++i) for_each(i, [&](float& logit, int) { logit *= p.scale_log2; });
  }
  if (p.alibi_slopes != nullptr) {
#pragma unroll
    for (int i = 0; i < C::kLaneRows; ++i) {
      const RowRule rule = rules[group_row<C>(i, lane)];
      const float distance = static_cast<float>(ahead(rule));
      for_each(i, [&](float& logit, int offset) { logit = fmaf(-rule.slope_log2, fabsf(distance - static_cast<float>(offset)), logit); });
    }
  }
  const int window = p.line.window_left;
  if (window >= 0 && stage.token_begin < info.kv_len - 1 - window) {
#pragma unroll
    for (int i = 0; i < C::kLaneRows; ++i) {
      const int hidden = ahead(rules[group_row<C>(i, lane)]) - window;  // tokens of the lane's that lie before the window
      for_each(i, [&](float& logit, int offset) {
        if (offset < hidden) logit = kMinusInfinity;
      });
    }
  }
  const int first_new = info.kv_len - info.q_len;  // token of the seq; below 0 where there are fewer keys than query tokens
  if (p.tree_mask != nullptr && info.rows > 0 && stage.token_begin + stage.tokens > first_new) {
    const std::int64_t q_begin = first_query<C>(p.line, info.seq);
#pragma unroll
    for (int i = 0; i < C::kLaneRows; ++i) {
      const int position = rules[group_row<C>(i, lane)].position;
      const std::uint32_t* const row = p.tree_mask + (q_begin + position - first_new) * p.tree_words;
      for_each(i, [&](float& logit, int offset) {
        const int bit = stage.token_begin + first + offset - first_new;
        if (bit < 0 || first + offset >= stage.tokens) return;
        if ((row[bit / 32] >> bit % 32 & 1) == 0) logit = kMinusInfinity;
      });
    }
  }
}

}  // namespace leanattn::cuda
