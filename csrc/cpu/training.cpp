// Glue of the training family for the CPU key: whole local steps in one call, or the gradients alone. Schemas:
// pfl_ext/ops/training.py.
//
// Autograd takes as long for a small network as its kernels do. Here layers, loss, gradients and step are called one
// after the other, and the gradient of a weight lives in the nearest cache until the step has used it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>

#include "common/elementary.h"
#include "cpu/kernels/convolution.h"
#include "cpu/kernels/linear.h"
#include "cpu/kernels/proximal.h"
#include "cpu/layers.h"
#include "glue/proximal.h"

namespace pfl::cpu {
namespace {

using glue::Tensor;
using TensorList = std::vector<Tensor>;

enum LayerKind : int64_t { kConvolution = 0, kLinearRelu = 1, kLinear = 2 };

// Memory for one call, from one allocation that the next call of the thread uses again.
class Arena {
 public:
  explicit Arena(int64_t bytes) {
    if (static_cast<int64_t>(memory().size()) < bytes) memory().resize(bytes);
  }
  static constexpr int64_t kAlignment = 64;
  static int64_t rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  char* take(int64_t bytes) {
    char* begin = memory().data() + used_;
    used_ += rounded(bytes);
    return begin;
  }

 private:
  static std::vector<char>& memory() {
    static thread_local std::vector<char> kept;
    return kept;
  }
  int64_t used_ = 0;
};

struct Layer {
  LayerKind kind;
  ConvolutionShape convolution;  // of a convolution
  LinearShape linear;            // of a linear layer
  int64_t flattened = 0;         // channels of the images that a first linear layer flattens; 0: none
  int64_t outputs = 0;           // numbers that it gives of a sample
  const char* x = nullptr;
  char* y = nullptr;
  uint8_t* which = nullptr;
};

// [samples, places, channels] to [samples, channels, places], or back with the last two exchanged.
void exchange(int64_t item, int64_t samples, int64_t places, int64_t channels, const char* from, char* to) {
  const auto move = [&](auto zero) {
    using T = decltype(zero);
    for (int64_t n = 0; n < samples; ++n) {
      const T* in = reinterpret_cast<const T*>(from) + n * places * channels;
      T* out = reinterpret_cast<T*>(to) + n * places * channels;
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t p = 0; p < places; ++p) out[c * places + p] = in[p * channels + c];
      }
    }
  };
  item == 4 ? move(float{}) : move(double{});
}

// The mean over samples of hard_scale CE(target, student) + soft_scale D(teacher, student). D is the KL divergence or
// the cross-entropy of the softmax of logits divided by the temperature; the teacher is read where soft_scale is not 0.
struct Objective {
  double temperature = 1.0, soft_scale = 0.0, hard_scale = 1.0;
  bool cross_entropy = false;
  const char* teacher = nullptr;
};

// Softmax of a row of numbers divided by T.
template <typename T>
class Softmax {
 public:
  Softmax(int64_t classes, const T* z, double temperature = 1.0) : z_(z), scale_(1.0 / temperature), largest_(z[0]) {
    for (int64_t k = 1; k < classes; ++k) largest_ = z[k] > largest_ ? z[k] : largest_;
    for (int64_t k = 0; k < classes; ++k) sum_ += exp_nonpositive(apart(k));
  }
  double sum() const { return sum_; }
  double part(int64_t k) const { return exp_nonpositive(apart(k)); }  // of sum()
  double minus_log(int64_t k) const { return log_positive(sum_) - apart(k); }

 private:
  double apart(int64_t k) const { return (z_[k] - largest_) * scale_; }

  const T* z_;
  double scale_, largest_, sum_ = 0.0;
};

