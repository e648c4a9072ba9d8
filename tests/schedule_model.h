// SPDX-License-Identifier: Apache-2.0
// What the schedule tests check against: a line spelled out unit by unit, and seeded random lines. Uses no function of schedule.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "leanattn/schedule.h"

namespace leanattn::schedule_test {

// Counter-based generator (splitmix64), the same on every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {}
  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int between(int low, int high) {  // inclusive
    return low + static_cast<int>(next() % (static_cast<std::uint64_t>(static_cast<std::int64_t>(high) - low) + 1));
  }
  bool one_in(int n) { return between(1, n) == 1; }

 private:
  std::uint64_t state_;
};

// A line that owns its arrays.
struct OwnedLine {
  std::vector<int> lens;  // kv_lens, or cu_seqlens_kv when ragged
  std::vector<int> cu_q;  // empty: q_len
  bool ragged = false;
  Line line;

  void point() {
    line.kv_lens = ragged ? nullptr : lens.data();
    line.cu_seqlens_kv = ragged ? lens.data() : nullptr;
    line.cu_seqlens_q = cu_q.empty() ? nullptr : cu_q.data();
  }
  int kv_len(int seq) const { return ragged ? lens[seq + 1] - lens[seq] : lens[seq]; }
  int q_len(int seq) const { return cu_q.empty() ? line.q_len : cu_q[seq + 1] - cu_q[seq]; }
};

inline int random_length(Random& random, int tile, int most_tiles) {
  switch (random.between(0, 7)) {
    case 0: return 0;
    case 1: return 1;
    case 2: return tile;
    case 3: return tile + 1;
    case 4: return tile - 1;
    case 5: return tile * random.between(0, most_tiles);
    case 6: return random.between(0, 4 * tile);
    default: return random.between(0, tile * most_tiles);
  }
}

inline void random_line(std::uint64_t seed, OwnedLine& owned) {
  Random random(seed);
  Line line;
  line.num_seqs = random.one_in(40) ? 0 : random.between(1, random.one_in(8) ? 24 : 6);
  static constexpr int kTiles[] = {1, 2, 3, 16, 64, 100, 256};
  line.tile_tokens = kTiles[random.between(0, 6)];
  const int most_tiles = random.one_in(10) ? 120 : 24;
  owned.ragged = random.one_in(3);
  owned.lens.clear();
  for (int seq = 0, sum = 0; seq < line.num_seqs; ++seq) {
    if (owned.ragged && seq == 0) owned.lens.push_back(0);
    const int length = random_length(random, line.tile_tokens, most_tiles);
    sum += length;
    owned.lens.push_back(owned.ragged ? sum : length);
  }
  if (owned.lens.empty()) owned.lens.push_back(0);
  owned.cu_q.clear();
  line.q_len = random.one_in(3) ? random.between(0, 9) : 1;
  if (random.one_in(3)) {
    owned.cu_q.push_back(0);
    for (int seq = 0; seq < line.num_seqs; ++seq) owned.cu_q.push_back(owned.cu_q.back() + (random.one_in(3) ? 0 : random.between(0, 7)));
  }
  line.kv_heads = random.one_in(3) ? random.between(1, 9) : 1;
  line.group = random.between(1, 8);
  if (random.one_in(3)) line.rows_per_block = random.between(1, 16);
  line.head_order = random.one_in(2) ? HeadOrder::kBeside : HeadOrder::kAlong;
  if (random.one_in(3)) line.window_left = random.between(0, line.tile_tokens * random.between(0, most_tiles));
  if (random.one_in(3)) line.chunk_tiles = random.between(1, 9);
  line.chunks_grow = random.one_in(2);
  line.policy = static_cast<Policy>(random.between(0, 4) % 3);
  line.splits = random.one_in(8) ? random.between(1, 100) : random.between(1, 8);
  line.workers = random.one_in(3) ? random.between(1, 300) : random.between(1, 12);
  if (random.one_in(2)) line.fragment_cost_tiles = random.between(0, 8);
  if (random.one_in(3)) line.min_stretch_units = random.between(0, 12);
  if (random.one_in(4)) line.max_output_stretches = random.between(1, 8);
  line.runs = random.one_in(3);
  if (random.one_in(4)) {
    line.cluster_stretches = random.between(1, 6);
    line.output_stretches = line.cluster_stretches * random.between(1, 6);
    line.join_cost_tiles = random.between(0, 4);
  }
  owned.line = line;
  owned.point();
}

