#include "card.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <map>
#include <thread>
#include <utility>

#include "pool.h"
#include "transfer.h"

namespace csd {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kPage = 4096;

std::string seconds(milliseconds t) {
  char text[32];
  snprintf(text, sizeof text, "%g s", static_cast<double>(t.count()) / 1000);
  return text;
}

// Restores the process's signal handlers. XRT's software emulation installs its own for the whole process, and kills
// the process group when its device is gone.
class SignalHandlerGuard {
 public:
  SignalHandlerGuard() {
    for (size_t i = 0; i < kCount; i++) sigaction(kSignals[i], nullptr, &saved_[i]);
  }
  ~SignalHandlerGuard() {
    for (size_t i = 0; i < kCount; i++) sigaction(kSignals[i], &saved_[i], nullptr);
  }

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGFPE, SIGABRT, SIGUSR1, SIGCHLD};
  static constexpr size_t kCount = std::size(kSignals);
  struct sigaction saved_[kCount];
};

// All cards of the process. Never destroyed: when the process exits, threads may still be waiting for a lost card.
struct Cards {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Card>> opened;  // includes lost cards
  std::atomic<pid_t> owner{0};

  static Cards &get() {
    static Cards *const all = new Cards;
    return *all;
  }
};

// XRT's destructors crash if a card is still open. They wait forever for a lost card and, in a forked child, for
// threads that do not exist there. This exit handler runs before them, and in these cases ends the process without
// them.
void exit_without_xrt(int status, void *) {
  Cards &all = Cards::get();
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  if (all.owner == getpid() && lock && all.opened.empty()) return;
  fflush(nullptr);
  _exit(status);
}

void register_exit_handler() {  // the exit handler that is registered last runs first
  on_exit(exit_without_xrt, nullptr);
}

}  // namespace

// ---- Opened once per process ------------------------------------------------

std::shared_ptr<Card> Card::open(const std::string &name, const std::string &xclbin, const std::string &kernels,
                                 milliseconds timeout) {
  Cards &all = Cards::get();
  if (all.owner != 0 && all.owner != getpid())
    throw Failure{CSD_EDEVICE,
                  "a card was opened before this process was forked, and XRT does not survive that: fork first"};
  std::lock_guard lock(all.mutex);
  const auto found = all.opened.find(name);
  std::shared_ptr<Card> card = found != all.opened.end() ? found->second : nullptr;
  if (!card) {
    card.reset(new Card(name, xclbin, timeout));
    if (all.owner.exchange(getpid()) == 0) pthread_atfork(nullptr, nullptr, register_exit_handler);
    all.opened[name] = card;
    try {
      card->call_with_timeout("being opened", [card, kernels] { card->open_now(kernels); });
    } catch (...) {
      if (!card->lost_) all.opened.erase(name);
      throw;
    }
  }
  if (card->xclbin_ != xclbin) fail("it is in use in this process with the kernels of " + card->xclbin_, EBUSY);
  card->throw_if_lost();
  card->users_++;
  return card;
}

void Card::close(std::shared_ptr<Card> card) {
  Cards &all = Cards::get();
  std::lock_guard lock(all.mutex);
  if (--card->users_ > 0 || card->lost_) return;
  card->call_with_timeout("being closed", [card] { card->close_now(); });
  all.opened.erase(card->name_);
}

Card::Card(std::string name, std::string xclbin, milliseconds timeout)
    : xrt_(Xrt::get()),
      name_(std::move(name)),
      xclbin_(std::move(xclbin)),
      timeout_(timeout),
      kernels_(all_kernels().size()) {
  const char *mode = getenv("XCL_EMULATION_MODE");
  emulated_ = mode && *mode;
}

