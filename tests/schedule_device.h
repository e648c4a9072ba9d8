// SPDX-License-Identifier: Apache-2.0
// The schedule and the merge evaluated by a GPU, for tests that compare them with the host. Pointers are device pointers.
#pragma once

#include <cuda_runtime_api.h>

#include "leanattn/schedule.h"
#include "partial.h"

namespace leanattn::schedule_test {

// digests[i] = that of lines[i] plus the sum over its stretches (schedule_digest.h).
cudaError_t digest_on_device(int count, const Line* lines, unsigned long long* digests);

// seq_unit_prefix of one line.
cudaError_t prefix_on_device(const Line& line, long long* prefix);

struct DeviceMerge {
  RowMerge merge;
  float value = 0.0f;  // of x and y with one value each
  float o = 0.0f;      // value·finish_factor
  float lse = 0.0f;    // finish_lse
};
cudaError_t merge_on_device(int count, const RowPartial* x, const RowPartial* y, const float* x_values, const float* y_values,
                            DeviceMerge* merges);

}  // namespace leanattn::schedule_test
