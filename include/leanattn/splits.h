// SPDX-License-Identifier: Apache-2.0
// How many splits the flashdecoding policy takes where none are given. Compiles with g++, clang, nvcc and NVRTC.
#pragma once

#include "leanattn/schedule.h"

namespace leanattn {

// splits of the flashdecoding policy when none are given, as FlashAttention-2 chooses them (num_splits_heuristic, flash_api.cpp): one if
// the outputs alone fill 80 % of the workers; else the fewest whose last wave is at least 85 % as full as that of the best choice.
// A number of splits that only shortens the last split is passed over. outputs, workers, tiles (of the longest output) ≥ 1.
LEANATTN_HOST_DEVICE inline int flashdecoding_splits(long long outputs, int workers, int tiles) {
  constexpr int kMaxSplits = 128;
  if (outputs >= workers || outputs * 10 >= workers * 8LL) return 1;
  const int most = min_of(min_of(kMaxSplits, workers), max_of(tiles, 1));
  long long best_busy = 0, best_slots = 1;  // fullness of the waves = busy / slots
  for (int pass = 0; pass < 2; ++pass) {
    for (int splits = 1; splits <= most; ++splits) {
      if (splits > 1 && ceil_div(tiles, splits) == ceil_div(tiles, splits - 1)) continue;
      const long long busy = outputs * splits;
      const long long slots = (busy + workers - 1) / workers * workers;
      if (pass == 0 && busy * best_slots > best_busy * slots) {
        best_busy = busy;
        best_slots = slots;
      }
      if (pass == 1 && busy * best_slots * 100 >= best_busy * slots * 85) return splits;
    }
  }
  return 1;
}

}  // namespace leanattn
