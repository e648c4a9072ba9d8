// SPDX-License-Identifier: Apache-2.0
// Inputs that broke other libraries, on the GPU: graphs, workspaces, streams, repeats, limits on multiprocessors (docs/cases.md).
#include <cstdio>
#include <thread>

#include "cuda_decoding.h"
#include "cuda_graph.h"
#include "cuda_kernels.h"
#include "partial.h"

namespace leanattn::testing {
namespace {

// decode on a stream, from memory that stays as it is between calls.
void queue_call(const DeviceProblem& device, Options options, const DeviceWorkspace& workspace, cudaStream_t stream) {
  options.stream = stream;
  decode(device.problem, options, workspace.span());
}

Options on_stream(Options options, cudaStream_t stream) {
  options.stream = stream;
  return options;
}

// --- Graphs ---

// Captured at one length, replayed at others in the same buffers. V and K hold values up to the longest length: a token too many shows.
TEST_F(CudaCases, R1_GraphReplayedAtOtherLengthsLong) {
  for (const char* layout : {" layout=contiguous", " page=16", " page=64 dtype=f16"}) {
    const std::vector<std::vector<std::int32_t>> replays = {{1, 1, 1},       {4096, 1, 0},     {144 * 1024, 4096, 7},
                                                            {144128, 0, 33}, {0, 144128, 144}, {0, 0, 0},
                                                            {1, 1, 1},       {65, 64, 63},     {144128, 144128, 144128}};
    CaseData data(parse_case(std::string("3 4 1 128 147500") + layout));
    Problem host = data.problem();
    std::vector<Reference> references;
    for (const std::vector<std::int32_t>& lens : replays) {
      host.kv_lens = lens.data();
      references.push_back(compute_reference(host));
    }
    host.kv_lens = replays[0].data();
    DeviceProblem device(host);
    const Stream stream;
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : device_ways()) {
        if (enough_failures()) return;
        const Options options = device_options(way, path, stream);
        const DeviceWorkspace workspace(workspace_bytes(device.problem, options), options);
        stream.wait();
        device.set_kv_lens(replays[0]);
        const CapturedGraph graph(stream, [&](cudaStream_t s) { queue_call(device, options, workspace, s); });
        for (std::size_t i = 0; i < replays.size(); ++i) {
          device.set_kv_lens(replays[i]);
          device.reset_outputs();
          graph.launch(stream);
          EXPECT_EQ(device.fetch(), "");
          host.kv_lens = replays[i].data();
          EXPECT_TRUE(is_right(host, references[i])) << "replay " << i << layout << " " << device_text_of(options);
        }
        EXPECT_EQ(workspace.fault(), "");
      }
    }
  }
}

// One call is one kernel: no copy, no memset, no second kernel; allocations and synchronisations would end the capture.
TEST_F(CudaCases, R2_OneKernelAndNothingElse) {
  for (const char* line :
       {"- 8 2 64 700,0,1", "1 8 1 128 16k dtype=f16", "64 32 8 128 5 page=16", "- 16 2 256 300,2 q_len=4", "3 8 2 96 0"}) {
    DeviceCase own{std::string(line)};
    const Stream stream;
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : device_ways()) {
        if (enough_failures()) return;
        for (const bool programmatic : {false, true}) {
          Options options = device_options(way, path, stream);
          options.programmatic_launch = programmatic;
          const DeviceWorkspace workspace(workspace_bytes(own.device.problem, options), options);
          stream.wait();
          const CapturedGraph graph(stream, [&](cudaStream_t s) { queue_call(own.device, options, workspace, s); });
          ASSERT_EQ(graph.nodes().size(), 1u) << line << " " << device_text_of(options);
          EXPECT_GE(graph.blocks(), 1) << line << " " << device_text_of(options);
          own.device.reset_outputs();
          graph.launch(stream);
          EXPECT_EQ(own.device.fetch(), "");
          EXPECT_TRUE(is_right(own.host, own.reference)) << line << " " << device_text_of(options);
        }
      }
    }
  }
}

// --- Workspaces ---

constexpr const char* kWorkspaceLines[] = {"- 8 2 64 700,33,1,0",      "- 6 3 96 500,64 q_len=4 page=16 dtype=f16",
                                           "2 16 1 128 30000",         "- 4 4 64 5,0 q_len=0,3",
                                           "1 2 2 256 1000 dtype=f16", "200 8 8 128 9"};

