// Lists of tensors that correspond: tensor t has one shape, type and device in all of them. Shared by the CPU and the
// CUDA glue of the ops that update one list by others.
#pragma once

#include "common/planner.h"
#include "glue/prepared.h"

namespace pfl::glue {

struct ListRole {
  const char* name;
  GivenList list;
  bool written;

  const std::vector<Tensor>& tensors() const { return list.tensors(); }
};

// Bytes [begin, end) of memory that belong to a tensor of a list.
struct ListSpan {
  const char* begin;
  const char* end;
  size_t role;
  size_t tensor;
};

// Checked lists as pointers, each in the order in which the first list's tensor lies in memory. Where another tensor
// lies differently it is copied, and copied back by `finish` if it is written.
class MatchedLists {
 public:
  MatchedLists(const char* op, const std::vector<ListRole>& roles, bool on_cpu) : pointers_(roles.size()) {
    const std::vector<Tensor>& first = roles[0].tensors();
    const size_t tensors = first.size();
    for (const ListRole& role : roles) {
      if (role.tensors().size() != tensors) {
        fail(op, ": ", role.tensors().size(), " ", role.name, " for ", tensors, " ", roles[0].name);
      }
    }
    dtypes.reserve(tensors);
    sizes.reserve(tensors);
    std::vector<ListSpan> spans;
    spans.reserve(tensors * roles.size());
    for (size_t t = 0; t < tensors; ++t) {
      dtypes.push_back(dtype_of(first[t], op, roles[0].name, t));
      const Kind kind(first[t]);
      check_device(op, roles[0].name, first, t, on_cpu);
      for (size_t r = 1; r < roles.size(); ++r) {
        const Tensor& x = roles[r].tensors()[t];
        if (Kind(x) != kind) {
          fail(op, ": tensor ", t, " of ", roles[r].name, " is ", describe(x), ", of ", roles[0].name, " ",
               describe(first[t]));
        }
      }
      sizes.push_back(first[t].numel());
      if (sizes[t] == 0) continue;
      for (size_t r = 0; r < roles.size(); ++r) {
        if (roles[r].written) check_places(op, roles[r].name, t, roles[r].tensors()[t]);
        const Span span(roles[r].tensors()[t]);
        spans.push_back({span.begin, span.end, r, t});
      }
    }
    refuse_overlaps(op, roles, spans);
    // Only now: the copies made for odd layouts must not happen for a call that is refused.
    for (std::vector<void*>& list : pointers_) list.reserve(tensors);
    for (size_t t = 0; t < tensors; ++t) {
      const bool contiguous = first[t].is_contiguous();
      const bool dense = contiguous || is_dense(first[t]);
      for (size_t r = 0; r < roles.size(); ++r) {
        const Tensor& x = roles[r].tensors()[t];
        const bool in_place = contiguous ? x.is_contiguous() : dense && equal(x.strides(), first[t].strides());
        if (in_place) {
          pointers_[r].push_back(const_cast<void*>(x.const_data_ptr()));
          continue;
        }
        copies_.push_back(dense ? torch::stable::empty_like(first[t]) : torch::stable::new_empty(x, x.sizes()));
        torch::stable::copy_(copies_.back(), x);
        pointers_[r].push_back(copies_.back().mutable_data_ptr());
        if (roles[r].written) copied_back_.emplace_back(x, copies_.size() - 1);
      }
    }
    join_neighbours();
  }

  void* pointer(size_t role, int64_t t) const { return pointers_[role][t]; }

  // The memory of the written lists, for checks against further arguments.
  bool written_overlaps(const Tensor& x) const {
    const Span span(x);
    for (const ListSpan& s : written_) {
      if (s.begin < span.end && span.begin < s.end) return true;
    }
    return false;
  }

  void finish() const {
    for (const auto& [tensor, copy] : copied_back_) {
      Tensor out = tensor;
      torch::stable::copy_(out, copies_[copy]);
    }
  }

  // Whether the pointers are those of the lists themselves: then they are good for the next call, too.
  bool in_place() const { return copies_.empty(); }

  std::vector<DType> dtypes;
  std::vector<int64_t> sizes;

