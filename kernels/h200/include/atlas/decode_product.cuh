// A product of few rows as a stream of weights: blocks of 128 weight rows by up to N tokens.
//
// A thread block has two warpgroups that multiply and a warp that copies. It takes one of kSplits
// ranges of k of a row block (or of several, one after the other); the thread blocks of a cluster
// are the ranges of kPair row blocks: rank = split + kSplits * pair. The copying warp fills a ring
// in shared memory: a slot holds a tile of weights and the tile of tokens that goes with it. The
// ring is full of weights before the inputs are there (programmatic dependent launch); only tokens
// wait for them. With kShare the thread blocks of a pair, which multiply by the same tokens, bring
// half of them each and send it to both.
//
// Ranges of k depend on the shape alone, so that a row's sum does not depend on the number of rows.
#pragma once

#include "atlas/bulk_copy.cuh"
#include "atlas/decode_weights.cuh"
#include "atlas/pdl.cuh"

namespace atlas {

constexpr int kConsumers = 2 * kWarpgroup;
// 256 tokens need more registers than an even share: a whole warpgroup copies, and gives up its
// own.
__host__ __device__ constexpr bool moves_registers(int tokens) { return tokens == 256; }
__host__ __device__ constexpr int decode_threads(int tokens) {
  return kConsumers + (moves_registers(tokens) ? kWarpgroup : 32);
}

__host__ __device__ constexpr int align_up(int bytes, int unit) {
  return (bytes + unit - 1) / unit * unit;
}

// kBlocks row blocks; kTiles tiles of k; kBytes of dynamic shared memory.
template <class Weights, int kN, int kBlocks, int kTiles, int kSplits, int kPair, bool kShare,
          int kBytes>
class DecodeProduct {
 public:
  static constexpr int kCluster = kSplits * kPair;
  static constexpr int kSharers = kShare ? kPair : 1;
  static constexpr int kSpan = Weights::kSpan;
  static constexpr int kSlots = (kTiles + kSpan - 1) / kSpan;  // of a row block
  // Ranges of k begin at multiples of this many tiles, whatever a slot holds.
  static constexpr int kUnit = Weights::kUnit;
  static constexpr int kUnits = (kTiles + kUnit - 1) / kUnit;
  static_assert(kUnit % kSpan == 0, "a unit is whole slots");
  // A slot: weights, scales of tokens, and from a multiple of 1,024 on (the swizzle) tokens.
  static constexpr int kWeightBytes = kSpan * Weights::kTile;
  static constexpr int kScaleBytes = Weights::kScaled ? kSpan * kN * 4 : 0;
  static constexpr int kTokensAt = align_up(kWeightBytes + kScaleBytes, 1024);
  static constexpr int kSlotBytes = kTokensAt + kSpan * kN * kTileRowBytes;
  static constexpr int kStages = (kBytes - 1024) / kSlotBytes;  // the barriers take less than 1,024
  static_assert(kStages >= 2, "the ring has at least two slots");
  static_assert(kStages <= 32, "the barriers fit in 1,024 bytes");
  static_assert(kSplits <= kUnits, "every thread block has something to multiply");
  static_assert(kN % kSharers == 0 && kCluster <= 8, "a cluster of eight blocks is portable");

  // `shared` is aligned to 1,024 bytes. Every thread calls this first.
  __device__ explicit DecodeProduct(unsigned char* shared)
      : ring_(shared),
        full_(reinterpret_cast<Barrier*>(shared + kStages * kSlotBytes)),
        empty_(full_ + kStages),
        split_(blockIdx.x % kSplits),
        pair_(blockIdx.x / kSplits % kPair) {
    if (threadIdx.x == kConsumers) {
      for (int i = 0; i < kStages; ++i) {
        full_[i].init(1);
        empty_[i].init(kConsumers / 32 * kSharers);
      }
      publish_barriers();
    }
    __syncthreads();
    if constexpr (kSharers > 1) cluster_arrive_relaxed();
  }

  __device__ int rank() const { return split_ + kSplits * pair_; }
  // Row blocks of this cluster: first_block() .. + kPair; the last of a launch may not exist.
  __device__ static int first_block() { return blockIdx.x / kCluster * kPair; }
  __device__ static int block_step() { return gridDim.x / kCluster * kPair; }
  __device__ bool is_producer() const { return threadIdx.x >= kConsumers; }

