// SPDX-License-Identifier: Apache-2.0
// Merging shards on the device: the values of the host's merge, empties and lone shards bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "leanattn/attention.h"
#include "numeric.h"
#include "tests/cuda_memory.h"

namespace leanattn::testing {
namespace {

class CudaMerge : public CudaTest {};

struct Shards {
  MergeProblem problem;
  std::vector<std::byte> shard_o, o;
  std::vector<float> shard_lse, lse;
};

// Every third row of a shard is empty, with NaN as its O.
Shards make_shards(int shards, std::int64_t rows, int dims, DType dtype, LseBase base) {
  Shards made;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const std::size_t bytes = dtype_bytes(dtype), row_values = static_cast<std::size_t>(rows) * dims;
  made.shard_o.resize(row_values * shards * bytes);
  made.o.resize(row_values * bytes);
  made.lse.resize(rows);
  for (std::int64_t i = 0; i < shards * rows; ++i) {
    const bool empty = i % 3 == 1;
    made.shard_lse.push_back(empty ? -std::numeric_limits<float>::infinity() : 4.0f * normal(random));
    for (int dim = 0; dim < dims; ++dim)
      store_from_float(made.shard_o.data(), dtype, i * dims + dim, empty ? std::nanf("") : normal(random));
  }
  made.problem = {.shards = shards, .rows = rows, .head_dim_v = dims, .dtype = dtype, .lse_base = base};
  return made;
}

std::vector<std::byte> from_device(const void* data, std::size_t bytes) {
  std::vector<std::byte> copy(bytes);
  must(cudaMemcpy(copy.data(), data, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return copy;
}

void* to_device(const void* data, std::size_t bytes) {
  void* memory = nullptr;
  must(cudaMalloc(&memory, bytes), "cudaMalloc");
  must(cudaMemcpy(memory, data, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

TEST_F(CudaMerge, IsTheHostsMerge) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
      for (const auto& [shards, rows, dims] :
           {std::tuple{1, std::int64_t{9}, 64}, {2, std::int64_t{1000}, 72}, {5, std::int64_t{40000}, 300}}) {
        Shards host = make_shards(shards, rows, dims, dtype, base);
        MergeProblem device = host.problem;
        device.shard_o = to_device(host.shard_o.data(), host.shard_o.size());
        device.shard_lse = static_cast<const float*>(to_device(host.shard_lse.data(), host.shard_lse.size() * 4));
        device.o = to_device(host.o.data(), host.o.size());
        device.lse = static_cast<float*>(to_device(host.lse.data(), host.lse.size() * 4));
        host.problem.shard_o = host.shard_o.data(), host.problem.shard_lse = host.shard_lse.data();
        host.problem.o = host.o.data(), host.problem.lse = host.lse.data();
        merge(host.problem);
        Stream stream;
        Options options;
        options.backend = Backend::kCuda;
        options.stream = stream;
        merge(device, options);
        stream.wait();
        const auto o = from_device(device.o, host.o.size());
        const auto lse = from_device(device.lse, host.lse.size() * 4);
        for (std::int64_t row = 0; row < rows; ++row) {
          float got;
          std::memcpy(&got, lse.data() + row * 4, 4);
          const float right = host.lse[row];
          ASSERT_TRUE(got == right || std::abs(got - right) <= 4e-6f * std::max(1.0f, std::abs(right)))
              << row << ": " << got << " " << right;
          for (int dim = 0; dim < dims; ++dim) {
            const float value = load_as_float(o.data(), dtype, row * dims + dim),
                        wanted = load_as_float(host.o.data(), dtype, row * dims + dim);
            const float relative = dtype == DType::kFloat32 ? 2e-6f : dtype == DType::kFloat16 ? 2e-3f : 1.6e-2f;
            ASSERT_LE(std::abs(value - wanted), relative * std::max(1.0f, std::abs(wanted))) << row << " " << dim;
          }
          if (shards == 1) {
            ASSERT_EQ(std::memcmp(&got, &right, 4), 0) << row;
          }
        }
        if (shards == 1) {
          EXPECT_EQ(std::memcmp(o.data(), host.o.data(), o.size()), 0);
        }
        for (const void* memory : {device.shard_o, static_cast<const void*>(device.shard_lse), static_cast<const void*>(device.o),
                                   static_cast<const void*>(device.lse)}) {
          cudaFree(const_cast<void*>(memory));
        }
      }
    }
  }
}

}  // namespace
}  // namespace leanattn::testing
