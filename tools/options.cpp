// SPDX-License-Identifier: Apache-2.0
#include "tools/options.h"

#include <algorithm>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "backend.h"
#include "problem_view.h"

namespace leanattn::tools {
namespace {

// Options of one processor choose the backend; throws leanattn::Error where it is CUDA and there is none.
void settle_backend(RunSettings& settings) {
  const bool of_cpu = !settings.isa.empty() || !settings.threads.empty();
  const bool of_gpu = !settings.cuda_path.empty() || settings.thread_blocks > 0 || settings.programmatic_launch;
  if (of_cpu && (of_gpu || settings.backend == "cuda")) throw CaseError("--threads and --isa are of the CPU; a GPU has --workers");
  if (of_gpu && settings.backend == "cpu") throw CaseError("--cuda-path, --workers and --pdl are of a GPU; the CPU has --threads");
  if (of_gpu) settings.backend = "cuda";
  if (settings.backend != "cuda") return;
  require_cuda(cuda::available(), cuda::why_absent);
  const std::vector<std::string> paths = cuda_paths();
  if (!settings.cuda_path.empty() && std::find(paths.begin(), paths.end(), settings.cuda_path) == paths.end()) {
    throw CaseError(fmt::format("--cuda-path \"{}\": expected one of {}", settings.cuda_path, fmt::join(paths, ", ")));
  }
}

}  // namespace

void add_case_options(CLI::App& command, CaseChoice& choice) {
  command.add_option("case", choice.words,
                     "batch q_heads kv_heads head_dim length, or - q_heads kv_heads head_dim length,length,…, then key=value…; "
                     "lengths take k and m, and 2kx15 is fifteen times 2k. Quote each case to give several");
  command.add_option("--cases", choice.files, "a file of cases, one a line, # for comments; may be repeated")
      ->type_name("FILE")
      ->allow_extra_args(false);
  command.footer("Keys of a case (key=value, in any order). Without dtype a case is bf16:\n" + case_keys_text() + "\n" +
                 command.get_footer());
}

void add_run_options(CLI::App& command, RunSettings& settings) {
  command.add_option("--backend", settings.backend, "cpu, cuda, or auto: the GPU for the cases that it takes, else the CPU")
      ->type_name("NAME")
      ->capture_default_str();
  command
      .add_option("--threads", settings.threads,
                  "workers instead of the case's own, each on a thread where the machine has one; may be repeated")
      ->type_name("N")
      ->allow_extra_args(false);
  command.add_option("--isa", settings.isa, "an instruction set of `leanattn info` instead of the fastest")->type_name("NAME");
  add_gpu_options(command, settings);
}

void add_gpu_options(CLI::App& command, RunSettings& settings) {
  command
      .add_option("--policy", settings.policies, "lean, fa2, flashdecoding or flashdecoding:N instead of the case's own; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command.add_option("--dtype", settings.dtypes, "f32, f16 or bf16 instead of the case's own; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command.add_option("--cuda-path", settings.cuda_path, "GPU: a kernel path of `leanattn info` instead of the fastest")->type_name("NAME");
  command.add_option("--workers", settings.thread_blocks, "GPU: thread blocks instead of the case's own workers")->type_name("N");
  command.add_flag("--pdl", settings.programmatic_launch, "GPU: each call starts while the one before it ends (programmatic launch)");
  command.add_flag("--json", settings.json, "one JSON object a line");
}

std::vector<Case> chosen_cases(const CaseChoice& choice) {
  std::vector<Case> cases;
  for (const std::string& file : choice.files) {
    const std::vector<Case> more = read_case_file(file);
    cases.insert(cases.end(), more.begin(), more.end());
  }
  std::string loose;
  for (const std::string& word : choice.words) {
    if (word.find(' ') == std::string::npos) {
      loose += (loose.empty() ? "" : " ") + word;
    } else {
      cases.push_back(parse_case(word));
    }
  }
  if (!loose.empty()) cases.push_back(parse_case(loose));
  return cases;
}

void check_settings(RunSettings& settings) {
  Case scratch;
  for (const std::string& policy : settings.policies) parse_policy(policy, scratch.policy, scratch.splits);
  for (const std::string& dtype : settings.dtypes) parse_dtype(dtype);
  for (const int threads : settings.threads) {
    if (threads < 1 || threads > (1 << 16)) throw CaseError(fmt::format("--threads {}: expected 1 to 65536", threads));
  }
  if (settings.backend != "auto" && settings.backend != "cpu" && settings.backend != "cuda") {
    throw CaseError(fmt::format("--backend \"{}\": expected auto, cpu or cuda", settings.backend));
  }
  const std::vector<std::string> isas = cpu_isas();
  if (!settings.isa.empty() && std::find(isas.begin(), isas.end(), settings.isa) == isas.end()) {
    throw CaseError(fmt::format("--isa \"{}\": expected one of {}", settings.isa, fmt::join(isas, ", ")));
  }
  if (settings.thread_blocks < 0 || settings.thread_blocks > (1 << 16)) {
    throw CaseError(fmt::format("--workers {}: expected 1 to 65536", settings.thread_blocks));
  }
  settle_backend(settings);
}

}  // namespace leanattn::tools
