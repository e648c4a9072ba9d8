// SPDX-License-Identifier: Apache-2.0
// The instantiations of one element type: variants.h, walked, those of wgmma apart from the others.
#pragma once

#include <iterator>
#include <utility>

#include "cuda/decode.cuh"
#include "cuda/launch.h"
#include "cuda/variants.h"

namespace leanattn::cuda {

template <class T, int kHeadDim, int kRows, Features kFeatures>
Kernel kernel_of() {
  using C = Config<T, kHeadDim, kRows, kFeatures>;
  Kernel kernel;
  kernel.function = reinterpret_cast<const void*>(&decode_kernel<C>);
  kernel.threads = C::kThreads;
  kernel.rows = C::kRows;
  kernel.tile_tokens = kTile;
  kernel.stage_tokens = C::kTokens;
  kernel.chunk_tiles = C::kChunkTiles;
  kernel.slot_value_bytes = C::kConsumerWarps * C::kLaneRows * C::kRowVectors * kWarp * static_cast<int>(sizeof(float4));
  kernel.slot_row_bytes = C::kConsumerWarps * C::kGroupRows * static_cast<int>(sizeof(float2));
  kernel.fixed_shared_bytes = Shared<C>::bytes(0);
  kernel.stage_shared_bytes = Shared<C>::bytes(1) - Shared<C>::bytes(0);
  return kernel;
}

template <class T, bool kWarpgroup, std::size_t... kIndex>
Kernel find_kernel(const Variant& variant, std::index_sequence<kIndex...>) {
  Kernel found;
  const auto look = [&]<std::size_t kOne>() {
    constexpr Variant kThis = kVariants[kOne];
    if constexpr (is_warpgroup(kThis) == kWarpgroup) {
      if (kThis.head_dim == variant.head_dim && kThis.rows == variant.rows && kThis.features == variant.features) {
        found = kernel_of<T, kThis.head_dim, kThis.rows, kThis.features>();
      }
    }
  };
  (look.template operator()<kIndex>(), ...);
  return found;
}

template <class T, bool kWarpgroup>
Kernel find_kernel(const Variant& variant) {
  return find_kernel<T, kWarpgroup>(variant, std::make_index_sequence<std::size(kVariants)>());
}

}  // namespace leanattn::cuda
