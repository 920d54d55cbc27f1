#include "cpu/numa.h"

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

namespace atlas {
namespace {

// Numbers of a list like "0-3,8,10-11"; what is no number ends it.
std::vector<int> parse_list(std::istream& text) {
  std::vector<int> numbers;
  int first = 0;
  while (text >> first) {
    int last = first;
    if (text.peek() == '-') {
      text.get();
      if (!(text >> last)) break;
    }
    for (int number = first; number <= last && numbers.size() < 65536; ++number) {
      numbers.push_back(number);
    }
    if (text.peek() != ',') break;
    text.get();
  }
  return numbers;
}

}  // namespace

std::vector<int> memory_nodes(const std::string& root) {
  std::vector<int> nodes;
#ifdef __linux__
  cpu_set_t mine;
  if (sched_getaffinity(0, sizeof(mine), &mine) != 0) return nodes;
  std::ifstream online(root + "/online");
  for (const int node : parse_list(online)) {
    std::ifstream cpus(root + "/node" + std::to_string(node) + "/cpulist");
    const std::vector<int> numbers = parse_list(cpus);
    const bool near = std::any_of(numbers.begin(), numbers.end(), [&](int cpu) {
      return cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &mine);
    });
    if (near) nodes.push_back(node);
  }
#else
  static_cast<void>(root);
#endif
  return nodes;
}

std::string interleave(void* data, size_t bytes, const std::vector<int>& nodes) {
#ifdef __linux__
  if (nodes.size() < 2 || bytes == 0) return "";
  constexpr int kDefault = 0, kInterleave = 3;  // MPOL_DEFAULT, MPOL_INTERLEAVE
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  int policy = kDefault;
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0) return std::strerror(errno);
  if (policy != kDefault) return "";
  std::vector<unsigned long> mask(static_cast<size_t>(nodes.back()) / kBits + 1);
  for (const int node : nodes) {
    mask[static_cast<size_t>(node) / kBits] |= 1ul << (static_cast<size_t>(node) % kBits);
  }
  // The kernel counts the bits of the mask and one more.
  if (syscall(SYS_mbind, data, bytes, kInterleave, mask.data(), mask.size() * kBits + 1, 0) != 0) {
    return std::strerror(errno);
  }
#else
  static_cast<void>(data), static_cast<void>(bytes), static_cast<void>(nodes);
#endif
  return "";
}

}  // namespace atlas
