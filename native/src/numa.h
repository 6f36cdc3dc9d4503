// NUMA nodes, from Linux' sysfs and system calls. Throughout, 0 stands for any node and 1 + n for node n, so that a
// zero-initialised field means any node.
#pragma once
#include <sched.h>

#include <cstdint>

namespace csd {

cpu_set_t usable_cpus();  // the CPUs that this process may run on

// The usable CPUs of a node; empty if the system has no such node, or the process may use none of its CPUs.
cpu_set_t usable_cpus_of(uint32_t numa);

// Makes untouched pages of this memory come from the node as long as it has free memory. Returns whether the system
// accepts the request: containers may forbid it.
bool prefer_node(void *address, uint64_t bytes, uint32_t numa);

}  // namespace csd
