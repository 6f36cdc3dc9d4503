// A card: the FPGA of a SmartSSD with our kernels loaded, opened once per process and shared by all engines.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "card_kernels.h"
#include "csd.h"
#include "failure.h"
#include "xrt.h"

namespace csd {

class Card : public std::enable_shared_from_this<Card> {
 public:
  // `name`: XRT's index, or a PCIe address; `kernels`: see csd_card_open. Throws Failure. Each open() needs a close().
  // Free all buffers and runs of the card before the last close(), because XRT crashes otherwise.
  static std::shared_ptr<Card> open(const std::string &name, const std::string &xclbin, const std::string &kernels,
                                    std::chrono::milliseconds timeout);
  static void close(std::shared_ptr<Card>);

  bool has_p2p() const noexcept { return has_p2p_; }
  bool has_kernel(const Kernel &) const noexcept;
  const Kernel &first_kernel() const;     // the first one in its xclbin, which has at least one
  void try_p2p(int fd, uint64_t offset);  // see csd_card_try_p2p

  // Runs `call`, which calls XRT, on a thread of its own. XRT may never return, for example if a driver hangs or an
  // emulated device is gone. After `limit` the thread is abandoned, so `call` must own everything it touches. The card
  // is then lost, and every further call fails at once. Throws what `call` throws, or Failure if the card is lost.
  void call_with_timeout(const char *what, std::function<void()> call,
                         std::chrono::milliseconds limit = std::chrono::minutes(2));

  // The limit for a call that executes a kernel. It covers all the time that execute() waits before it gives up.
  std::chrono::milliseconds run_limit() const { return 4 * timeout_; }

  // The XRT calls; use them only within call_with_timeout().
  Xrt::Handle open_run(const Kernel &) const;
  void set_arg(Xrt::Handle run, int index, Xrt::Handle buffer) const;
  void set_arg(Xrt::Handle run, int index, uint32_t value) const;
  void execute(Xrt::Handle run);  // runs a kernel and waits for it; one at a time, because all share the same memory
  void close_run(Xrt::Handle run) const;
  [[noreturn]] static void fail(const std::string &what, int os_errno);

 private:
  friend class CardBuffer;
  Card(std::string name, std::string xclbin, std::chrono::milliseconds timeout);
  void open_now(const std::string &kernels);
  void close_now();
  bool maps_p2p() const;
  uint32_t memory_group(KernelArg) const;
  Xrt::Handle handle_of(const Kernel &) const noexcept;
  void mark_lost(const std::string &why);
  void throw_if_lost();  // throws if the card is lost
  bool lost() const { return lost_; }

  const Xrt &xrt_;
  const std::string name_, xclbin_;
  const std::chrono::milliseconds timeout_;
  Xrt::Handle device_ = nullptr;
  std::vector<Xrt::Handle> kernels_;  // same indices as all_kernels(); null: not in its xclbin
  std::atomic<bool> has_p2p_{false};
  bool emulated_ = false;
  uint32_t users_ = 0;  // guarded by the mutex in Cards
  std::timed_mutex kernel_in_use_;
  std::mutex mutex_;  // guards why_
  std::atomic<bool> lost_{false};
  std::string why_;
};

// A buffer of a card, mapped into host memory. Create, sync and destroy it within Card::call_with_timeout().
class CardBuffer {
 public:
  // With `p2p`, the mapping is the card's memory itself, for a drive to read and write; the CPU should not touch it
  // (70 MB/s). Otherwise it is host memory, and to_device and from_device copy by DMA. `arg`: the kernel argument it is
  // for.
  CardBuffer(std::shared_ptr<Card>, uint64_t bytes, KernelArg arg, bool p2p = false);
  ~CardBuffer();
  CardBuffer(const CardBuffer &) = delete;
  CardBuffer &operator=(const CardBuffer &) = delete;

  char *bytes() const { return map_; }
  Xrt::Handle handle() const { return handle_; }
  void to_device(uint64_t bytes) const { sync(kToDevice, bytes); }
  void from_device(uint64_t bytes) const { sync(kFromDevice, bytes); }

 private:
  void sync(int direction, uint64_t bytes) const;
  void share_with_children(bool yes) const;
  const std::shared_ptr<Card> card_;
  const uint64_t size_;
  const bool p2p_;
  Xrt::Handle handle_ = nullptr;
  char *map_ = nullptr;
};

}  // namespace csd

struct csd_card {
  std::shared_ptr<csd::Card> card;
};