struct ModelOutput {
  int seq = 0;
  int output = 0;
  int first_token = 0;
  int tiles = 0;
  int units = 0;
  int first_unit = 0;
};

struct ModelSegment {
  int output = 0;  // index into outputs
  int tile_begin = 0;
  int tile_end = 0;
};

// The line unit by unit. borders[u] of an output: the tile at which a cut in front of its unit u falls.
struct Model {
  std::vector<ModelOutput> outputs;
  std::vector<std::vector<int>> borders;            // [outputs][units + 1]
  std::vector<int> stretch_begins;                  // [stretches + 1]
  std::vector<int> stretch_costs;                   // [stretches] cost units
  std::vector<std::vector<ModelSegment>> segments;  // [stretches]
  int units = 0;
};

// Chunks of an output that grow: the largest power of two of them that is allowed. Eight where each has a grain, up to 128 where each has
// three, up to 256 where each has six.
inline int model_grown_chunks(long long grains) {
  int count = 1;
  for (int wanted = 2; wanted <= 256; wanted *= 2) {
    const bool allowed =
        (wanted <= 8 && wanted <= grains) || (wanted <= 128 && 3LL * wanted <= grains) || (6LL * wanted <= grains && grains <= 1 << 24);
    if (allowed) count = wanted;
  }
  return count;
}

// Tiles where a cut of an output may fall, from 0 to `tiles`: borders of its chunks, where it has any.
inline std::vector<int> model_places(const Line& line, int tiles) {
  const int grain = line.chunk_tiles == 0 ? 1 : line.chunk_tiles;
  std::vector<int> grains{0};  // where each begins
  for (int tile = 1; tile < tiles; ++tile) {
    if (tile % grain == 0) grains.push_back(tile);
  }
  grains.push_back(tiles);
  if (line.chunk_tiles == 0 || !line.chunks_grow) return grains;
  const long long all = static_cast<long long>(grains.size()) - 1, count = model_grown_chunks(all);
  std::vector<int> places;
  long long grain_of = 0;
  for (long long chunk = 0; chunk <= count; ++chunk) {  // its share of the grains before it, rounded down
    while ((grain_of + 1) * count <= chunk * all) ++grain_of;
    places.push_back(grains[grain_of]);
  }
  return places;
}

// Borders of one output by dealing its tiles out to units one by one.
inline std::vector<int> model_borders(const Line& line, int tiles) {
  const std::vector<int> places = model_places(line, tiles);
  const int pieces = static_cast<int>(places.size()) - 1;
  std::vector<int> borders{0};
  if (line.policy == Policy::kFa2) {
    borders.push_back(tiles);
  } else if (line.policy == Policy::kFlashDecoding) {
    int a_split = 1;
    while (a_split * line.splits < pieces) ++a_split;
    for (int split = 1; split <= line.splits; ++split) borders.push_back(places[std::min(split * a_split, pieces)]);
  } else if (line.output_stretches > 0) {
    const bool one_cluster = tiles <= line.cluster_stretches * line.join_cost_tiles;
    const int most = one_cluster ? line.cluster_stretches : line.output_stretches;
    int together = 1;  // with chunks 1, 2, 4 … of them, few enough for all stretches
    if (line.chunk_tiles > 0) {
      while ((pieces + together - 1) / together > most) together *= 2;
    }
    int stretches = line.cluster_stretches;
    while (stretches < most && stretches * together < pieces) stretches += line.cluster_stretches;
    std::vector<int> dealt(static_cast<std::size_t>(stretches));  // pieces dealt out in turn, then each stretch's put behind each other
    for (int piece = 0, part = 0; piece < pieces; piece += together, part = (part + 1) % stretches) dealt[part] += together;
    int piece = 0;
    for (const int own : dealt) borders.push_back(places[piece = std::min(piece + own, pieces)]);
  } else {
    for (int i = 1; i <= line.fragment_cost_tiles; ++i) borders.push_back(0);
    int place = 0;
    for (int tile = 1; tile <= tiles; ++tile) {
      if (tile == places[place + 1]) ++place;
      borders.push_back(places[place]);
    }
  }
  return borders;
}