// Exactly as large as the query said, between canaries, full of NaN before it is initialised (DeviceWorkspace); then used by problems of
// every kind one after another, never initialised again.
TEST_F(CudaCases, R3_WorkspaceReusedByOtherProblems) {
  std::vector<std::unique_ptr<DeviceCase>> cases;
  for (const char* line : kWorkspaceLines) cases.push_back(std::make_unique<DeviceCase>(std::string(line)));
  for (std::size_t path = 0; path < device_paths().size(); ++path) {
    std::size_t most = 0;
    for (const auto& own : cases) {
      for (const DeviceWay& way : device_ways()) most = std::max(most, workspace_bytes(own->device.problem, device_options(way, path)));
    }
    const DeviceWorkspace shared(most, device_options({}, path));
    for (int round = 0; round < 3; ++round) {
      for (std::size_t turn = 0; turn < cases.size() * device_ways().size(); ++turn) {
        DeviceCase& own = *cases[turn % cases.size()];
        const Options options = device_options(device_ways()[turn % device_ways().size()], path);
        own.device.reset_outputs();
        decode(own.device.problem, options, shared.span().first(workspace_bytes(own.device.problem, options)));
        EXPECT_EQ(own.device.fetch(), "");
        EXPECT_TRUE(is_right(own.host, own.reference)) << to_string(own.data.spec()) << " " << device_text_of(options);
      }
    }
    EXPECT_EQ(shared.fault(), "");
  }
}

TEST_F(CudaCases, R3_WorkspaceIsBoundedByTheMultiprocessors) {
  const std::size_t most = static_cast<std::size_t>(multiprocessors()) << 20;
  for (const char* line : {"4096 8 1 64 1", "1 8 8 256 100", "1000 64 8 256 1 q_len=2", "1 8 1 128 16k", "3 64 64 128 40"}) {
    const CaseData data(parse_case(line));
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : {device_ways()[0], DeviceWay{Policy::kFa2, 0, 0}, DeviceWay{Policy::kFlashDecoding, 1024, 0}}) {
        if (enough_failures()) return;
        EXPECT_LE(workspace_bytes(data.problem(), device_options(way, path)), most) << line;
      }
    }
  }
}

// Refused calls leave O, LSE and the workspace as they are.
TEST_F(CudaCases, R3_RefusedWorkspaces) {
  DeviceCase own("- 8 2 64 700,33,1,0");
  const Options options = device_options({}, 0);
  const std::size_t bytes = workspace_bytes(own.device.problem, options);
  const DeviceWorkspace workspace(bytes + 16, options);
  const auto status_of = [&](const Problem& problem, std::span<std::byte> span, const Options& with) {
    try {
      decode(problem, with, span);
    } catch (const Error& error) {
      return error.status();
    }
    return Status::kOk;
  };
  own.device.reset_outputs();
  if (bytes > 0) {
    EXPECT_EQ(status_of(own.device.problem, workspace.span().first(bytes - 1), options), Status::kWorkspaceTooSmall);
    EXPECT_EQ(status_of(own.device.problem, {}, options), Status::kWorkspaceTooSmall);
    EXPECT_EQ(status_of(own.device.problem, workspace.span().subspan(8), options), Status::kInvalidArgument);
  }
  Options unknown_path = options;
  unknown_path.cuda_path = "sm_10";
  EXPECT_EQ(status_of(own.device.problem, workspace.span(), unknown_path), Status::kUnsupported);
  Problem refused = own.device.problem;
  refused.q_dtype = refused.kv_dtype = DType::kFloat32;
  EXPECT_EQ(status_of(refused, workspace.span(), options), Status::kUnsupported);
  EXPECT_EQ(own.device.fetch(), "");
  for (const std::uint32_t word : output_bits(own.host)) ASSERT_TRUE(std::isnan(std::bit_cast<float>(word)));
  EXPECT_EQ(workspace.fault(), "");
  own.device.reset_outputs();
  decode(own.device.problem, options, workspace.span());
  EXPECT_EQ(own.device.fetch(), "");
  EXPECT_TRUE(is_right(own.host, own.reference));
}

// A workspace that no kernel could use is named before anything is queued; CUDA keeps no error of it.
TEST_F(CudaCases, R3_InitializeRefusesOtherMemory) {
  const Options options = device_options({}, 0);
  const DeviceWorkspace workspace(4096, options);
  alignas(16) std::byte on_host[64] = {};
  const auto sentence_of = [&](std::span<std::byte> span) -> std::string {
    try {
      initialize_workspace(options, span);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument) << error.what();
      return error.what();
    }
    return {};
  };
  EXPECT_NE(sentence_of(on_host).find("memory of the device"), std::string::npos);
  EXPECT_NE(sentence_of({static_cast<std::byte*>(nullptr), 64}).find("memory of the device"), std::string::npos);
  EXPECT_NE(sentence_of(workspace.span().subspan(8)).find("aligned to 16 bytes"), std::string::npos);
  EXPECT_EQ(sentence_of(workspace.span()), "");
  EXPECT_EQ(sentence_of({}), "");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  for (const std::byte b : on_host) EXPECT_EQ(b, std::byte{0});
  void* managed = nullptr;
  must(cudaMallocManaged(&managed, 64), "cudaMallocManaged");
  EXPECT_EQ(sentence_of({static_cast<std::byte*>(managed), 64}), "");
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cudaFree(managed);
}

