// SPDX-License-Identifier: Apache-2.0
// The command line as a user meets it: exit codes, words on stderr, JSON that parses.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "backend.h"
#include "tools/run.h"

namespace {

struct Outcome {
  int exit_code = -1;
  std::string out;
  std::string err;
};

class Cli : public testing::Test {
 protected:
  void SetUp() override {
    const std::string pattern = (std::filesystem::temp_directory_path() / "leanattn_cli_XXXXXX").string();
    std::vector<char> name(pattern.c_str(), pattern.c_str() + pattern.size() + 1);
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name.data();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& name, const std::string& content) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << content;
    return path;
  }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  Outcome run(const std::string& arguments) const {
    const std::string err = folder_ + "/stderr";
    FILE* pipe = popen(("cd " + folder_ + " && " LEANATTN_CLI " " + arguments + " 2>" + err).c_str(), "r");
    Outcome outcome;
    std::array<char, 4096> piece;
    for (std::size_t n; (n = fread(piece.data(), 1, piece.size(), pipe)) > 0;) outcome.out.append(piece.data(), n);
    const int status = pclose(pipe);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::ostringstream text;
    text << std::ifstream(err).rdbuf();
    outcome.err = text.str();
    return outcome;
  }

  static std::vector<nlohmann::json> lines(const std::string& text) {
    std::vector<nlohmann::json> all;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) all.push_back(nlohmann::json::parse(line));
    return all;
  }
  static bool has(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

 private:
  std::string folder_;
};

TEST_F(Cli, HelpAndVersion) {
  EXPECT_EQ(run("--help").exit_code, 0);
  EXPECT_EQ(run("--version").exit_code, 0);
  for (const char* command : {"info", "check", "bench", "timeline", "plan", "demo"}) {
    EXPECT_TRUE(has(run("--help").out, command));
    const Outcome help = run(std::string(command) + " --help");
    EXPECT_EQ(help.exit_code, 0);
    for (const char* words : {"Exit codes:", "  0  all", "  1  a check failed", "  2  the command line"}) {
      EXPECT_TRUE(has(help.out, words)) << command << ": " << words;
    }
  }
}

TEST_F(Cli, HelpOfTimelineIsOfAGpu) {
  const std::string help = run("timeline --help").out;
  for (const char* words : {"--replays INT:INT in [1 - 1000000]=25", "replays of a case's graph", "--blocks FILE",
                            "a JSON line a thread block", "--cuda-path NAME", "--workers N", "--pdl"}) {
    EXPECT_TRUE(has(help, words)) << words << ": " << help;
  }
  for (const char* of_the_cpu : {"--threads", "--isa", "--backend"}) EXPECT_FALSE(has(help, of_the_cpu)) << of_the_cpu;
}

TEST_F(Cli, HelpListsTheKeysOfACase) {
  for (const char* command : {"check", "bench"}) {
    const std::string help = run(std::string(command) + " --help").out;
    for (const char* words : {"Without dtype a case is bf16", "  softcap ", "  spread "}) {
      EXPECT_TRUE(has(help, words)) << command << ": " << words;
    }
  }
  const std::string bench = run("bench --help").out;
  for (const char* words : {"--backend NAME=auto", "--min-seconds FLOAT:FLOAT in [0 - 3600]=1", "--pairs INT:INT in [1 - 1000000]=15",
                            "--max-seconds FLOAT:FLOAT in [0 - 3600]=60", "--replays INT:INT in [3 - 1000000]="}) {
    EXPECT_TRUE(has(bench, words)) << words << ": " << bench;
  }
  const std::string plan = run("plan --help").out;
  EXPECT_TRUE(has(plan, "--fragment-cost INT:INT in [0 - 1000000]=0")) << plan;
  EXPECT_FALSE(has(plan, "softcap")) << plan;
}

TEST_F(Cli, Info) {
  const Outcome text = run("info");
  EXPECT_EQ(text.exit_code, 0);
  for (const char* word : {"backends", "threads", "ISA", "GPU"}) EXPECT_TRUE(has(text.out, word)) << word;
  const auto info = nlohmann::json::parse(run("info --json").out);
  EXPECT_GE(info["threads"], 1);
  EXPECT_EQ(info["isa"], info["isas"][0]);
  EXPECT_TRUE(info["backends"]["cpu"]);
}

