// A product of few rows as a stream of weights: blocks of 128 weight rows by up to N tokens.
//
// A thread block has two warpgroups that multiply and a warp that copies. The copying warp fills a
// ring in shared memory: a slot holds a tile of weights and the tile of tokens that goes with it.
// The ring is full of weights before the inputs are there (programmatic dependent launch); only
// tokens wait for them.
//
// Split of work: row blocks stand in groups of kPair, which kPair thread blocks, a team, take side
// by side. The stream of all groups' k tiles, one group after the other, is cut into equal ranges,
// a team each, so that all multiprocessors draw the same bytes, whatever the shape. A range begins
// and ends within a group as a rule; shared_sums.cuh adds up what teams have of the same group.
// Ranges depend on the shape and the hardware alone, never on the number of rows.
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

// kRowBlocks of kTiles tiles of k, over kThreadBlocks thread blocks.
template <class Weights_, int kN_, int kRowBlocks, int kTiles, int kPair_, int kThreadBlocks>
struct DecodeSplit {
  using Weights = Weights_;
  static constexpr int kN = kN_, kPair = kPair_, kBlocks = kRowBlocks, kKTiles = kTiles;
  // Ranges of k begin at multiples of a unit of tiles, whatever a slot holds.
  static constexpr int kUnits = (kTiles + Weights::kUnit - 1) / Weights::kUnit;
  static constexpr int kGroups = (kRowBlocks + kPair - 1) / kPair, kTotal = kGroups * kUnits;
  static constexpr int kTeams = kThreadBlocks / kPair < kTotal ? kThreadBlocks / kPair : kTotal;
  static_assert(Weights::kUnit % Weights::kSpan == 0, "a unit is whole slots");
  static_assert(static_cast<long long>(kTotal) * (kTeams + 1) < 1ll << 31, "ranges fit in an int");

  // The first unit of a team's range, of all groups' units.
  __device__ static int start(int team) { return kTotal * team / kTeams; }
  __device__ static int team_of(int unit) { return ((unit + 1) * kTeams - 1) / kTotal; }
  // The teams that have a part of a group.
  __device__ static int first_team(int group) { return team_of(group * kUnits); }
  __device__ static int last_team(int group) { return team_of(group * kUnits + kUnits - 1); }
  __device__ static int first_group(int team) { return start(team) / kUnits; }
};

// kBytes of dynamic shared memory; all but the last kRest hold the ring and its barriers.
template <class Split, int kBytes>
class DecodeProduct {
 public:
  using Weights = typename Split::Weights;
  static constexpr int kN = Split::kN, kSpan = Weights::kSpan, kPair = Split::kPair;
  static constexpr int kSlots = (Split::kKTiles + kSpan - 1) / kSpan;  // of a row block
  // A slot: weights, scales of tokens, and from a multiple of 1,024 on (the swizzle) tokens.
  static constexpr int kWeightBytes = kSpan * Weights::kTile;
  static constexpr int kScaleBytes = Weights::kScaled ? kSpan * kN * 4 : 0;
  static constexpr int kTokensAt = align_up(kWeightBytes + kScaleBytes, 1024);
  static constexpr int kSlotBytes = kTokensAt + kSpan * kN * kTileRowBytes;
  static constexpr int kRest = 512, kBarriers = 512;
  static constexpr int kStages = (kBytes - kRest - kBarriers) / kSlotBytes;
  static_assert(kStages >= 2, "the ring has at least two slots");
  static_assert(kStages * 2 * sizeof(Barrier) <= kBarriers, "the barriers have room");

  // `shared` is aligned to 1,024 bytes. Every thread calls this first.
  __device__ explicit DecodeProduct(unsigned char* shared)
      : ring_(shared),
        full_(reinterpret_cast<Barrier*>(shared + kBytes - kRest - kBarriers)),
        empty_(full_ + kStages),
        pair_(blockIdx.x % kPair) {
    const int team = blockIdx.x / kPair;
    if (team < Split::kTeams) {
      constexpr int kUnitSlots = Weights::kUnit / kSpan;
      const int first = Split::start(team), last = Split::start(team + 1) - 1;
      first_ = {first / Split::kUnits, first % Split::kUnits * kUnitSlots};
      last_group_ = last / Split::kUnits;
      const int end = (last % Split::kUnits + 1) * kUnitSlots;
      last_end_ = end < kSlots ? end : kSlots;
    } else {
      first_ = {0, 0};
      last_group_ = -1;
      last_end_ = 0;
    }
    if (threadIdx.x == kConsumers) {
      for (int i = 0; i < kStages; ++i) {
        full_[i].init(1);
        empty_[i].init(kConsumers / 32);
      }
      publish_barriers();
    }
    __syncthreads();
  }

