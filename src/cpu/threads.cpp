// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/threads.h"

#include <algorithm>

#if defined(_OPENMP)
#include <omp.h>
#else
#include <exception>
#include <thread>
#include <vector>
#endif

namespace leanattn::cpu {

int default_workers() {
#if defined(_OPENMP)
  return std::max(1, omp_get_max_threads());
#else
  return std::max(1u, std::thread::hardware_concurrency());
#endif
}

void run_tasks(const Executor& executor, int tasks, void (*body)(void* argument, std::int32_t task), void* argument) {
  if (tasks <= 0) return;
  if (tasks == 1) return body(argument, 0);
  if (executor.run) return executor.run(executor.context, tasks, body, argument);
#if defined(_OPENMP)
    // More tasks than threads, or fewer threads granted than asked for (nesting, limits): the stride covers every task all the same.
#pragma omp parallel num_threads(std::min(tasks, default_workers()))
  for (int task = omp_get_thread_num(); task < tasks; task += omp_get_num_threads()) body(argument, task);
#else
  const int threads = std::min(tasks, default_workers());
  const auto share = [=](int first) {
    for (int task = first; task < tasks; task += threads) body(argument, task);
  };
  std::vector<std::thread> others;
  int next = 1;
  try {
    others.reserve(static_cast<std::size_t>(threads - 1));
    for (; next < threads; ++next) others.emplace_back(share, next);
  } catch (const std::exception&) {
    // No more threads to be had: the caller does what is left.
  }
  share(0);
  for (; next < threads; ++next) share(next);
  for (std::thread& thread : others) thread.join();
#endif
}

}  // namespace leanattn::cpu
