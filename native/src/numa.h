// NUMA nodes: what Linux tells of them in sysfs, and takes by a system call. 0 stands for "any" throughout, 1 + n for
// node n, so that whoever says nothing of nodes has said "any".
#pragma once
#include <sched.h>

#include <cstdint>

namespace csd {

cpu_set_t usable_cpus();  // that this process may run on

// Those of them that belong to a node; none if the system has no such node, or the process none of its CPUs.
cpu_set_t usable_cpus_of(uint32_t numa);

// Pages of this memory that nobody has touched yet come from the node, as long as it has any. Returns whether the system
// takes that: containers may forbid it.
bool prefer_node(void *address, uint64_t bytes, uint32_t numa);

}  // namespace csd