  __device__ bool is_producer() const { return threadIdx.x >= kConsumers; }
  __device__ int pair() const { return pair_; }
  __device__ int first_group() const { return first_.group; }
  __device__ int last_group() const { return last_group_; }
  // Whether another team has a part of this thread block's first or last group.
  __device__ bool shares(int group) const {
    return (group == first_.group && first_.slot != 0) ||
           (group == last_group_ && last_end_ != kSlots);
  }

  // The warps behind the consumers: one thread copies everything into the ring.
  __device__ void produce(const unsigned char* weights, const unsigned char* tokens) {
    if constexpr (moves_registers(kN)) give_registers<56>();
    const bool chosen = threadIdx.x == kConsumers;
    Position next = first_, waiting = first_;
    int early = 0;
    if (chosen) {
      for (; early < kStages && next.group <= last_group_; ++early) {
        load_weights(weights, next, early);
        advance(next);
      }
    }
    __syncwarp();
    wait_for_inputs();
    if (chosen) {
      for (int slot = 0; slot < early; ++slot) {
        load_tokens(tokens, waiting, slot);
        advance(waiting);
      }
      Turn turn;
      while (next.group <= last_group_) {
        empty_[turn.slot].wait(turn.parity);
        load_weights(weights, next, turn.slot);
        load_tokens(tokens, next, turn.slot);
        advance(next);
        turn.advance();
      }
    }
    __syncwarp();
  }

  // The warpgroups, first of all.
  __device__ void start_consumers() const {
    if constexpr (moves_registers(kN)) take_registers<224>();
    wait_for_inputs();
  }

  // The warpgroups: epilogue(group, product) for each group of the range.
  template <class Epilogue>
  __device__ void consume(const unsigned char* weights, Epilogue epilogue) {
    Weights product;
    Turn turn;
    Position at = first_;
    for (; at.group <= last_group_; at = {at.group + 1, 0}) {
      const int end = end_of(at.group);
      product.clear();
#pragma unroll 1
      for (int k = at.slot; k < end; ++k) {
        full_[turn.slot].wait(turn.parity);
        product.multiply(slot(turn.slot), tiles_in(k));
        if constexpr (Weights::kLag == 0) {
          release(turn.slot);
        } else {
          if (k > at.slot) release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
        }
        turn.advance();
      }
      product.finish(weights + (row_block(at.group) + 1) * kBlockBytes - Weights::kTail);
      if constexpr (Weights::kLag != 0) release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
      epilogue(at.group, product);
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
    int group, slot;  // slot of k
  };

  __device__ int end_of(int group) const { return group == last_group_ ? last_end_ : kSlots; }
  __device__ void advance(Position& at) const {
    if (++at.slot == end_of(at.group)) at = {at.group + 1, 0};
  }
  __device__ static int tiles_in(int k) {
    if constexpr (Split::kKTiles % kSpan == 0) return kSpan;
    return k == kSlots - 1 ? Split::kKTiles % kSpan : kSpan;
  }
  // The last group may be short of row blocks: its thread block repeats the last one, unseen.
  __device__ int row_block(int group) const {
    const int block = group * kPair + pair_;
    if constexpr (Split::kBlocks % kPair == 0) return block;
    return block < Split::kBlocks ? block : Split::kBlocks - 1;
  }
  __device__ Slot slot(int i) const {
    const unsigned char* at = ring_ + i * kSlotBytes;
    return {at, reinterpret_cast<const float*>(at + kWeightBytes), at + kTokensAt};
  }
  __device__ void release(int i) {
    if (threadIdx.x % 32 == 0) empty_[i].arrive();
  }

  // Announces all of the slot's bytes.
  __device__ void load_weights(const unsigned char* weights, Position at, int i) {
    const int tiles = tiles_in(at.slot), bytes = tiles * Weights::kTile;
    full_[i].arrive_expect(bytes + tiles * kN * (kTileRowBytes + (Weights::kScaled ? 4 : 0)));
    bulk_load(
        ring_ + i * kSlotBytes,
        weights + row_block(at.group) * kBlockBytes + static_cast<size_t>(at.slot) * kWeightBytes,
        bytes, full_[i], evict_first_policy());
  }
  __device__ void load_tokens(const unsigned char* tokens, Position at, int i) {
    constexpr int kCopy = kN < kTileRows ? kN : kTileRows;
    const int tiles = tiles_in(at.slot);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int row = 0; row < kN; row += kCopy) {
        const unsigned char* from =
            tokens +
            tile_offset<Weights::kScaled>(row / kTileRows, at.slot * kSpan + tile, Split::kKTiles);
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

  unsigned char* ring_;
  Barrier *full_, *empty_;
  int pair_;
  Position first_;
  int last_group_, last_end_;  // the last group, and the end of its slots
};

}  // namespace atlas
