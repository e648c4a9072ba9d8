// SPDX-License-Identifier: Apache-2.0
#include "tools/floor.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "numeric.h"
#include "problem_view.h"
#include "src/cpu/threads.h"

namespace leanattn::tools {
namespace {

constexpr std::int64_t kBlockBytes = 16 << 10;  // small beside a thread's part, large beside a block's own 16 bytes

// Appends a piece, joined to the last one where they touch.
void append(std::vector<FloorBlock>& pieces, const void* data, std::int64_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  if (bytes <= 0) return;
  if (!pieces.empty() && pieces.back().data + pieces.back().bytes == begin) {
    pieces.back().bytes += bytes;
  } else {
    pieces.push_back({begin, bytes});
  }
}

// Tokens [begin, end) of a seq that lie token_stride apart, all KV heads.
void append_tokens(std::vector<FloorBlock>& pieces, const Problem& p, const KvView& view, std::int64_t dim, int seq, std::int64_t begin,
                   std::int64_t end) {
  const auto element = static_cast<std::int64_t>(dtype_bytes(p.kv_dtype));
  const auto* base = static_cast<const std::byte*>(view.data);
  const std::byte* first = base + kv_row_offset(p, view, seq, begin, 0) * element;
  const std::int64_t tokens = end - begin;
  if (view.token_stride == dim) {  // head-major: the tokens of a head in one piece
    for (int head = 0; head < p.kv_heads; ++head) append(pieces, first + head * view.head_stride * element, tokens * dim * element);
    return;
  }
  const bool heads_touch = view.head_stride == dim || p.kv_heads == 1;
  if (heads_touch && view.token_stride == p.kv_heads * dim) return append(pieces, first, tokens * p.kv_heads * dim * element);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (int head = 0; head < p.kv_heads; ++head) {
      append(pieces, first + (token * view.token_stride + head * view.head_stride) * element, dim * element);
    }
  }
}

// The pieces cut into parts of equal bytes, on multiples of a cache line, and the parts into blocks.
std::vector<std::vector<FloorBlock>> share_out(const std::vector<FloorBlock>& pieces, std::int64_t bytes, int threads) {
  std::vector<std::vector<FloorBlock>> parts(static_cast<std::size_t>(std::max(1, threads)));
  const std::int64_t count = static_cast<std::int64_t>(parts.size());
  std::int64_t done = 0;
  std::size_t part = 0;
  const auto part_end = [&] { return (bytes * (static_cast<std::int64_t>(part) + 1) / count + 63) / 64 * 64; };
  for (FloorBlock piece : pieces) {
    while (piece.bytes > 0) {
      while (part + 1 < parts.size() && done >= part_end()) ++part;
      std::int64_t take = std::min(piece.bytes, kBlockBytes);
      if (part + 1 < parts.size()) take = std::min(take, part_end() - done);
      parts[part].push_back({piece.data, take});
      piece.data += take;
      piece.bytes -= take;
      done += take;
    }
  }
  return parts;
}

struct ReadCall {
  const std::vector<std::vector<FloorBlock>>* parts;
  FloorVariant variant;
};

void read_part(void* argument, std::int32_t part) {
  const auto* call = static_cast<const ReadCall*>(argument);
  const std::vector<FloorBlock>& blocks = (*call->parts)[static_cast<std::size_t>(part)];
  [[maybe_unused]] static thread_local volatile std::uint64_t digest;  // somewhere for the result to go
  digest = read_blocks(blocks.data(), blocks.size(), call->variant);
}

}  // namespace

std::vector<FloorBlock> kv_pieces(const Problem& p) {
  std::vector<FloorBlock> pieces;
  for (int seq = 0; seq < p.batch; ++seq) {
    if (seq_q_len(p, seq) == 0) continue;
    const std::int64_t len = seq_kv_len(p, seq);
    for (const auto& [view, dim] : {std::pair{&p.k, p.head_dim}, std::pair{&p.v, head_dim_v(p)}}) {
      for (std::int64_t begin = seq_first_token(p, seq); begin < len;) {
        const std::int64_t end = p.kv_layout == KvLayout::kPaged ? std::min(len, begin - begin % p.page_size + p.page_size) : len;
        append_tokens(pieces, p, *view, dim, seq, begin, end);
        begin = end;
      }
    }
  }
  return pieces;
}