// The objective of logits, and its gradient in their place.
template <typename T>
double take_gradient(const Objective& of, int64_t rows, int64_t classes, const int64_t* targets, const T* teacher,
                     T* logits) {
  double hard = 0.0, soft = 0.0;
  for (int64_t n = 0; n < rows; ++n) {
    T* z = logits + n * classes;
    const Softmax<T> student(classes, z);
    hard += student.minus_log(targets[n]);
    const double share = 1.0 / (student.sum() * static_cast<double>(rows));
    const double one = 1.0 / static_cast<double>(rows);
    if (of.soft_scale == 0) {
      for (int64_t k = 0; k < classes; ++k) {
        z[k] = static_cast<T>(of.hard_scale * (student.part(k) * share - (k == targets[n] ? one : 0.0)));
      }
      continue;
    }
    const Softmax<T> smooth(classes, z, of.temperature);
    const Softmax<T> known(classes, teacher + n * classes, of.temperature);
    const double scale = of.soft_scale / of.temperature * one;
    for (int64_t k = 0; k < classes; ++k) {
      const double target = known.part(k) / known.sum();
      if (target != 0) soft += target * (smooth.minus_log(k) - (of.cross_entropy ? 0.0 : known.minus_log(k)));
      z[k] = static_cast<T>(of.hard_scale * (student.part(k) * share - (k == targets[n] ? one : 0.0)) +
                            scale * (smooth.part(k) / smooth.sum() - target));
    }
  }
  const double total = of.hard_scale * hard + (of.soft_scale == 0 ? 0.0 : of.soft_scale * soft);
  return total / static_cast<double>(rows);
}

// Steps of a network made of layers in a row, each on the objective of the next samples; or its gradients.
class LocalSteps {
 public:
  LocalSteps(const char* op, const TensorList& params, const TensorList& buffers, const TensorList& anchors,
             const Tensor& x, const Tensor& targets, const std::vector<int64_t>& kinds, int64_t batch_size,
             const ProximalStep& how, const Objective& objective, const std::optional<Tensor>& teacher)
      : op_(op),
        how_(how),
        objective_(objective),
        has_anchors_(how.lam != 0),
        has_buffers_(how.mode != Momentum::kNone) {
    std::vector<glue::ListRole> roles{{"params", params, true}};
    if (has_anchors_) roles.push_back({"anchors", anchors, false});
    if (has_buffers_) roles.push_back({"momentum_buffers", buffers, true});
    if (batch_size < 0) glue::fail(op, ": batch_size is ", batch_size, "; 1 and more are accepted, 0: all samples");
    read(roles, params, x, targets, kinds);
    read_objective(teacher);
    batch_size_ = batch_size == 0 ? samples_ : std::min(batch_size, samples_);
  }

  // No steps: the gradients of the mean over all samples go to `gradients`.
  LocalSteps(const char* op, const TensorList& gradients, const TensorList& params, const Tensor& x,
             const Tensor& targets, const std::vector<int64_t>& kinds)
      : op_(op), gives_gradients_(true) {
    read({{"params", params, false}, {"gradients", gradients, true}}, params, x, targets, kinds);
    batch_size_ = samples_;
  }

  int64_t count() const { return (samples_ + batch_size_ - 1) / batch_size_; }

  // The loss of each batch goes to `losses`, of the type of the network.
  void run(void* losses) {
    take_rows(batch_size_);
    const int64_t bytes = bytes_needed();
    for (int64_t step = 0; step < count(); ++step) {
      const int64_t begin = step * batch_size_;
      take_rows(std::min(batch_size_, samples_ - begin));
      Arena arena(bytes);
      const double loss = take_step(arena, begin);
      if (dtype_ == DType::kFloat64) {
        static_cast<double*>(losses)[step] = loss;
      } else {
        static_cast<float*>(losses)[step] = static_cast<float>(loss);
      }
      if (how_.mode == Momentum::kFirst) how_.mode = Momentum::kRunning;
    }
    lists_->finish();
  }

 private:
  // A step on the next rows_ samples, the first of which is number `begin`.
  double take_step(Arena& arena, int64_t begin) {
    forward(arena, x_ + begin * inputs_ * item_);
    char* grad = layers_.back().y;
    const int64_t* targets = targets_ + begin;
    const char* teacher = objective_.teacher == nullptr ? nullptr : objective_.teacher + begin * classes_ * item_;
    const auto loss_as = [&](auto zero) {
      using T = decltype(zero);
      return take_gradient(objective_, rows_, classes_, targets, reinterpret_cast<const T*>(teacher),
                           reinterpret_cast<T*>(grad));
    };
    const double loss = dtype_ == DType::kFloat64 ? loss_as(double{}) : loss_as(float{});
    for (size_t l = layers_.size(); l-- > 0;) grad = backward(arena, l, grad);
    return loss;
  }

