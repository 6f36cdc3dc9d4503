#include "numa.h"

#include <linux/mempolicy.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

namespace csd {

cpu_set_t usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return set;
  CPU_ZERO(&set);
  const unsigned n = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned cpu = 0; cpu < n && cpu < CPU_SETSIZE; cpu++) CPU_SET(cpu, &set);
  return set;
}

cpu_set_t usable_cpus_of(uint32_t numa) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const std::string path = "/sys/devices/system/node/node" + std::to_string(numa - 1) + "/cpulist";
  if (FILE *list = fopen(path.c_str(), "re")) {  // "0-7,16-23"
    unsigned from, to;
    for (int c = ','; c == ',' && fscanf(list, "%u", &from) == 1;) {
      to = from;
      c = fgetc(list);
      if (c == '-' && fscanf(list, "%u", &to) == 1) c = fgetc(list);
      for (unsigned cpu = from; cpu <= to && cpu < CPU_SETSIZE; cpu++) CPU_SET(cpu, &set);
    }
    fclose(list);
  }
  const cpu_set_t usable = usable_cpus();
  CPU_AND(&set, &set, &usable);
  return set;
}

bool prefer_node(void *address, uint64_t bytes, uint32_t numa) {
  constexpr uint32_t kBits = 8 * sizeof(unsigned long);
  const uint32_t node = numa - 1;
  std::vector<unsigned long> nodes(node / kBits + 1);
  nodes.back() = 1ul << node % kBits;
  // Preferred, not bound: memory of another node is better than none. The kernel uses one bit less than `maxnode`, the
  // last argument but one, says.
  return syscall(SYS_mbind, address, bytes, MPOL_PREFERRED, nodes.data(), kBits * nodes.size() + 1, 0u) == 0;
}

}  // namespace csd