void Card::open_now(const std::string &kernels) try {
  const SignalHandlerGuard guard;
  errno = 0;
  const bool is_index = std::all_of(name_.begin(), name_.end(), [](char c) { return c >= '0' && c <= '9'; });
  device_ = is_index ? xrt_.device_open(static_cast<unsigned>(strtoul(name_.c_str(), nullptr, 10)))
                     : xrt_.device_open_by_bdf(name_.c_str());
  static std::once_flag driver_is_loaded;
  std::call_once(driver_is_loaded, register_exit_handler);
  if (!device_) fail("XRT cannot open it; `csd-optim devices` lists the cards that there are", errno ? errno : ENODEV);
  errno = 0;
  if (xrt_.device_load_xclbin(device_, xclbin_.c_str())) {
    const int error = errno;
    const char *why = error == EKEYREJECTED                    ? " (its shell takes signed files only)"
                      : error == EBUSY                         ? " (another process uses other kernels on it)"
                      : error == EINVAL || error == EOPNOTSUPP ? " (it has to be built for the card's shell)"
                                                               : "";
    fail(std::string("XRT cannot load the kernels") + why + ", " + xclbin_, error ? error : EIO);
  }
  unsigned char uuid[16];
  if (xrt_.device_xclbin_uuid(device_, uuid)) fail("XRT does not say which kernels are loaded", errno);
  for (size_t i = 0; i < kernels_.size(); i++) {
    const Kernel &kernel = all_kernels()[i];
    if ((' ' + kernels + ' ').find(' ' + kernel.name + ' ') == std::string::npos) continue;
    errno = 0;
    kernels_[i] = xrt_.kernel_open(device_, uuid, kernel.name.c_str());
    if (!kernels_[i]) fail("XRT does not find the kernel " + kernel.name + " in " + xclbin_, errno ? errno : ENOENT);
    // A kernel of another version may have a scalar where ours has a pointer. Each run also checks the reported
    // version.
    if (xrt_.kernel_arg_group(kernels_[i], kernel.index(KernelArg::report)) < 0)
      fail(xclbin_ + " has a " + kernel.name + " of another version: build both from the same source", EPROTO);
  }
  first_kernel();  // throws
  has_p2p_ = maps_p2p();
} catch (...) {
  close_now();
  throw;
}

Xrt::Handle Card::handle_of(const Kernel &kernel) const noexcept {
  return kernels_[static_cast<size_t>(&kernel - all_kernels().data())];
}

bool Card::has_kernel(const Kernel &kernel) const noexcept { return handle_of(kernel) != nullptr; }

const Kernel &Card::first_kernel() const {
  for (const Kernel &kernel : all_kernels())
    if (has_kernel(kernel)) return kernel;
  fail(xclbin_ + " has none of our kernels: it is another program's; build ours (docs/smartssd.md)", ENOENT);
}

// The memory group of an argument. Any kernel will do, because all use the same memory bank.
uint32_t Card::memory_group(KernelArg arg) const {
  const Kernel &kernel = first_kernel();
  return static_cast<uint32_t>(xrt_.kernel_arg_group(handle_of(kernel), kernel.index(arg)));
}

bool Card::maps_p2p() const {
  const Xrt::Handle buffer = xrt_.buffer_alloc(device_, 1 << 20, kP2p, memory_group(KernelArg::tile_in));
  if (!buffer) return false;
  // Direct I/O needs a page-aligned address; XRT's `noop` driver, for one, does not return one.
  void *const map = xrt_.buffer_map(buffer);
  const bool usable = map && reinterpret_cast<uintptr_t>(map) % kPage == 0;
  xrt_.buffer_free(buffer);
  return usable;
}

// On some systems P2P memory can be mapped, but transfers fail.
void Card::try_p2p(int fd, uint64_t offset) {
  call_with_timeout("trying P2P", [card = shared_from_this(), fd, offset] {
    const CardBuffer page(card, kPage, KernelArg::tile_in, true);
    if (read_fully(fd, page.bytes(), kPage, offset) || write_fully(fd, page.bytes(), kPage, offset))
      card->has_p2p_ = false;
  });
}

void Card::close_now() {
  for (Xrt::Handle &kernel : kernels_)
    if (const Xrt::Handle open = std::exchange(kernel, nullptr)) xrt_.kernel_close(open);
  if (const Xrt::Handle open = std::exchange(device_, nullptr)) xrt_.device_close(open);
}

// ---- Calls ------------------------------------------------------------------

void Card::call_with_timeout(const char *what, std::function<void()> call, milliseconds limit) {
  throw_if_lost();
  std::packaged_task<void()> task([call = std::move(call)]() mutable {
    const std::function<void()> own = std::move(call);  // destroyed before the future becomes ready
    own();
  });
  std::future<void> end = task.get_future();
  std::thread([self = shared_from_this(), task = std::move(task)]() mutable {
    block_signals();
    task();
  }).detach();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (end.wait_for(milliseconds(50)) != std::future_status::ready) {
    if (std::chrono::steady_clock::now() > deadline)
      mark_lost("it has not answered for " + seconds(limit) + " while " + what);
    throw_if_lost();
  }
  end.get();
}