  // Runs of tensors that follow each other in memory in all lists, as views of flat buffers do: one stretch from the
  // first tensor on. For work element by element; a sum is cut by tensors, as its order must not depend on memory.
  std::vector<int64_t> run_tensors;
  std::vector<int64_t> run_sizes;

  // How threads share the runs, or the tensors. Made once.
  const BundlePlan& run_plan(int64_t bundle_elements) const {
    std::call_once(runs_planned_, [&] { run_plan_ = plan_bundles(run_sizes, bundle_elements); });
    return run_plan_;
  }
  const BundlePlan& tensor_plan(int64_t bundle_elements) const {
    std::call_once(tensors_planned_, [&] { tensor_plan_ = plan_bundles(sizes, bundle_elements); });
    return tensor_plan_;
  }

 private:
  void join_neighbours() {
    for (size_t t = 0; t < sizes.size(); ++t) {
      if (sizes[t] == 0) continue;
      if (!run_tensors.empty() && continues_run(t)) {
        run_sizes.back() += sizes[t];
      } else {
        run_tensors.push_back(static_cast<int64_t>(t));
        run_sizes.push_back(sizes[t]);
      }
    }
  }

  bool continues_run(size_t t) const {
    const int64_t first = run_tensors.back();
    const int64_t bytes = run_sizes.back() * item_size(dtypes[first]);
    return dtypes[t] == dtypes[first] &&
           std::all_of(pointers_.begin(), pointers_.end(), [&](const std::vector<void*>& list) {
             return static_cast<char*>(list[first]) + bytes == static_cast<char*>(list[t]);
           });
  }

  // A written tensor may be read as the same tensor at the same place of another list, and in no other way.
  void refuse_overlaps(const char* op, const std::vector<ListRole>& roles, const std::vector<ListSpan>& spans) {
    for (const ListSpan& s : spans) {
      if (roles[s.role].written) written_.push_back(s);
    }
    std::sort(written_.begin(), written_.end(), [](const ListSpan& a, const ListSpan& b) { return a.begin < b.begin; });
    const auto refuse = [&](const ListSpan& a, const ListSpan& b) {
      fail(op, ": tensor ", a.tensor, " of ", roles[a.role].name, " and tensor ", b.tensor, " of ", roles[b.role].name,
           " overlap in memory");
    };
    for (size_t i = 1; i < written_.size(); ++i) {
      if (written_[i].begin < written_[i - 1].end) refuse(written_[i - 1], written_[i]);
    }
    for (const ListSpan& s : spans) {
      if (roles[s.role].written) continue;
      auto after = std::lower_bound(written_.begin(), written_.end(), s.end,
                                    [](const ListSpan& w, const char* end) { return w.begin < end; });
      while (after != written_.begin() && (--after)->end > s.begin) {
        const Tensor& w = roles[after->role].tensors()[after->tensor];
        const bool same = after->tensor == s.tensor && after->begin == s.begin &&
                          equal(w.strides(), roles[s.role].tensors()[s.tensor].strides());
        if (!same) refuse(*after, s);
      }
    }
  }

  std::vector<std::vector<void*>> pointers_;
  std::vector<Tensor> copies_;
  std::vector<std::pair<Tensor, size_t>> copied_back_;
  std::vector<ListSpan> written_;
  mutable std::once_flag runs_planned_;
  mutable std::once_flag tensors_planned_;
  mutable BundlePlan run_plan_;
  mutable BundlePlan tensor_plan_;
};

// Matches lists anew, or finds what was kept of the last time if all of them are prepared and none has changed.
inline std::shared_ptr<const MatchedLists> match(const char* op, const std::vector<ListRole>& roles, bool on_cpu) {
  std::vector<uint64_t> stamps;
  stamps.reserve(roles.size());
  for (const ListRole& role : roles) {
    if (role.list.prepared() == nullptr) return std::make_shared<const MatchedLists>(op, roles, on_cpu);
    stamps.push_back(role.list.prepared()->stamp() * 2 + (role.written ? 1 : 0));
  }
  PreparedList& first = *roles[0].list.prepared();
  std::shared_ptr<const MatchedLists> lists = first.matched(stamps);
  if (lists == nullptr) {
    lists = std::make_shared<const MatchedLists>(op, roles, on_cpu);
    if (lists->in_place()) first.keep(stamps, lists);
  }
  return lists;
}

}  // namespace pfl::glue
