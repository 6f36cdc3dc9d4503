#include "card_kernels.h"

#include <ctype.h>

#include <algorithm>
#include <string_view>

#include "csd.h"
#include "updater.h"

namespace csd {
namespace {

constexpr int kPortsOfCodes = 3;
constexpr uint32_t kSectionsOfCodes = 5;  // with 16-bit parameters

std::string name_of(std::string_view type, const char *end) {
  std::string name = "csd_";
  for (const char c : type) name += static_cast<char>(tolower(c));
  return name + end;
}

std::vector<Kernel> make_kernels() {
  std::vector<csd_rule_row> rows;
  for (const csd_rule_row *row = kRules; row->type; row++)
    if (row->of_pass == 0) rows.push_back(*row);
  std::vector<Kernel> kernels;
  for (const csd_rule_row &first : rows) {
    const std::string_view type = first.type;
    const std::string name = name_of(type, "_update");
    const auto same = [&name](const Kernel &kernel) { return kernel.name == name; };
    if (std::any_of(kernels.begin(), kernels.end(), same)) continue;
    Kernel kernel{name, CSD_FP32, 0, {}, first.updated};
    for (const csd_rule_row &row : rows) {
      if (row.type == type) kernel.ports = std::max(kernel.ports, static_cast<int>(row.most));
      // Adam's type also implements AdamW's rules: see adam.h.
      if (row.type == type || (type == "Adam" && row.type == std::string_view("AdamW")))
        kernel.rules.push_back(row.number);
    }
    kernels.push_back(kernel);
    if (first.codec == CSD_8BIT)
      kernels.push_back({name_of(type, "_8bit_update"), CSD_8BIT, kPortsOfCodes, kernel.rules, kSectionsOfCodes});
  }
  return kernels;
}

}  // namespace

int Kernel::index(KernelArg arg) const noexcept {
  const int with_one_port = static_cast<int>(arg);
  return with_one_port + (ports - 1) * ((arg > KernelArg::tile_in) + (arg > KernelArg::tile_out));
}

bool Kernel::has_rule(uint32_t rule) const noexcept {
  return std::find(rules.begin(), rules.end(), rule) != rules.end();
}

bool Kernel::takes(uint32_t of, uint32_t n) const noexcept {
  return codec == of && (codec != CSD_FP32 || n <= static_cast<uint32_t>(ports));
}

const std::vector<Kernel> &all_kernels() {
  static const std::vector<Kernel> all = make_kernels();
  return all;
}

}  // namespace csd
