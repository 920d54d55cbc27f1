// Matrix tiles of AMX: 8 registers, each of up to 16 rows of 64 bytes, whose shapes are configured.
//
// A product of int8 takes a tile of rows [m][4 k'] and one of [k'][n][4], which is how a panel's
// steps lie (int_dot.h), and adds exact int32 sums [m][n].
//
// Where there is no AMX the same functions are plain loops that trap on what a CPU would refuse. No
// kernel calls them there, except in tests, which define ATLAS_AMX_EMULATED.
#pragma once

#include "atlas/kernel.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

#if defined(__AMX_INT8__) || defined(ATLAS_AMX_EMULATED)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// What `ldtilecfg` reads.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  ATLAS_INLINE void set(int tile, int64_t tile_rows, int64_t tile_row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(tile_row_bytes);
  }
};
static_assert(sizeof(TileConfig) == 64, "as the CPU reads it");

#if defined(__AMX_INT8__)

// Not the intrinsics: compilers differ in whether a tile's number may be a template's constant.
ATLAS_INLINE void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config));
}
ATLAS_INLINE void release_tiles() { asm volatile("tilerelease"); }
template <int tile>
ATLAS_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile>
ATLAS_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
ATLAS_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
// sums += rows * codes, both int8
template <int sums, int rows, int codes>
ATLAS_INLINE void multiply_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(codes));
}

#else

struct Tiles {
  TileConfig config;
  uint8_t bytes[8][16][64];
};
ATLAS_INLINE Tiles& tiles() {
  static thread_local Tiles state;
  return state;
}
ATLAS_INLINE void require(bool condition) {
  if (!condition) __builtin_trap();
}

ATLAS_INLINE void configure_tiles(const TileConfig& config) {
  require(config.palette == 1 && config.start_row == 0);
  for (int t = 0; t < 16; ++t) {
    require(config.rows[t] <= 16 && config.row_bytes[t] <= 64);
    require((config.rows[t] == 0) == (config.row_bytes[t] == 0));
    require(t < 8 || config.rows[t] == 0);
  }
  tiles() = Tiles();  // zeros
  tiles().config = config;
}
ATLAS_INLINE void release_tiles() {
  tiles() = Tiles();
  tiles().config.palette = 0;
}
template <int tile>
ATLAS_INLINE void zero_tile() {
  require(tiles().config.palette == 1 && tiles().config.rows[tile] > 0);
  __builtin_memset(tiles().bytes[tile], 0, sizeof(tiles().bytes[tile]));
}
template <int tile>
ATLAS_INLINE void load_tile(const void* from, int64_t stride) {
  zero_tile<tile>();
  for (int64_t r = 0; r < tiles().config.rows[tile]; ++r) {
    __builtin_memcpy(tiles().bytes[tile][r], static_cast<const char*>(from) + r * stride,
                     tiles().config.row_bytes[tile]);
  }
}
template <int tile>
ATLAS_INLINE void store_tile(void* to, int64_t stride) {
  require(tiles().config.palette == 1 && tiles().config.rows[tile] > 0);
  for (int64_t r = 0; r < tiles().config.rows[tile]; ++r) {
    __builtin_memcpy(static_cast<char*>(to) + r * stride, tiles().bytes[tile][r],
                     tiles().config.row_bytes[tile]);
  }
}
template <int sums, int rows, int codes>
ATLAS_INLINE void multiply_tiles() {
  Tiles& t = tiles();
  const TileConfig& c = t.config;
  require(sums != rows && sums != codes && rows != codes && c.palette == 1 && c.rows[sums] > 0);
  require(c.rows[sums] == c.rows[rows] && c.row_bytes[sums] == c.row_bytes[codes]);
  require(c.row_bytes[rows] == c.rows[codes] * 4 && c.row_bytes[sums] % 4 == 0);
  for (int m = 0; m < c.rows[sums]; ++m) {
    for (int n = 0; n < c.row_bytes[sums] / 4; ++n) {
      int32_t sum;
      __builtin_memcpy(&sum, t.bytes[sums][m] + 4 * n, 4);
      for (int k = 0; k < c.row_bytes[rows]; ++k) {
        sum += static_cast<int8_t>(t.bytes[rows][m][k]) *
               static_cast<int8_t>(t.bytes[codes][k / 4][4 * n + k % 4]);
      }
      __builtin_memcpy(t.bytes[sums][m] + 4 * n, &sum, 4);
    }
  }
}

#endif

}  // namespace
}  // namespace atlas
