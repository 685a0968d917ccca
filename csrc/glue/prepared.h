// Lists of tensors that callers hand over again and again. Handing over a tensor takes 0.3 us, so a prepared list stays
// here, and ops are given its ticket in its place: a list of one small tensor. Stable ABI only.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <unordered_map>

#include "glue/tensor_list.h"

namespace pfl::glue {

class MatchedLists;

// Owns the tensors, so that what it remembers of their memory stays true for as long as it looks unchanged.
class PreparedList {
 public:
  explicit PreparedList(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) { remember(); }

  const std::vector<Tensor>& tensors() const { return tensors_; }

  // Another number after a tensor was given other memory, another shape, other strides or another type.
  uint64_t stamp() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!unchanged()) remember();
    return stamp_;
  }

  // What was found out about this list together with others, whose stamps these are; null if nothing was.
  std::shared_ptr<const MatchedLists> matched(const std::vector<uint64_t>& stamps) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [known, lists] : matches_) {
      if (known == stamps) return lists;
    }
    return nullptr;
  }

  void keep(const std::vector<uint64_t>& stamps, std::shared_ptr<const MatchedLists> lists) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A list is used in a few ways: a step with and without an anchor, a perturbation and the way back.
    constexpr size_t kMost = 8;
    if (matches_.size() == kMost) matches_.erase(matches_.begin());
    matches_.emplace_back(stamps, std::move(lists));
  }

 private:
  // What is remembered of a tensor. Read with few calls, as each crosses the ABI, and lists hold thousands.
  struct Layout {
    explicit Layout(const Tensor& t) {
      const AtenTensorHandle handle = t.get();
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dims));
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
    }

    void* data = nullptr;
    int32_t dtype = 0;
    int64_t dims = 0;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
  };

  void remember() {
    static std::atomic<uint64_t> last{0};
    stamp_ = ++last;
    matches_.clear();
    words_.clear();
    for (const Tensor& t : tensors_) {
      const Layout now(t);
      words_.push_back(reinterpret_cast<int64_t>(now.data));
      words_.push_back(now.dtype);
      words_.push_back(now.dims);
      words_.insert(words_.end(), now.sizes, now.sizes + now.dims);
      words_.insert(words_.end(), now.strides, now.strides + now.dims);
    }
  }

  bool unchanged() const {
    const int64_t* known = words_.data();
    for (const Tensor& t : tensors_) {
      const Layout now(t);
      const bool same = known[0] == reinterpret_cast<int64_t>(now.data) && known[1] == now.dtype &&
                        known[2] == now.dims && std::equal(now.sizes, now.sizes + now.dims, known + 3) &&
                        std::equal(now.strides, now.strides + now.dims, known + 3 + now.dims);
      if (!same) return false;
      known += 3 + 2 * now.dims;
    }
    return true;
  }

  std::mutex mutex_;
  std::vector<Tensor> tensors_;
  std::vector<int64_t> words_;  // of each tensor: memory, type, dimensions, their sizes, their strides
  uint64_t stamp_ = 0;
  std::vector<std::pair<std::vector<uint64_t>, std::shared_ptr<const MatchedLists>>> matches_;
};

// The prepared lists of this library by their number. A ticket is (mark, number): the mark is drawn when the library is
// loaded, so that no tensor of somebody's integers is taken for one.
class Tickets {
 public:
  static constexpr int64_t kWords = 2;

  static Tickets& instance() {
    static Tickets tickets;
    return tickets;
  }

  Tensor issue(const std::vector<Tensor>& tensors) {
    Tensor ticket = torch::stable::new_empty(tensors[0], {kWords}, ScalarType::Long);
    auto list = std::make_shared<PreparedList>(tensors);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* words = static_cast<int64_t*>(ticket.mutable_data_ptr());
    words[0] = mark_;
    words[1] = ++last_;
    lists_.emplace(last_, std::move(list));
    return ticket;
  }

  // Null for what is no ticket.
  std::shared_ptr<PreparedList> find(const std::vector<Tensor>& given) {
    if (given.size() != 1 || !is_ticket(given[0], kWords)) return nullptr;
    return find(words_of(given[0])[1]);
  }

  std::shared_ptr<PreparedList> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lists_.find(number);
    return found == lists_.end() ? nullptr : found->second;
  }

  // Whether it has the mark of this library, and so many words.
  bool is_ticket(const Tensor& t, int64_t words) const {
    return t.scalar_type() == ScalarType::Long && t.is_cpu() && t.numel() == words && t.is_contiguous() &&
           words_of(t)[0] == mark_;
  }

  static const int64_t* words_of(const Tensor& ticket) { return static_cast<const int64_t*>(ticket.const_data_ptr()); }

  void end(const Tensor& ticket) {
    std::shared_ptr<PreparedList> last_use;  // its tensors may free memory: not under the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_ticket(ticket, kWords)) return;
    const auto found = lists_.find(words_of(ticket)[1]);
    if (found == lists_.end()) return;
    last_use = std::move(found->second);
    lists_.erase(found);
  }

 private:
  Tickets() {
    std::random_device draw;
    mark_ = static_cast<int64_t>((static_cast<uint64_t>(draw()) << 32) | draw());
  }

  std::mutex mutex_;
  int64_t mark_ = 0;
  int64_t last_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<PreparedList>> lists_;
};

// A list as an op is given it: its tensors, or the ticket of a prepared one.
class GivenList {
 public:
  // Implicit: any list of tensors is one.
  GivenList(const std::vector<Tensor>& given) : prepared_(Tickets::instance().find(given)), given_(given) {}
  // The list of this number; none for 0.
  GivenList(const char* op, int64_t number) : prepared_(Tickets::instance().find(number)), given_(kNone) {
    if (prepared_ == nullptr && number != 0) fail(op, ": the prepared list ", number, " is gone");
  }

  const std::vector<Tensor>& tensors() const { return prepared_ ? prepared_->tensors() : given_; }
  bool empty() const { return tensors().empty(); }
  size_t size() const { return tensors().size(); }
  PreparedList* prepared() const { return prepared_.get(); }

 private:
  inline static const std::vector<Tensor> kNone;

  std::shared_ptr<PreparedList> prepared_;
  const std::vector<Tensor>& given_;
};

// Lists one after the other as an op is given them: their tensors, or all of them as tickets.
class GivenLists {
 public:
  explicit GivenLists(const std::vector<Tensor>& given) : given_(given) {
    for (const Tensor& ticket : given) {
      if (!Tickets::instance().is_ticket(ticket, Tickets::kWords)) return;
      const auto list = Tickets::instance().find(Tickets::words_of(ticket)[1]);
      if (list == nullptr) fail("a prepared list is gone");
      own_.insert(own_.end(), list->tensors().begin(), list->tensors().end());
    }
    spelled_out_ = true;
  }

  const std::vector<Tensor>& tensors() const { return spelled_out_ ? own_ : given_; }

 private:
  const std::vector<Tensor>& given_;
  std::vector<Tensor> own_;
  bool spelled_out_ = false;
};

}  // namespace pfl::glue
