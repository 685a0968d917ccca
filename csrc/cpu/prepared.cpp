// Prepared lists for the CPU key: ops of all families take their tickets. Schemas: pfl_ext/ops/prepared.py.
#include "glue/prepared.h"

#include <torch/csrc/stable/library.h>

namespace pfl::cpu {
namespace {

using glue::Tensor;

Tensor prepare(const std::vector<Tensor>& tensors) {
  if (tensors.empty()) glue::fail("pfl_ext::prepare: no tensors given");
  return glue::Tickets::instance().issue(tensors);
}

void end_prepared_(const Tensor& ticket) { glue::Tickets::instance().end(ticket); }

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("prepare", TORCH_BOX(&pfl::cpu::prepare));
  m.impl("end_prepared_", TORCH_BOX(&pfl::cpu::end_prepared_));
}
