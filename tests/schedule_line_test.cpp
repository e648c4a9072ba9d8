// SPDX-License-Identifier: Apache-2.0
// Invariants of the cut over 120,000 seeded lines, each against the line spelled out unit by unit (schedule_model.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "schedule_model.h"

namespace leanattn::schedule_test {
namespace {

constexpr int kProblems = 120000;

struct Piece {
  long long stretch = 0;
  Segment segment;
};

std::vector<Piece> all_pieces(const Line& line, const Cut& cut) {
  std::vector<Piece> pieces;
  for (long long stretch = 0; stretch < cut.stretches; ++stretch) {
    Cursor cursor = stretch_cursor(line, cut, stretch);
    Segment segment;
    while (next_segment(line, cursor, segment)) pieces.push_back({stretch, segment});
  }
  return pieces;
}

bool same(const Segment& a, const Segment& b) {
  return a.seq == b.seq && a.output == b.output && a.tiles == b.tiles && a.tile_begin == b.tile_begin && a.tile_end == b.tile_end;
}

// Each check returns false on the first fault, so that a broken schedule reports one line and not a million.
#define CHECK_OR_FAIL(condition)                               \
  do {                                                         \
    if (!(condition)) {                                        \
      ADD_FAILURE() << #condition << " | " << describe(owned); \
      return false;                                            \
    }                                                          \
  } while (0)

// Every tile of every output once; segments ordered, disjoint, and the ones of the model.
bool check_coverage(const OwnedLine& owned, const Model& model, const Cut& cut, const std::vector<Piece>& pieces) {
  CHECK_OR_FAIL(cut.units == model.units);
  CHECK_OR_FAIL(cut.stretches + 1 == static_cast<long long>(model.stretch_begins.size()));
  std::vector<std::vector<int>> times(model.outputs.size());
  for (std::size_t i = 0; i < times.size(); ++i) times[i].assign(model.outputs[i].tiles, 0);
  std::size_t next = 0, output = 0;
  for (long long stretch = 0; stretch < cut.stretches; ++stretch) {
    for (const ModelSegment& expected : model.segments[stretch]) {
      CHECK_OR_FAIL(next < pieces.size());
      const Piece& piece = pieces[next++];
      const ModelOutput& target = model.outputs[expected.output];
      CHECK_OR_FAIL(piece.stretch == stretch);
      CHECK_OR_FAIL(piece.segment.seq == target.seq && piece.segment.output == target.output && piece.segment.tiles == target.tiles);
      CHECK_OR_FAIL(piece.segment.tile_begin == expected.tile_begin && piece.segment.tile_end == expected.tile_end);
    }
  }
  CHECK_OR_FAIL(next == pieces.size());
  for (const Piece& piece : pieces) {
    while (output < model.outputs.size() &&
           (model.outputs[output].seq != piece.segment.seq || model.outputs[output].output != piece.segment.output)) {
      ++output;  // pieces come in line order, so the search never goes back
    }
    CHECK_OR_FAIL(output < model.outputs.size());
    CHECK_OR_FAIL(0 <= piece.segment.tile_begin && piece.segment.tile_begin < piece.segment.tile_end);
    CHECK_OR_FAIL(piece.segment.tile_end <= model.outputs[output].tiles);
    for (int tile = piece.segment.tile_begin; tile < piece.segment.tile_end; ++tile) ++times[output][tile];
  }
  for (const auto& tiles : times) CHECK_OR_FAIL(std::all_of(tiles.begin(), tiles.end(), [](int n) { return n == 1; }));
  return true;
}

// Tokens of the tiles of an output: from the first visible one to the last, without a gap; tile borders on multiples of tile_tokens.
bool check_tokens(const OwnedLine& owned, const Model& model) {
  const Line& line = owned.line;
  for (const ModelOutput& output : model.outputs) {
    if (output.output != 0) continue;
    const int kv_len = owned.kv_len(output.seq);
    int token = std::min(output.first_token, kv_len);
    for (int tile = 0; tile < output.tiles; ++tile) {
      const int begin = tile_token_begin(line, output.seq, tile), end = tile_token_end(line, output.seq, tile);
      CHECK_OR_FAIL(begin == token);
      CHECK_OR_FAIL(kv_len == 0 ? end == 0 : (begin < end && end - begin <= line.tile_tokens));
      CHECK_OR_FAIL(end == kv_len || end % line.tile_tokens == 0);
      token = end;
    }
    CHECK_OR_FAIL(token == kv_len);
  }
  return true;
}

// Loads of a lean cut: units within one; tiles within 2c − 1 beyond the difference of the cost units, c = max(chunk_tiles, 1).
bool check_loads(const OwnedLine& owned, const Model& model, const Cut& cut, const std::vector<Piece>& pieces) {
  if (owned.line.policy != Policy::kLean || has_own_stretches(owned.line) || cut.stretches == 0) return true;
  std::vector<long long> tiles(cut.stretches), units(cut.stretches);
  for (const Piece& piece : pieces) tiles[piece.stretch] += piece.segment.tile_end - piece.segment.tile_begin;
  for (long long stretch = 0; stretch < cut.stretches; ++stretch) {
    units[stretch] = stretch_begin(cut, stretch + 1) - stretch_begin(cut, stretch);
    tiles[stretch] += model.stretch_costs[stretch];
  }
  const auto [shortest, longest] = std::minmax_element(units.begin(), units.end());
  CHECK_OR_FAIL(*longest - *shortest <= 1);
  const auto [least, most] = std::minmax_element(tiles.begin(), tiles.end());
  int grain = 1;
  for (const ModelOutput& output : model.outputs) {  // the longest way between two places where a cut may fall
    const std::vector<int> places = model_places(owned.line, output.tiles);
    for (std::size_t i = 1; i < places.size(); ++i) grain = std::max(grain, places[i] - places[i - 1]);
  }
  CHECK_OR_FAIL(*most - *least <= 2 * grain - 1);
  CHECK_OR_FAIL(cut.stretches <= owned.line.workers);
  CHECK_OR_FAIL(cut.stretches == 1 || *shortest >= owned.line.min_stretch_units);
  return true;
}

// Loads where outputs have stretches of their own: those of an output differ by a tile at most, with chunks that grow by a grain. With
// chunks of a fixed length all but the last are equal.
bool check_own_loads(const OwnedLine& owned, const Cut& cut, const std::vector<Piece>& pieces) {
  const Line& line = owned.line;
  if (!has_own_stretches(line)) return true;
  for (const Piece& one : pieces) {
    for (const Piece& other : pieces) {
      if (one.segment.seq != other.segment.seq || one.segment.output != other.segment.output) continue;
      const int tiles = one.segment.tile_end - one.segment.tile_begin, others = other.segment.tile_end - other.segment.tile_begin;
      const int more = line.chunk_tiles == 0 ? 1 : line.chunks_grow ? line.chunk_tiles : 0;
      const int last = line.chunks_grow ? line.chunk_tiles - 1 : tiles;  // the output's last grain may have fewer tiles
      CHECK_OR_FAIL(tiles <= others + more + (line.chunk_tiles > 0 && ends_output(other.segment) ? last : 0));
    }
  }
  return cut.stretches == cut.units;
}

bool check_inverse(const OwnedLine& owned, const Model& model, const Cut& cut) {
  for (long long stretch = 0; stretch < cut.stretches; ++stretch) {
    CHECK_OR_FAIL(stretch_begin(cut, stretch) == model.stretch_begins[stretch]);
    CHECK_OR_FAIL(stretch_begin(cut, stretch) < stretch_begin(cut, stretch + 1));
    for (int unit = model.stretch_begins[stretch]; unit < model.stretch_begins[stretch + 1]; ++unit) {
      CHECK_OR_FAIL(stretch_of(cut, unit) == stretch);
    }
  }
  if (cut.stretches > 0) CHECK_OR_FAIL(stretch_begin(cut, cut.stretches) == cut.units);
  return true;
}

// The merge list of every output gives exactly its pieces, in tile order; slots of cut pieces are distinct and in range.
bool check_merges(const OwnedLine& owned, const Model& model, const Cut& cut, const std::vector<Piece>& pieces) {
  const Line& line = owned.line;
  std::size_t next = 0;
  std::set<long long> slots;
  for (const ModelOutput& output : model.outputs) {
    const MergeList list = merge_list(line, cut, output.seq, output.output);
    CHECK_OR_FAIL(list.output_unit == output.first_unit);
    CHECK_OR_FAIL(0 <= list.first && list.first <= list.last && list.last < cut.stretches);
    if (line.policy == Policy::kLean && !has_own_stretches(line) && line.max_output_stretches > 0)
      CHECK_OR_FAIL(list.last - list.first <= line.max_output_stretches);
    int segments = 0, tile = 0;
    for (long long stretch = list.first; stretch <= list.last; ++stretch) {
      const Segment segment = segment_of(line, cut, list, output.seq, output.output, stretch);
      CHECK_OR_FAIL(segment.tile_begin == tile && segment.tile_begin <= segment.tile_end);
      tile = segment.tile_end;
      if (segment.tile_begin == segment.tile_end) continue;
      CHECK_OR_FAIL(next < pieces.size() && pieces[next].stretch == stretch && same(pieces[next].segment, segment));
      ++next;
      ++segments;
    }
    CHECK_OR_FAIL(tile == output.tiles && segments >= 1);
    if (has_own_stretches(line)) {
      const int stretches = own_stretches(line, output.tiles);
      for (int part = 0; part < stretches; ++part) {
        const Segment own = own_segment(line, output.seq, seq_lens(line, output.seq), output.output, output.tiles, stretches,
                                        output.tiles / stretches, part);
        CHECK_OR_FAIL(same(own, segment_of(line, cut, list, output.seq, output.output, list.first + part)));
      }
      CHECK_OR_FAIL(stretches % line.cluster_stretches == 0 && stretches <= line.output_stretches);
    }
    if (line.chunk_tiles == 0) {  // part_list: the same stretches but for those without a tile
      const MergeList parts = part_list(line, cut, list.output_unit, output.tiles);
      CHECK_OR_FAIL(parts.output_unit == output.first_unit);
      CHECK_OR_FAIL(parts.first == pieces[next - segments].stretch && parts.last == pieces[next - 1].stretch);
      CHECK_OR_FAIL(parts.last - parts.first + 1 == segments);
    }
    for (std::size_t i = next - segments; i < next; ++i) {
      const Segment& segment = pieces[i].segment;
      CHECK_OR_FAIL(is_cut(segment) == (segments > 1));
      CHECK_OR_FAIL(starts_output(segment) == (i == next - segments));
      CHECK_OR_FAIL(ends_output(segment) == (i == next - 1));
      if (segments == 1) continue;
      const long long slot = partial_slot(line, pieces[i].stretch, segment);
      CHECK_OR_FAIL(0 <= slot && slot < partial_slots(line, cut));
      CHECK_OR_FAIL(slots.insert(slot).second);
    }
  }
  CHECK_OR_FAIL(next == pieces.size());
  return true;
}

// The same answers with the prefix, from copied arrays, and asked in reverse order.
bool check_purity(const OwnedLine& owned, const Model& model, const Cut& cut, const std::vector<Piece>& pieces) {
  OwnedLine copy = owned;
  copy.point();
  std::vector<long long> prefix(copy.line.num_seqs + 1, -1);
  seq_unit_prefix(copy.line, prefix.data());
  CHECK_OR_FAIL(prefix.front() == 0 && prefix.back() == cut.units);
  for (const ModelOutput& output : model.outputs) {
    if (output.output != 0) continue;
    CHECK_OR_FAIL(prefix[output.seq] == output.first_unit);
    CHECK_OR_FAIL(seq_first_unit(owned.line, output.seq) == output.first_unit);
  }
  copy.line.seq_units = prefix.data();
  const Cut again = make_cut(copy.line);
  CHECK_OR_FAIL(again.units == cut.units && again.stretches == cut.stretches);
  std::size_t next = pieces.size();
  for (long long stretch = cut.stretches - 1; stretch >= 0; --stretch) {
    Cursor cursor = stretch_cursor(copy.line, again, stretch);
    Segment segment;
    std::vector<Segment> segments;
    while (next_segment(copy.line, cursor, segment)) segments.push_back(segment);
    CHECK_OR_FAIL(segments.size() <= next);
    next -= segments.size();
    for (std::size_t i = 0; i < segments.size(); ++i) {
      CHECK_OR_FAIL(pieces[next + i].stretch == stretch && same(pieces[next + i].segment, segments[i]));
    }
  }
  CHECK_OR_FAIL(next == 0);
  for (const ModelOutput& output : model.outputs) {
    const MergeList a = merge_list(owned.line, cut, output.seq, output.output), b = merge_list(copy.line, again, output.seq, output.output);
    CHECK_OR_FAIL(a.output_unit == b.output_unit && a.first == b.first && a.last == b.last);
  }
  CHECK_OR_FAIL(copy.lens == owned.lens && copy.cu_q == owned.cu_q);
  return true;
}

TEST(ScheduleLine, InvariantsOver120000SeededLines) {
  OwnedLine owned;
  int with_outputs = 0, with_cut_outputs = 0, with_empty_seqs = 0;
  for (int seed = 0; seed < kProblems; ++seed) {
    random_line(seed, owned);
    const Model model = make_model(owned);
    const Cut cut = make_cut(owned.line);
    const std::vector<Piece> pieces = all_pieces(owned.line, cut);
    ASSERT_TRUE(check_coverage(owned, model, cut, pieces)) << "seed " << seed;
    ASSERT_TRUE(check_tokens(owned, model)) << "seed " << seed;
    ASSERT_TRUE(check_loads(owned, model, cut, pieces)) << "seed " << seed;
    ASSERT_TRUE(check_own_loads(owned, cut, pieces)) << "seed " << seed;
    ASSERT_TRUE(check_inverse(owned, model, cut)) << "seed " << seed;
    ASSERT_TRUE(check_merges(owned, model, cut, pieces)) << "seed " << seed;
    ASSERT_TRUE(check_purity(owned, model, cut, pieces)) << "seed " << seed;
    with_outputs += !model.outputs.empty();
    with_cut_outputs += pieces.size() > model.outputs.size();
    for (const ModelOutput& output : model.outputs) {
      if (owned.kv_len(output.seq) == 0) {
        ++with_empty_seqs;
        break;
      }
    }
  }
  // The generator reaches what it should.
  EXPECT_GT(with_outputs, kProblems * 3 / 4);
  EXPECT_GT(with_cut_outputs, kProblems / 4);
  EXPECT_GT(with_empty_seqs, kProblems / 10);
}

TEST(ScheduleLine, SeqWithoutRowsHasNoOutput) {
  const int kv_lens[] = {100, 100, 100}, cu_q[] = {0, 1, 1, 2};
  Line line;
  line.num_seqs = 3;
  line.kv_lens = kv_lens;
  line.cu_seqlens_q = cu_q;
  line.tile_tokens = 10;
  line.workers = 3;
  const Cut cut = make_cut(line);
  EXPECT_EQ(cut.units, 20);
  const std::vector<Piece> pieces = all_pieces(line, cut);
  for (const Piece& piece : pieces) EXPECT_NE(piece.segment.seq, 1);
}

TEST(ScheduleLine, NothingToDoHasNoStretch) {
  Line line;
  for (const Policy policy : {Policy::kLean, Policy::kFa2, Policy::kFlashDecoding}) {
    line.policy = policy;
    line.workers = 8;
    EXPECT_EQ(make_cut(line).stretches, 0);
    EXPECT_EQ(partial_slots(line, make_cut(line)), 0);
    const int kv_lens[] = {5, 7};
    Line no_rows = line;
    no_rows.num_seqs = 2;
    no_rows.kv_lens = kv_lens;
    no_rows.q_len = 0;
    EXPECT_EQ(make_cut(no_rows).stretches, 0);
  }
}

// Figure 1 of the LeanAttention paper in small: two outputs of ten tiles on five workers are five stretches of four.
TEST(ScheduleLine, TwoHeadsOnFiveWorkers) {
  const int kv_lens[] = {160};
  Line line;
  line.num_seqs = 1;
  line.kv_lens = kv_lens;
  line.kv_heads = 2;
  line.tile_tokens = 16;
  line.workers = 5;
  const std::vector<Piece> pieces = all_pieces(line, make_cut(line));
  const int expected[][4] = {{0, 0, 0, 4}, {1, 0, 4, 8}, {2, 0, 8, 10}, {2, 1, 0, 2}, {3, 1, 2, 6}, {4, 1, 6, 10}};
  ASSERT_EQ(pieces.size(), 6u);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(pieces[i].stretch, expected[i][0]);
    EXPECT_EQ(pieces[i].segment.output, expected[i][1]);
    EXPECT_EQ(pieces[i].segment.tile_begin, expected[i][2]);
    EXPECT_EQ(pieces[i].segment.tile_end, expected[i][3]);
  }
}

}  // namespace
}  // namespace leanattn::schedule_test
