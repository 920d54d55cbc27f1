// A product of few rows as a stream of weights: row blocks of 128 weight rows by up to N tokens.
//
// A thread block has two warpgroups that multiply and a warp that copies. The copying warp fills a
// ring in shared memory: a slot holds tiles of weights and the tile of tokens that goes with them.
// Most of the ring is full of weights before the inputs are there (programmatic dependent launch).
//
// Split of work: row blocks stand in groups, which share a tile of tokens: kTogether to a thread,
// and kSides times as many thread by thread. The stream of all groups' k tiles, one group after the
// other, is cut into equal ranges, a thread block each, so that all multiprocessors draw the same
// bytes, whatever the shape. A range begins and ends within a group as a rule; shared_sums.cuh adds
// up what ranges have of the same group. Ranges depend on the shape and the hardware alone, never
// on the number of rows.
//
// A thread block takes the groups of its range from the last to the first: the last one's
// beginning, which another thread block finishes, is summed first, long before it is missed.
//
// More tokens than a thread's registers hold the sums of go in passes over each group.
#pragma once

#include "atlas/async_copy.cuh"
#include "atlas/bulk_copy.cuh"
#include "atlas/cluster.cuh"
#include "atlas/decode_weights.cuh"
#include "atlas/pdl.cuh"

namespace atlas {

constexpr int kConsumers = 2 * kWarpgroup;  // of a side
__host__ __device__ constexpr int decode_threads(bool moves_registers, int sides = 1) {
  return sides * kConsumers + (moves_registers ? kWarpgroup : 32);
}

// kRowBlocks of kTiles tiles of k in kRanges_ ranges, for kPasses times N tokens. kPairs: whether
// the ranges of a group are added up two by two. kCluster: thread blocks of a cluster.
template <class Weights_, int kPasses_, int kRowBlocks, int kTiles, int kRanges_, bool kPairs,
          int kCluster>
struct DecodeSplit {
  using Weights = Weights_;
  static constexpr int kN = Weights::kTokens, kPasses = kPasses_;
  static constexpr int kTogether = Weights::kTogether, kSides = Weights::kSides;
  static constexpr int kOfGroup = kSides * kTogether, kBlocks = kRowBlocks, kKTiles = kTiles;
  // Ranges of k begin at multiples of a unit of tiles, whatever a slot holds.
  static constexpr int kUnits = (kTiles + Weights::kUnit - 1) / Weights::kUnit;
  static constexpr int kGroups = (kRowBlocks + kOfGroup - 1) / kOfGroup;
  static constexpr int kTotal = kGroups * kUnits, kRanges = kRanges_ < kTotal ? kRanges_ : kTotal;
  // Whether ranges end with groups, kEach with each.
  static constexpr bool kEven = kRanges % kGroups == 0;
  static constexpr int kEach = kEven ? kRanges / kGroups : 0;
  // Whether a group's sums are added up two by two, and whether a cluster has such a pair, or all.
  static constexpr bool kByPairs = kPairs && kEven && kEach % 2 == 0;
  static constexpr bool kTrades = kByPairs && kCluster > 1 && (kCluster == 2 || kCluster == kEach);
  static constexpr int kWays = kTrades ? kCluster : 1;
  static_assert(!kTrades || kPasses == 1, "a cluster trades the sums of one group, once");
  static_assert(Weights::kUnit % Weights::kSpan == 0, "a unit is whole slots");
  static_assert(static_cast<long long>(kTotal) * (kRanges + 1) < 1ll << 31, "ranges fit in an int");

  // The side that a consumer belongs to, and its number there.
  __device__ static int side() { return kSides == 1 ? 0 : threadIdx.x / kConsumers; }
  __device__ static int consumer() { return kSides == 1 ? threadIdx.x : threadIdx.x % kConsumers; }

