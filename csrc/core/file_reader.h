// Threads that read files into memory: weights on their way to a device.
//
// All threads read what was asked for first together, a chunk each, so that it is there first and
// little memory is in flight. They never touch Python: its lock, taken and given back by sixteen
// threads beside the one that feeds the device, cost three times the reading (8B: 1.0 s in all).
// Threads: one thread at a time may call a reader.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace atlas {

// Bytes of a file that stand together there, and where they go: each `piece` of them `stride` bytes
// after the one before it.
struct FilePart {
  int file = -1;
  int64_t offset = 0;
  char* to = nullptr;
  size_t bytes = 0;
  size_t piece = 0;
  size_t stride = 0;
};

class FileReader {
 public:
  // Throws DeviceFault if the threads cannot start.
  explicit FileReader(int threads);
  ~FileReader() { close(); }
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Begin to read. The files must stay open and the memory there until wait() or close() has
  // returned. Returns a ticket.
  int64_t read(const std::vector<FilePart>& parts);

  // Wait until a read is done, and forget it. Returns whether every byte of it came.
  bool wait(int64_t ticket);

  // Give up what has not begun, and end the threads.
  void close();

 private:
  struct Chunk {
    FilePart part;
    size_t begin, end;  // bytes of the part
    int64_t ticket;
  };
  struct Pending {
    size_t chunks = 0;
    bool complete = true;
  };

  void work();
  static bool read(const Chunk& chunk);

  std::mutex mutex_;
  std::condition_variable asked_, done_;
  std::deque<Chunk> chunks_;
  std::map<int64_t, Pending> pending_;  // by ticket
  int64_t last_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace atlas
