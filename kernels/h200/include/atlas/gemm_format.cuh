// The formats of both operands of gemm.cuh, and which of them an instance has.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/instance.h"

namespace atlas {

// x and weight are bf16; or x is f8g128 and the weight f8 (a scale a row) or f8g128 too.
enum class GemmFormat { kBf16, kRowScales, kGroupScales };

#if defined(ATLAS_TYPE_WEIGHT_F8)
constexpr auto kInstanceFormat = GemmFormat::kRowScales;
#elif defined(ATLAS_TYPE_WEIGHT_F8G128)
constexpr auto kInstanceFormat = GemmFormat::kGroupScales;
#else
static_assert(same_type<types::weight, __nv_bfloat16> && same_type<types::x, __nv_bfloat16>,
              "x is bf16 with weights in bf16, f8g128 with weights in f8 or f8g128");
constexpr auto kInstanceFormat = GemmFormat::kBf16;
#endif

}  // namespace atlas