  // The first unit of a range, of all groups' units.
  __device__ static int start(int range) { return kTotal * range / kRanges; }
  __device__ static int range_of(int unit) { return ((unit + 1) * kRanges - 1) / kTotal; }
  // The ranges that have a part of a group.
  __device__ static int first_range(int group) {
    return kEven ? group * kEach : range_of(group * kUnits);
  }
  __device__ static int last_range(int group) {
    return kEven ? group * kEach + kEach - 1 : range_of(group * kUnits + kUnits - 1);
  }
  __device__ static int first_group(int range) { return start(range) / kUnits; }
};

// kBytes of dynamic shared memory; all but the last kRest hold the ring and its barriers.
template <class Split, int kBytes, int kRest>
class DecodeProduct {
 public:
  using Weights = typename Split::Weights;
  static constexpr int kN = Split::kN, kSpan = Weights::kSpan, kTogether = Split::kTogether;
  static constexpr int kSides = Split::kSides, kOfGroup = Split::kOfGroup;
  static constexpr int kThreads = kSides * kConsumers;
  static constexpr int kSlots = (Split::kKTiles + kSpan - 1) / kSpan;  // of a row block
  // A slot: weights of each row block, scales of tokens, and from a multiple of 1,024 on (the
  // swizzle) tokens.
  static constexpr int kBlockWeights = kSpan * Weights::kTile;
  static constexpr int kBlockStride =
      kOfGroup == 1 ? kBlockWeights : align_up(kBlockWeights, 1024);  // as is the swizzle
  static constexpr int kWeightBytes = kOfGroup * kBlockStride;
  static constexpr int kScaleBytes = Weights::kScaled ? kSpan * kN * 4 : 0;
  static constexpr int kTokensAt = align_up(kWeightBytes + kScaleBytes, 1024);
  static constexpr int kSlotBytes = kTokensAt + kSpan * kN * kTileRowBytes;
  static constexpr int kBarriers = 512;
  static constexpr int kStages = (kBytes - kRest - kBarriers) / kSlotBytes;
  // Whether the ring holds all of a range: no slot is used twice, and none is given back. Products
  // of a slot need not end before the next one's begin.
  static constexpr int kMostUnits = (Split::kTotal + Split::kRanges - 1) / Split::kRanges;
  static constexpr bool kWhole =
      Weights::kStarts && Split::kPasses == 1 && kMostUnits * (Weights::kUnit / kSpan) <= kStages;
  // Slots that are filled before inputs are there. The kernels between products wait behind these
  // copies, so fewer than all: Llama-3-8B's products with norms between, one row, all, 5 and 3 of 8
  // slots: 3.473, 3.440 and 3.466 ms in bf16, 2.030, 2.016 and 2.034 in fp8.
  static constexpr int kEarly = kWhole ? kStages : (5 * kStages + 7) / 8;
  // Tokens by cp.async of all lanes: a few KB need not wait in the queue of bulk copies.
  static constexpr bool kByLanes = Weights::kTokensByLanes;
  static_assert(!kByLanes || (!Weights::kScaled && Split::kKTiles % kSpan == 0 && kN <= kTileRows &&
                              kSpan <= 4),
                "whole slots of tokens without scales");
  static constexpr int kReadySlots = Weights::kReadySlots;
  static_assert(kStages >= 2, "the ring has at least two slots");
  static_assert((2 * kStages + kReadySlots) * sizeof(Barrier) <= kBarriers,
                "the barriers have room");
  static_assert(kReadySlots <= 2 && kReadySlots <= kEarly, "filled before inputs are there");

  // `shared` is aligned to 1,024 bytes. Every thread calls this first.
  __device__ explicit DecodeProduct(unsigned char* shared)
      : ring_(shared),
        full_(reinterpret_cast<Barrier*>(shared + kBytes - kRest - kBarriers)),
        empty_(full_ + kStages),
        ready_(empty_ + kStages),
        first_group_(0),
        last_group_(-1),
        first_slot_(0),
        last_end_(0) {
    const int range = blockIdx.x;
    if (range < Split::kRanges) {
      constexpr int kUnitSlots = Weights::kUnit / kSpan;
      const int first = Split::start(range), last = Split::start(range + 1) - 1;
      first_group_ = first / Split::kUnits;
      first_slot_ = first % Split::kUnits * kUnitSlots;
      last_group_ = last / Split::kUnits;
      const int end = (last % Split::kUnits + 1) * kUnitSlots;
      last_end_ = end < kSlots ? end : kSlots;
    }
    if (threadIdx.x == kThreads) {
      for (int i = 0; i < kStages; ++i) {
        full_[i].init(kByLanes ? 1 + 32 : 1);
        empty_[i].init(kThreads / 32);
      }
      for (int i = 0; i < kReadySlots; ++i) ready_[i].init(1);
      publish_barriers();
    }
    __syncthreads();
    if constexpr (Split::kTrades) cluster_arrive();
  }

  __device__ const Weights& weights() const { return product_; }
  __device__ int first_group() const { return first_group_; }  // of the range, its last in time
  __device__ bool is_producer() const { return threadIdx.x >= kThreads; }

