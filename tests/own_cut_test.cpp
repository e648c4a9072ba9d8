// SPDX-License-Identifier: Apache-2.0
// Which outputs get stretches of their own, in clusters of how many: the laws that the launch relies on, and the choices that matter.
#include "cuda/own_cut.h"

#include <gtest/gtest.h>

#include "schedule_model.h"

namespace leanattn::cuda {
namespace {

// Clusters that an H200 holds at once, as its runtime says.
constexpr std::array<int, kMaxCluster + 1> kH200 = {0, 0, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7};
constexpr std::int64_t kTileBytes = 64 * 128 * 4;

Work h200(std::int64_t outputs, std::int64_t tiles, int chunk_tiles = 0) { return {outputs, tiles, kTileBytes, 132, chunk_tiles, kH200}; }

TEST(OwnCut, FitsTheDeviceAtOnce) {
  schedule_test::Random random(1);
  for (int i = 0; i < 20000; ++i) {
    Work work = h200(random.between(1, 200), random.between(1, random.one_in(2) ? 40 : 100000));
    work.blocks = random.between(1, 132);
    work.chunk_tiles = random.between(0, 2);
    if (random.one_in(3)) {
      for (int& clusters : work.clusters) clusters = random.between(0, 66);
    }
    const OwnCut cut = own_cut(work);
    if (cut.stretches == 0) continue;
    ASSERT_GE(cut.cluster, 1);
    ASSERT_LE(cut.cluster, kMaxCluster);
    ASSERT_EQ(cut.stretches % cut.cluster, 0);
    ASSERT_LE(cut.stretches * work.outputs, work.blocks);
    if (work.chunk_tiles > 0) {
      ASSERT_EQ(cut.cluster & (cut.cluster - 1), 0);
    }
    if (cut.cluster == 1) {
      ASSERT_EQ(cut.stretches, 1);
    } else {
      ASSERT_LE(cut.stretches / cut.cluster * work.outputs, work.clusters[cut.cluster]);
    }
  }
}

TEST(OwnCut, WithoutClustersOnlyWholeOutputs) {
  for (const std::int64_t outputs : {1, 8, 64, 120, 132}) {
    for (const std::int64_t tiles : {1, 16, 64, 4096}) {
      Work work = h200(outputs, tiles);
      work.clusters = {};
      EXPECT_LE(own_cut(work).stretches, 1) << outputs << " outputs of " << tiles << " tiles";
    }
  }
}

TEST(OwnCut, ShortWorkTakesClusters) {
  EXPECT_GT(own_cut(h200(1, 16)).cluster, 4);
  EXPECT_EQ(own_cut(h200(1, 16)).stretches, own_cut(h200(1, 16)).cluster);  // one cluster: nothing to merge through memory
  EXPECT_GT(own_cut(h200(1, 4096)).stretches, 100);                         // most of the device
  EXPECT_EQ(own_cut(h200(64, 16)).stretches, 2);
  EXPECT_EQ(own_cut(h200(128, 16)).stretches, 1);
}

TEST(OwnCut, LongWorkTakesWholeTheDevice) {
  EXPECT_EQ(own_cut(h200(24, 100000)).stretches, 0);  // no equal share for each of 24 uses nearly all of 132
  EXPECT_EQ(own_cut(h200(133, 16)).stretches, 0);
  EXPECT_EQ(own_cut(h200(1 << 20, 1 << 20)).stretches, 0);
}

// The search leaves out numbers of clusters that cannot be faster: none that fits is.
TEST(OwnCut, NothingThatFitsIsFaster) {
  schedule_test::Random random(2);
  for (int i = 0; i < 3000; ++i) {
    Work work = h200(random.between(1, random.one_in(3) ? 132 : 12), random.between(1, random.one_in(2) ? 400 : 100000));
    if (random.one_in(3)) work.blocks = random.between(1, 132);
    const OwnCut cut = own_cut(work);
    const double chosen_us = cut.stretches == 0 ? across_us(work) : own_cut_us(work, cut.cluster, cut.stretches / cut.cluster);
    for (int cluster = 1; cluster <= kMaxCluster; ++cluster) {
      for (std::int64_t joined = 1; joined <= most_joined(work, cluster); ++joined) {
        ASSERT_GE(own_cut_us(work, cluster, joined), chosen_us)
            << work.outputs << " outputs of " << work.tiles << " tiles: " << joined << " clusters of " << cluster;
      }
    }
  }
}

// More context never takes fewer blocks away from it than half: a bound twice as long is no reason to collapse.
TEST(OwnCut, LongerContextsKeepTheirBlocks) {
  for (std::int64_t outputs = 1; outputs <= 66; ++outputs) {
    for (std::int64_t tiles = 4; tiles <= 1 << 16; tiles *= 2) {
      const OwnCut shorter = own_cut(h200(outputs, tiles)), longer = own_cut(h200(outputs, 2 * tiles));
      if (longer.stretches == 0) continue;
      EXPECT_GE(longer.stretches * 2, shorter.stretches) << outputs << " outputs of " << tiles << " tiles";
    }
  }
}

}  // namespace
}  // namespace leanattn::cuda
