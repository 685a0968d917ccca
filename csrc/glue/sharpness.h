// The arguments of the sharpness ops, checked in full before anything is written. Shared by the CPU and CUDA glue.
#pragma once

#include <cmath>
#include <optional>

#include "common/sharpness.h"
#include "glue/matched_lists.h"

namespace pfl::glue {

// Each tensor's bytes in a backup begin at a multiple of this: a cache line, and any vector access.
constexpr int64_t kBackupAlignment = 64;

// Where each tensor's bytes begin in a backup, and at the end its size.
inline std::vector<int64_t> backup_offsets(const std::vector<int64_t>& sizes, const std::vector<DType>& dtypes) {
  std::vector<int64_t> offsets{0};
  offsets.reserve(sizes.size() + 1);
  for (size_t t = 0; t < sizes.size(); ++t) {
    const int64_t bytes = sizes[t] * item_size(dtypes[t]);
    offsets.push_back(offsets[t] + (bytes + kBackupAlignment - 1) / kBackupAlignment * kBackupAlignment);
  }
  return offsets;
}

inline void check_backup(const char* op, const Tensor& backup, const std::vector<Tensor>& params, int64_t bytes) {
  if (backup.scalar_type() != ScalarType::Byte || backup.dim() != 1 || !backup.is_contiguous() ||
      backup.numel() < bytes ||
      (!params.empty() &&
       (backup.is_cpu() != params[0].is_cpu() || backup.get_device_index() != params[0].get_device_index()))) {
    fail(op, ": the backup is ", describe(backup), "; a contiguous vector of at least ", bytes,
         " bytes (uint8) on the params' device is needed");
  }
}

// Memory is taken for each layer: a number far beyond any network's layers is a mistake, not a sparse numbering.
constexpr int64_t kMostLayers = int64_t{1} << 20;

inline void check_groups(const char* op, const std::vector<int64_t>& groups, size_t tensors, int64_t count) {
  if (count > kMostLayers) fail(op, ": ", count, " layers; at most ", kMostLayers, " are accepted");
  if (groups.size() != tensors) fail(op, ": ", groups.size(), " group indices for ", tensors, " tensors");
  for (size_t t = 0; t < tensors; ++t) {
    if (groups[t] < 0 || groups[t] >= count) {
      fail(op, ": the group of tensor ", t, " is ", groups[t], "; 0 to ", count - 1, " are accepted");
    }
  }
}

// backup = params; params += eps(grads).
struct PerturbProblem {
  PerturbProblem(const char* op, const std::vector<Tensor>& params, const Tensor& backup_tensor,
                 const std::vector<Tensor>& grads, const std::optional<Tensor>& score_tensor,
                 const std::vector<int64_t>& group_indices, int64_t group_count, double p, bool literal, bool per_layer,
                 double rho, bool on_cpu)
      : groups(group_indices), layers(group_count), norms(per_layer ? group_count : 1) {
    if (!(rho >= 0) || std::isinf(rho))
      fail(op, ": rho is ", rho, "; a finite number that is not negative is accepted");
    if (!(p >= 1)) fail(op, ": p is ", p, "; 1 or more is accepted");
    if (literal && (p == 1 || std::isinf(p))) fail(op, ": the literal exponent p - 1 needs 1 < p < infinity, p is ", p);
    const std::vector<ListRole> roles{{"params", params, true}, {"grads", grads, false}};
    check_groups(op, groups, roles[0].tensors().size(), group_count);
    how = make_perturbation(p, literal);
    lists = match(op, roles, on_cpu);
    if (score_tensor.has_value()) {
      const Tensor& s = *score_tensor;
      const bool elsewhere =
          !params.empty() && (s.is_cpu() != on_cpu || s.get_device_index() != roles[0].tensors()[0].get_device_index());
      if (s.scalar_type() != ScalarType::Double || s.dim() != 1 || !s.is_contiguous() || s.numel() != group_count ||
          elsewhere) {
        fail(op, ": scores are ", describe(s), "; a contiguous float64 vector of ", group_count,
             " values on the params' device is accepted");
      }
      scores = static_cast<const double*>(s.const_data_ptr());
      if (lists->written_overlaps(s)) fail(op, ": the scores and the params overlap in memory");
    }
    offsets = backup_offsets(lists->sizes, lists->dtypes);
    check_backup(op, backup_tensor, roles[0].tensors(), offsets.back());
    if (lists->written_overlaps(backup_tensor)) fail(op, ": the backup and the params overlap in memory");
    const Span saved(backup_tensor);
    for (size_t t = 0; t < lists->sizes.size(); ++t) {
      if (saved.overlaps(Span(roles[1].tensors()[t])))
        fail(op, ": the backup and tensor ", t, " of grads overlap in memory");
    }
    if (score_tensor.has_value() && saved.overlaps(Span(*score_tensor))) {
      fail(op, ": the backup and the scores overlap in memory");
    }
    backup_bytes = static_cast<char*>(backup_tensor.mutable_data_ptr());
  }

  void* weight(int64_t t) const { return lists->pointer(0, t); }
  const void* grad(int64_t t) const { return lists->pointer(1, t); }
  void* backup(int64_t t) const { return backup_bytes + offsets[t]; }
  // The norm that tensor t is divided by.
  int64_t norm_of(int64_t t) const { return norms == 1 ? 0 : groups[t]; }

  Perturbation how;
  const std::vector<int64_t>& groups;
  int64_t layers;
  int64_t norms;
  const double* scores = nullptr;  // none: all 1, which is SAM
  std::shared_ptr<const MatchedLists> lists;
  std::vector<int64_t> offsets;
  char* backup_bytes = nullptr;
};

// params = backup.
struct RestoreProblem {
  RestoreProblem(const char* op, const std::vector<Tensor>& params, const Tensor& backup_tensor, bool on_cpu)
      : roles{{"params", params, true}},
        matched(match(op, roles, on_cpu)),
        lists(*matched),
        offsets(backup_offsets(lists.sizes, lists.dtypes)) {
    check_backup(op, backup_tensor, roles[0].tensors(), offsets.back());
    if (lists.written_overlaps(backup_tensor)) fail(op, ": the backup and the params overlap in memory");
    backup_bytes = static_cast<const char*>(backup_tensor.const_data_ptr());
  }

  std::vector<ListRole> roles;
  std::shared_ptr<const MatchedLists> matched;
  const MatchedLists& lists;
  std::vector<int64_t> offsets;
  const char* backup_bytes;
};

// Personalisation scores of the groups of two lists.
struct ScoreProblem {
  ScoreProblem(const char* op, const std::vector<Tensor>& a, const std::vector<Tensor>& b,
               const std::vector<int64_t>& group_indices, int64_t count, bool on_cpu)
      : groups(group_indices) {
    if (a.empty() || count < 1)
      fail(op, ": ", a.size(), " tensors in ", count, " groups; at least one of each is needed");
    check_groups(op, groups, a.size(), count);
    lists.emplace(op, std::vector<ListRole>{{"a", a, false}, {"b", b, false}}, on_cpu);
    elements.assign(count, 0);
    for (size_t t = 0; t < a.size(); ++t) elements[groups[t]] += lists->sizes[t];
    scores.emplace(torch::stable::new_empty(a[0], {count}, ScalarType::Double));
  }

  double* out() const { return static_cast<double*>(scores->mutable_data_ptr()); }

  const std::vector<int64_t>& groups;
  std::optional<MatchedLists> lists;
  std::vector<int64_t> elements;  // of each group
  std::optional<Tensor> scores;
};

}  // namespace pfl::glue
