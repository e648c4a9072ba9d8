// SPDX-License-Identifier: Apache-2.0
// The plan as a picture: policies above each other on one time axis, a row a worker, a hue a seq, a shade a head, and at the right a
// bracket for every cut output that joins the workers whose partials merge.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "tools/plan.h"

namespace leanattn {
namespace {

constexpr double kWidth = 960.0;
constexpr double kLeft = 78.0;            // where time 0 is
constexpr double kRight = 836.0;          // where the longest time ends
constexpr double kMergeWidth = 100.0;     // room for the brackets behind a panel's end
constexpr std::size_t kMostTitles = 700;  // segments with a tooltip; more are drawn as one path a colour
constexpr int kMostLegend = 32;

struct Color {
  int red = 0, green = 0, blue = 0;
  std::string hex() const { return fmt::format("#{:02x}{:02x}{:02x}", red, green, blue); }
};

// OKLCH to sRGB (Björn Ottosson's OKLab matrices): equal steps look equal, so no seq stands out.
Color color_from_oklch(double lightness, double chroma, double hue_degrees) {
  const double hue = hue_degrees * 0.017453292519943295;
  const double a = chroma * std::cos(hue), b = chroma * std::sin(hue);
  const auto cube = [](double x) { return x * x * x; };
  const double l = cube(lightness + 0.3963377774 * a + 0.2158037573 * b);
  const double m = cube(lightness - 0.1055613458 * a - 0.0638541728 * b);
  const double s = cube(lightness - 0.0894841775 * a - 1.2914855480 * b);
  const auto channel = [](double linear) {
    const double x = std::clamp(linear, 0.0, 1.0);
    const double gamma = x <= 0.0031308 ? 12.92 * x : 1.055 * std::pow(x, 1.0 / 2.4) - 0.055;
    return static_cast<int>(std::lround(gamma * 255.0));
  };
  return {channel(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s), channel(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
          channel(-0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s)};
}

struct Palette {
  int seqs = 1;
  int shades = 1;

  // The golden angle keeps any number of hues apart, and neighbours most of all; many seqs also take turns in lightness.
  Color seq_color(int seq, double shift) const {
    const double hue = std::fmod(252.0 + 137.50776 * seq, 360.0);
    const double step = seqs > 6 ? (seq % 2 == 0 ? -0.03 : 0.03) : 0.0;
    return color_from_oklch(0.77 + step + shift, 0.115, hue);
  }
  Color output_color(int seq, int shade) const {
    const double place = shades > 1 ? static_cast<double>(shade % shades) / (shades - 1) - 0.5 : 0.0;  // −0.5 … 0.5
    return seq_color(seq, place * (seqs > 6 ? 0.12 : 0.18));
  }
  Color line_color(int seq) const { return seq_color(seq, -0.25); }
};

struct Panel {
  const PlannedPolicy* planned = nullptr;
  double top = 0.0;         // of the first row
  double row_height = 0.0;  // pitch
  double bar_height = 0.0;
  double row_middle(int worker) const { return top + worker * row_height + bar_height / 2; }
};

std::string number(double x) {
  std::string text = fmt::format("{:.2f}", x);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string text_element(double x, double y, const char* css_class, const std::string& content) {
  return fmt::format("<text x=\"{}\" y=\"{}\" class=\"{}\">{}</text>\n", number(x), number(y), css_class, content);
}

std::string short_tokens(int tokens) {
  if (tokens < 1000) return std::to_string(tokens);
  return tokens < 9950 ? fmt::format("{:.1f}K", tokens / 1000.0) : fmt::format("{}K", (tokens + 500) / 1000);
}

std::string segment_title(const PlanSegment& segment, const Plan& plan) {
  std::string text = fmt::format("worker {}: seq {}", segment.worker, segment.segment.seq);
  text += segment.kv_head_end - segment.kv_head_begin == 1
              ? fmt::format(", KV head {}", segment.kv_head_begin)
              : fmt::format(", KV heads {} to {}", segment.kv_head_begin, segment.kv_head_end - 1);
  text += fmt::format(", tokens {} to {} (tiles {} to {} of {})", with_commas(segment.token_begin), with_commas(segment.token_end),
                      segment.segment.tile_begin, segment.segment.tile_end, segment.segment.tiles);
  if (segment.merge >= 0) text += fmt::format(", one of {} partials", plan.merges[segment.merge].segments.size());
  return text;
}

class Drawing {
 public:
  Drawing(const PlanRequest& request, const std::vector<PlannedPolicy>& plans) : request_(request), plans_(plans) {
    long long span = 1;
    std::size_t segments = 0;
    for (const PlannedPolicy& planned : plans) {
      span = std::max(span, planned.plan.makespan_tiles);
      segments += planned.plan.segments.size();
    }
    span_ = static_cast<double>(span);
    with_titles_ = segments <= kMostTitles;
    palette_.seqs = static_cast<int>(request.kv_lens.size());
    palette_.shades = request.head_order == HeadOrder::kBeside ? 1 : request.kv_heads;
    for (const PlannedPolicy& planned : plans) {
      for (const PlanSegment& segment : planned.plan.segments) palette_.shades = std::max(palette_.shades, segment.row_block + 1);
    }
  }

  std::string draw() {
    double y = 54.0;
    for (const PlannedPolicy& planned : plans_) {
      Panel panel;
      panel.planned = &planned;
      panel.row_height = std::clamp(std::floor(288.0 / planned.plan.workers), 3.0, 24.0);
      panel.bar_height = panel.row_height >= 8.0 ? panel.row_height - 3.0 : panel.row_height - (panel.row_height >= 5.0 ? 1.0 : 0.0);
      panel.top = y + 26.0;
      draw_panel(panel);
      y = panel.top + panel.row_height * planned.plan.workers + 24.0;
    }
    draw_axis(y - 12.0);
    const double bottom = draw_legend(y + 52.0);
    return head(bottom) + body_ + "</svg>\n";
  }

 private:
  double x_of(double tiles) const { return kLeft + tiles / span_ * (kRight - kLeft); }

  std::string head(double height) const {
    std::string svg =
        fmt::format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\">\n",
                    number(kWidth), number(height));
    svg += "<title>Schedule: " + plan_title(request_) + "</title>\n";
    svg +=
        "<style>text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
        ".t{font-size:16px;font-weight:600}.p{font-size:14px}.b{font-weight:600}.s{font-size:11px;fill:#59636e}"
        ".r{font-size:11px;fill:#59636e;text-anchor:end}.m{font-size:11px;fill:#59636e;text-anchor:middle}.d{font-size:10.5px;text-anchor:"
        "middle}"
        ".f{stroke:#fff;stroke-width:.8}.c{fill:none;stroke:#1f2328;stroke-width:1.6}</style>\n";
    svg += fmt::format("<rect width=\"{}\" height=\"{}\" rx=\"8\" fill=\"#fff\"/>\n", number(kWidth), number(height));
    return svg + text_element(20.0, 32.0, "t", plan_title(request_));
  }

  int shade_of(const PlanSegment& segment) const { return std::max(segment.row_block, palette_.shades > 1 ? segment.segment.output : 0); }

  void draw_panel(const Panel& panel) {
    const PlannedPolicy& planned = *panel.planned;
    body_ +=
        fmt::format("<g id=\"policy-{}\"{}>\n", &planned - plans_.data(), panel.row_height < 8.0 ? " shape-rendering=\"crispEdges\"" : "");
    body_ += fmt::format("<text x=\"20\" y=\"{}\" class=\"p\"><tspan class=\"b\">{}</tspan><tspan dx=\"8\">{}</tspan></text>\n",
                         number(panel.top - 10.0), planned.name, plan_busy(planned, plans_.front()));
    draw_rows(panel);
    draw_segments(panel);
    draw_merges(panel);
    body_ += "</g>\n";
  }

  // Idle time as a pale band behind each row, and the workers' names.
  void draw_rows(const Panel& panel) {
    const Plan& plan = panel.planned->plan;
    const double end = x_of(static_cast<double>(plan.makespan_tiles));
    std::string band;
    int every = 1;  // a name where names have 14 px of room
    while (every * panel.row_height < 14.0) every *= 2;
    for (int worker = 0; worker < plan.workers; ++worker) {
      const double top = panel.top + worker * panel.row_height;
      band += fmt::format("M{} {}H{}v{}H{}z", number(kLeft), number(top), number(end), number(panel.bar_height), number(kLeft));
      if (worker % every == 0) {
        body_ += text_element(kLeft - 8.0, top + panel.bar_height / 2 + 4.0, "r", worker == 0 ? "worker 0" : std::to_string(worker));
      }
    }
    if (plan.makespan_tiles == 0) return;
    const double bottom = panel.top + plan.workers * panel.row_height;
    body_ += fmt::format("<path d=\"{}\" fill=\"#e9ecef\"/>\n", band);
    body_ += fmt::format("<path d=\"M{0} {1}V{2}\" stroke=\"#59636e\" stroke-dasharray=\"3 2\"/>\n", number(end), number(panel.top - 2.0),
                         number(bottom + 2.0));
  }

  void draw_segments(const Panel& panel) {
    const Plan& plan = panel.planned->plan;
    std::map<std::string, std::string> paths;  // by colour, for plans of many segments
    std::string cuts, labels;
    for (const PlanSegment& segment : plan.segments) {
      const double left = x_of(static_cast<double>(segment.start_tiles)), right = x_of(static_cast<double>(segment.end_tiles));
      const double top = panel.top + segment.worker * panel.row_height;
      const Color color = palette_.output_color(segment.segment.seq, shade_of(segment));
      if (with_titles_) {
        body_ += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"{}><title>{}</title></rect>\n", number(left),
                             number(top), number(right - left), number(panel.bar_height), color.hex(),
                             right - left > 3.0 && panel.bar_height > 3.0 ? " class=\"f\"" : "", segment_title(segment, plan));
      } else {
        paths[color.hex()] += fmt::format("M{} {}h{}", number(left), number(top + panel.bar_height / 2), number(right - left));
      }
      if (segment.merge >= 0 && panel.bar_height >= 5.0) {  // where the output goes on elsewhere
        if (!starts_output(segment.segment)) cuts += fmt::format("M{} {}v{}", number(left + 0.8), number(top), number(panel.bar_height));
        if (!ends_output(segment.segment)) cuts += fmt::format("M{} {}v{}", number(right - 0.8), number(top), number(panel.bar_height));
      }
      labels += segment_label(segment, (left + right) / 2, right - left, top, panel.bar_height);
    }
    for (const auto& [color, path] : paths) {
      body_ += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\"/>\n", path, color, number(panel.bar_height));
    }
    if (!cuts.empty()) body_ += fmt::format("<path d=\"{}\" class=\"c\"/>\n", cuts);
    body_ += labels;
  }