TEST_F(Cli, CheckAnswersInWordsAndJson) {
  const Outcome text = run("check 2 8 2 64 300 page=16 softcap=20");
  EXPECT_EQ(text.exit_code, 0) << text.out << text.err;
  EXPECT_TRUE(has(text.out, "2 8 2 64 300 page=16 softcap=20")) << text.out;
  EXPECT_TRUE(has(text.out, "1 of 1 cases right")) << text.out;
  const Outcome json = run("check --json --threads 1 --threads 3 --policy lean --policy flashdecoding:2 \"- 8 2 64 300,0\" \"1 4 4 32 9\"");
  EXPECT_EQ(json.exit_code, 0) << json.out << json.err;
  const auto records = lines(json.out);
  ASSERT_EQ(records.size(), 8u);
  for (const auto& record : records) {
    EXPECT_TRUE(record["ok"]);
    EXPECT_LE(record["error"], record["tolerance"]);
    for (const char* key : {"case", "dtype", "policy", "workers", "threads", "isa", "error_over_tolerance", "device", "commit", "date"}) {
      EXPECT_TRUE(record.contains(key)) << key;
    }
  }
  EXPECT_EQ(records[1]["policy"], "flashdecoding:2");
  EXPECT_EQ(records[2]["workers"], 3);
  EXPECT_EQ(records[2]["threads"], std::min(3, nlohmann::json::parse(run("info --json").out)["threads"].get<int>()));
}

TEST_F(Cli, CheckTakesEveryInstructionSet) {
  const auto info = nlohmann::json::parse(run("info --json").out);
  for (const auto& isa : info["isas"]) {
    const Outcome outcome = run("check --json --isa " + isa.get<std::string>() + " 1 8 2 64 500");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
    EXPECT_EQ(lines(outcome.out).at(0)["isa"], isa);
  }
}

TEST_F(Cli, CheckKeepsItsColumnsAndNamesWhatTheLibraryRefuses) {
  const std::string longer = "- 8 2 64 40,41,42,43,44,45,46,47,48,49 softcap=20 policy=flashdecoding:1024";
  const Outcome outcome = run("check \"1 8 2 64 40\" \"" + longer + "\" \"1 8 2 100 40\"");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.out << outcome.err;
  std::istringstream in(outcome.out);
  std::string first, second, refused, refused_case;
  for (std::string* line : {&first, &second, &refused, &refused_case}) std::getline(in, *line);
  EXPECT_EQ(first.find("tolerance"), second.find("tolerance")) << outcome.out;
  EXPECT_EQ(first.find("1 8 2 64 40"), second.find(longer)) << outcome.out;
  EXPECT_NE(first.find("1 8 2 64 40"), std::string::npos) << outcome.out;
  EXPECT_EQ(refused.rfind("refused: head_dim 100", 0), 0u) << outcome.out;
  EXPECT_TRUE(has(refused_case, "case: 1 8 2 100 40")) << outcome.out;
  EXPECT_FALSE(has(outcome.out, "inf")) << outcome.out;
  EXPECT_TRUE(has(outcome.out, "2 of 3 cases right")) << outcome.out;
  const auto record = lines(run("check --json 1 8 2 100 40").out).at(0);
  EXPECT_FALSE(record["ok"]);
  EXPECT_TRUE(record["error"].is_null());
  EXPECT_TRUE(has(record["message"], "refused: head_dim 100")) << record["message"];
}

TEST_F(Cli, ACaseFile) {
  const std::string good = file("good.txt", "# two\n1 8 2 64 40\n\n- 8 2 64 40,1 dtype=f32 # ragged\n");
  const Outcome outcome = run("check --cases " + good);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, "2 of 2 cases right"));
  const Outcome bad = run("check --cases " + file("bad.txt", "1 8 2 64 40\n1 8 2 64 4q\n"));
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_TRUE(has(bad.err, "bad.txt:2: length \"4q\"")) << bad.err;
}

TEST_F(Cli, WrongCommandLinesAreExitCode2) {
  const std::pair<const char*, const char*> wrong[] = {
      {"", "ubcommand"},
      {"dance", "dance"},
      {"check --frobnicate", "--frobnicate"},
      {"check 1 8 2 64", "1 8 2 64"},
      {"check 1 8 2 64 40 page=none", "page \"none\""},
      {"check --cases /no/such/file", "/no/such/file"},
      {"check --cases /dev/null", "holds no case"},
      {"check ''", "no case"},
      {"check --policy magic", "policy \"magic\""},
      {"check --dtype f8", "dtype \"f8\""},
      {"check --threads 0", "--threads"},
      {"check --threads x", "--threads"},
      {"check --isa VAX", "--isa \"VAX\""},
      {"check --backend tpu", "--backend \"tpu\""},
      {"bench", "expected a case"},
      {"bench 1 8 2 64 40 --pairs 0", "--pairs"},
      {"plan", "lengths"},
      {"plan 1,x", "length \"x\""},
      {"plan 1 --format gif", "gif"},
      {"demo /no/such/trace", "\"/no/such/trace\": cannot be read; run it in the source tree, or name a trace"},
      {"check 1 8 2 64 40 policy=flashdecoding:1025", "1 to 1024"},
  };
  for (const auto& [arguments, words] : wrong) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments << ": " << outcome.err;
    EXPECT_TRUE(has(outcome.err, words)) << arguments << ": " << outcome.err;
    EXPECT_FALSE(has(outcome.err, "terminate")) << arguments;
  }
}