  // The warps behind the consumers: one thread copies everything into the ring.
  __device__ void produce(const unsigned char* weights, const unsigned char* tokens) {
    if constexpr (moves_registers(kN)) give_registers<56>();
    const bool chosen = threadIdx.x == kConsumers;
    Position next = start(), waiting = next;
    int early = 0;
    if (chosen) {
      for (; early < kStages && next.block < kBlocks; ++early) {
        load_weights(weights, next, early);
        advance(next);
      }
    }
    __syncwarp();
    if constexpr (kSharers > 1) cluster_wait();  // the other block's barriers are set up
    wait_for_inputs();
    if (chosen) {
      for (int slot = 0; slot < early; ++slot) {
        load_tokens(tokens, waiting, slot);
        advance(waiting);
      }
      Turn turn;
      while (next.block < kBlocks) {
        empty_[turn.slot].wait(turn.parity);
        load_weights(weights, next, turn.slot);
        load_tokens(tokens, next, turn.slot);
        advance(next);
        turn.advance();
      }
    }
    __syncwarp();
  }

  // The warpgroups: epilogue(row block, product) for each of their row blocks.
  template <class Epilogue>
  __device__ void consume(const unsigned char* weights, Epilogue epilogue) {
    if constexpr (moves_registers(kN)) take_registers<224>();
    if constexpr (kSharers > 1) cluster_wait();
    wait_for_inputs();
    Weights product;
    Turn turn;
    const int first = slot_of(split_), last = slot_of(split_ + 1);
    for (int block = first_block(); block < kBlocks; block += block_step()) {
      product.clear();
#pragma unroll 1
      for (int k = first; k < last; ++k) {
        full_[turn.slot].wait(turn.parity);
        product.multiply(slot(turn.slot), tiles_in(k));
        if constexpr (Weights::kLag == 0) {
          release(turn.slot);
        } else {
          if (k > first) release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
        }
        turn.advance();
      }
      const int mine = existing(block + pair_);
      product.finish(weights + (mine + 1) * kBlockBytes - Weights::kTail);
      if constexpr (Weights::kLag != 0) release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
      epilogue(block + pair_, product);
    }
  }

 private:
  static constexpr size_t kBlockBytes =
      static_cast<size_t>(kTiles) * Weights::kTile + Weights::kTail;

  // A slot's turn in the ring: its number and the parity of its barriers' phase.
  struct Turn {
    int slot = 0, parity = 0;
    __device__ void advance() {
      if (++slot == kStages) {
        slot = 0;
        parity ^= 1;
      }
    }
  };
  struct Position {
    int block, k;  // the cluster's first row block; slot of k
  };

  __device__ static int slot_of(int split) {
    const int slot = kUnits * split / kSplits * (kUnit / kSpan);
    return slot < kSlots ? slot : kSlots;
  }
  __device__ static int tiles_in(int k) {
    if constexpr (kTiles % kSpan == 0) return kSpan;
    return k == kSlots - 1 ? kTiles % kSpan : kSpan;
  }
  // A cluster may have a block more than there are row blocks: it repeats the last one, unseen.
  __device__ static int existing(int block) {
    if constexpr (kBlocks % kPair == 0) return block;
    return block < kBlocks ? block : kBlocks - 1;
  }
  __device__ Position start() const { return {first_block(), slot_of(split_)}; }
  __device__ void advance(Position& at) const {
    if (++at.k == slot_of(split_ + 1)) at = {at.block + block_step(), slot_of(split_)};
  }
  __device__ Slot slot(int i) const {
    const unsigned char* at = ring_ + i * kSlotBytes;
    return {at, reinterpret_cast<const float*>(at + kWeightBytes), at + kTokensAt};
  }
  __device__ void release(int i) {
    const int lane = threadIdx.x % 32;
    if constexpr (kSharers == 1) {
      if (lane == 0) empty_[i].arrive();
    } else {
      if (lane < kSharers) empty_[i].arrive_remote(split_ + kSplits * lane);
    }
  }

