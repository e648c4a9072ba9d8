// SPDX-License-Identifier: Apache-2.0
#include "tools/timeline.h"

#include <algorithm>

#include "tools/run.h"

namespace leanattn::tools {

std::int64_t Timeline::duration_ns() const {
  std::int64_t last = 0;
  for (const std::vector<std::int64_t>& block : blocks) {
    for (const std::int64_t ns : block) last = std::max(last, ns);
  }
  return last;
}

Timeline make_timeline(std::span<const std::uint64_t> times, std::size_t marks) {
  std::uint64_t first = 0;
  for (std::size_t at = 0; at + marks <= times.size(); at += marks) {
    if (times[at] != 0 && (first == 0 || times[at] < first)) first = times[at];
  }
  Timeline timeline;
  for (std::size_t at = 0; at + marks <= times.size(); at += marks) {
    if (times[at] == 0) continue;
    std::vector<std::int64_t>& block = timeline.blocks.emplace_back(marks, Timeline::kNever);
    for (std::size_t mark = 0; mark < marks; ++mark) {
      if (times[at + mark] >= times[at]) block[mark] = static_cast<std::int64_t>(times[at + mark] - first);
    }
  }
  return timeline;
}

MarkQuantiles mark_quantiles(const Timeline& timeline, std::size_t mark) {
  std::vector<double> times;
  for (const std::vector<std::int64_t>& block : timeline.blocks) {
    if (block[mark] != Timeline::kNever) times.push_back(static_cast<double>(block[mark]));
  }
  MarkQuantiles q;
  if (times.empty()) return q;
  std::sort(times.begin(), times.end());
  q.blocks = static_cast<int>(times.size());
  q.min_ns = times.front();
  q.median_ns = percentile(times, 0.5);
  q.p90_ns = percentile(times, 0.9);
  q.max_ns = times.back();
  return q;
}

const Timeline& median_timeline(const std::vector<Timeline>& all) {
  std::vector<std::size_t> order(all.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  const std::size_t middle = (order.size() - 1) / 2;
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(middle), order.end(),
                   [&](std::size_t a, std::size_t b) { return all[a].duration_ns() < all[b].duration_ns(); });
  return all[order[middle]];
}

}  // namespace leanattn::tools