void Card::throw_if_lost() {
  if (!lost_) return;
  std::lock_guard lock(mutex_);
  throw Failure{CSD_EDEVICE, why_ + ". This process can no longer use the card: restart it when the card works again",
                ENODEV};
}

void Card::close_run(Xrt::Handle run) const {
  if (!lost_) xrt_.run_close(run);
}

void Card::mark_lost(const std::string &why) {
  std::lock_guard lock(mutex_);
  if (lost_.exchange(true)) return;
  why_ = why;
  register_exit_handler();  // XRT may hang inside open_now(), which has then not registered it yet
}

void Card::fail(const std::string &what, int os_errno) { throw Failure{CSD_EDEVICE, what, os_errno}; }

Xrt::Handle Card::open_run(const Kernel &kernel) const {
  const Xrt::Handle run = xrt_.run_open(handle_of(kernel));
  if (!run) fail("cannot make a run of its kernel", errno);
  return run;
}

void Card::set_arg(Xrt::Handle run, int index, Xrt::Handle buffer) const {
  if (xrt_.run_set_arg(run, index, buffer)) fail("the kernel does not take argument " + std::to_string(index), errno);
}

void Card::set_arg(Xrt::Handle run, int index, uint32_t value) const {
  if (xrt_.run_set_arg(run, index, value)) fail("the kernel does not take argument " + std::to_string(index), errno);
}

void Card::execute(Xrt::Handle run) {
  const std::unique_lock in_use(kernel_in_use_, 3 * timeout_);
  if (!in_use) mark_lost("it has not come to an end with a tile in " + seconds(3 * timeout_));
  throw_if_lost();
  if (xrt_.run_start(run)) fail("cannot start its kernel", errno);
  // Polled, because not every XRT driver honours the timeout of a wait.
  const auto start = std::chrono::steady_clock::now();
  for (auto pause = std::chrono::microseconds(20);; pause = std::min(2 * pause, std::chrono::microseconds(500))) {
    const int state = xrt_.run_state(run);
    if (state == kCompleted) return;
    if (state == kError || state == kAborted || state >= kTimedOut)
      fail("its kernel has failed, with state " + std::to_string(state), EIO);
    if (std::chrono::steady_clock::now() - start > timeout_) break;
    std::this_thread::sleep_for(pause);
  }
  mark_lost("its kernel has not come to an end in " + seconds(timeout_));
  throw_if_lost();
}

// ---- Memory -----------------------------------------------------------------

CardBuffer::CardBuffer(std::shared_ptr<Card> card, uint64_t bytes, KernelArg arg, bool p2p)
    : card_(std::move(card)), size_((bytes + kPage - 1) / kPage * kPage), p2p_(p2p) {
  // In emulation, normal buffers are shared with the device, so a forgotten sync would go unnoticed; cacheable buffers
  // are not shared.
  const uint64_t flags = p2p ? kP2p : card_->emulated_ ? kCacheable : kNormal;
  handle_ = card_->xrt_.buffer_alloc(card_->device_, size_, flags, card_->memory_group(arg));
  if (!handle_)
    Card::fail(
        "no room for " + std::to_string(size_) + " bytes in its memory; fewer buffers or a smaller tile_size take less",
        ENOMEM);
  map_ = static_cast<char *>(card_->xrt_.buffer_map(handle_));
  if (map_) {
    share_with_children(false);
    return;
  }
  card_->xrt_.buffer_free(handle_);
  Card::fail("its memory cannot be mapped", errno);
}

CardBuffer::~CardBuffer() {
  if (card_->lost()) return;
  share_with_children(true);  // the memory returns to the heap
  card_->xrt_.buffer_free(handle_);
}

// Sets whether forked children share the buffer. Normal buffers are memory of this process that the driver has pinned
// for DMA. After a fork, the first process to write to a shared page gets a copy. If that were the parent, DMA would
// continue to use the old page.
void CardBuffer::share_with_children(bool yes) const {
  if (!p2p_) madvise(map_, size_, yes ? MADV_DOFORK : MADV_DONTFORK);
}

void CardBuffer::sync(int direction, uint64_t bytes) const {
  if (bytes && card_->xrt_.buffer_sync(handle_, direction, bytes, 0))
    Card::fail(direction == kToDevice ? "DMA to it failed" : "DMA from it failed", errno);
}

}  // namespace csd
