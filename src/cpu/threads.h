// SPDX-License-Identifier: Apache-2.0
// Runs the workers of a call: on the caller's executor, on OpenMP's threads, or on threads of its own where there is no OpenMP.
#pragma once

#include <cstdint>

#include "leanattn/problem.h"

namespace leanattn::cpu {

// Workers that Options::workers = 0 stands for.
int default_workers();

// body(argument, i) for every i in 0 … tasks − 1; returns after the last. One task runs on the caller.
void run_tasks(const Executor& executor, int tasks, void (*body)(void* argument, std::int32_t task), void* argument);

}  // namespace leanattn::cpu