  // Announces all of the slot's bytes.
  __device__ void load_weights(const unsigned char* weights, Position at, int i) {
    const int tiles = tiles_in(at.k), bytes = tiles * Weights::kTile;
    full_[i].arrive_expect(bytes + tiles * kN * (kTileRowBytes + (Weights::kScaled ? 4 : 0)));
    bulk_load(ring_ + i * kSlotBytes,
              weights + existing(at.block + pair_) * kBlockBytes +
                  static_cast<size_t>(at.k) * kWeightBytes,
              bytes, full_[i], evict_first_policy());
  }
  __device__ void load_tokens(const unsigned char* tokens, Position at, int i) {
    constexpr int kRows = kN / kSharers;  // this block's part
    constexpr int kCopy = kRows < kTileRows ? kRows : kTileRows;
    const int tiles = tiles_in(at.k);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int part = 0; part < kRows; part += kCopy) {
        const int row = (kSharers > 1 ? pair_ * kRows : 0) + part;
        const unsigned char* from =
            tokens + tile_offset<Weights::kScaled>(row / kTileRows, at.k * kSpan + tile, kTiles);
        unsigned char* to = ring_ + i * kSlotBytes;
        copy(to + kTokensAt + (tile * kN + row) * kTileRowBytes,
             from + row % kTileRows * kTileRowBytes, kCopy * kTileRowBytes, i);
        if constexpr (Weights::kScaled) {
          copy(to + kWeightBytes + (tile * kN + row) * 4, from + kTileBytes + row % kTileRows * 4,
               kCopy * 4, i);
        }
      }
    }
  }
  __device__ void copy(unsigned char* to, const unsigned char* from, int bytes, int i) {
    if constexpr (kSharers == 1) {
      bulk_load(to, from, bytes, full_[i]);
    } else {
      unsigned blocks = 0;
#pragma unroll
      for (int pair = 0; pair < kPair; ++pair) blocks |= 1u << (split_ + kSplits * pair);
      bulk_load_multicast(to, from, bytes, full_[i], static_cast<unsigned short>(blocks));
    }
  }

  unsigned char* ring_;
  Barrier *full_, *empty_;
  int split_, pair_;
};

// Every thread of the cluster: nobody touches another block's shared memory any more.
__device__ inline void leave_cluster() {
  cluster_arrive_relaxed();
  cluster_wait();
}

// The sums of a cluster's thread blocks, added up token by token in a fixed order through
// distributed shared memory. Takes the ring's place.
template <int kN, int kSplits, int kPair, int kBytes>
class ClusterSum {
 public:
  // Rows of the block, and 4 more so that a warp's stores touch every bank once.
  static constexpr int kStride = kTileRows + 4;
  static_assert(kN * kStride * 4 <= kBytes, "the sums fit where the ring was");

  __device__ explicit ClusterSum(unsigned char* shared)
      : partial_(reinterpret_cast<float*>(shared)) {}

  // The consumers: puts this thread block's sums where the cluster reads them.
  __device__ void put(const float (&sum)[kN / 2], int rows) const {
    named_barrier(1, kConsumers);  // both warpgroups have left the ring
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
    float* to = partial_ + token * kStride + row;
    const int left = rows - token;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * j + e >= left) continue;
        to[(8 * j + e) * kStride] = sum[4 * j + e];
        to[(8 * j + e) * kStride + 8] = sum[4 * j + 2 + e];
      }
    }
  }

  // Weight rows 4 * quad .. + 3 of the pair's row block, for one token.
  __device__ float4 get(int token, int quad, int pair) const {
    const float* at = partial_ + token * kStride + 4 * quad;
    float4 parts[kSplits];
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      if constexpr (kSplits * kPair == 1) {
        parts[split] = *reinterpret_cast<const float4*>(at);
      } else {
        parts[split] = load_remote_float4(remote_address(at, split + kSplits * pair));
      }
    }
    float4 total = parts[0];
#pragma unroll
    for (int split = 1; split < kSplits; ++split) {
      total.x += parts[split].x;
      total.y += parts[split].y;
      total.z += parts[split].z;
      total.w += parts[split].w;
    }
    return total;
  }

  // Every thread of the cluster: all sums are in place.
  __device__ void all_put() const {
    if constexpr (kSplits * kPair == 1) {
      __syncthreads();
    } else {
      cluster_barrier();
    }
  }

 private:
  float* partial_;
};

}  // namespace atlas