inline Model make_model(const OwnedLine& owned) {
  const Line& line = owned.line;
  Model model;
  int longest = 1;
  for (int seq = 0; seq < line.num_seqs; ++seq) {
    const int kv_len = owned.kv_len(seq), q_len = owned.q_len(seq);
    int first_token = kv_len;  // over every row: the left end of its window
    for (int i = 0; i < q_len; ++i) {
      const int left = line.window_left < 0 ? 0 : kv_len - q_len + i - line.window_left;
      first_token = left < first_token ? left : first_token;
    }
    if (first_token < 0) first_token = 0;
    int tiles = 0;
    for (int begin = 0; begin < kv_len; begin += line.tile_tokens) tiles += begin + line.tile_tokens > first_token;
    if (tiles == 0) tiles = 1;
    int blocks = 0;
    for (int row = 0; row < q_len * line.group; ++row) {
      if (line.rows_per_block == 0 ? row == 0 : row % line.rows_per_block == 0) ++blocks;
    }
    const int outputs = line.head_order == HeadOrder::kBeside ? blocks : blocks * line.kv_heads;
    for (int output = 0; output < outputs; ++output) {
      model.borders.push_back(model_borders(line, tiles));
      const int units = static_cast<int>(model.borders.back().size()) - 1;
      model.outputs.push_back({seq, output, first_token, tiles, units, model.units});
      model.units += units;
      if (units > longest) longest = units;
    }
  }
  int stretches = model.units;
  const bool own = line.policy == Policy::kLean && line.output_stretches > 0;
  if (line.policy == Policy::kLean && !own && model.units > 0) {
    int shortest = line.min_stretch_units > 1 ? line.min_stretch_units : 1;
    if (line.max_output_stretches > 0) {
      while (shortest * line.max_output_stretches < longest) ++shortest;
    }
    stretches = line.workers;
    while (stretches > 1 && stretches * shortest > model.units) --stretches;
  } else if (line.policy != Policy::kLean && line.runs && line.workers < stretches) {
    stretches = line.workers;
  }
  model.stretch_begins.push_back(0);
  for (int stretch = 0, unit = 0; stretch < stretches; ++stretch) {
    unit += model.units / stretches + (stretch < model.units % stretches ? 1 : 0);
    model.stretch_begins.push_back(unit);
  }
  model.segments.resize(stretches);
  model.stretch_costs.resize(stretches);
  std::size_t output = 0;
  for (int stretch = 0; stretch < stretches; ++stretch) {
    for (int unit = model.stretch_begins[stretch]; unit < model.stretch_begins[stretch + 1]; ++unit) {
      if (unit == model.outputs[output].first_unit + model.outputs[output].units) ++output;
      const int index = unit - model.outputs[output].first_unit;
      if (line.policy == Policy::kLean && !own && index < line.fragment_cost_tiles) ++model.stretch_costs[stretch];
      const int begin = model.borders[output][index], end = model.borders[output][index + 1];
      if (begin == end) continue;
      auto& segments = model.segments[stretch];
      if (!segments.empty() && segments.back().output == static_cast<int>(output)) {
        segments.back().tile_end = end;
      } else {
        segments.push_back({static_cast<int>(output), begin, end});
      }
    }
  }
  return model;
}

inline std::string describe(const OwnedLine& owned) {
  const Line& line = owned.line;
  std::string text = "kv_lens";
  for (int seq = 0; seq < line.num_seqs; ++seq) text += " " + std::to_string(owned.kv_len(seq)) + "/" + std::to_string(owned.q_len(seq));
  const auto add = [&](const char* name, long long value) { text += std::string(", ") + name + " " + std::to_string(value); };
  add("tile_tokens", line.tile_tokens);
  add("kv_heads", line.kv_heads);
  add("group", line.group);
  add("rows_per_block", line.rows_per_block);
  add("head_order", static_cast<int>(line.head_order));
  add("window_left", line.window_left);
  add("chunk_tiles", line.chunk_tiles);
  add("fragment_cost_tiles", line.fragment_cost_tiles);
  add("policy", static_cast<int>(line.policy));
  add("splits", line.splits);
  add("workers", line.workers);
  add("runs", line.runs);
  add("min_stretch_units", line.min_stretch_units);
  add("max_output_stretches", line.max_output_stretches);
  add("output_stretches", line.output_stretches);
  add("cluster_stretches", line.cluster_stretches);
  add("chunks_grow", line.chunks_grow);
  add("join_cost_tiles", line.join_cost_tiles);
  return text;
}

}  // namespace leanattn::schedule_test
