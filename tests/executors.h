// SPDX-License-Identifier: Apache-2.0
// A caller's own threads, of several kinds.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "leanattn/problem.h"

namespace leanattn::testing {

using TaskBody = void (*)(void* argument, std::int32_t task);

inline void run_in_order(void*, std::int32_t tasks, TaskBody body, void* argument) {
  for (std::int32_t task = 0; task < tasks; ++task) body(argument, task);
}

inline void run_reversed(void*, std::int32_t tasks, TaskBody body, void* argument) {
  for (std::int32_t task = tasks; task-- > 0;) body(argument, task);
}

// A thread a task, started from the last.
inline void run_on_threads(void*, std::int32_t tasks, TaskBody body, void* argument) {
  std::vector<std::thread> threads;
  for (std::int32_t task = tasks; task-- > 0;) threads.emplace_back(body, argument, task);
  for (std::thread& thread : threads) thread.join();
}

struct NamedExecutor {
  const char* name;
  Executor executor;
};

inline const std::vector<NamedExecutor>& executors() {
  static const std::vector<NamedExecutor> all = {
      {"in order", {run_in_order, nullptr}}, {"reversed", {run_reversed, nullptr}}, {"threads", {run_on_threads, nullptr}}};
  return all;
}

}  // namespace leanattn::testing