  // The warps behind the consumers: one thread copies everything into the ring, or with its warp.
  // `rows` of the tokens are there.
  __device__ void produce(const unsigned char* weights, const unsigned char* tokens, int rows) {
    if constexpr (Weights::kMovesRegisters) give_registers<kSides == 1 ? 56 : 24>();
    const bool chosen = kByLanes ? threadIdx.x < kThreads + 32 : threadIdx.x == kThreads;
    Position next = first(), waiting = next;
    int early = 0;
    if (chosen) {
      for (; early < kEarly && more(next); ++early) {
        load_weights(weights, next, early, early < ready_slots() ? ready_[early] : full_[early]);
        if (early < ready_slots() && threadIdx.x == kThreads) full_[early].arrive();
        advance(next);
      }
    }
    __syncwarp();
    if constexpr (Split::kTrades) cluster_wait();
    wait_for_inputs();
    if (chosen) {
      for (int slot = 0; slot < early; ++slot) {
        load_tokens(tokens, rows, waiting, slot);
        advance(waiting);
      }
      for (int slot = early; slot < kStages && more(next); ++slot) {
        load_weights(weights, next, slot, full_[slot]);
        load_tokens(tokens, rows, next, slot);
        advance(next);
      }
      Turn turn;
      while (more(next)) {
        empty_[turn.slot].wait(turn.parity);
        load_weights(weights, next, turn.slot, full_[turn.slot]);
        load_tokens(tokens, rows, next, turn.slot);
        advance(next);
        turn.advance();
      }
    }
    __syncwarp();
  }

  // The warpgroups, first of all.
  __device__ void start_consumers() {
    if constexpr (Weights::kMovesRegisters) take_registers<kSides == 1 ? 224 : 112>();
    if constexpr (Split::kTrades) cluster_wait();
    if constexpr (kReadySlots > 0) prepare<0>();
    if constexpr (kReadySlots > 1) prepare<1>();
    wait_for_inputs();
  }

  // The warpgroups: epilogue(group, pass, sums of its row blocks) for each group of the range.
  template <class Epilogue>
  __device__ void consume(const unsigned char* weights, Epilogue epilogue) {
    Turn turn;
    const int mine = Split::side() * kTogether;
    for (Position at = first(); more(at);) {
      const unsigned char* tails[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        tails[i] = weights + (row_block(at.group, mine + i) + 1) * kBlockBytes - Weights::kTail;
      }
      const int end = end_of(at.group);
      product_.begin(tails);
      int k = at.slot;
      if (kReadySlots > 0 && at.group == last_group_) {
        if constexpr (kReadySlots > 0) multiply_ready<0>(k, turn);
        if constexpr (kReadySlots > 1) multiply_ready<1>(k, turn);
      }
#pragma unroll 1
      for (; k < end; ++k) {
        full_[turn.slot].wait(turn.parity);
        if constexpr (kWhole) {
          product_.start(slot(turn.slot, mine));
        } else {
          product_.multiply(slot(turn.slot, mine), tiles_in(k));
          if constexpr (Weights::kLag == 0) {
            release(turn.slot);
          } else {
            if (k > at.slot) release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
          }
        }
        turn.advance();
      }
      product_.finish(tails);
      if constexpr (!kWhole && Weights::kLag != 0) {
        release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
      }
      epilogue(at.group, at.pass, product_.sum);
      at.slot = end - 1;
      advance(at);
    }
  }

 private:
  static constexpr size_t kBlockBytes =
      static_cast<size_t>(Split::kKTiles) * Weights::kTile + Weights::kTail;

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
    int group, pass, slot;  // slot of k
  };

  // Of the range's first slots, all of one group, those whose weights go to registers.
  __device__ int ready_slots() const {
    return min(kReadySlots, end_of(last_group_) - start_of(last_group_));
  }
  template <int kSlot>
  __device__ void prepare() {
    if (kSlot >= ready_slots()) return;
    ready_[kSlot].wait(0);
    product_.template prepare<kSlot>(slot(kSlot, Split::side() * kTogether));
  }
  template <int kSlot>
  __device__ void multiply_ready(int& k, Turn& turn) {
    if (kSlot >= ready_slots()) return;
    full_[kSlot].wait(0);
    product_.template multiply_ready<kSlot>(slot(kSlot, Split::side() * kTogether));
    release(kSlot);
    turn.advance();
    ++k;
  }