  // What follows is on so many samples.
  void take_rows(int64_t rows) {
    rows_ = rows;
    for (Layer& layer : layers_) {
      (layer.kind == kConvolution ? layer.convolution.samples : layer.linear.rows) = rows;
    }
  }

  // Numbers that a layer gives.
  int64_t outputs_of(const Layer& layer) const { return rows_ * layer.outputs; }

  void read(std::vector<glue::ListRole> roles, const TensorList& params, const Tensor& x, const Tensor& targets,
            const std::vector<int64_t>& kinds) {
    lists_ = glue::match(op_, roles, /*on_cpu=*/true);
    read_layers(roles[0].tensors(), x, kinds);
    check_targets(targets);
    if (lists_->written_overlaps(x)) glue::fail(op_, ": x and what is written overlap in memory");
  }

  void refuse(size_t l, const Tensor& weight) const {
    glue::fail(op_, ": layer ", l, " has the weight ", glue::describe(weight), ", which does not fit what enters it");
  }

  // Elements [outputs, inputs, height, width] with the inputs next to each other.
  static bool is_channels_last(const Tensor& weight) {
    const int64_t strides[] = {weight.numel() / std::max<int64_t>(weight.size(0), 1), 1,
                               weight.size(3) * weight.size(1), weight.size(1)};
    for (int d = 0; d < 4; ++d) {
      if (weight.size(d) > 1 && weight.stride(d) != strides[d]) return false;
    }
    return true;
  }

  void read_layers(const TensorList& params, const Tensor& x, const std::vector<int64_t>& kinds) {
    const bool images = x.dim() == 4;
    dtype_ = checked_layer(op_, "x", x, images ? 4 : 2, x);
    if (kinds.empty() || params.size() != 2 * kinds.size() || kinds.back() != kLinear) {
      glue::fail(op_, ": ", params.size(), " params for ", kinds.size(),
                 " layers; a weight and a bias for each are expected, of which the last is linear");
    }
    samples_ = x.size(0);
    if (samples_ == 0) glue::fail(op_, ": x is ", glue::describe(x), "; at least one sample is needed");
    item_ = item_size(dtype_);
    x_ = static_cast<const char*>(x.const_data_ptr());
    inputs_ = x.numel() / samples_;
    int64_t height = images ? x.size(1) : 1, width = images ? x.size(2) : 1;
    int64_t channels = images ? x.size(3) : x.size(1);
    for (size_t l = 0; l < kinds.size(); ++l) {
      const Tensor& weight = params[2 * l];
      const Tensor& bias = params[2 * l + 1];
      if (lists_->dtypes[2 * l] != dtype_ || lists_->dtypes[2 * l + 1] != dtype_) refuse(l, weight);
      Layer layer{};
      layer.kind = static_cast<LayerKind>(kinds[l]);
      if (kinds[l] == kConvolution) {
        if (weight.dim() != 4 || weight.size(1) != channels || weight.size(2) > height || weight.size(3) > width ||
            weight.numel() == 0 || !is_channels_last(weight) || (l > 0 && kinds[l - 1] != kConvolution)) {
          refuse(l, weight);
        }
        layer.convolution = {samples_, height, width, channels, weight.size(0), weight.size(2), weight.size(3)};
        height = layer.convolution.cell_rows();
        width = layer.convolution.cell_columns();
        channels = weight.size(0);
        layer.outputs = height * width * channels;
        if (layer.outputs == 0) refuse(l, weight);
      } else if (kinds[l] == kLinearRelu || kinds[l] == kLinear) {
        const int64_t inputs = height * width * channels;
        if (weight.dim() != 2 || weight.size(1) != inputs || weight.numel() == 0 || !weight.is_contiguous() ||
            (kinds[l] == kLinear && l + 1 != kinds.size())) {
          refuse(l, weight);
        }
        layer.flattened = height * width > 1 ? channels : 0;
        layer.linear = {samples_, inputs, weight.size(0)};
        height = width = 1;
        channels = weight.size(0);
        layer.outputs = channels;
      } else {
        glue::fail(op_, ": layer ", l, " is ", kinds[l], "; 0, 1 and 2 are accepted");
      }
      if (bias.dim() != 1 || bias.size(0) != weight.size(0) || !bias.is_contiguous()) {
        glue::fail(op_, ": layer ", l, " has the bias ", glue::describe(bias), " for ", weight.size(0), " outputs");
      }
      layers_.push_back(layer);
    }
    classes_ = channels;
  }

