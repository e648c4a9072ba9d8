// SPDX-License-Identifier: Apache-2.0
// Lines too long to spell out: ten million tiles, 100,000 seqs, contexts near 2^31 tokens. And the default splits, and what the headers
// may include.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "leanattn/splits.h"
#include "schedule_model.h"

namespace leanattn::schedule_test {
namespace {

constexpr int kLongest = 0x7fffffff;

// Walks every stretch: outputs in order, tiles without gap or overlap, merge lists that name the same pieces. Returns tiles covered.
// expected_tiles(seq) is the caller's own arithmetic; outputs is the number of outputs of every seq.
template <class ExpectedTiles>
long long walk(const Line& line, int outputs, ExpectedTiles expected_tiles) {
  const Cut cut = make_cut(line);
  long long covered = 0, least = -1, most = 0;
  int seq = 0, output = 0, tile = 0;
  for (long long stretch = 0; stretch < cut.stretches; ++stretch) {
    Cursor cursor = stretch_cursor(line, cut, stretch);
    Segment segment;
    long long load = 0;
    while (next_segment(line, cursor, segment)) {
      EXPECT_EQ(segment.seq, seq);
      EXPECT_EQ(segment.output, output);
      EXPECT_EQ(segment.tiles, expected_tiles(seq));
      EXPECT_EQ(segment.tile_begin, tile);
      EXPECT_GT(segment.tile_end, tile);
      load += segment.tile_end - segment.tile_begin;
      if (is_cut(segment)) {
        const MergeList list = merge_list(line, cut, seq, output);
        EXPECT_LE(list.first, stretch);
        EXPECT_GE(list.last, stretch);
        const Segment found = segment_of(line, cut, list, seq, output, stretch);
        EXPECT_EQ(found.tile_begin, segment.tile_begin);
        EXPECT_EQ(found.tile_end, segment.tile_end);
      }
      tile = segment.tile_end;
      if (tile == segment.tiles) {
        tile = 0;
        if (++output == outputs) {
          output = 0;
          ++seq;
        }
      }
      if (::testing::Test::HasFailure()) return -1;
    }
    covered += load;
    least = least < 0 ? load : std::min(least, load);
    most = std::max(most, load);
  }
  EXPECT_EQ(seq, line.num_seqs);
  EXPECT_EQ(tile, 0);
  if (line.policy == Policy::kLean) {
    EXPECT_LE(most - least, 2LL * std::max(line.chunk_tiles, 1) - 1);
  }
  return covered;
}

TEST(ScheduleExtreme, TenMillionTilesInOneOutput) {
  const int kv_lens[] = {10'000'000};
  Line line;
  line.num_seqs = 1;
  line.kv_lens = kv_lens;
  for (const int workers : {1, 7, 132, 300}) {
    line.workers = workers;
    for (const int chunk : {0, 1, 16, 1000}) {
      line.chunk_tiles = chunk;
      EXPECT_EQ(walk(line, 1, [](int) { return 10'000'000; }), 10'000'000);
    }
  }
  line.chunk_tiles = 0;
  line.policy = Policy::kFlashDecoding;
  line.splits = 1000;
  EXPECT_EQ(walk(line, 1, [](int) { return 10'000'000; }), 10'000'000);
}

// Chunks that grow, at lengths around which their number changes and where it stops to: none is empty, they differ by a grain at most, and
// Chunks::of is the inverse of Chunks::begin.
TEST(ScheduleExtreme, GrownChunksOfAnyLength) {
  std::vector<int> lengths{10'000'000, (1 << 24) - 1, 1 << 24, (1 << 24) + 1, (1 << 25) - 1, 1 << 25};
  for (int tiles = 1; tiles <= 3200; ++tiles) lengths.push_back(tiles);
  for (const int tiles : lengths) {
    for (const int grain : {1, 2, 4, 7}) {
      const Chunks chunks = make_chunks(tiles, grain, true);
      ASSERT_EQ(chunks.begin(0), 0);
      ASSERT_EQ(chunks.begin(chunks.count), tiles);
      ASSERT_EQ(chunks.count & (chunks.count - 1), 0);
      const int whole = (tiles + grain - 1) / grain / chunks.count * grain;
      for (int i = 0; i < chunks.count; ++i) {
        const int begin = chunks.begin(i), end = chunks.begin(i + 1);
        ASSERT_GT(end, begin) << tiles << " tiles, grain " << grain;
        ASSERT_LE(end - begin, whole + grain) << tiles << " tiles, grain " << grain;
        ASSERT_TRUE(end - begin >= whole || end == tiles) << tiles << " tiles, grain " << grain;
        for (const int tile : {begin, (begin + end) / 2, end - 1}) ASSERT_EQ(chunks.of(tile), i) << tile << " of " << tiles;
      }
      ASSERT_EQ(chunks.of(tiles), chunks.count - 1);
    }
  }
}

TEST(ScheduleExtreme, HundredThousandSeqs) {
  constexpr int kSeqs = 100'000;
  Random random(3);
  std::vector<int> kv_lens(kSeqs);
  for (int& length : kv_lens) length = random.one_in(10) ? 0 : random.between(1, random.one_in(100) ? 200'000 : 3000);
  Line line;
  line.num_seqs = kSeqs;
  line.kv_lens = kv_lens.data();
  line.tile_tokens = 64;
  line.kv_heads = 8;
  line.workers = 300;
  const auto tiles = [&](int seq) { return std::max((kv_lens[seq] + 63) / 64, 1); };
  long long all = 0;
  for (int seq = 0; seq < kSeqs; ++seq) all += 8LL * tiles(seq);
  EXPECT_GT(all, 10'000'000);
  std::vector<long long> prefix(kSeqs + 1);
  seq_unit_prefix(line, prefix.data());
  Line with_prefix = line;
  with_prefix.seq_units = prefix.data();
  EXPECT_EQ(walk(with_prefix, 8, tiles), all);
  line.workers = 13;  // a scan a stretch
  EXPECT_EQ(walk(line, 8, tiles), all);
  for (const Policy policy : {Policy::kFa2, Policy::kFlashDecoding}) {
    with_prefix.seq_units = nullptr;
    with_prefix.policy = policy;
    with_prefix.splits = 3;
    seq_unit_prefix(with_prefix, prefix.data());
    with_prefix.seq_units = prefix.data();
    EXPECT_EQ(walk(with_prefix, 8, tiles), all);
  }
}

TEST(ScheduleExtreme, ContextsNearTwoToThe31) {
  const int kv_lens[] = {kLongest, 0, kLongest - 1, 1, kLongest};
  Line line;
  line.num_seqs = 5;
  line.kv_lens = kv_lens;
  line.kv_heads = 128;
  line.workers = 300;
  for (const int tile : {1, 16, 256, kLongest}) {
    line.tile_tokens = tile;
    const auto tiles = [&](int seq) {
      return static_cast<int>(std::max((static_cast<std::int64_t>(kv_lens[seq]) + tile - 1) / tile, std::int64_t{1}));
    };
    long long all = 0;
    for (int seq = 0; seq < 5; ++seq) all += 128LL * tiles(seq);
    for (const int chunk : {0, 7, kLongest}) {
      line.chunk_tiles = chunk;
      EXPECT_EQ(walk(line, 128, tiles), all) << tile << " " << chunk;
    }
    line.chunk_tiles = 0;
    line.policy = Policy::kFlashDecoding;
    line.splits = 128;
    EXPECT_EQ(walk(line, 128, tiles), all) << tile;
    line.policy = Policy::kLean;
    const int last = tiles(0) - 1;
    EXPECT_EQ(tile_token_end(line, 0, last), kLongest);
    EXPECT_EQ(tile_token_begin(line, 0, last), static_cast<std::int64_t>(last) * tile);
  }
}

TEST(ScheduleExtreme, WindowAtTheEndOfALongContext) {
  const int kv_lens[] = {kLongest};
  Line line;
  line.num_seqs = 1;
  line.kv_lens = kv_lens;
  line.q_len = 4;
  line.window_left = 4096;
  line.tile_tokens = 256;
  EXPECT_EQ(seq_first_token(line, 0), kLongest - 4 - 4096);
  EXPECT_EQ(seq_tiles(line, 0), 17);  // 4100 tokens, the first and the last tile in part
  EXPECT_EQ(tile_token_begin(line, 0, 0), kLongest - 4100);
  EXPECT_EQ(tile_token_end(line, 0, 16), kLongest);
  line.window_left = kLongest;
  EXPECT_EQ(seq_first_token(line, 0), 0);
  const int empty[] = {0};
  line.kv_lens = empty;
  EXPECT_EQ(seq_first_token(line, 0), 0);
  EXPECT_EQ(seq_tiles(line, 0), 1);
}

TEST(ScheduleExtreme, MoreSplitsThanFitEvenly) {
  const int kv_lens[] = {kLongest};
  Line line;
  line.num_seqs = 1;
  line.kv_lens = kv_lens;
  line.policy = Policy::kFlashDecoding;
  line.splits = 300'000;  // 7159 tiles each: the last splits have none
  EXPECT_EQ(walk(line, 1, [](int) { return kLongest; }), kLongest);
}

// The rule in words: enough outputs, one split; else the least eligible number of splits whose last wave is 85 % as full as the best.
int splits_by_definition(long long outputs, int workers, int tiles) {
  if (outputs * 5 >= workers * 4LL) return 1;
  std::vector<int> eligible;
  for (int splits = 1; splits <= 128 && splits <= workers && splits <= tiles; ++splits) {
    const auto tiles_a_split = [&](int n) { return tiles / n + (tiles % n > 0); };
    if (splits == 1 || tiles_a_split(splits) < tiles_a_split(splits - 1)) eligible.push_back(splits);
  }
  const auto percent_e12 = [&](int splits) {  // fullness × 10^12, rounded down
    long long waves = 0;
    while (waves * workers < outputs * splits) ++waves;
    return static_cast<__int128>(outputs) * splits * 1'000'000'000'000 / (static_cast<__int128>(waves) * workers);
  };
  __int128 best = 0;
  for (const int splits : eligible) best = std::max(best, percent_e12(splits));
  for (const int splits : eligible) {
    if (percent_e12(splits) * 100 + 100 >= best * 85) return splits;
  }
  return 1;
}

TEST(ScheduleExtreme, DefaultSplitsFollowTheRule) {
  EXPECT_EQ(flashdecoding_splits(1, 132, 64), 64);
  EXPECT_EQ(flashdecoding_splits(8, 132, 64), 16);
  EXPECT_EQ(flashdecoding_splits(106, 132, 64), 1);
  EXPECT_EQ(flashdecoding_splits(1, 1, 100), 1);
  EXPECT_EQ(flashdecoding_splits(1, 132, 1), 1);
  Random random(11);
  for (int round = 0; round < 20000; ++round) {
    const int outputs = random.between(1, 200), workers = random.between(1, 300), tiles = random.between(1, random.one_in(4) ? 2000 : 60);
    ASSERT_EQ(flashdecoding_splits(outputs, workers, tiles), splits_by_definition(outputs, workers, tiles))
        << outputs << " outputs, " << workers << " workers, " << tiles << " tiles";
  }
}

TEST(ScheduleExtreme, HeadersForTheDeviceIncludeNothing) {
  for (const char* name : {"/include/leanattn/chunks.h", "/include/leanattn/schedule.h", "/src/partial.h"}) {
    std::ifstream file(std::string(LEANATTN_SOURCE_DIR) + name);
    ASSERT_TRUE(file) << name;
    int lines = 0;
    for (std::string line; std::getline(file, line); ++lines) {
      const std::size_t first = line.find_first_not_of(" \t");
      if (first == std::string::npos || line[first] != '#' || line == "#include \"leanattn/chunks.h\"") continue;
      EXPECT_EQ(line.find("include"), std::string::npos) << name << ": " << line;
    }
    EXPECT_GT(lines, 50) << name;
  }
}

}  // namespace
}  // namespace leanattn::schedule_test