TEST_F(Cli, ErrorsOfTheLibraryAreExitCode1) {
  const std::pair<const char*, const char*> failing[] = {
      {"check 1 8 2 100 40", "head_dim 100"},  {"check 1 7 2 64 40", "q_heads 7"},
      {"bench 1 8 2 100 40", "head_dim 100"},  {"plan 1k --q-heads 7 --kv-heads 2", "q_heads 7"},
      {"check 1000000 64 64 256 1m", "bytes"}, {"plan 1k --format svg --output /proc/no/such.svg", "/proc/no/such.svg"},
  };
  for (const auto& [arguments, words] : failing) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 1) << arguments << ": " << outcome.err;
    EXPECT_TRUE(has(outcome.out + outcome.err, words)) << arguments << ": " << outcome.out << outcome.err;
  }
}

TEST_F(Cli, TheSameMistakeHasTheSameExitCodeInEveryCommand) {
  const struct {
    int exit_code;
    std::vector<const char*> commands;
  } mistakes[] = {
      {2, {"check 1 8 2 64 x", "bench 1 8 2 64 x", "plan x"}},                                             // a length
      {2, {"check 1 8 2 64 3000m", "bench 1 8 2 64 3000m", "plan 3000m"}},                                 // beyond the language
      {2, {"check 1 8 2 64 9 policy=magic", "bench 1 8 2 64 9 --policy magic", "plan 9 --policy magic"}},  // a name
      {2, {"check 1 8 2 64 9 --threads 0", "bench 1 8 2 64 9 --threads 0", "plan 9 --workers 0", "demo --threads 0"}},
      {2, {"check --no", "bench --no", "plan --no", "demo --no", "info --no", "timeline --no"}},  // an option
      {1, {"check 1 7 2 64 9", "bench 1 7 2 64 9", "plan 9 --q-heads 7 --kv-heads 2"}},           // refused by the library
      {1, {"plan 9 --output /proc/no/such.svg"}},
  };
  for (const auto& [exit_code, commands] : mistakes) {
    for (const char* command : commands) {
      const Outcome outcome = run(command);
      EXPECT_EQ(outcome.exit_code, exit_code) << command << ": " << outcome.err;
      EXPECT_FALSE((outcome.out + outcome.err).empty()) << command;
    }
  }
}

TEST(Busy, IsAFloorWhoseTimesLieFarApart) {
  using leanattn::tools::busy_sentence;
  EXPECT_EQ(busy_sentence({100.0}), "");
  EXPECT_EQ(busy_sentence({0.0, 0.0, 0.0}), "");
  EXPECT_EQ(busy_sentence({100.0, 100.0, 110.0, 120.0, 120.0}), "");
  EXPECT_EQ(busy_sentence({100.0, 100.0, 110.0, 140.0, 140.0}), "this machine is busy: times are not comparable");
}

TEST_F(Cli, ABackendThatIsNotThereIsNamed) {
  const auto info = nlohmann::json::parse(run("info --json").out);
  if (!info["gpu"].is_null()) GTEST_SKIP() << "there is a GPU here: " << info["gpu"]["name"];
  const std::string why = "leanattn: backend cuda: " + info["gpu_absent"].get<std::string>();
  EXPECT_FALSE(info["backends"]["cuda"]);
  for (const char* arguments : {"check --backend cuda", "check 1 8 2 64 40 --pdl", "bench 1 8 2 64 40 --workers 4",
                                "check 1 8 2 64 40 --cuda-path portable", "bench 1 8 2 64 40 --backend cuda"}) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 1) << arguments;
    EXPECT_TRUE(has(outcome.err, why)) << arguments << ": " << outcome.err;
    EXPECT_EQ(outcome.out, "") << arguments;
  }
}

TEST_F(Cli, TimelineNamesTheBuildThatItNeeds) {
  if (!leanattn::cuda::timeline_marks().empty()) GTEST_SKIP() << "a build with LEANATTN_TIMELINE";
  const Outcome outcome = run("timeline 1 8 2 64 40");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, "timeline: this build keeps none; configure with the preset timeline (LEANATTN_TIMELINE)")) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

TEST_F(Cli, OptionsOfOneProcessorAreNotTheOthers) {
  for (const char* arguments : {"check 1 8 2 64 40 --threads 1 --pdl", "check 1 8 2 64 40 --isa SCALAR --backend cuda",
                                "check 1 8 2 64 40 --backend cpu --workers 4", "bench 1 8 2 64 40 --backend cpu --cuda-path portable"}) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_TRUE(has(outcome.err, "--threads")) << arguments << ": " << outcome.err;
  }
}

