// Formats of 4 bits for decode_product.cuh: A operands expanded in registers (four_bit.cuh).
//
// Up to 16 tokens a thread multiplies by mma.m16n8k16: A and D of it lie as wgmma's do, a warp for
// 16 rows, and both add 16 columns at a time, so that sums have the same bits. A wgmma takes as
// long for few tokens as for 64, and its warps wait for each other.
#pragma once

#include "atlas/decode_weights.cuh"
#include "atlas/four_bit.cuh"

namespace atlas {

// The largest number up to `most` that divides `count`.
__host__ __device__ constexpr int divisor_up_to(int count, int most) {
  return count % most == 0 ? most : divisor_up_to(count, most - 1);
}

// kSides row blocks make a group, each with two warpgroups of its own. Every slot is full.
template <int kN, class Format, int kTiles, int kSides_, int kMost>
struct FourBitWeights {
  static constexpr int kTokens = kN, kTogether = 1, kSides = kSides_;
  static constexpr int kTile = Format::kTile, kTail = Format::kTail;
  static constexpr int kUnit = divisor_up_to(kTiles, 4), kSpan = divisor_up_to(kUnit, kMost);
  static constexpr int kLag = 0, kReadySlots = 0;
  static constexpr bool kStarts = false;
  static constexpr bool kTokensByLanes = kN <= 16;
  static constexpr bool kScaled = false, kMovesRegisters = kN == 128 && kSides == 2;
  float sum[1][kN / 2];

  __device__ void begin(const unsigned char* const (&tails)[1]) {
    factors_ = RowFactors4<Format>(tails[0]);
#pragma unroll
    for (float& value : sum[0]) value = 0.0f;
  }
  __device__ void finish(const unsigned char* const (& /*tails*/)[1]) { factors_.apply(sum[0]); }

 private:
  RowFactors4<Format> factors_;
};

// While the tensor cores have one tile's registers, the next one's are made: by the other side's
// warpgroups, or, of one side, by the same in other registers.
template <int kN, class Format, int kTiles, int kSides>
struct ManyTokens4 : FourBitWeights<kN, Format, kTiles, kSides, 2> {
  using Base = FourBitWeights<kN, Format, kTiles, kSides, 2>;
  static constexpr int kBuffers = kSides == 1 && Base::kSpan == 2 ? 2 : 1, kLag = kBuffers - 1;

  __device__ void multiply(const Slot& slot, int /*tiles*/) {
    typename Format::Packed packed = Format::load(slot.weights);
    const auto tokens = wgmma_descriptor(slot.tokens);
#pragma unroll
    for (int tile = 0; tile < Base::kSpan; ++tile) {
      unsigned (&a)[4][4] = fragments_[tile % kBuffers];
#pragma unroll
      for (int step = 0; step < 4; ++step) Format::expand(packed, step, a[step]);
      if (tile + 1 < Base::kSpan) packed = Format::load(slot.weights + (tile + 1) * Base::kTile);
      const auto b = tokens + tile * kN * kTileRowBytes / 16;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Wgmma<kN>::bf16_rs(this->sum[0], a[step], b + 2 * step, 1);
      }
      wgmma_commit();
      wgmma_wait<kBuffers - 1>();
    }
  }
  __device__ void finish(const unsigned char* const (&tails)[1]) {
    if constexpr (kLag != 0) wgmma_wait<0>();
    wgmma_hold(this->sum[0]);
    Base::finish(tails);
  }

 private:
  unsigned fragments_[kBuffers][4][4];
};

// Of eight tokens a thread has the first tiles of its range expanded in registers when inputs come.
template <int kN, class Format, int kTiles, int kSides>
struct FewTokens4 : FourBitWeights<kN, Format, kTiles, kSides, 4> {
  using Base = FourBitWeights<kN, Format, kTiles, kSides, 4>;
  static constexpr int kReady = kN > 8 ? 0 : kSides == 1 ? 6 : 2;  // as many as registers hold
  static constexpr int kReadySlots = kReady == 0 ? 0 : kReady <= Base::kSpan ? 1 : 2;

  __device__ FewTokens4() {
    // Shuffled, so that the compiler keeps them instead of working them out again for each slot.
    const int lane = threadIdx.x % 32, row = lane % 8 * kTileRowBytes;
    place_.codes = kept(place_.codes);
    place_.row = kept(place_.row);
    chunk_[0] = kept(row + (lane / 8 ^ lane % 8) * 16);
    chunk_[1] = kept(row + (lane / 8 + 4 ^ lane % 8) * 16);
  }

  template <int kSlot>
  __device__ void prepare(const Slot& slot) {
#pragma unroll
    for (int tile = 0; tile < Base::kSpan && kSlot * Base::kSpan + tile < kReady; ++tile) {
      const auto packed = Format::load(slot.weights + tile * Base::kTile, place_);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Format::expand(packed, step, ready_[kSlot * Base::kSpan + tile][step]);
      }
    }
  }
  template <int kSlot>
  __device__ void multiply_ready(const Slot& slot) {
    multiply<kSlot * Base::kSpan>(slot);
  }
  __device__ void multiply(const Slot& slot, int /*tiles*/) { multiply<kReady>(slot); }

 private:
  static constexpr int kSize = kReady == 0 ? 1 : kReady;
  unsigned ready_[kSize][4][4];
  Place4 place_;
  unsigned chunk_[2];  // of a row of tokens, 16-byte chunks 0..3 and 4..7 of the tile

  __device__ static int kept(int value) {
    return __shfl_sync(0xFFFFFFFFu, value, threadIdx.x % 32);
  }

  // The slot's first tile is number kFirst of those that may be ready.
  template <int kFirst>
  __device__ void multiply(const Slot& slot) {
    const unsigned tokens = shared_address(slot.tokens);
    const unsigned chunk[2] = {tokens + chunk_[0], tokens + chunk_[1]};
#pragma unroll
    for (int tile = 0; tile < Base::kSpan; ++tile) {
      const bool ready = kFirst + tile < kReady;
      typename Format::Packed packed;
      if (!ready) packed = Format::load(slot.weights + tile * Base::kTile, place_);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (ready) {
#pragma unroll
            for (int p = 0; p < 4; ++p) a[i][p] = ready_[(kFirst + tile) % kSize][2 * half + i][p];
          } else {
            Format::expand(packed, 2 * half + i, a[i]);
          }
        }
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          unsigned b[4];
          load_matrices(b, chunk[half] + (tile * kN + 8 * j) * kTileRowBytes);
          multiply_add(this->sum[0] + 4 * j, a[0], b[0], b[1]);
          multiply_add(this->sum[0] + 4 * j, a[1], b[2], b[3]);
        }
      }
    }
  }
  __device__ static void load_matrices(unsigned (&b)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address));
  }
  __device__ static void multiply_add(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <bool kFew, int kN, class Format, int kTiles, int kSides>
struct Choose4 {
  using type = ManyTokens4<kN, Format, kTiles, kSides>;
};
template <int kN, class Format, int kTiles, int kSides>
struct Choose4<true, kN, Format, kTiles, kSides> {
  using type = FewTokens4<kN, Format, kTiles, kSides>;
};
template <int kN, class Format, int kTiles, int kSides>
using Weights4 = typename Choose4<kN <= 16, kN, Format, kTiles, kSides>::type;

}  // namespace atlas