// --- The same bits ---

TEST_F(CudaCases, N6_RepeatsStreamsAndGraphs) {
  for (const char* line :
       {"- 8 2 64 2000,33,1,0", "- 8 2 128 700,130 q_len=3 page=16 dtype=f16", "1 8 1 128 40000", "- 32 8 128 9000,100x15"}) {
    const std::string text(line);
    DeviceCase own(text), other(text);
    const Stream streams[2];
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : device_ways()) {
        if (enough_failures()) return;
        const Options options = device_options(way, path);
        const Bits first = own.bits(options);
        EXPECT_TRUE(is_right(own.host, own.reference));
        for (int repeat = 1; repeat < 50; ++repeat) ASSERT_EQ(own.bits(options), first) << line << " " << device_text_of(options);

        const std::size_t bytes = workspace_bytes(own.device.problem, options);
        const DeviceWorkspace one(bytes, on_stream(options, streams[0])), two(bytes, on_stream(options, streams[1]));
        own.device.reset_outputs();
        other.device.reset_outputs();
        for (int repeat = 0; repeat < 16; ++repeat) {
          queue_call(own.device, options, one, streams[0]);
          queue_call(other.device, options, two, streams[1]);
        }
        EXPECT_EQ(own.device.fetch() + other.device.fetch() + one.fault() + two.fault(), "");
        EXPECT_EQ(output_bits(own.host), first) << line << " " << device_text_of(options);
        EXPECT_EQ(output_bits(other.host), first) << line << " " << device_text_of(options);

        const CapturedGraph graph(streams[0], [&](cudaStream_t s) { queue_call(own.device, options, one, s); });
        own.device.reset_outputs();
        graph.launch(streams[0]);
        EXPECT_EQ(own.device.fetch(), "");
        EXPECT_EQ(output_bits(own.host), first) << line << " " << device_text_of(options);
      }
    }
  }
}

TEST_F(CudaCases, N6_TwoHostThreads) {
  const std::string line = "- 8 2 128 3000,500,1,0";
  DeviceCase own(line), other(line);
  const Options options = device_options({}, 0);
  const Bits first = own.bits(options);
  const auto many = [&](DeviceCase& one) {
    const Stream stream;
    const DeviceWorkspace workspace(workspace_bytes(one.device.problem, options), on_stream(options, stream));
    for (int repeat = 0; repeat < 500; ++repeat) queue_call(one.device, options, workspace, stream);
    stream.wait();
  };
  std::thread second([&] { many(other); });
  many(own);
  second.join();
  EXPECT_EQ(own.device.fetch() + other.device.fetch(), "");
  EXPECT_EQ(output_bits(own.host), first);
  EXPECT_EQ(output_bits(other.host), first);
}

// --- Fewer multiprocessors ---

TEST_F(CudaCases, WorkersLimitTheBlocks) {
  for (const char* line : {"- 8 2 64 2000,33,1,0", "1 8 1 128 30000 dtype=f16", "40 8 8 128 200 page=16", "- 8 1 256 3000,1 q_len=5"}) {
    DeviceCase own{std::string(line)};
    const Stream stream;
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const int workers : {1, 2, 5, 66, 131, 132, 1000}) {
        for (const Policy policy : {Policy::kLean, Policy::kFa2, Policy::kFlashDecoding}) {
          const Options options = device_options({policy, 0, workers}, path, stream);
          EXPECT_TRUE(own.judge(options));
          const DeviceWorkspace workspace(workspace_bytes(own.device.problem, options), options);
          stream.wait();
          const CapturedGraph graph(stream, [&](cudaStream_t s) { queue_call(own.device, options, workspace, s); });
          EXPECT_GE(graph.blocks(), 1);
          EXPECT_LE(graph.blocks(), std::min(workers, multiprocessors())) << line << " " << device_text_of(options);
        }
      }
    }
  }
}

// --- Programmatic dependent launch ---