TEST_F(Cli, BenchReportsTimeAndFloor) {
  const std::string quick = "bench --min-seconds 0 --pairs 3 --max-seconds 1 1 8 2 64 3000 dtype=f32";
  const Outcome text = run(quick);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_TRUE(has(text.out, "÷ floor"));
  EXPECT_TRUE(has(text.out, "1 8 2 64 3000 dtype=f32"));
  const Outcome json = run(quick + " --json --threads 1");
  EXPECT_EQ(json.exit_code, 0) << json.err;
  const auto record = lines(json.out).at(0);
  for (const char* key : {"case",
                          "dtype",
                          "policy",
                          "workers",
                          "threads",
                          "isa",
                          "kv_bytes",
                          "us",
                          "p10_us",
                          "p90_us",
                          "floor_us",
                          "floor_p10_us",
                          "floor_p90_us",
                          "ratio",
                          "ratio_of_medians",
                          "gb_per_s",
                          "error",
                          "tolerance",
                          "error_over_tolerance",
                          "device",
                          "commit",
                          "date"}) {
    EXPECT_TRUE(record.contains(key)) << key;
  }
  EXPECT_EQ(record["kv_bytes"], 2 * 3000 * 2 * 64 * 4);
  EXPECT_LE(record["p10_us"], record["us"]);
  EXPECT_LE(record["us"], record["p90_us"]);
  EXPECT_GT(record["floor_p10_us"], 0.0);
  EXPECT_LE(record["floor_p10_us"], record["floor_us"]);
  EXPECT_LE(record["floor_us"], record["floor_p90_us"]);
}

TEST_F(Cli, PlanInThreeForms) {
  const std::string plan = "plan 10k,1kx3 --q-heads 8 --kv-heads 2 --workers 4 --policy lean --policy fa2";
  EXPECT_TRUE(has(run(plan).out, "fa2"));
  EXPECT_TRUE(nlohmann::json::accept(run(plan + " --format json").out));
  const Outcome svg = run(plan + " --format svg --output plan.svg");
  EXPECT_EQ(svg.exit_code, 0) << svg.err;
  std::ifstream in(path("plan.svg"));
  std::string first;
  std::getline(in, first);
  EXPECT_TRUE(has(first, "<svg") || has(first, "<?xml")) << first;
}

TEST_F(Cli, FoldersAreNotMade) {
  const std::string trace = file("trace.jsonl", "{\"input_length\": 900, \"output_length\": 7}\n");
  for (const std::string& command : {std::string("plan 1k"), "demo " + trace}) {
    const Outcome outcome = run(command + " --output pictures/cut.svg");
    EXPECT_EQ(outcome.exit_code, 1) << command;
    EXPECT_EQ(outcome.out, "") << command << ": said before anything runs";
    EXPECT_EQ(outcome.err, "leanattn: file \"pictures/cut.svg\": there is no folder \"pictures\"\n") << command;
    EXPECT_FALSE(std::filesystem::exists(path("pictures"))) << command;
    EXPECT_TRUE(has(run(command.substr(0, 4) + " --help").out, "in a folder that is there")) << command;
  }
}

TEST_F(Cli, DemoOfAShortTrace) {
  const std::string trace =
      file("trace.jsonl", "{\"input_length\": 900, \"output_length\": 7}\n{\"input_length\": 20, \"output_length\": 0}\n");
  const Outcome outcome = run("demo --json --output cut.svg " + trace);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto records = lines(outcome.out);
  ASSERT_EQ(records.size(), 3u);
  EXPECT_TRUE(has(records[0]["case"], "- 32 8 128 903,20")) << records[0]["case"];
  for (const auto& record : records) EXPECT_TRUE(record["ok"]);
  EXPECT_EQ(records[1]["policy"], "flashdecoding:4");
  EXPECT_EQ(records[2]["policy"], "fa2");
  EXPECT_TRUE(std::filesystem::exists(path("cut.svg")));
  const Outcome table = run("demo --threads 1 --output cut.svg " + trace);
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* words : {"flashdecoding:4", "p10–p90", "right: 8 of 64 (request, head) rows compared with float64",
                            "flashdecoding:4 keeps 1 worker as busy as lean does, so lean has no idle time to win back from it here."}) {
    EXPECT_TRUE(has(table.out, words)) << words << ": " << table.out;
  }
  const Outcome bad = run("demo " + file("bad.jsonl", "{\"input_length\": 900, \"output_length\": 7}\n{\"input_length\": \"x\"}\n"));
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_TRUE(has(bad.err, "bad.jsonl:2:")) << bad.err;
  const Outcome unwritable = run("demo --threads 1 --output /proc/no/such.svg " + trace);
  EXPECT_EQ(unwritable.exit_code, 1);
  EXPECT_TRUE(has(unwritable.err, "/proc/no/such.svg")) << unwritable.err;
}

}  // namespace
