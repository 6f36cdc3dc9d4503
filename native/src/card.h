// A card: the FPGA of a SmartSSD with our kernel on it, opened once per process and shared by all engines.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csd.h"
#include "failure.h"
#include "xrt.h"

namespace csd {

// The kernels (csd_kernel.h), by csd_codec. Their arguments are in one order, whatever the number of ports that they have
// for a tile each way.
struct Kernel {
  const char *name;
  int ports;
};
constexpr Kernel kKernels[] = {{"csd_adamw_update", 4}, {"csd_adamw_8bit_update", 3}};

// The arguments of the first one; buffers are made for these. The others' lie in the same bank.
enum KernelArg {
  kTileIn = 0,
  kGrad = 4,
  kEntries = 5,
  kSegments = 6,
  kTileOut = 7,
  kParam = 11,
  kReport = 12,
  kScalars = 13
};

class Card : public std::enable_shared_from_this<Card> {
 public:
  // `name`: XRT's index, or a PCIe address. Throws Failure. To be closed as often as it was opened; its buffers and runs
  // first, because XRT crashes otherwise.
  static std::shared_ptr<Card> open(const std::string &name, const std::string &xclbin,
                                    std::chrono::milliseconds timeout);
  static void close(std::shared_ptr<Card>);

  bool has_p2p() const noexcept { return has_p2p_; }
  bool has_kernel(uint32_t codec) const noexcept { return codec < kCodecs && kernels_[codec]; }
  void try_p2p(int fd, uint64_t offset);  // see csd_card_try_p2p

  // XRT may never return: a driver hangs, an emulated device is gone. So whatever calls it runs on a thread of its own,
  // which is left to itself when the time is up; `call` therefore has to own all that it touches. From then on the card
  // is lost, and every call fails at once. Throws Failure: what `call` throws, or that.
  void guarded(const char *what, std::function<void()> call, std::chrono::milliseconds limit = std::chrono::minutes(2));

  // The limit for a call that executes the kernel: who waits for it notices earlier by himself that it hangs.
  std::chrono::milliseconds run_limit() const { return 4 * timeout_; }

  // The calls themselves, all from within guarded().
  Xrt::Handle open_run(uint32_t codec) const;
  void set_arg(Xrt::Handle run, int index, Xrt::Handle buffer) const;
  void set_arg(Xrt::Handle run, int index, uint32_t value) const;
  void execute(Xrt::Handle run);  // one at a time, of either kernel: all share the same memory; waits for its end
  void close_run(Xrt::Handle run) const;
  [[noreturn]] static void fail(const std::string &what, int os_errno);

 private:
  friend class CardBuffer;
  Card(std::string name, std::string xclbin, std::chrono::milliseconds timeout);
  void open_now();
  void close_now();
  bool maps_p2p() const;
  void lose(const std::string &why);
  void check();  // throws if it is lost
  bool lost() const { return lost_; }

  const Xrt &xrt_;
  const std::string name_, xclbin_;
  const std::chrono::milliseconds timeout_;
  static constexpr uint32_t kCodecs = std::size(kKernels);
  Xrt::Handle device_ = nullptr, kernels_[kCodecs] = {};
  std::atomic<bool> has_p2p_{false};
  bool emulated_ = false;
  uint32_t users_ = 0;  // guarded by the mutex of all cards
  std::timed_mutex kernel_in_use_;
  std::mutex mutex_;  // guards why_
  std::atomic<bool> lost_{false};
  std::string why_;
};

// Memory of a card, mapped into ours. Made, used and destroyed within Card::guarded().
class CardBuffer {
 public:
  // P2P: the map is the card's memory itself, for a drive to read and write; the CPU must not (70 MB/s). Otherwise it is
  // ours, and to_device and from_device copy by DMA. `arg`: the kernel's argument that it is for.
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
