// SPDX-License-Identifier: Apache-2.0
#include "tools/golden.h"

namespace leanattn::tools {
namespace {

constexpr GoldenCase kGolden[] = {
    // Groups and dtypes.
    {"group_1_f32", "2 4 4 64 300 dtype=f32"},
    {"group_2_f16", "2 8 4 64 517 dtype=f16"},
    {"group_3_bf16", "2 9 3 64 1000"},
    {"group_4_bf16", "2 32 8 128 1025"},
    {"group_4_f16", "2 32 8 128 1025 dtype=f16"},
    {"group_4_f32", "2 32 8 128 1025 dtype=f32"},
    {"group_5_f32", "3 5 1 128 769 dtype=f32"},
    {"group_6_bf16", "3 12 2 128 640"},
    {"group_7_bf16", "2 28 4 128 2049"},
    {"group_8_f16", "1 8 1 128 4k dtype=f16"},
    {"group_12_bf16", "2 24 2 64 777"},
    {"group_16_f32", "2 16 1 64 1k dtype=f32"},
    {"group_64_bf16", "1 64 1 128 1500"},

    // Head dimensions, and V's apart from K's.
    {"dim_32", "2 4 2 32 400"},
    {"dim_40", "2 4 2 40 333 dtype=f32"},
    {"dim_72", "2 6 2 72 333 dtype=f16"},
    {"dim_80", "2 4 1 80 500"},
    {"dim_96", "2 8 2 96 500 dtype=f32"},
    {"dim_112", "1 7 1 112 700 dtype=f16"},
    {"dim_120", "1 4 2 120 700"},
    {"dim_160", "2 4 2 160 300"},
    {"dim_192_v_128", "2 8 2 192 600 head_dim_v=128"},
    {"dim_256", "2 8 2 256 600 dtype=f16"},
    {"dim_128_v_64", "2 8 2 128 500 head_dim_v=64 dtype=f32"},
    {"dim_64_v_256", "2 4 4 64 500 head_dim_v=256"},

    // Layouts and strides.
    {"contiguous_unequal", "- 8 2 64 700,1,64,0,513 layout=contiguous"},
    {"contiguous_strided", "- 8 2 64 700,1,64,0,513 layout=contiguous strided=1 dtype=f32"},
    {"contiguous_interleaved", "3 8 2 64 450 interleaved=1 dtype=f16"},
    {"head_major", "- 8 4 128 900,130,77 layout=head_major"},
    {"head_major_strided", "- 8 4 128 900,130,77 layout=head_major strided=1 dtype=f16"},
    {"head_major_interleaved", "- 6 3 64 500,130,77 layout=head_major interleaved=1 head_dim_v=96"},
    {"ragged", "- 8 2 64 1,2,3,1000,65,64,63,0,512"},
    {"ragged_strided", "- 8 2 64 1,2,3,1000,65,64,63,0,512 strided=1 dtype=f32"},
    {"ragged_interleaved", "- 8 2 64 33,1000,65 interleaved=1 strided=1"},
    {"page_1", "- 8 2 64 100,31,257 page=1"},
    {"page_3", "- 8 2 64 100,31,257 page=3 dtype=f32"},
    {"page_8", "- 8 2 128 800,31,257 page=8 dtype=f16"},
    {"page_16", "- 32 8 128 1k,900,15,16,17 page=16"},
    {"page_64", "- 32 8 128 1k,900,63,64,65 page=64 strided=1"},
    {"page_128_interleaved", "- 8 2 128 1k,900,127,128,129 page=128 interleaved=1 dtype=f16"},
    {"page_256", "- 8 2 64 1k,900,255,256,257 page=256 interleaved=1 strided=1 dtype=f32"},
    {"page_1000", "- 8 2 64 2500,999,1000,1001 page=1000"},

    // Masks.
    {"window_128", "- 8 2 128 2000,128,129,5 window=128"},
    {"window_0", "- 4 2 64 300,1,0 window=0 dtype=f32"},
    {"window_paged", "- 8 2 64 5000,1024,1023,7 window=1000 page=16 dtype=f16"},
    {"causal_5", "- 8 2 64 1000,5,3,0 q_len=5 dtype=f32"},
    {"causal_16_strided", "- 12 4 64 700,17,16,15 q_len=16 strided=1"},
    {"not_causal_4", "- 8 2 128 600,4,3 q_len=4 causal=0"},
    {"q_len_ragged", "- 8 2 64 0,5,3000,9 q_len=0,0,7,1 dtype=f32"},
    {"q_len_ragged_paged", "- 14 2 64 600,5,77,9 q_len=3,8,0,1 page=16 window=50"},
    {"tree_5", "2 8 2 128 800 tree=5"},
    {"tree_64_window", "- 4 2 64 1000,64,40 tree=64 window=200 page=32 dtype=f32"},
    {"tree_70_not_causal", "- 4 2 64 500,90 q_len=70,3 tree=70 causal=0 dtype=f16"},

    // Logit rules and LSE.
    {"scale", "2 8 2 64 500 scale=0.5 dtype=f32"},
    {"softcap_30", "2 8 2 256 513 softcap=30 spread=60"},
    {"softcap_50_f32", "2 8 2 64 513 softcap=50 spread=200 dtype=f32"},
    {"alibi", "- 12 4 64 1000,100,1 alibi=1"},
    {"alibi_causal", "- 8 8 64 500,9 alibi=1 q_len=7 dtype=f32"},
    {"sink_varied", "- 10 2 64 500,1,0 sink=1"},
    {"sink_10000", "2 4 2 64 200 sink=10000 dtype=f32"},
    {"sink_off", "- 4 2 64 200,0 sink=-inf dtype=f16"},
    {"lse_base_2", "- 8 2 128 700,0,1 lse=2 sink=1"},
    {"lse_none", "2 8 2 128 700 lse=none"},
    {"spread_10000", "2 8 2 64 900 spread=10000 dtype=f32"},
    {"spread_1000_bf16", "2 8 2 128 900 spread=1000"},
    {"everything", "- 12 2 80 900,33,5,0 q_len=4 tree=4 window=300 softcap=20 alibi=1 sink=1 page=8 strided=1 lse=2 head_dim_v=96"},

    // Empties, and many short sequences.
    {"no_sequence", "0 8 2 64 0"},
    {"all_empty", "5 8 2 64 0 dtype=f32"},
    {"empty_paged_sink", "- 8 2 64 0,0,40,0 page=16 sink=1"},
    {"many_short", "- 4 1 64 1x200,0x50,3x200,7x50 page=4"},

    // Cuts of the line.
    {"lean_along_3", "- 8 2 64 5000,100,0,700 workers=3 order=along"},
    {"lean_beside_3", "- 8 2 64 5000,100,0,700 workers=3 order=beside dtype=f32"},
    {"lean_one_head_7", "1 8 1 128 10000 workers=7 dtype=f32"},
    {"fa2", "- 8 2 64 5000,100,0,700 policy=fa2 workers=2"},
    {"flashdecoding", "- 8 2 64 5000,100,0,700 policy=flashdecoding workers=5 dtype=f32"},
    {"flashdecoding_4", "- 8 2 64 5000,100,0,700 policy=flashdecoding:4 workers=2 order=along dtype=f16"},
    {"flashdecoding_61", "1 8 1 64 4k policy=flashdecoding:61 order=beside"},
    {"invariant_lean", "- 8 2 64 5000,100,0,700 invariant=1 workers=3"},
    {"invariant_fa2", "- 8 2 64 5000,100,0,700 invariant=1 policy=fa2 dtype=f32"},
    {"invariant_flashdecoding", "- 8 2 64 5000,100,0,700 invariant=1 policy=flashdecoding:3 workers=3 page=16"},
    {"mixed_context", "- 32 8 128 20k,2kx7 workers=2 page=16"},
};

}  // namespace

std::span<const GoldenCase> golden_cases() { return kGolden; }

}  // namespace leanattn::tools
