// null: stores nothing, computes nothing, leaves the parameters alone. This measures the time of everything else and,
// with a pace, adds the time that transfers and updates would take.
#include "device.h"
#include "topk.h"

namespace csd {
namespace {

// Counts what a real device would transfer and update.
Failure count(const Tile &tile, Work &work) {
  provide_entries(tile, work);
  for (const csd_piece *p = tile.pieces; p != tile.pieces + tile.n_pieces; p++) {
    const csd_param &param = work.params[p->param];
    if (!grad_of(*p, tile, work)) continue;
    if (!is_sparse(param)) work.pushed += dtype_bytes(param.grad_dtype) * p->elems;
    work.pulled += dtype_bytes(param.param_dtype) * p->elems;
    work.updated += p->elems;
  }
  return {};
}

class NullDevice : public Device {
 public:
  explicit NullDevice(bool counts) : counts_(counts) {}
  bool resident() const override { return true; }
  void update(const Tile &tile, float *, Work &work, Updated done) override {
    submit_update([this, &tile, &work] { return counts_ ? count(tile, work) : Failure{}; }, std::move(done));
  }

 private:
  const bool counts_;
};

}  // namespace

std::unique_ptr<Device> make_null_device(const csd_device &d) {
  return std::make_unique<NullDevice>(d.pace && (d.pace->update != 0 || d.pace->link != 0));
}

}  // namespace csd
