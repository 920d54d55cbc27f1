#include "core/file_reader.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include "core/backend.h"

namespace atlas {
namespace {

constexpr size_t kChunk = 1 << 20;
constexpr size_t kPlaces = 64;  // that one call reads into

}  // namespace

FileReader::FileReader(int threads) {
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    const size_t started = threads_.size();
    close();
    throw DeviceFault("threads that read files: could start " + std::to_string(started) + " of " +
                      std::to_string(threads) + " (" + error.what() + "); allow more processes");
  }
}

int64_t FileReader::read(const std::vector<FilePart>& parts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) throw DeviceFault("read() from a closed FileReader");
  const int64_t ticket = ++last_;
  Pending& pending = pending_[ticket];
  for (const FilePart& part : parts) {
    for (size_t begin = 0; begin < part.bytes; begin += kChunk) {
      chunks_.push_back({part, begin, std::min(begin + kChunk, part.bytes), ticket});
      ++pending.chunks;
    }
  }
  asked_.notify_all();
  return ticket;
}

bool FileReader::wait(int64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = pending_.find(ticket);
  if (found == pending_.end()) throw DeviceFault("no read " + std::to_string(ticket) + " is begun");
  done_.wait(lock, [&] { return found->second.chunks == 0; });
  const bool complete = found->second.complete;
  pending_.erase(found);
  return complete;
}

void FileReader::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    for (const Chunk& chunk : chunks_) {
      Pending& pending = pending_[chunk.ticket];
      pending.complete = false;
      --pending.chunks;
    }
    chunks_.clear();
    asked_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void FileReader::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    asked_.wait(lock, [&] { return closing_ || !chunks_.empty(); });
    if (chunks_.empty()) return;
    const Chunk chunk = chunks_.front();
    chunks_.pop_front();
    lock.unlock();
    const bool complete = read(chunk);
    lock.lock();
    Pending& pending = pending_[chunk.ticket];
    pending.complete &= complete;
    if (--pending.chunks == 0) done_.notify_all();
  }
}

bool FileReader::read(const Chunk& chunk) {
  const FilePart& part = chunk.part;
  iovec places[kPlaces];
  for (size_t at = chunk.begin; at < chunk.end;) {
    size_t count = 0;
    for (size_t next = at; next < chunk.end && count < kPlaces; ++count) {
      const size_t within = next % part.piece;
      const size_t bytes = std::min(part.piece - within, chunk.end - next);
      places[count] = {part.to + next / part.piece * part.stride + within, bytes};
      next += bytes;
    }
    const ssize_t bytes = preadv(part.file, places, static_cast<int>(count),
                                 static_cast<off_t>(part.offset + static_cast<int64_t>(at)));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) return false;
    at += static_cast<size_t>(bytes);
  }
  return true;
}

}  // namespace atlas
