// The class of decode_product.cuh for the weights of an instance, by the type of operand `weight`.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/decode_weights.cuh"
#include "atlas/instance.h"
#if !defined(ATLAS_TYPE_WEIGHT_F8G128) && !defined(ATLAS_TYPE_WEIGHT_BF16)
#include "atlas/decode_weights4.cuh"
#include "atlas/weights4.cuh"
#endif

namespace atlas {

// kTileColumns: columns of a k tile. InstanceWeights of N tokens and kTiles k tiles.
#if defined(ATLAS_TYPE_WEIGHT_F8G128)
constexpr int kTileColumns = 128;
template <int kN, int kTiles>
using InstanceWeights = F8Weights<kN>;
static_assert(same_type<types::x, unsigned char>, "x and weight are both f8g128");
#else
constexpr int kTileColumns = 64;
static_assert(same_type<types::x, __nv_bfloat16>, "x is bf16 where the weight is not f8g128");
#if defined(ATLAS_TYPE_WEIGHT_BF16)
template <int kN, int kTiles>
using InstanceWeights = Bf16Weights<kN>;
#else
template <int kN, int kTiles>
using InstanceWeights = FourBitWeights<kN, InstanceFormat, kTiles>;
#endif
#endif

}  // namespace atlas
