// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/tile.h"
namespace leanattn::cpu {
const IsaKernels* amx_kernels() { return nullptr; }
}
