// SPDX-License-Identifier: Apache-2.0
// The kernel's time line as the command line sums it up: from times as the blocks wrote them.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tools/timeline.h"

namespace leanattn::tools {
namespace {

TEST(Timeline, CountsFromTheFirstEntry) {
  const std::vector<std::uint64_t> times = {1000, 1100, 1400,   // a block
                                            970,  900,  1500,   // entered first; its second mark is an earlier call's
                                            0,    0,    0,      // never ran
                                            1010, 1010, 1020};  // a mark at once
  const Timeline timeline = make_timeline(times, 3);
  ASSERT_EQ(timeline.blocks.size(), 3u);
  EXPECT_EQ(timeline.blocks[0], (std::vector<std::int64_t>{30, 130, 430}));
  EXPECT_EQ(timeline.blocks[1], (std::vector<std::int64_t>{0, Timeline::kNever, 530}));
  EXPECT_EQ(timeline.blocks[2], (std::vector<std::int64_t>{40, 40, 50}));
  EXPECT_EQ(timeline.duration_ns(), 530);
}

TEST(Timeline, QuantilesAreOverTheBlocksThatCame) {
  std::vector<std::uint64_t> times;
  for (std::uint64_t block = 0; block < 11; ++block) {
    times.push_back(5000 + block);
    times.push_back(block < 5 ? 0 : 6000 + 10 * block);
  }
  const Timeline timeline = make_timeline(times, 2);
  const MarkQuantiles entry = mark_quantiles(timeline, 0);
  EXPECT_EQ(entry.blocks, 11);
  EXPECT_EQ(entry.min_ns, 0.0);
  EXPECT_EQ(entry.median_ns, 5.0);
  EXPECT_EQ(entry.p90_ns, 9.0);
  EXPECT_EQ(entry.max_ns, 10.0);
  const MarkQuantiles other = mark_quantiles(timeline, 1);
  EXPECT_EQ(other.blocks, 6);
  EXPECT_EQ(other.min_ns, 1050.0);
  EXPECT_EQ(other.median_ns, 1075.0);
  EXPECT_EQ(other.max_ns, 1100.0);
  const MarkQuantiles none = mark_quantiles(make_timeline(std::vector<std::uint64_t>{7, 0}, 2), 1);
  EXPECT_EQ(none.blocks, 0);
}

TEST(Timeline, NothingRan) {
  const Timeline timeline = make_timeline(std::vector<std::uint64_t>(6, 0), 3);
  EXPECT_TRUE(timeline.blocks.empty());
  EXPECT_EQ(timeline.duration_ns(), 0);
  EXPECT_EQ(mark_quantiles(timeline, 2).blocks, 0);
}

TEST(Timeline, TheMedianCall) {
  std::vector<Timeline> all;
  for (const std::uint64_t duration : {50u, 10u, 40u, 30u, 20u})
    all.push_back(make_timeline(std::vector<std::uint64_t>{100, 100 + duration}, 2));
  EXPECT_EQ(median_timeline(all).duration_ns(), 30);
  all.pop_back();
  EXPECT_EQ(median_timeline(all).duration_ns(), 30);  // of 10, 30, 40, 50 the shorter
}

}  // namespace
}  // namespace leanattn::tools
