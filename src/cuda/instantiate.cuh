// SPDX-License-Identifier: Apache-2.0
// The instantiations of one element type: variants.h, walked.
#pragma once

#include <iterator>
#include <utility>

#include "cuda/decode.cuh"
#include "cuda/launch.h"
#include "cuda/variants.h"

namespace leanattn::cuda {

template <class T, int kHeadDim, int kRows>
Kernel kernel_of() {
  using C = Config<T, kHeadDim, kRows>;
  Kernel kernel;
  kernel.function = reinterpret_cast<const void*>(&decode_kernel<C>);
  kernel.threads = C::kThreads;
  kernel.rows = C::kRows;
  kernel.tile_tokens = kTile;
  kernel.stage_tokens = C::kTokens;
  kernel.slot_value_bytes = C::kConsumerWarps * C::kLaneRows * C::kRowVectors * kWarp * static_cast<int>(sizeof(float4));
  kernel.slot_row_bytes = C::kConsumerWarps * C::kGroupRows * static_cast<int>(sizeof(float2));
  kernel.fixed_shared_bytes = Shared<C>::bytes(0);
  kernel.stage_shared_bytes = Shared<C>::bytes(1) - Shared<C>::bytes(0);
  return kernel;
}

template <class T, std::size_t... kDims, std::size_t... kBlocks>
Kernel find_kernel(int head_dim, int rows, std::index_sequence<kDims...>, std::index_sequence<kBlocks...>) {
  Kernel found;
  const auto look = [&]<int kHeadDim>() {
    const auto look_block = [&]<int kRows>() {
      if constexpr (has_variant(kHeadDim, kRows)) {
        if (kHeadDim == head_dim && kRows == rows) found = kernel_of<T, kHeadDim, kRows>();
      }
    };
    (look_block.template operator()<kRowBlocks[kBlocks]>(), ...);
  };
  (look.template operator()<kHeadDims[kDims]>(), ...);
  return found;
}

template <class T>
Kernel find_kernel(int head_dim, int rows) {
  return find_kernel<T>(head_dim, rows, std::make_index_sequence<std::size(kHeadDims)>(),
                        std::make_index_sequence<std::size(kRowBlocks)>());
}

}  // namespace leanattn::cuda
