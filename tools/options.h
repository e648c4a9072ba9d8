// SPDX-License-Identifier: Apache-2.0
// Options that several subcommands share.
#pragma once

#include <string>
#include <vector>

#include "tools/run.h"

namespace CLI {
class App;
}

namespace leanattn::tools {

struct CaseChoice {
  std::vector<std::string> words;  // of the command line
  std::vector<std::string> files;
};

void add_case_options(CLI::App& command, CaseChoice& choice);
void add_run_options(CLI::App& command, RunSettings& settings);
// Those of them that a GPU has, for a command that knows no CPU.
void add_gpu_options(CLI::App& command, RunSettings& settings);

// Cases of the files, then those of the words: a word with blanks is a case of its own, words without are one case together.
// Throws CaseError.
std::vector<Case> chosen_cases(const CaseChoice& choice);
// Throws CaseError for words that no case or option knows, so that a mistake is found before anything runs. Options of one processor settle
// the backend; throws leanattn::Error where it is CUDA and there is none.
void check_settings(RunSettings& settings);

}  // namespace leanattn::tools
