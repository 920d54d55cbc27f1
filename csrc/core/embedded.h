// The kernel sets embedded in this extension (embedded.S).
#pragma once

#include <string_view>

extern "C" {
extern const char atlas_manifest_begin[];
extern const char atlas_manifest_end[];
extern const char atlas_images_begin[];
extern const char atlas_images_end[];
}

namespace atlas {

inline std::string_view embedded_manifest() {
  return {atlas_manifest_begin, static_cast<size_t>(atlas_manifest_end - atlas_manifest_begin)};
}
inline std::string_view embedded_images() {
  return {atlas_images_begin, static_cast<size_t>(atlas_images_end - atlas_images_begin)};
}

}  // namespace atlas
