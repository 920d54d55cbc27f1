// Warpgroup matrix multiply-accumulate (PTX ISA, wgmma.mma_async), sm_90a.
//
// Four warps multiply A [64, k] by B [k, N] and add to D [64, N] in fp32; k is 16 for bf16 and 32
// for E4M3, 32 bytes either way. B stands in shared memory as N rows of k (or, transposed, as k
// rows of N); A in shared memory as 64 rows of k, or in registers. With w the warp of the group, g
// = lane / 4, t = lane % 4, a thread holds D[16 w + g + 8 i, 8 j + 2 t + e] in d[4 j + 2 i + e],
// and of A what mma.m16n8k16 takes (mma.cuh), for rows 16 w...
//
// Order of use: wgmma_fence() after registers were written; any number of products; wgmma_commit();
// wgmma_wait<n>() until at most n committed groups are in flight, before their D, or their A's
// registers or shared memory, are touched.
#pragma once

#include "atlas/mbarrier.cuh"

namespace atlas {

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accumulators across an asynchronous product.
template <int kCount>
__device__ inline void wgmma_hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Descriptor of an operand in shared memory in 128-byte swizzle: rows of 128 bytes, atoms of 8 rows
// that start at multiples of 1,024 and follow each other every `atom_stride` bytes. The next slice
// of 32 bytes along k is the descriptor plus 2. For a transposed B whose N is over 64 elements,
// `group_stride` is the distance between its groups of 64 columns.
__device__ inline unsigned long long wgmma_descriptor(const void* tile, unsigned atom_stride = 1024,
                                                      unsigned group_stride = 16) {
  return (static_cast<unsigned long long>(shared_address(tile)) & 0x3FFFF) >> 4 |
         static_cast<unsigned long long>(group_stride >> 4) << 16 |
         static_cast<unsigned long long>(atom_stride >> 4) << 32 | 1ull << 62;
}

// One instruction of N columns: ss takes both operands from shared memory, rs takes A from
// registers; bf16 products may take B transposed. accumulate 0 ignores what D held.
template <int kN>
struct Wgmma;

// clang-format off
#define ATLAS_D4 "%0, %1, %2, %3"
#define ATLAS_D8 ATLAS_D4 ", %4, %5, %6, %7"
#define ATLAS_D12 ATLAS_D8 ", %8, %9, %10, %11"
#define ATLAS_D16 ATLAS_D12 ", %12, %13, %14, %15"
#define ATLAS_D20 ATLAS_D16 ", %16, %17, %18, %19"
#define ATLAS_D24 ATLAS_D20 ", %20, %21, %22, %23"
#define ATLAS_D28 ATLAS_D24 ", %24, %25, %26, %27"
#define ATLAS_D32 ATLAS_D28 ", %28, %29, %30, %31"
#define ATLAS_D36 ATLAS_D32 ", %32, %33, %34, %35"
#define ATLAS_D40 ATLAS_D36 ", %36, %37, %38, %39"
#define ATLAS_D44 ATLAS_D40 ", %40, %41, %42, %43"
#define ATLAS_D48 ATLAS_D44 ", %44, %45, %46, %47"
#define ATLAS_D52 ATLAS_D48 ", %48, %49, %50, %51"
#define ATLAS_D56 ATLAS_D52 ", %52, %53, %54, %55"
#define ATLAS_D60 ATLAS_D56 ", %56, %57, %58, %59"
#define ATLAS_D64 ATLAS_D60 ", %60, %61, %62, %63"
#define ATLAS_D68 ATLAS_D64 ", %64, %65, %66, %67"
#define ATLAS_D72 ATLAS_D68 ", %68, %69, %70, %71"
#define ATLAS_D76 ATLAS_D72 ", %72, %73, %74, %75"
#define ATLAS_D80 ATLAS_D76 ", %76, %77, %78, %79"
#define ATLAS_D84 ATLAS_D80 ", %80, %81, %82, %83"
#define ATLAS_D88 ATLAS_D84 ", %84, %85, %86, %87"
#define ATLAS_D92 ATLAS_D88 ", %88, %89, %90, %91"
#define ATLAS_D96 ATLAS_D92 ", %92, %93, %94, %95"
#define ATLAS_D100 ATLAS_D96 ", %96, %97, %98, %99"
#define ATLAS_D104 ATLAS_D100 ", %100, %101, %102, %103"
#define ATLAS_D108 ATLAS_D104 ", %104, %105, %106, %107"
#define ATLAS_D112 ATLAS_D108 ", %108, %109, %110, %111"
#define ATLAS_D116 ATLAS_D112 ", %112, %113, %114, %115"
#define ATLAS_D120 ATLAS_D116 ", %116, %117, %118, %119"
#define ATLAS_D124 ATLAS_D120 ", %120, %121, %122, %123"
#define ATLAS_D128 ATLAS_D124 ", %124, %125, %126, %127"
#define ATLAS_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ATLAS_O4 ATLAS_F4(0)
#define ATLAS_O8 ATLAS_O4, ATLAS_F4(4)
#define ATLAS_O12 ATLAS_O8, ATLAS_F4(8)
#define ATLAS_O16 ATLAS_O12, ATLAS_F4(12)
#define ATLAS_O20 ATLAS_O16, ATLAS_F4(16)
#define ATLAS_O24 ATLAS_O20, ATLAS_F4(20)
#define ATLAS_O28 ATLAS_O24, ATLAS_F4(24)
#define ATLAS_O32 ATLAS_O28, ATLAS_F4(28)
#define ATLAS_O36 ATLAS_O32, ATLAS_F4(32)
#define ATLAS_O40 ATLAS_O36, ATLAS_F4(36)
#define ATLAS_O44 ATLAS_O40, ATLAS_F4(40)
#define ATLAS_O48 ATLAS_O44, ATLAS_F4(44)
#define ATLAS_O52 ATLAS_O48, ATLAS_F4(48)
#define ATLAS_O56 ATLAS_O52, ATLAS_F4(52)
#define ATLAS_O60 ATLAS_O56, ATLAS_F4(56)
#define ATLAS_O64 ATLAS_O60, ATLAS_F4(60)
#define ATLAS_O68 ATLAS_O64, ATLAS_F4(64)
#define ATLAS_O72 ATLAS_O68, ATLAS_F4(68)
#define ATLAS_O76 ATLAS_O72, ATLAS_F4(72)
#define ATLAS_O80 ATLAS_O76, ATLAS_F4(76)
#define ATLAS_O84 ATLAS_O80, ATLAS_F4(80)
#define ATLAS_O88 ATLAS_O84, ATLAS_F4(84)
#define ATLAS_O92 ATLAS_O88, ATLAS_F4(88)
#define ATLAS_O96 ATLAS_O92, ATLAS_F4(92)
#define ATLAS_O100 ATLAS_O96, ATLAS_F4(96)
#define ATLAS_O104 ATLAS_O100, ATLAS_F4(100)
#define ATLAS_O108 ATLAS_O104, ATLAS_F4(104)
#define ATLAS_O112 ATLAS_O108, ATLAS_F4(108)
#define ATLAS_O116 ATLAS_O112, ATLAS_F4(112)
#define ATLAS_O120 ATLAS_O116, ATLAS_F4(116)
#define ATLAS_O124 ATLAS_O120, ATLAS_F4(120)
#define ATLAS_O128 ATLAS_O124, ATLAS_F4(124)

// P0..P6: the operands after D, by number.
#define ATLAS_WGMMA(N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                          \
  template <>                                                                                      \
  struct Wgmma<N> {                                                                                \
    static constexpr int kCount = COUNT;                                                           \
    template <int kTransposeB = 0>                                                                 \
    __device__ static void bf16_ss(float (&d)[COUNT], unsigned long long a, unsigned long long b,  \
                                   int accumulate) {                                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n"                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" ATLAS_D##COUNT     \
                   "}, " P0 ", " P1 ", p, 1, 1, 0, " P3 ";\n}"                                     \
                   : ATLAS_O##COUNT                                                                \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB));                           \
    }                                                                                              \
    template <int kTransposeB = 0>                                                                 \
    __device__ static void bf16_rs(float (&d)[COUNT], const unsigned (&a)[4],                      \
                                   unsigned long long b, int accumulate) {                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\n"                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" ATLAS_D##COUNT     \
                   "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, " P6 ";\n}"              \
                   : ATLAS_O##COUNT                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),          \
                     "n"(kTransposeB));                                                            \
    }                                                                                              \
    __device__ static void e4m3_ss(float (&d)[COUNT], unsigned long long a, unsigned long long b,  \
                                   int accumulate) {                                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n"                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" ATLAS_D##COUNT     \
                   "}, " P0 ", " P1 ", p, 1, 1;\n}"                                                \
                   : ATLAS_O##COUNT                                                                \
                   : "l"(a), "l"(b), "r"(accumulate));                                             \
    }                                                                                              \
  };

ATLAS_WGMMA(8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
ATLAS_WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
ATLAS_WGMMA(24, 12, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
ATLAS_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
ATLAS_WGMMA(40, 20, "%20", "%21", "%22", "%23", "%24", "%25", "%26")
ATLAS_WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
ATLAS_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
ATLAS_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
ATLAS_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
ATLAS_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
ATLAS_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
ATLAS_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
ATLAS_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef ATLAS_WGMMA
// clang-format on

}  // namespace atlas
