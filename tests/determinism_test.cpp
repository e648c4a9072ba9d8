// SPDX-License-Identifier: Apache-2.0
// The same bits: of a row whatever stands round it (batch_invariant), of a call whoever runs its tasks; and right outputs under any cut.
#include <algorithm>

#include "decoding.h"
#include "executors.h"
#include "inputs.h"

namespace leanattn::testing {
namespace {

// Everything that a row's bits may not depend on in batch-invariant mode.
std::vector<Options> invariant_options() {
  std::vector<Options> all;
  for (const HeadOrder order : {HeadOrder::kAuto, HeadOrder::kAlong, HeadOrder::kBeside}) {
    for (const int workers : {1, 2, 5, 9}) {
      all.push_back(options_of({Policy::kLean, 0, order, true, workers}));
      if (workers == 5) continue;
      all.push_back(options_of({Policy::kFa2, 0, order, true, workers}));
      all.push_back(options_of({Policy::kFlashDecoding, 0, order, true, workers}));
      all.push_back(options_of({Policy::kFlashDecoding, 1 + 3 * workers, order, true, workers}));
    }
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i % 3 == 1) all[i].executor = executors()[i % executors().size()].executor;
  }
  return all;
}

constexpr const char* kBatches[] = {
    "- 8 2 64 700,1,300,257,0,33,1025,513,2000,16",
    "- 6 3 72 700,1,300,257,0,33,1025 q_len=3 dtype=f32 softcap=20 sink=1",
    "- 16 1 128 700,1,300,257,0,33 dtype=f16 q_len=1,5,0,2,3,8",
    "- 8 2 64 3000,1,1300,257,0,33 window=700 alibi=1 lse=2",
    "- 4 2 64 900,80,300 q_len=70 tree=70 dtype=f32",
};

TEST(Determinism, InvariantRowsAreTheSameAloneAndInAnyBatch) {
  std::size_t isa = 0;
  for (const char* batch : kBatches) {
    for (const char* layout : {" layout=contiguous", " page=16", " page=7 strided=1", " layout=ragged", " layout=head_major"}) {
      CaseData data(parse_case(std::string(batch) + layout));
      const Problem whole = data.problem();
      isa += 1;
      std::vector<Bits> alone;
      for (int seq = 0; seq < whole.batch; ++seq) {
        const Part part(whole, seq, seq + 1);
        alone.push_back(decoded_bits(data, part.problem, with_isa(options_of({Policy::kLean, 0, HeadOrder::kAuto, true, 1}), isa)));
      }
      std::size_t turn = 0, way = isa;
      for (const Options& options : invariant_options()) {
        if (short_run() && way++ % 3 != 0) continue;
        const int begin = static_cast<int>(turn % 3), end = whole.batch - static_cast<int>(turn % 4 == 3);
        ++turn;
        const Part part(whole, begin, std::max(begin + 1, end));
        Bits expected;
        for (int seq = begin; seq < begin + part.problem.batch; ++seq) {
          expected.insert(expected.end(), alone[static_cast<std::size_t>(seq)].begin(), alone[static_cast<std::size_t>(seq)].end());
        }
        EXPECT_EQ(decoded_bits(data, part.problem, with_isa(options, isa)), expected) << batch << layout << " " << text_of(options);
      }
      const Reference reference = compute_reference(whole);
      EXPECT_TRUE(is_right(data, with_isa(options_of({Policy::kLean, 0, HeadOrder::kAuto, true, 3}), isa), reference));
    }
  }
}

TEST(Determinism, InvariantBitsDoNotDependOnTheLayout) {
  for (const char* batch : kBatches) {
    for (std::size_t isa = 0; isa < isas().size(); ++isa) {
      Bits first;
      int turn = 0;
      for (const char* layout : {" layout=contiguous", " page=1", " page=16", " page=7 strided=1", " page=1000 interleaved=1",
                                 " layout=ragged", " layout=head_major", " layout=contiguous strided=1"}) {
        CaseData data(parse_case(std::string(batch) + layout));
        Options options = options_of({Policy::kLean, 0, HeadOrder::kAuto, true, 1 + turn++ % 4});
        const Bits bits = decoded_bits(data, with_isa(options, isa));
        if (first.empty()) first = bits;
        EXPECT_EQ(bits, first) << batch << layout << " " << isas()[isa];
      }
    }
  }
}

// The same worker count gives the same bits on every repeat, whoever runs the tasks and in whatever order.
TEST(Determinism, SameWorkersSameBitsUnderAnyExecutor) {
  for (const char* batch : kBatches) {
    CaseData data(parse_case(batch));
    for (const Way& way : ways()) {
      for (const int workers : {way.workers, 2, 6}) {
        Options options = options_of(way);
        options.workers = workers;
        const Bits first = decoded_bits(data, options);
        EXPECT_EQ(decoded_bits(data, options), first);
        for (const NamedExecutor& executor : executors()) {
          options.executor = executor.executor;
          EXPECT_EQ(decoded_bits(data, options), first) << batch << " " << executor.name << " " << text_of(options);
          EXPECT_EQ(decoded_bits(data, options), first);
        }
      }
    }
  }
}

// Any number of workers and of splits cuts the line somewhere else; the outputs stay right.
TEST(Determinism, AnyCutIsRight) {
  const int cuts = short_run() ? 6 : 30;
  for (std::size_t b = 0; b < std::size(kBatches); ++b) {
    CaseData data(parse_case(kBatches[b]));
    const Reference reference = compute_reference(data.problem());
    for (int cut = 0; cut < cuts; ++cut) {
      const auto random = [&](std::uint64_t what, int most) {
        return 1 + static_cast<int>(input_hash(100 + b, Input::kLengths, static_cast<std::uint64_t>(cut) * 8 + what) %
                                    static_cast<std::uint64_t>(most));
      };
      Way way{cut % 2 ? Policy::kFlashDecoding : Policy::kLean, 0, static_cast<HeadOrder>(random(0, 3) - 1), random(1, 3) == 1,
              random(2, 90)};
      if (way.policy == Policy::kFlashDecoding) way.splits = random(3, 130);
      Options options = with_isa(options_of(way), static_cast<std::size_t>(cut));
      options.executor = executors()[static_cast<std::size_t>(cut % 2)].executor;
      EXPECT_TRUE(is_right(data, options, reference));
    }
  }
}

}  // namespace
}  // namespace leanattn::testing
