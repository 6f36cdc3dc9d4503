#include "xrt.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>

#include <mutex>
#include <string>

#include "failure.h"

namespace csd {
namespace {

constexpr const char *kLibrary = "libxrt_coreutil.so.2";

void *open_library() {
  // XRT finds its own drivers below XILINX_XRT, so load the library from there, too.
  if (const char *root = getenv("XILINX_XRT"))
    if (void *library = dlopen((std::string(root) + "/lib/" + kLibrary).c_str(), RTLD_NOW | RTLD_GLOBAL))
      return library;
  if (void *library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL)) return library;
  throw Failure{
      CSD_EDEVICE,
      std::string("the Xilinx runtime (XRT) was not found: ") + dlerror() + ". docs/smartssd.md says how to install it",
      ENOENT};
}

template <typename Function>
void find(void *library, Function &function, const char *name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function)
    throw Failure{CSD_EDEVICE, std::string("this XRT has no function ") + name + "; it has to be 2.13 or later",
                  ENOSYS};
}

}  // namespace

const Xrt &Xrt::get() {
  static std::mutex mutex;
  static Xrt xrt;
  static bool loaded = false;
  std::lock_guard lock(mutex);
  if (loaded) return xrt;
  void *library = open_library();  // never unloaded: XRT does not support that
  find(library, xrt.device_open, "xrtDeviceOpen");
  find(library, xrt.device_open_by_bdf, "xrtDeviceOpenByBDF");
  find(library, xrt.device_close, "xrtDeviceClose");
  find(library, xrt.device_load_xclbin, "xrtDeviceLoadXclbinFile");
  find(library, xrt.device_xclbin_uuid, "xrtDeviceGetXclbinUUID");
  find(library, xrt.kernel_open, "xrtPLKernelOpen");
  find(library, xrt.kernel_close, "xrtKernelClose");
  find(library, xrt.kernel_arg_group, "xrtKernelArgGroupId");
  find(library, xrt.buffer_alloc, "xrtBOAlloc");
  find(library, xrt.buffer_free, "xrtBOFree");
  find(library, xrt.buffer_map, "xrtBOMap");
  find(library, xrt.buffer_sync, "xrtBOSync");
  find(library, xrt.run_open, "xrtRunOpen");
  find(library, xrt.run_close, "xrtRunClose");
  find(library, xrt.run_set_arg, "xrtRunSetArg");
  find(library, xrt.run_start, "xrtRunStart");
  find(library, xrt.run_state, "xrtRunState");
  loaded = true;
  return xrt;
}

}  // namespace csd