// Each call reads the O of the one before as its Q. With the launch option a call starts while the one before it is ending.
TEST_F(CudaCases, ProgrammaticLaunchOfAChain) {
  constexpr int kCalls = 24;
  for (const char* line : {"- 8 2 64 40,700,3 scale=1", "1 8 1 128 5000 scale=1 dtype=f16", "- 8 8 128 64x20,9000 scale=1 page=16"}) {
    CaseData data(parse_case(line));
    Problem host = data.problem();
    host.o.seq_stride = host.q.seq_stride, host.o.token_stride = host.q.token_stride, host.o.head_stride = host.q.head_stride;
    const std::size_t bytes = static_cast<std::size_t>(span_of_rows(host, host.q, host.head_dim)) * 2;
    const Stream stream;
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      for (const DeviceWay& way : {device_ways()[0], device_ways()[2], device_ways()[3], device_ways()[6]}) {
        if (enough_failures()) return;
        std::vector<std::vector<std::byte>> plain;
        for (const int kind : {0, 1, 2}) {  // plain; programmatic; programmatic in a graph
          DeviceProblem device(host);
          Options options = device_options(way, path, stream);
          options.programmatic_launch = kind > 0;
          const DeviceWorkspace workspace(workspace_bytes(device.problem, options), options);
          std::vector<GuardedBuffer> outputs;  // of each call; every call but the first reads the one before
          for (int call = 0; call < kCalls; ++call) outputs.emplace_back(bytes, nullptr, kNanByte);
          must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
          const auto queue = [&](cudaStream_t s) {
            for (int call = 0; call < kCalls; ++call) {
              Problem p = device.problem;
              if (call > 0) p.q.data = outputs[static_cast<std::size_t>(call) - 1].data();
              p.o.data = outputs[static_cast<std::size_t>(call)].data();
              decode(p, on_stream(options, s), workspace.span());
            }
          };
          if (kind == 2) {
            const CapturedGraph graph(stream, queue);
            EXPECT_EQ(graph.nodes().size(), static_cast<std::size_t>(kCalls));
            graph.launch(stream);
            stream.wait();
          } else {
            queue(stream);
          }
          must(cudaDeviceSynchronize(), "the kernels");
          for (int call = 0; call < kCalls; ++call) {
            const auto at = static_cast<std::size_t>(call);
            const std::vector<std::byte> o = outputs[at].download();
            EXPECT_EQ(outputs[at].fault("o"), "");
            if (kind > 0) {
              ASSERT_EQ(o, plain[at]) << "call " << call << " of kind " << kind << " " << line << " " << device_text_of(options);
              continue;
            }
            plain.push_back(o);
            Problem p = host;
            if (call > 0) p.q.data = plain[at - 1].data();
            p.o.data = plain[at].data();
            p.lse = nullptr;
            EXPECT_TRUE(is_right(p, compute_reference(p))) << "call " << call << " " << line << " " << device_text_of(options);
          }
        }
      }
    }
  }
}

// Lengths and page ids that the kernel before writes last of all, after it has let this one start.
TEST_F(CudaCases, ProgrammaticLaunchReadsWhatTheKernelBeforeWrote) {
  for (const char* line : {"- 8 2 64 700,3,130 page=16", "1 8 1 128 5000 page=1 dtype=f16", "- 8 8 256 64x20,900 page=3 strided=1"}) {
    DeviceCase own{std::string(line)};
    const auto seqs = static_cast<std::size_t>(own.host.batch);
    const std::size_t slots =
        (seqs - 1) * static_cast<std::size_t>(block_table_stride(own.host)) + static_cast<std::size_t>(own.host.max_pages);
    GuardedBuffer table(slots * 4, nullptr, kNanByte), lens(seqs * 4, nullptr, kNanByte);
    table.upload(own.host.block_table);
    lens.upload(own.host.kv_lens);
    const LateCopy copies[] = {{const_cast<std::int32_t*>(own.device.problem.block_table), table.data(), static_cast<int>(slots)},
                               {const_cast<std::int32_t*>(own.device.problem.kv_lens), lens.data(), static_cast<int>(seqs)}};
    const Stream stream;
    for (std::size_t path = 0; path < device_paths().size(); ++path) {
      Options options = device_options({}, path, stream);
      options.programmatic_launch = true;
      const DeviceWorkspace workspace(workspace_bytes(own.device.problem, options), options);
      for (int repeat = 0; repeat < 20; ++repeat) {
        for (const LateCopy& copy : copies) must(cudaMemset(copy.to, 0, static_cast<std::size_t>(copy.words) * 4), "cudaMemset");
        own.device.reset_outputs();
        must(copy_late(copies[0], copies[1], 5e-5, stream), "copy_late");
        queue_call(own.device, options, workspace, stream);
        EXPECT_EQ(own.device.fetch(), "");
        ASSERT_TRUE(is_right(own.host, own.reference)) << "repeat " << repeat << " " << line << " " << device_text_of(options);
      }
    }
  }
}

}  // namespace
}  // namespace leanattn::testing
