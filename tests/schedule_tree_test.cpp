// SPDX-License-Identifier: Apache-2.0
// The batch-invariant merge tree: whatever the cut, the chunks of an output combine in one order. The order is spelled out as brackets.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "leanattn/merge_tree.h"
#include "schedule_model.h"

namespace leanattn::schedule_test {
namespace {

// Brackets as text, to be read in a failure.
struct Text {
  std::string value;
  static Text leaf(int chunk) { return {std::to_string(chunk)}; }
  static Text join(const Text& a, const Text& b) { return {"(" + a.value + " " + b.value + ")"}; }
  bool operator==(const Text&) const = default;
};

// Brackets as an order-sensitive hash, for long outputs.
struct Hash {
  std::uint64_t value = 0;
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 31)) * 0x7fb5d329728ea185u;
    return (z ^ (z >> 27)) * 0x81dadef4bc2dd44du;
  }
  static Hash leaf(int chunk) { return {mix(chunk + 0x1234567u)}; }
  static Hash join(const Hash& a, const Hash& b) { return {mix(3 * mix(a.value) + 5 * mix(b.value + 1))}; }
  bool operator==(const Hash&) const = default;
};

// The one tree, level by level: neighbours pair up, an odd last one goes up alone.
template <class Bracket>
Bracket canonical(int chunks) {
  std::vector<Bracket> level;
  for (int chunk = 0; chunk < chunks; ++chunk) level.push_back(Bracket::leaf(chunk));
  while (level.size() > 1) {
    std::vector<Bracket> above;
    for (std::size_t i = 0; i < level.size(); i += 2) {
      above.push_back(i + 1 < level.size() ? Bracket::join(level[i], level[i + 1]) : level[i]);
    }
    level = above;
  }
  return level.front();
}

template <class Bracket>
struct Row {
  std::vector<TreeNode> nodes;
  std::vector<Bracket> brackets;
  std::size_t most = 0;

  void push(TreeNode node, Bracket bracket) {
    nodes.push_back(node);
    brackets.push_back(bracket);
    most = std::max(most, nodes.size());
    while (nodes.size() >= 2 && are_siblings(nodes[nodes.size() - 2], nodes.back())) {
      brackets[brackets.size() - 2] = Bracket::join(brackets[brackets.size() - 2], brackets.back());
      const TreeNode right = nodes.back();
      nodes.pop_back();
      brackets.pop_back();
      nodes.back() = {right.level + 1, right.index / 2};
    }
  }
  Bracket finish() const {
    Bracket bracket = brackets.back();
    for (std::size_t i = brackets.size() - 1; i-- > 0;) bracket = Bracket::join(brackets[i], bracket);
    return bracket;
  }
};

// One segment streams its chunks [begin, end) and must end with the row that next_node names.
template <class Bracket>
Row<Bracket> stream(int begin, int end) {
  Row<Bracket> row;
  for (int chunk = begin; chunk < end; ++chunk) row.push({0, chunk}, Bracket::leaf(chunk));
  int next = begin;
  for (const TreeNode& have : row.nodes) {
    const TreeNode node = next_node(next, end);
    EXPECT_EQ(node.level, have.level) << begin << " " << end;
    EXPECT_EQ(node.index, have.index) << begin << " " << end;
    EXPECT_EQ(node.index << node.level, next);
    next = (node.index + 1) << node.level;
  }
  EXPECT_EQ(next, end);
  EXPECT_LE(row.most, static_cast<std::size_t>(max_row_nodes(end - begin))) << begin << " " << end;
  return row;
}

// Cuts: borders between chunks, ascending, without 0 and chunks.
template <class Bracket>
Bracket merge_cut(int chunks, const std::vector<int>& cuts) {
  Row<Bracket> all;
  int begin = 0;
  for (std::size_t i = 0; i <= cuts.size(); ++i) {
    const int end = i < cuts.size() ? cuts[i] : chunks;
    const Row<Bracket> row = stream<Bracket>(begin, end);
    for (std::size_t k = 0; k < row.nodes.size(); ++k) all.push(row.nodes[k], row.brackets[k]);
    begin = end;
  }
  EXPECT_LE(all.most, static_cast<std::size_t>(max_row_nodes(chunks))) << chunks;
  return all.finish();
}

