// The Python module through which the tests run kernels on numpy arrays.
#include <pybind11/pybind11.h>

#include "emulator/launch.h"

// One entry for each file of bindings: X(family) calls bind_family().
#define PFL_EMULATOR_FAMILIES(X) \
  X(averaging)                   \
  X(selftest)                    \
  X(selftest_numerics)           \
  X(spectral)

#define PFL_DECLARE(family) void bind_##family(pybind11::module_& m);
PFL_EMULATOR_FAMILIES(PFL_DECLARE)

PYBIND11_MODULE(_emulator, m) {
  m.doc() = "CUDA kernels executed on the host.";
  pybind11::register_exception<pfl::emulator::Error>(m, "EmulatorError", PyExc_RuntimeError);

  m.def("set_seed", &pfl::emulator::set_seed, pybind11::arg("seed"),
        "Choose the order in which blocks and threads run.");
  m.def("launch_count", &pfl::emulator::launch_count, "Number of launches since the last reset_launch_count().");
  m.def("reset_launch_count", &pfl::emulator::reset_launch_count);

#define PFL_BIND(family) bind_##family(m);
  PFL_EMULATOR_FAMILIES(PFL_BIND)
}