  void check_targets(const Tensor& targets) {
    if (targets.scalar_type() != glue::ScalarType::Long || !targets.is_cpu() || targets.dim() != 1 ||
        !targets.is_contiguous() || targets.size(0) != samples_) {
      glue::fail(op_, ": targets are ", glue::describe(targets), "; a class for each of ", samples_,
                 " samples is expected: contiguous int64 on the CPU");
    }
    targets_ = static_cast<const int64_t*>(targets.const_data_ptr());
    for (int64_t n = 0; n < samples_; ++n) {
      if (targets_[n] < 0 || targets_[n] >= classes_) {
        glue::fail(op_, ": target ", n, " is ", targets_[n], "; 0 to ", classes_ - 1, " are accepted");
      }
    }
  }

  void read_objective(const std::optional<Tensor>& teacher) {
    const Objective& o = objective_;
    if (!std::isfinite(o.soft_scale) || !std::isfinite(o.hard_scale)) {
      glue::fail(op_, ": the scales of the soft and the hard term are ", o.soft_scale, " and ", o.hard_scale,
                 "; finite numbers are accepted");
    }
    if (!(o.temperature > 0) || std::isinf(o.temperature)) {
      glue::fail(op_, ": temperature is ", o.temperature, "; a finite number above 0 is accepted");
    }
    if (o.soft_scale == 0) return;
    if (!teacher.has_value()) glue::fail(op_, ": soft_scale is ", o.soft_scale, " and there is no teacher");
    if (checked_layer(op_, "teacher", *teacher, 2, *teacher) != dtype_ || teacher->size(0) != samples_ ||
        teacher->size(1) != classes_) {
      glue::fail(op_, ": teacher is ", glue::describe(*teacher), "; logits of the params' type are accepted, ",
                 classes_, " for each of ", samples_, " samples");
    }
    if (lists_->written_overlaps(*teacher)) glue::fail(op_, ": the teacher and what is written overlap in memory");
    objective_.teacher = static_cast<const char*>(teacher->const_data_ptr());
  }

  int64_t size(size_t p) const { return lists_->sizes[p]; }
  char* weight(size_t p) const { return static_cast<char*>(lists_->pointer(0, p)); }
  char* gradient(size_t p) const { return static_cast<char*>(lists_->pointer(1, p)); }

  int64_t bytes_needed() const {
    int64_t bytes = 0;
    const auto add = [&](int64_t more) { bytes += Arena::rounded(more); };
    for (size_t l = 0; l < layers_.size(); ++l) {
      const Layer& layer = layers_[l];
      add(outputs_of(layer) * item_);  // y
      add(outputs_of(layer) * item_);  // its gradient behind ReLU
      if (layer.kind == kConvolution) {
        add(outputs_of(layer));
        add(convolution().packed_bytes(dtype_, layer.convolution));
        add(convolution().workspace(dtype_, layer.convolution));
        add(size(2 * l) * item_);
        add(size(2 * l + 1) * item_);
        add(rows_ * layer.convolution.height * layer.convolution.width * layer.convolution.inputs * item_);
      } else {
        add(layer.linear.rows * layer.linear.inputs * item_);  // the gradient of x
        add(layer.linear.outputs * item_);                     // that of the bias
        if (layer.flattened != 0) add(2 * layer.linear.rows * layer.linear.inputs * item_);
      }
    }
    return bytes + Arena::kAlignment;
  }

  static int64_t grain(int64_t tasks, int64_t products, int64_t least) {
    return products < kFewestParallelProducts ? std::max<int64_t>(tasks, 1) : least;
  }

