// SPDX-License-Identifier: Apache-2.0
// Masks and logit rules beyond causal: soft-cap, ALiBi, window, tree. Products of a stage become logits in log2 units; −inf where the row
// does not see the token. Only stages with Stage::kRuled come here (plain_tokens in load.cuh); the end of the seq and causal are masked
// in `weights` for every stage.
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
    const float slope = p.alibi_slopes != nullptr ? __ldg(p.alibi_slopes + info.q_head + head) * kLog2E : 0.0f;
    shared.row_rules[group][warp][row] = {info.kv_len - info.q_len + token, slope};
  }
  __syncwarp();
}

// sums: Q·K of the warp's tokens, 16 of every 64. Each rule is one uniform branch over all of them.
template <class C>
__device__ __forceinline__ void apply_rules(float (&sums)[C::kParts][C::kRowTiles][2][4], const Stage& stage, const SegmentInfo& info,
                                            const Params& p, const Shared<C>& shared, int group, int warp, int lane) {
  const RowRule* const rules = shared.row_rules[group][warp];
  // change(product or logit, token of the stage, rule of the row) for every one of the lane's
  const auto for_each = [&](const auto& change) {
#pragma unroll
    for (int i = 0; i < C::kLaneRows; ++i) {
      const RowRule rule = rules[group_row<C>(i, lane)];
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            change(sums[part][i / C::kHalves][n][2 * (i % C::kHalves) + j], part * 64 + warp * 16 + n * 8 + 2 * (lane % 4) + j, rule);
          }
        }
      }
    }
  };
  if (p.softcap_log2 > 0.0f) {
    for_each([&](float& logit, int, const RowRule&) { logit = p.softcap_log2 * tanhf(logit * p.softcap_scale); });
  } else {
    for_each([&](float& logit, int, const RowRule&) { logit *= p.scale_log2; });
  }
  if (p.alibi_slopes != nullptr) {
    for_each([&](float& logit, int token, const RowRule& rule) {
      logit = fmaf(-rule.slope_log2, fabsf(static_cast<float>(rule.position - stage.token_begin - token)), logit);
    });
  }
  const int window = p.line.window_left;
  if (window >= 0 && stage.token_begin < info.kv_len - 1 - window) {
    for_each([&](float& logit, int token, const RowRule& rule) {
      if (rule.position - stage.token_begin - token > window) logit = kMinusInfinity;
    });
  }
  const int first_new = info.kv_len - info.q_len;  // token of the seq; below 0 where there are fewer keys than query tokens
  if (p.tree_mask != nullptr && stage.token_begin + stage.tokens > first_new) {
    const std::int64_t q_begin = p.line.cu_seqlens_q ? p.line.cu_seqlens_q[info.seq] : static_cast<std::int64_t>(info.seq) * p.line.q_len;
    for_each([&](float& logit, int token, const RowRule& rule) {
      const int bit = stage.token_begin + token - first_new;
      if (bit < 0 || token >= stage.tokens) return;
      const std::int64_t row = q_begin + rule.position - first_new;
      if ((__ldg(p.tree_mask + row * p.tree_words + bit / 32) >> bit % 32 & 1) == 0) logit = kMinusInfinity;
    });
  }
}

}  // namespace leanattn::cuda
