// The class of decode_product.cuh for the weights of an instance, by the type of operand `weight`.
// kByToken: of bf16, f8 and f8g128 (decode_weights.cuh).
#pragma once

#include "atlas/convert.cuh"
#include "atlas/decode_product.cuh"
#include "atlas/decode_weights.cuh"
#include "atlas/instance.h"
#if !defined(ATLAS_TYPE_WEIGHT_F8) && !defined(ATLAS_TYPE_WEIGHT_F8G128) && \
    !defined(ATLAS_TYPE_WEIGHT_BF16)
#define ATLAS_FOUR_BIT
#include "atlas/decode_weights4.cuh"
#include "atlas/weights4.cuh"
#endif

namespace atlas {

// kTileColumns: columns of a k tile; kPasses over each group of row blocks. InstanceWeights of
// kTiles k tiles. kAlsoByToken: whether there are such of them.
constexpr int kPasses = ceil_div(launch::max_rows, 128), kTokens = launch::max_rows / kPasses;
#ifdef ATLAS_FOUR_BIT
constexpr bool kAlsoByToken = false;
constexpr int kTileColumns = 64;
template <int kTiles, bool kByToken = false>
using InstanceWeights = Weights4<kTokens, InstanceFormat, kTiles, knobs::SIDES>;
#else
constexpr bool kAlsoByToken = true;
#ifdef ATLAS_TYPE_WEIGHT_BF16
constexpr int kTileColumns = 64;
template <int kTiles, bool kByToken = false>
using InstanceWeights = Bf16Weights<kTokens, knobs::TOGETHER, kByToken>;
#else
constexpr int kTileColumns = 128;
#ifdef ATLAS_TYPE_WEIGHT_F8
constexpr bool kRowScales = true;
#else
constexpr bool kRowScales = false;
#endif
template <int kTiles, bool kByToken = false>
using InstanceWeights = F8Weights<kTokens, knobs::TOGETHER, kRowScales, kByToken>;
#endif
#endif

// How kRowBlocks row blocks of kTiles k tiles are divided, as the instance is launched.
template <class Weights, int kRowBlocks, int kTiles, bool kPairs>
using InstanceSplit =
    DecodeSplit<Weights, kPasses, kRowBlocks, kTiles, knobs::RANGES, kPairs, launch::cluster>;

}  // namespace atlas