  // The most telling words that fit.
  std::string segment_label(const PlanSegment& segment, double middle, double width, double top, double height) const {
    if (!with_titles_ || height < 12.0) return {};
    const int seq = segment.segment.seq;
    std::vector<std::string> words;
    if (request_.kv_heads > 1 && request_.head_order != HeadOrder::kBeside) {
      words = {fmt::format("seq {} · head {}", seq, segment.kv_head_begin), fmt::format("{}·{}", seq, segment.kv_head_begin)};
    } else {
      words = {fmt::format("seq {}", seq), std::to_string(seq)};
    }
    for (const std::string& word : words) {
      const double letters = static_cast<double>(std::count_if(word.begin(), word.end(), [](char c) { return (c & 0xc0) != 0x80; }));
      if (letters * 5.8 + 8.0 > width) continue;
      return text_element(middle, top + height / 2 + 3.8, "d", word);
    }
    return {};
  }

  // Merging comes when the partials are there: brackets stand behind the panel's end, each in the first lane that is free over its rows.
  void draw_merges(const Panel& panel) {
    const Plan& plan = panel.planned->plan;
    std::vector<std::vector<int>> rows_of(plan.merges.size());
    std::vector<int> lane_of(plan.merges.size()), lane_ends;
    std::vector<std::size_t> order(plan.merges.size());
    for (std::size_t i = 0; i < plan.merges.size(); ++i) {
      std::set<int> rows;
      for (const int segment : plan.merges[i].segments) rows.insert(plan.segments[segment].worker);
      rows_of[i].assign(rows.begin(), rows.end());
      order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return rows_of[a].front() < rows_of[b].front(); });
    for (const std::size_t i : order) {
      std::size_t lane = 0;
      while (lane < lane_ends.size() && lane_ends[lane] >= rows_of[i].front()) ++lane;
      if (lane == lane_ends.size()) lane_ends.push_back(0);
      lane_ends[lane] = rows_of[i].back();
      lane_of[i] = static_cast<int>(lane);
    }
    const double pitch = std::min(12.0, (kMergeWidth - 16.0) / static_cast<double>(std::max<std::size_t>(lane_ends.size(), 1)));
    const double stroke = std::clamp(pitch / 4.0, 0.5, 2.0);
    for (std::size_t i = 0; i < plan.merges.size(); ++i) {
      const std::vector<int>& rows = rows_of[i];
      const double x = x_of(static_cast<double>(plan.makespan_tiles)) + 14.0 + lane_of[i] * pitch;
      const double stub = std::min(pitch * 0.66, 6.0);
      std::string path = fmt::format("M{} {}V{}", number(x), number(panel.row_middle(rows.front())), number(panel.row_middle(rows.back())));
      for (const int row : pitch < 2.0 ? std::vector<int>{} : rows)
        path += fmt::format("M{} {}h-{}", number(x), number(panel.row_middle(row)), number(stub));
      const PlanMerge& merge = plan.merges[i];
      body_ += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\">", path, palette_.line_color(merge.seq).hex(),
                           number(stroke));
      if (with_titles_)
        body_ += fmt::format("<title>seq {}, output {}: {} partials merge</title>", merge.seq, merge.output, merge.segments.size());
      body_ += "</path>\n";
    }
  }

  void draw_axis(double y) {
    double step = 1.0;
    while (span_ / step > 10.0) {
      const double decade = std::pow(10.0, std::floor(std::log10(step) + 1e-9));
      step = step / decade < 1.5 ? 2.0 * decade : step / decade < 3.5 ? 5.0 * decade : 10.0 * decade;
    }
    std::string ticks = fmt::format("M{} {}H{}", number(kLeft), number(y), number(kRight));
    for (double tick = 0.0; tick <= span_ + 1e-9; tick += step) {
      ticks += fmt::format("M{} {}v4", number(x_of(tick)), number(y));
      body_ += text_element(x_of(tick), y + 16.0, "m", with_commas(std::llround(tick)));
    }
    body_ += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"#59636e\"/>\n", ticks);
    std::string unit = request_.tile_tokens == 1 ? "a token each" : fmt::format("{} tokens each", with_commas(request_.tile_tokens));
    if (request_.fragment_cost_tiles > 0) unit += fmt::format("; a segment costs {} more", request_.fragment_cost_tiles);
    body_ += text_element((kLeft + kRight) / 2, y + 33.0, "m", fmt::format("time, in tiles of the line ({})", unit));
  }

  double draw_legend(double y) {
    const int seqs = static_cast<int>(request_.kv_lens.size());
    double x = 20.0;
    const auto item = [&](double width) {
      if (x + width > kWidth - 20.0) {
        x = 20.0;
        y += 20.0;
      }
      const double at = x;
      x += width;
      return at;
    };
    for (int seq = 0; seq < std::min(seqs, kMostLegend); ++seq) {
      const std::string words = fmt::format("seq {}: {}", seq, short_tokens(request_.kv_lens[seq]));
      const double at = item(131.0);
      constexpr int kSwatches = 4;  // some of the seq's shades
      const int shown = std::min(palette_.shades, kSwatches);
      for (int i = 0; i < shown; ++i) {
        const int shade = shown == 1 ? 0 : i * (palette_.shades - 1) / (shown - 1);
        body_ += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"11\" fill=\"{}\"/>\n", number(at + i * 28.0 / shown),
                             number(y - 9.5), number(28.0 / shown), palette_.output_color(seq, shade).hex());
      }
      body_ += text_element(at + 34.0, y, "s", words);
    }
    if (seqs > kMostLegend) body_ += text_element(item(150.0), y, "s", fmt::format("… and {} more seqs", with_commas(seqs - kMostLegend)));
    x = 20.0;
    y += 22.0;
    const double idle = item(86.0);
    body_ += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"28\" height=\"11\" fill=\"#e9ecef\"/>\n", number(idle), number(y - 9.5));
    body_ += text_element(idle + 34.0, y, "s", "idle");
    const double cut = item(270.0);
    body_ += fmt::format("<path d=\"M{} {}v11\" class=\"c\"/>\n", number(cut + 14.0), number(y - 9.5));
    body_ += text_element(cut + 24.0, y, "s", "cut: the output goes on in another row");
    const double bracket = item(320.0);
    body_ += fmt::format("<path d=\"M{0} {1}h6v10h-6\" fill=\"none\" stroke=\"#59636e\" stroke-width=\"1.6\"/>\n", number(bracket),
                         number(y - 9.0));
    body_ += text_element(bracket + 14.0, y, "s", "bracket: these rows' partials merge into one output");
    if (palette_.shades > 1) body_ += text_element(item(180.0), y, "s", "shade: head");
    return y + 20.0;
  }

  const PlanRequest& request_;
  const std::vector<PlannedPolicy>& plans_;
  Palette palette_;
  double span_ = 1.0;
  bool with_titles_ = true;
  std::string body_;
};

}  // namespace

std::string plan_svg(const PlanRequest& request) {
  const std::vector<PlannedPolicy> plans = make_plans(request);
  return Drawing(request, plans).draw();
}

}  // namespace leanattn