  void forward(Arena& arena, const char* from) {
    for (size_t l = 0; l < layers_.size(); ++l) {
      Layer& layer = layers_[l];
      layer.y = arena.take(outputs_of(layer) * item_);
      if (layer.kind == kConvolution) {
        convolve(arena, l, from);
      } else {
        if (layer.flattened != 0) {
          char* flat = arena.take(layer.linear.rows * layer.linear.inputs * item_);
          exchange(item_, rows_, layer.linear.inputs / layer.flattened, layer.flattened, from, flat);
          from = flat;
        }
        const LinearShape& s = layer.linear;
        torch::stable::parallel_for(0, s.outputs, grain(s.outputs, s.rows * s.inputs * s.outputs, 64),
                                    [&](int64_t begin, int64_t end) {
                                      linear().forward(dtype_, s, layer.kind == kLinearRelu, begin, end, from,
                                                       weight(2 * l), weight(2 * l + 1), layer.y);
                                    });
      }
      layer.x = from;
      from = layer.y;
    }
  }

  void convolve(Arena& arena, size_t l, const char* from) {
    Layer& layer = layers_[l];
    const ConvolutionShape& s = layer.convolution;
    layer.which = reinterpret_cast<uint8_t*>(arena.take(outputs_of(layer)));
    char* packed = arena.take(convolution().packed_bytes(dtype_, s));
    convolution().pack(dtype_, s, weight(2 * l), weight(2 * l + 1), packed);
    const int64_t cells = s.samples * s.cell_rows();
    torch::stable::parallel_for(0, cells, grain(cells, 4 * outputs_of(layer) * s.taps(), 1),
                                [&](int64_t begin, int64_t end) {
                                  convolution().convolve(dtype_, s, begin, end, from, packed, layer.y, layer.which);
                                });
  }

  // Steps the layer by the gradient of its output; returns that of its input, which the first layer does not need.
  char* backward(Arena& arena, size_t l, char* grad) {
    return layers_[l].kind == kConvolution ? convolution_backward(arena, l, grad) : linear_backward(arena, l, grad);
  }

  char* linear_backward(Arena& arena, size_t l, char* grad) {
    const Layer& layer = layers_[l];
    const LinearShape& s = layer.linear;
    const int64_t products = s.rows * s.inputs * s.outputs;
    if (layer.kind == kLinearRelu) {
      char* masked = arena.take(outputs_of(layer) * item_);
      linear().mask(dtype_, outputs_of(layer), grad, layer.y, masked);
      grad = masked;
    }
    char* to_x = nullptr;
    if (l > 0) {
      to_x = arena.take(s.rows * s.inputs * item_);
      torch::stable::parallel_for(0, s.inputs, grain(s.inputs, products, 64), [&](int64_t begin, int64_t end) {
        linear().input_gradient(dtype_, s, begin, end, grad, weight(2 * l), to_x);
      });
      if (layer.flattened != 0) {
        char* images = arena.take(s.rows * s.inputs * item_);
        exchange(item_, rows_, layer.flattened, s.inputs / layer.flattened, to_x, images);
        to_x = images;
      }
    }
    if (gives_gradients_) {
      torch::stable::parallel_for(0, s.outputs, grain(s.outputs, products, 64), [&](int64_t begin, int64_t end) {
        linear().weight_gradient(dtype_, s, begin, end, grad, layer.x, gradient(2 * l), gradient(2 * l + 1));
      });
      return to_x;
    }
    if (is_plain()) {
      char* of_bias = arena.take(s.outputs * item_);
      torch::stable::parallel_for(0, s.outputs, grain(s.outputs, products, 64), [&](int64_t begin, int64_t end) {
        linear().weight_step(dtype_, how_, s, begin, end, grad, layer.x, weight(2 * l), of_bias);
      });
      move(2 * l + 1, 0, s.outputs, of_bias);
      return to_x;
    }
    // Some outputs at a time: their gradients stay in the first-level cache until they are used.
    const int64_t some = std::max<int64_t>(4, 4096 / s.inputs / 4 * 4);
    torch::stable::parallel_for(0, s.outputs, grain(s.outputs, products, 64), [&](int64_t begin, int64_t end) {
      const std::unique_ptr<char[]> gradient(new char[(some * s.inputs + some) * item_]);
      char* of_bias = gradient.get() + some * s.inputs * item_;
      for (int64_t o = begin; o < end; o += some) {
        const int64_t count = std::min(some, end - o);
        linear().weight_gradient(dtype_, s, 0, count, grad + o * item_, layer.x, gradient.get(), of_bias);
        move(2 * l, o * s.inputs, count * s.inputs, gradient.get());
        move(2 * l + 1, o, count, of_bias);
      }
    });
    return to_x;
  }

