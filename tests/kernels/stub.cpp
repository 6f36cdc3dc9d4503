// Stands in for libcaffe2_nvrtc.so, in which torch has NVRTC and the driver (with AMD defined: hipRTC and HIP): notes how
// it is called. The call that stub_fails() names fails.
#include <stdint.h>
#include <string.h>

#include <string>

#ifdef AMD
#define RTC(name) hiprtc##name
#define DRIVER(name) hip##name
#define LAUNCH hipModuleLaunchKernel
#define IMAGE Code
#else
#define RTC(name) nvrtc##name
#define DRIVER(name) cu##name
#define LAUNCH cuLaunchKernel
#define IMAGE CUBIN
#endif
#define RTC_(name) RTC(name)
#define JOIN(a, b, c) a##b##c
#define GET(what, size) RTC_(JOIN_(Get, what, size))
#define JOIN_(a, b, c) JOIN(a, b, c)

namespace {
std::string notes, failing;
const std::string image = "image", ptx = "ptx", complaint = "complaint";

int note(const std::string &name, const std::string &text = "") {
  notes += name + (text.empty() ? "" : " " + text) + "\n";
  return name == failing ? 7 : 0;
}
int size_of(const std::string &s, size_t *n) { return *n = s.size(), 0; }
int copy_of(const std::string &s, char *to) { return memcpy(to, s.data(), s.size()), 0; }
}  // namespace

extern "C" {
const char *stub_notes() { return notes.c_str(); }
void stub_fails(const char *name) { notes.clear(), failing = name; }

int RTC(CreateProgram)(void **program, const char *source, const char *, int headers, const char *const *texts,
                       const char *const *names) {
  for (int i = 0; i < headers; i++)
    if (!strcmp(names[i], "update.h") && strstr(texts[i], "KERNEL update(")) *program = &notes;
  return note("create", source);
}
int RTC(CompileProgram)(void *program, int n, const char *const *options) {
  std::string all = program == &notes ? "" : "no update.h ";
  for (int i = 0; i < n; i++) all += std::string(options[i]) + (i + 1 < n ? " " : "");
  return note("compile", all);
}
int RTC(DestroyProgram)(void **) { return note("destroy"); }
int RTC(GetProgramLogSize)(void *, size_t *n) { return size_of(complaint, n); }
int RTC(GetProgramLog)(void *, char *to) { return copy_of(complaint, to); }
int GET(IMAGE, Size)(void *, size_t *n) { return size_of(image, n); }
int GET(IMAGE, )(void *, char *to) { return copy_of(image, to); }
#ifndef AMD
int nvrtcGetPTXSize(void *, size_t *n) { return size_of(ptx, n); }
int nvrtcGetPTX(void *, char *to) { return copy_of(ptx, to); }
int nvrtcGetNumSupportedArchs(int *n) { return *n = 2, 0; }
int nvrtcGetSupportedArchs(int *known) { return known[0] = 90, known[1] = 80, 0; }
int cuCtxGetCurrent(void **context) { return *context = &failing, 0; }
int cuCtxSetCurrent(void *context) { return note("context", context == &failing ? "" : "of another device"); }
#endif
int DRIVER(ModuleLoadData)(void **module, const void *data) {
  *module = &failing;
  return note("load", std::string(static_cast<const char *>(data), memcmp(data, "ptx", 3) ? 5 : 3));
}
int DRIVER(ModuleGetFunction)(void **function, void *, const char *name) {
  *function = &notes;
  return note("function", name);
}
int LAUNCH(void *, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz, unsigned shared,
           void *stream, void **args, void **) {
  std::string all;
  for (const uint64_t n : {uint64_t{x}, uint64_t{y}, uint64_t{z}, uint64_t{threads}, uint64_t{ty}, uint64_t{tz},
                           uint64_t{shared}, reinterpret_cast<uint64_t>(stream)})
    all += std::to_string(n) + " ";
  return note("launch", all + std::to_string(static_cast<const uint64_t *>(args[0])[1]));  // UpdateArgs.rows
}
}
