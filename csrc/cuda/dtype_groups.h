// Lists of several storage types, type by type.
#pragma once

#include <vector>

#include "common/numeric.h"

namespace pfl::cuda {

// Indices of the tensors of each storage type: a kernel knows one type, so mixed lists take a launch for each.
inline std::vector<std::vector<int64_t>> by_dtype(const std::vector<DType>& dtypes) {
  std::vector<std::vector<int64_t>> groups(4);
  for (size_t t = 0; t < dtypes.size(); ++t) groups[static_cast<int>(dtypes[t])].push_back(static_cast<int64_t>(t));
  return groups;
}

// Visits the storage types that occur: f(TypeTag<T>, indices).
template <typename F>
void visit_groups(const std::vector<DType>& dtypes, F f) {
  const auto groups = by_dtype(dtypes);
  for (size_t d = 0; d < groups.size(); ++d) {
    if (!groups[d].empty()) visit_dtype(static_cast<DType>(d), [&](auto tag) { f(tag, groups[d]); });
  }
}

}  // namespace pfl::cuda
