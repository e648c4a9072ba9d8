// SPDX-License-Identifier: Apache-2.0
// Answers of CUDA as exceptions.
#pragma once

#include <cuda_runtime_api.h>

namespace leanattn::tools {

// Throws DeviceError (device.h), naming the call, unless CUDA says that all is well.
void check_cuda(cudaError_t answer, const char* call);

}  // namespace leanattn::tools
