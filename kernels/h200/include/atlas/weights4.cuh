// The format of 4 bits that an instance's operand `weight` has, as a class of four_bit.cuh.
#pragma once

#include "atlas/four_bit.cuh"
#include "atlas/instance.h"

namespace atlas {

#if defined(ATLAS_TYPE_WEIGHT_NVFP4)
using InstanceFormat = Nvfp4;
#elif defined(ATLAS_TYPE_WEIGHT_I4G32B)
using InstanceFormat = I4g32b;
#elif defined(ATLAS_TYPE_WEIGHT_I4G32)
using InstanceFormat = I4g32<false>;
#elif defined(ATLAS_TYPE_WEIGHT_I4G32Z)
using InstanceFormat = I4g32<true>;
#elif defined(ATLAS_TYPE_WEIGHT_I4G32M)
using InstanceFormat = I4g32m;
#else
#error "no format of 4 bits"
#endif

}  // namespace atlas