  __device__ Position first() const { return {last_group_, 0, start_of(last_group_)}; }
  __device__ bool more(const Position& at) const { return at.group >= first_group_; }
  __device__ int start_of(int group) const { return group == first_group_ ? first_slot_ : 0; }
  __device__ int end_of(int group) const { return group == last_group_ ? last_end_ : kSlots; }
  __device__ void advance(Position& at) const {
    if (++at.slot < end_of(at.group)) return;
    if (Split::kPasses == 1 || ++at.pass == Split::kPasses) {
      at.pass = 0;
      --at.group;
    }
    at.slot = start_of(at.group);
  }
  __device__ static int tiles_in(int k) {
    if constexpr (Split::kKTiles % kSpan == 0) return kSpan;
    return k == kSlots - 1 ? Split::kKTiles % kSpan : kSpan;
  }
  // The last group may be short of row blocks: the last one is repeated, unseen.
  __device__ static int row_block(int group, int i) {
    const int block = group * kOfGroup + i;
    if constexpr (Split::kBlocks % kOfGroup == 0) return block;
    return block < Split::kBlocks ? block : Split::kBlocks - 1;
  }
  __device__ Slot slot(int i, int block) const {
    const unsigned char* at = ring_ + i * kSlotBytes;
    return {at + block * kBlockStride, reinterpret_cast<const float*>(at + kWeightBytes),
            at + kTokensAt};
  }
  // Without a __syncwarp(): matrix instructions keep lanes together from the wait for the slot on
  // (in SASS, too, of f8, nvfp4 and i4g32b), so lane 0 arrives behind the loads of all. A compiler
  // that lets them part here needs one.
  __device__ void release(int i) {
    if (threadIdx.x % 32 == 0) empty_[i].arrive();
  }

  // Announces all of the slot's bytes that bulk copies bring.
  __device__ void load_weights(const unsigned char* weights, Position at, int i, Barrier& barrier) {
    if (threadIdx.x != kThreads) return;
    const int tiles = tiles_in(at.slot), bytes = tiles * Weights::kTile;
    const int token_bytes = kTileRowBytes + (Weights::kScaled ? 4 : 0);
    barrier.arrive_expect(kOfGroup * bytes + (kByLanes ? 0 : tiles * kN * token_bytes));
#pragma unroll
    for (int block = 0; block < kOfGroup; ++block) {
      bulk_load(ring_ + i * kSlotBytes + block * kBlockStride,
                weights + row_block(at.group, block) * kBlockBytes +
                    static_cast<size_t>(at.slot) * kBlockWeights,
                bytes, barrier, evict_first_policy());
    }
  }
  __device__ void load_tokens(const unsigned char* tokens, int rows, Position at, int i) {
    if constexpr (kByLanes) {
      // A row of all the slot's tiles at a time, of the rows that are there.
      constexpr int kChunks = kTileRowBytes / 16;
      const int lane = threadIdx.x % 32, tile = lane / kChunks, byte = lane % kChunks * 16;
      const unsigned char* from =
          tokens + tile_offset<false>(0, at.slot * kSpan + tile, Split::kKTiles) + byte;
      unsigned char* to = ring_ + i * kSlotBytes + kTokensAt + tile * kN * kTileRowBytes + byte;
#pragma unroll
      for (int row = 0; row < kN; ++row) {
        if (row >= rows) break;
        if (tile < kSpan) copy_async_16(to + row * kTileRowBytes, from + row * kTileRowBytes, true);
      }
      full_[i].arrive_after_copies();
      return;
    }
    constexpr int kCopy = kN < kTileRows ? kN : kTileRows;
    const int tiles = tiles_in(at.slot);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int row = 0; row < kN; row += kCopy) {
        const int row_tile = at.pass * (kN / kTileRows) + row / kTileRows;
        const unsigned char* from = tokens + tile_offset<Weights::kScaled>(
                                                 row_tile, at.slot * kSpan + tile, Split::kKTiles);
        unsigned char* to = ring_ + i * kSlotBytes;
        bulk_load(to + kTokensAt + (tile * kN + row) * kTileRowBytes, from, kCopy * kTileRowBytes,
                  full_[i]);
        if constexpr (Weights::kScaled) {
          bulk_load(to + kWeightBytes + (tile * kN + row) * 4, from + kTileBytes, kCopy * 4,
                    full_[i]);
        }
      }
    }
  }

  Weights product_;  // of the consumers
  unsigned char* ring_;
  Barrier *full_, *empty_, *ready_;                       // ready: of weights alone
  int first_group_, last_group_, first_slot_, last_end_;  // of the range
};

}  // namespace atlas