  char* convolution_backward(Arena& arena, size_t l, char* grad) {
    const Layer& layer = layers_[l];
    const ConvolutionShape& s = layer.convolution;
    const int64_t products = outputs_of(layer) * s.taps();
    const int64_t bytes = convolution().workspace(dtype_, s);
    char* to_x = nullptr;
    if (l > 0) {
      to_x = arena.take(s.samples * s.height * s.width * s.inputs * item_);
      torch::stable::parallel_for(0, s.samples, grain(s.samples, products, 1), [&](int64_t begin, int64_t end) {
        const std::unique_ptr<char[]> workspace(new char[bytes]);
        convolution().input_gradient(dtype_, s, begin, end, grad, layer.which, weight(2 * l), workspace.get(), to_x);
      });
    }
    char* of_weight = gives_gradients_ ? gradient(2 * l) : arena.take(size(2 * l) * item_);
    char* of_bias = gives_gradients_ ? gradient(2 * l + 1) : arena.take(size(2 * l + 1) * item_);
    torch::stable::parallel_for(0, s.outputs, grain(s.outputs, products, 1), [&](int64_t begin, int64_t end) {
      const std::unique_ptr<char[]> workspace(new char[bytes]);
      convolution().weight_gradient(dtype_, s, begin, end, grad, layer.which, layer.x, workspace.get(), of_weight,
                                    of_bias);
    });
    if (gives_gradients_) return to_x;
    move(2 * l, 0, size(2 * l), of_weight);
    move(2 * l + 1, 0, size(2 * l + 1), of_bias);
    return to_x;
  }

  bool is_plain() const { return !has_anchors_ && !has_buffers_ && how_.weight_decay == 0; }

  // Elements [offset, offset + n) of parameter p, whose gradient this is.
  void move(size_t p, int64_t offset, int64_t n, const char* gradient) const {
    const int64_t bytes = offset * item_;
    const auto at = [&](size_t role) { return static_cast<char*>(lists_->pointer(role, p)) + bytes; };
    proximal().step(dtype_, how_, 0, n, gradient, has_anchors_ ? at(1) : nullptr, at(0),
                    has_buffers_ ? at(has_anchors_ ? 2 : 1) : nullptr);
  }

  const char* op_;
  ProximalStep how_{};
  Objective objective_;
  bool has_anchors_ = false, has_buffers_ = false, gives_gradients_ = false;
  std::shared_ptr<const glue::MatchedLists> lists_;
  std::vector<Layer> layers_;
  DType dtype_ = DType::kFloat32;
  int64_t item_ = 0, samples_ = 0, batch_size_ = 0, rows_ = 0, inputs_ = 0, classes_ = 0;
  const char* x_ = nullptr;
  const int64_t* targets_ = nullptr;
};

Tensor train_steps_(const TensorList& params, const TensorList& buffers, const TensorList& anchors, const Tensor& x,
                    const Tensor& targets, const std::vector<int64_t>& layers, int64_t batch_size, double lr,
                    double lam, double momentum, double weight_decay, bool first, const std::optional<Tensor>& teacher,
                    double temperature, double soft_scale, double hard_scale, bool cross_entropy) {
  const char* op = "pfl_ext::train_steps_";
  const ProximalStep how = glue::proximal_step_of(lr, lam, momentum, 0.0, weight_decay, false, false, first);
  glue::check_step(op, how);
  LocalSteps steps(op, params, buffers, anchors, x, targets, layers, batch_size, how,
                   {temperature, soft_scale, hard_scale, cross_entropy}, teacher);
  Tensor losses = torch::stable::new_empty(x, {steps.count()});
  steps.run(losses.mutable_data_ptr());
  return losses;
}

Tensor loss_and_gradients_(const TensorList& gradients, const TensorList& params, const Tensor& x,
                           const Tensor& targets, const std::vector<int64_t>& layers) {
  LocalSteps steps("pfl_ext::loss_and_gradients_", gradients, params, x, targets, layers);
  Tensor loss = torch::stable::new_empty(x, {1});
  steps.run(loss.mutable_data_ptr());
  return loss;
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("train_steps_", TORCH_BOX(&pfl::cpu::train_steps_));
  m.impl("loss_and_gradients_", TORCH_BOX(&pfl::cpu::loss_and_gradients_));
}
