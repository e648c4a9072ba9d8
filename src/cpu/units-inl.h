// SPDX-License-Identifier: Apache-2.0
// Units: how the CPU tile kernel loads rows of K, V and Q as float vectors and stores rows of O, for each type.
//
// A unit is two vectors, 2·N dims, and a load of K or V. bfloat16 is widened by shift (even dims) and mask (odd dims), so a unit of Q and Õ
// holds the even dims first. Rows that are not whole units end in a unit that overlaps the one before; overlapped slots hold no dimension.
#if defined(LEANATTN_UNITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LEANATTN_UNITS_INL_H_
#undef LEANATTN_UNITS_INL_H_
#else
#define LEANATTN_UNITS_INL_H_
#endif

#include <algorithm>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "numeric.h"

HWY_BEFORE_NAMESPACE();
namespace leanattn::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, 16>;
using Vec = hn::Vec<Floats>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(Floats()));
constexpr int kUnit = 2 * kLanes;
// Rows of the largest row block: a lane each.
constexpr int kMaxRows = kLanes;
static_assert(32 % kUnit == 0 || kUnit <= 32, "a row of 32 dims holds at least one unit");

// --- Loading one unit of K or V as two float vectors ---

// The two vectors of a unit.
struct Unit {
  Vec a, b;
};

struct Float32 {
  using Element = float;
  static HWY_INLINE Unit load(const float* p) { return {hn::LoadU(Floats(), p), hn::LoadU(Floats(), p + kLanes)}; }
  static HWY_INLINE void store(const Unit& unit, float* p) {
    hn::StoreU(unit.a, Floats(), p);
    hn::StoreU(unit.b, Floats(), p + kLanes);
  }
};

struct Float16 {
  using Element = hwy::float16_t;
  static HWY_INLINE Unit load(const hwy::float16_t* p) {
    const hn::Rebind<hwy::float16_t, Floats> half;
    return {widen(hn::LoadU(half, p)), widen(hn::LoadU(half, p + kLanes))};
  }
  template <class Halves>
  static HWY_INLINE Vec widen(Halves halves) {
    const Vec value = hn::PromoteTo(Floats(), halves);
#if HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SCALAR
    // Highway's own conversion, where the processor has none, takes Inf and NaN for numbers from 65536.
    const auto special = hn::Ge(hn::Abs(value), hn::Set(Floats(), 65536.0f));
    return hn::IfThenElse(special, hn::Or(value, hn::Set(Floats(), std::numeric_limits<float>::infinity())), value);
#else
    return value;
#endif
  }
  // Scalar: Highway's conversion is rounded to nearest even only where the processor has one.
  static HWY_INLINE void store(const Unit& unit, hwy::float16_t* p) {
    HWY_ALIGN float lanes[kUnit];
    hn::Store(unit.a, Floats(), lanes);
    hn::Store(unit.b, Floats(), lanes + kLanes);
    for (int i = 0; i < kUnit; ++i) store_from_float(p, DType::kFloat16, i, lanes[i]);
  }
};

struct BFloat16 {
  using Element = std::uint16_t;
#if HWY_TARGET == HWY_SCALAR
  static HWY_INLINE Unit load(const std::uint16_t* p) {
    return {hn::Set(Floats(), float_from_bfloat16(p[0])), hn::Set(Floats(), float_from_bfloat16(p[1]))};
  }
  static HWY_INLINE void store(const Unit& unit, std::uint16_t* p) {
    p[0] = bfloat16_from_float(hn::GetLane(unit.a));
    p[1] = bfloat16_from_float(hn::GetLane(unit.b));
  }
#else
  static HWY_INLINE Unit load(const std::uint16_t* p) {
    const hn::RebindToUnsigned<Floats> bits;
    const auto pairs = hn::BitCast(bits, hn::LoadU(hn::Repartition<std::uint16_t, Floats>(), p));
    return {hn::BitCast(Floats(), hn::ShiftLeft<16>(pairs)), hn::BitCast(Floats(), hn::And(pairs, hn::Set(bits, 0xffff0000u)))};
  }
  // bfloat16_from_float of numeric.h, lane by lane; the result stands in the upper half.
  static HWY_INLINE auto round(Vec value) {
    const hn::RebindToUnsigned<Floats> bits;
    const auto raw = hn::BitCast(bits, value);
    const auto odd = hn::And(hn::ShiftRight<16>(raw), hn::Set(bits, 1u));
    const auto rounded = hn::Add(hn::Add(raw, hn::Set(bits, 0x7fffu)), odd);
    const auto quiet = hn::Or(raw, hn::Set(bits, 0x400000u));
    return hn::IfThenElse(hn::RebindMask(bits, hn::IsNaN(value)), quiet, rounded);
  }
  static HWY_INLINE void store(const Unit& unit, std::uint16_t* p) {
    const hn::RebindToUnsigned<Floats> bits;
    const auto pairs = hn::Or(hn::ShiftRight<16>(round(unit.a)), hn::And(round(unit.b), hn::Set(bits, 0xffff0000u)));
    hn::StoreU(hn::BitCast(hn::Repartition<std::uint16_t, Floats>(), pairs), hn::Repartition<std::uint16_t, Floats>(), p);
  }
#endif
};

constexpr int units_of(int dims) { return (dims + kUnit - 1) / kUnit; }
// First dimension of a unit.
constexpr int unit_start(int dims, int unit) { return std::min(unit * kUnit, dims - kUnit); }

inline int padded_dims(int dims) { return units_of(dims) * kUnit; }

// Zeroes the slots of a last unit that the unit before holds already: a K of Inf there must not meet Q's zero.
template <class Kv>
struct Overlap {
  int a_lanes = 0, b_lanes = 0;
  explicit Overlap(int dims) {
    const int overlap = units_of(dims) * kUnit - dims;
    if (std::is_same_v<Kv, BFloat16>) {
      a_lanes = (overlap + 1) / 2;
      b_lanes = overlap / 2;
    } else {
      a_lanes = std::min(overlap, kLanes);
      b_lanes = overlap - a_lanes;
    }
  }
  HWY_INLINE Unit clear(const Unit& unit) const {
    return {hn::IfThenZeroElse(hn::FirstN(Floats(), static_cast<std::size_t>(a_lanes)), unit.a),
            hn::IfThenZeroElse(hn::FirstN(Floats(), static_cast<std::size_t>(b_lanes)), unit.b)};
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace leanattn::cpu
HWY_AFTER_NAMESPACE();

#endif  // LEANATTN_UNITS_INL_H_
