#include "cuda/events.h"

namespace atlas {
namespace cuda {

void Fences::create(const Driver& cuda, Stream stream) {
  cuda_ = &cuda;
  stream_ = stream;
  for (Event& event : events_) check(cuda.event_create(&event, kEventUntimed), "cuEventCreate");
}

void Fences::destroy() {
  for (Event event : events_) {
    if (event != nullptr) cuda_->event_destroy(event);
  }
}

int64_t Fences::set() {
  const int64_t mark = last_ + 1;
  check(cuda_->event_record(events_[static_cast<size_t>(mark) % kEvents], stream_),
        "cuEventRecord");
  return last_ = mark;
}

Event Fences::event(int64_t mark) const {
  if (mark < 0 || mark > last_) {
    throw DeviceFault("fence " + std::to_string(mark) + " was never set; the last is " +
                      std::to_string(last_));
  }
  return events_[static_cast<size_t>(mark) % kEvents];
}

void Stopwatch::destroy() {
  for (Event event : events_) cuda_.event_destroy(event);
}

const std::vector<Event>& Stopwatch::events(size_t count) {
  while (events_.size() < count) {
    Event event = nullptr;
    check(cuda_.event_create(&event, kEventTimed), "cuEventCreate");
    events_.push_back(event);
  }
  return events_;
}

double Stopwatch::seconds(size_t i) const {
  float milliseconds = 0;
  check(cuda_.event_elapsed(&milliseconds, events_[i], events_[i + 1]), "cuEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace cuda
}  // namespace atlas