TEST(ScheduleTree, EveryCutOfUpToElevenChunksGivesTheSameBrackets) {
  EXPECT_EQ(canonical<Text>(7).value, "(((0 1) (2 3)) ((4 5) 6))");
  for (int chunks = 1; chunks <= 11; ++chunks) {
    const Text expected = canonical<Text>(chunks);
    for (int mask = 0; mask < 1 << (chunks - 1); ++mask) {
      std::vector<int> cuts;
      for (int chunk = 1; chunk < chunks; ++chunk) {
        if (mask >> (chunk - 1) & 1) cuts.push_back(chunk);
      }
      ASSERT_EQ(merge_cut<Text>(chunks, cuts).value, expected.value);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(ScheduleTree, RandomCutsOfLongOutputsGiveTheSameBrackets) {
  Random random(7);
  for (int round = 0; round < 3000; ++round) {
    const int chunks = random.between(1, random.one_in(10) ? 3000 : 200);
    std::vector<int> cuts;
    const int most = random.between(0, 12);
    for (int i = 0; i < most && chunks > 1; ++i) cuts.push_back(random.between(1, chunks - 1));
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    ASSERT_TRUE(merge_cut<Hash>(chunks, cuts) == canonical<Hash>(chunks)) << chunks;
    ASSERT_FALSE(HasFailure());
  }
}

// Nodes while one chunk after another is pushed, over every run inside an output, against the bound from the run's length alone.
TEST(ScheduleTree, RowsStayWithinTheirBound) {
  std::vector<std::size_t> most(131, 0);
  for (int begin = 0; begin < 130; ++begin) {
    Row<Hash> row;
    for (int end = begin + 1; end <= 260 && end - begin <= 130; ++end) {
      row.push({0, end - 1}, Hash::leaf(end - 1));
      most[end - begin] = std::max(most[end - begin], row.most);
    }
  }
  for (int chunks = 1; chunks <= 130; ++chunks) EXPECT_LE(most[chunks], static_cast<std::size_t>(max_row_nodes(chunks))) << chunks;
  EXPECT_EQ(max_row_nodes(1), 1);
  EXPECT_LE(max_row_nodes(0x7fffffff), 63);
}

// The line's own cuts: each segment of a batch-invariant line is a run of whole chunks, and its brackets depend on its own seq alone.
TEST(ScheduleTree, LinesOfAnyBatchGiveTheBracketsOfTheirSeqs) {
  OwnedLine owned;
  int cut_outputs = 0;
  for (int seed = 0; seed < 4000; ++seed) {
    random_line(seed + 1000000, owned);
    owned.line.chunk_tiles = 1 + seed % 5;
    const Line& line = owned.line;
    const Cut cut = make_cut(line);
    Row<Hash> row;
    for (long long stretch = 0; stretch < cut.stretches; ++stretch) {
      Cursor cursor = stretch_cursor(line, cut, stretch);
      Segment segment;
      while (next_segment(line, cursor, segment)) {
        const Chunks chunks = output_chunks(line, segment.tiles);
        const int begin = chunks.of(segment.tile_begin), end = chunks.of(segment.tile_end - 1) + 1;
        ASSERT_EQ(segment.tile_begin, chunks.begin(begin)) << describe(owned);
        ASSERT_EQ(segment.tile_end, chunks.begin(end)) << describe(owned);
        if (segment.tile_begin == 0) row = {};
        const Row<Hash> part = stream<Hash>(begin, end);
        if (has_own_stretches(line)) {  // one node, or the part of one that is there
          const int span = 1 << own_level(chunks.count, own_stretches(line, segment.tiles));
          ASSERT_TRUE(begin % span == 0 && end <= begin + span) << describe(owned);
        }
        for (std::size_t k = 0; k < part.nodes.size(); ++k) row.push(part.nodes[k], part.brackets[k]);
        if (segment.tile_end != segment.tiles) continue;
        ASSERT_TRUE(row.finish() == canonical<Hash>(chunks.count)) << describe(owned);
        cut_outputs += segment.tile_begin > 0;
      }
    }
    ASSERT_FALSE(HasFailure()) << describe(owned);
  }
  EXPECT_GT(cut_outputs, 1000);
}

}  // namespace
}  // namespace leanattn::schedule_test
