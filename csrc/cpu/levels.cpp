#include "cpu/levels.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "cpu/features.h"
#include "cpu/registry.h"
#include "cpu/self_test.h"

namespace atlas {

CpuLevel judge_cpu_level(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, CpuLevel> judged;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = judged.find(name);
  if (known != judged.end()) return known->second;
  CpuLevel level;
  level.name = name;
  const std::vector<std::string> compiled = registered_cpu_levels();
  level.compiled = std::find(compiled.begin(), compiled.end(), name) != compiled.end();
  if (level.compiled) level.obstacle = cpu_level_obstacle(name);
  if (level.compiled && level.obstacle.empty()) level.failure = self_test_cpu_level(name);
  judged.emplace(name, level);
  return level;
}

std::vector<std::string> usable_cpu_levels(const std::string& first) {
  const std::vector<std::string>& known = known_cpu_levels();
  auto level = first.empty() ? known.begin() : std::find(known.begin(), known.end(), first);
  std::vector<std::string> usable;
  for (; level != known.end(); ++level) {
    if (judge_cpu_level(*level).usable()) {
      usable.push_back(*level);
    } else if (*level == first) {
      return {};
    }
  }
  return usable;
}

std::vector<CpuLevel> cpu_levels() {
  std::vector<CpuLevel> levels;
  for (const std::string& name : known_cpu_levels()) levels.push_back(judge_cpu_level(name));
  return levels;
}

}  // namespace atlas
