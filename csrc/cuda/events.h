// Marks in a stream, and time between them. All events are made at load.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cuda/driver.h"

namespace atlas {
namespace cuda {

// The events of one stream, used in turn. A mark is the number of times that one was set, so a mark
// whose event was set again since then is waited for a little longer, never too short.
class Fences {
 public:
  void create(const Driver& cuda, Stream stream);
  void destroy();

  // Sets the next event behind everything put on the stream so far. Returns its mark.
  int64_t set();
  // The event of a mark. Throws DeviceFault if the mark was never given.
  Event event(int64_t mark) const;

 private:
  // More than any ring of steps or of staging buffers has in flight.
  static constexpr size_t kEvents = 64;
  const Driver* cuda_ = nullptr;
  Stream stream_ = nullptr;
  int64_t last_ = -1;
  std::array<Event, kEvents> events_ = {};
};

// Events that carry times, made when first asked for: only debugging and benchmarks do.
class Stopwatch {
 public:
  explicit Stopwatch(const Driver& cuda) : cuda_(cuda) {}
  void destroy();

  // At least `count` events.
  const std::vector<Event>& events(size_t count);
  // Seconds between event i and the one after it, once both were reached.
  double seconds(size_t i) const;

 private:
  const Driver& cuda_;
  std::vector<Event> events_;
};

}  // namespace cuda
}  // namespace atlas