ReadFloor::ReadFloor(std::vector<FloorBlock> pieces, int threads) {
  std::sort(pieces.begin(), pieces.end(), [](const FloorBlock& a, const FloorBlock& b) { return std::less<>()(a.data, b.data); });
  std::vector<FloorBlock> joined;
  for (const FloorBlock& piece : pieces) {
    append(joined, piece.data, piece.bytes);
    bytes_ += piece.bytes;
  }
  parts_ = share_out(joined, bytes_, threads);
}

ReadFloor::ReadFloor(const Problem& problem, int threads) : ReadFloor(kv_pieces(problem), threads) {}

void ReadFloor::read() const {
  ReadCall call{&parts_, variant_};
  cpu::run_tasks({}, threads(), read_part, &call);
}

double ReadFloor::read_us() const {
  const auto begin = std::chrono::steady_clock::now();
  read();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

std::vector<FloorVariant> floor_variants() {
  std::vector<FloorVariant> variants;
  for (const int streams : {1, 2, 4, 8}) {
    for (const int prefetch_bytes : {0, 512, 1024, 2048, 4096}) variants.push_back({streams, prefetch_bytes});
  }
  return variants;
}

FloorVariant fastest_variant(std::vector<ReadFloor>& floors, double seconds) {
  const std::vector<FloorVariant> variants = floor_variants();
  std::vector<std::vector<double>> times(variants.size());
  const auto start = std::chrono::steady_clock::now();
  std::size_t turn = 0;
  // Turn by turn, so that a busy spell of the machine meets every variant.
  for (int round = 0; round < 15; ++round) {
    for (std::size_t i = 0; i < variants.size(); ++i) {
      ReadFloor& floor = floors[turn++ % floors.size()];
      floor.set_variant(variants[i]);
      times[i].push_back(floor.read_us());
    }
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) break;
  }
  FloorVariant best;
  double best_us = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < variants.size(); ++i) {
    std::nth_element(times[i].begin(), times[i].begin() + static_cast<std::ptrdiff_t>(times[i].size() / 2), times[i].end());
    const double us = times[i][times[i].size() / 2];
    if (us < best_us) {
      best_us = us;
      best = variants[i];
    }
  }
  for (ReadFloor& floor : floors) floor.set_variant(best);
  return best;
}

std::string variant_name(FloorVariant variant) {
  return variant.prefetch_bytes > 0 ? fmt::format("{} streams, prefetch {}", variant.streams, variant.prefetch_bytes)
                                    : fmt::format("{} streams", variant.streams);
}

}  // namespace leanattn::tools

void* leanattn_floor_new(const void* const* data, const std::int64_t* bytes, std::int64_t sets, std::int64_t pieces, std::int32_t threads,
                         double seconds) {
  using namespace leanattn::tools;
  auto* floors = new std::vector<ReadFloor>;
  for (std::int64_t set = 0; set < sets; ++set) {
    std::vector<FloorBlock> blocks;
    for (std::int64_t i = set * pieces; i < (set + 1) * pieces; ++i) blocks.push_back({static_cast<const std::byte*>(data[i]), bytes[i]});
    floors->emplace_back(std::move(blocks), threads);
  }
  if (seconds > 0.0) fastest_variant(*floors, seconds);
  return floors;
}

double leanattn_floor_read(void* floor, std::int64_t set) {
  return (*static_cast<std::vector<leanattn::tools::ReadFloor>*>(floor))[static_cast<std::size_t>(set)].read_us();
}

void leanattn_floor_free(void* floor) { delete static_cast<std::vector<leanattn::tools::ReadFloor>*>(floor); }
