// Greedy top-down fit, level by level. In each node (Bamler & Mandt 2020, section 3) two steps alternate: a damped
// Newton step for (w, b) at fixed split, and the exact discrete step for the split at fixed (w, b). Neither lowers
//
//   L(w, b, split) = sum over right of (w.x + b) - sum of softplus(w.x + b) - reg (|w|^2 + b^2)
//
// The second sum, its gradient and its Hessian do not know the split: a change of the split costs one pass of
// additions, and the passes over examples need no labels.
//
// Large nodes are fitted one after the other, all threads sharing a node's blocks of examples; the others in parallel,
// one thread each. A node's rows are gathered once, from x itself, into a separate buffer.
#include "sampler/tree_fit/tree_fit.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/parallel.h"
#include "sampler/tree_fit/tree_fit_math.h"

namespace samplex {

namespace {

using namespace tree_fit;

constexpr int64_t kChunk = 1024;            // examples per partial sum, at least
constexpr int64_t kMostChunks = 256;        // partial sums of a node
constexpr int64_t kPartialBytes = 1 << 25;  // of all of them together
constexpr int64_t kSharedNode = 32768;      // from here on all threads work in one node
constexpr int kNewtonSteps = 100;
constexpr double kTolerance = 0.5e-8;  // half of what is promised: the caller's sum rounds differently
constexpr int kPowerSteps = 300;

// What does not change while the tree grows.
struct Problem {
  const float* x;
  int64_t k, leaves;
  const TreeFitOptions& options;
  std::vector<uint32_t> rows;   // [n] row numbers, sorted by class
  std::vector<uint32_t> first;  // [C + 1] where a class begins in `rows`
};

struct NodeResult {
  double log_likelihood = 0.0, objective = 0.0, gradient_ratio = 0.0;
  int64_t right_classes = 0, rounds = 0, newton_steps = 0;
  bool fitted = false, unfinished = false;
};

// Fits nodes, one at a time; keeps its buffers between them.
class NodeFit {
 public:
  NodeFit(const Problem& problem, bool shared)
      : problem_(problem),
        at_(problem.k),
        shared_(shared),
        own_(at_),
        w_(at_.kp),
        trial_(at_.kp),
        right_sum_(at_.kp),
        now_(at_.size),
        next_(at_.size),
        matrix_((at_.k + 1) * (at_.k + 1)),
        step_(at_.k + 1) {}

  // classes [m]: reordered, left ones first. half: leaves of a child. Writes w [k] and b.
  NodeResult fit(int64_t node, int32_t* classes, int64_t m, int64_t half, float* weights, float* bias, double* exact,
                 std::vector<TreeFitTrace>* trace) {
    NodeResult result;
    if (m == 0) return result;
    const int64_t least = std::max<int64_t>(0, m - half), most = std::min(half, m);
    gather(classes, m);
    delta_.assign(m, 0.0);
    right_.assign(m, 0);
    std::fill(w_.begin(), w_.end(), 0.0);
    b_ = 0.0;
    trace_ = trace;
    trace_node_ = node;
    trace_round_ = 0;
    if (m == 1) {
      count_ = 0;
    } else {
      if (n_ > 0) start_direction(m);
      // The median split; without examples there is nothing more to do.
      order_.resize(m);
      count_ = rank(classes, m, m / 2, m / 2);
      if (n_ > 0) {
        result.fitted = true;
        alternate(classes, m, least, most, result);
      }
    }
    int64_t left_end = partition(classes, m);
    result.right_classes = m - left_end;
    const bool both = count_ > 0 && count_ < m;
    if (!both) {
      std::fill(w_.begin(), w_.end(), 0.0);
      b_ = count_ == 0 ? negative_infinity<double>() : -negative_infinity<double>();
      result.log_likelihood = result.objective = result.gradient_ratio = 0.0;
      result.fitted = false;
    }
    for (int64_t i = 0; i < problem_.k; ++i) weights[i] = float(w_[i]);
    *bias = float(b_);
    if (exact != nullptr) {
      std::copy_n(w_.data(), problem_.k, exact);
      exact[problem_.k] = b_;
    }
    return result;
  }

 private:
  // body(begin, end, scratch, out) adds examples [begin, end) to `out`; the partial sums are added up in order, so that
  // the total does not depend on who made them.
  template <typename F>
  void sum_chunks(int64_t size, double* total, const F& body) {
    std::fill_n(total, size, 0.0);
    const int64_t most = std::clamp<int64_t>(kPartialBytes / (8 * size), 8, kMostChunks);
    const int64_t chunk = std::max(kChunk, round_up((n_ + most - 1) / most, kBlock));
    const int64_t chunks = (n_ + chunk - 1) / chunk;
    const auto one = [&](int64_t c, Scratch& scratch, double* out) {
      std::fill_n(out, size, 0.0);
      body(c * chunk, std::min(n_, (c + 1) * chunk), scratch, out);
    };
    if (!shared_ || chunks == 1) {
      for (int64_t c = 0; c < chunks; ++c) {
        one(c, own_, own_.partial.data());
        for (int64_t i = 0; i < size; ++i) total[i] += own_.partial[i];
      }
      return;
    }
    partials_.resize(chunks * size);
    parallel_for_shared(chunks, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(at_);
      for (int64_t c = begin; c < end; ++c) one(c, scratch, partials_.data() + c * size);
    });
    for (int64_t c = 0; c < chunks; ++c) {
      for (int64_t i = 0; i < size; ++i) total[i] += partials_[c * size + i];
    }
  }

  // body(begin, end) over the classes of the node.
  template <typename F>
  void for_classes(int64_t m, const F& body) {
    if (shared_) {
      parallel_for_shared(m, 512, body);
    } else {
      body(int64_t(0), m);
    }
  }

  void gather(const int32_t* classes, int64_t m) {
    begin_.resize(m + 1);
    begin_[0] = 0;
    for (int64_t i = 0; i < m; ++i) {
      begin_[i + 1] = begin_[i] + (problem_.first[classes[i] + 1] - problem_.first[classes[i]]);
    }
    n_ = begin_[m];
    const int64_t k = problem_.k;
    rows_.resize(n_ * k);
    point_right_.assign(n_, 0);
    for_classes(m, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t* rows = problem_.rows.data() + problem_.first[classes[i]];
        for (int64_t j = 0, count = begin_[i + 1] - begin_[i]; j < count; ++j) {
          std::memcpy(rows_.data() + (begin_[i] + j) * k, problem_.x + int64_t(rows[j]) * k, k * sizeof(float));
        }
      }
    });
  }

  // delta_ = v.T_y for the dominant eigenvector v of sum over y of T_y T_y^T, T_y = sum over D_y of (x - mean). That is
  // Eq. 9's delta for w = v and b = -v.mean. Also sum of |x|, the scale of the gradient.
  void start_direction(int64_t m) {
    const int64_t k = problem_.k, kp = at_.kp;
    std::vector<double> sums(kp + 4);
    sum_chunks(kp + 1, sums.data(), [&](int64_t begin, int64_t end, Scratch&, double* out) {
      for (int64_t row = begin; row < end; ++row) {
        double square = 0.0;
        for (int64_t i = 0; i < k; ++i) {
          const double value = rows_[row * k + i];
          out[i] += value;
          square += value * value;
        }
        out[kp] += std::sqrt(square);
      }
    });
    scale_ = std::max(1.0, sums[kp]);
    std::vector<double> mean(kp), v(kp);
    for (int64_t i = 0; i < kp; ++i) mean[i] = sums[i] / double(n_);
    const auto centred = [&](int64_t y, double* out) {
      std::fill_n(out, kp, 0.0);
      for (int64_t row = begin_[y]; row < begin_[y + 1]; ++row) {
        for (int64_t i = 0; i < k; ++i) out[i] += double(rows_[row * k + i]) - mean[i];
      }
    };
    // In fixed groups of classes, as the examples are.
    const int64_t group = std::max<int64_t>(kBlock, round_up((m + 63) / 64, kBlock)), groups = (m + group - 1) / group;
    std::vector<double> covariance(kp * kp), parts((shared_ ? groups : 1) * kp * kp);
    const auto one = [&](int64_t g, Scratch& scratch, double* out) {
      std::fill_n(out, kp * kp, 0.0);
      for (int64_t y = g * group, end = std::min(m, y + group); y < end; y += kBlock) {
        const int64_t count = std::min(kBlock, end - y);
        for (int64_t j = 0; j < count; ++j) centred(y + j, scratch.block.data() + j * kp);
        add_gram(scratch.block.data(), scratch.block.data(), count, kp, out);
      }
    };
    if (shared_) {
      parallel_for_shared(groups, 1, [&](int64_t begin, int64_t end) {
        Scratch scratch(at_);
        for (int64_t g = begin; g < end; ++g) one(g, scratch, parts.data() + g * kp * kp);
      });
    }
    for (int64_t g = 0; g < groups; ++g) {
      if (!shared_) one(g, own_, parts.data());
      const double* part = parts.data() + (shared_ ? g * kp * kp : 0);
      for (int64_t i = 0; i < kp * kp; ++i) covariance[i] += part[i];
    }
    // Where all T_y are 0 except for rounding (one class has all examples, constant features) there is no direction.
    const double noise = 1e-13 * sums[kp];
    dominant(covariance, noise * noise, v);
    for_classes(m, [&](int64_t begin, int64_t end) {
      std::vector<double> sum(kp);
      for (int64_t y = begin; y < end; ++y) {
        centred(y, sum.data());
        delta_[y] = dot(sum.data(), v.data(), kp);
      }
    });
  }

  // Power iteration on a symmetric matrix given by its lower triangle; the zero vector where no entry exceeds
  // `least`. It only
  // starts the alternation: where two eigenvalues are so near that the bound ends it, any mixture is as good.
  void dominant(std::vector<double>& a, double least, std::vector<double>& v) {
    const int64_t kp = at_.kp;
    int64_t largest = 0;
    for (int64_t i = 0; i < kp; ++i) {
      for (int64_t j = 0; j < i; ++j) a[j * kp + i] = a[i * kp + j];
      if (a[i * kp + i] > a[largest * kp + largest]) largest = i;
    }
    const double top = a[largest * kp + largest];
    std::fill(v.begin(), v.end(), 0.0);
    if (!(top > least)) return;
    for (double& value : a) value /= top;  // no overflow of squares
    v[largest] = 1.0;
    std::vector<double> next(kp);
    for (int step = 0; step < kPowerSteps; ++step) {
      double square = 0.0;
      for (int64_t i = 0; i < kp; ++i) {
        next[i] = dot(a.data() + i * kp, v.data(), kp);
        square += next[i] * next[i];
      }
      const double inverse = 1.0 / std::sqrt(square);
      double moved = 0.0;
      for (int64_t i = 0; i < kp; ++i) {
        const double value = next[i] * inverse;
        moved += (value - v[i]) * (value - v[i]);
        v[i] = value;
      }
      if (moved < 1e-24) break;
    }
    // One of the two signs: the largest component positive.
    int64_t biggest = 0;
    for (int64_t i = 1; i < kp; ++i) biggest = std::fabs(v[i]) > std::fabs(v[biggest]) ? i : biggest;
    if (v[biggest] < 0.0) {
      for (double& value : v) value = -value;
    }
  }

  int64_t rank(const int32_t* classes, int64_t m, int64_t least, int64_t most);

  void class_scores(int64_t m) {
    const int64_t k = problem_.k, kp = at_.kp;
    for_classes(m, [&](int64_t begin, int64_t end) {
      std::vector<double> sum(kp);
      for (int64_t y = begin; y < end; ++y) {
        std::fill(sum.begin(), sum.end(), 0.0);
        for (int64_t row = begin_[y]; row < begin_[y + 1]; ++row) {
          for (int64_t i = 0; i < k; ++i) sum[i] += double(rows_[row * k + i]);
        }
        const int64_t count = begin_[y + 1] - begin_[y];
        delta_[y] = count == 0 ? 0.0 : dot(sum.data(), w_.data(), kp) + double(count) * b_;
      }
    });
  }

  // Sum of x and number of examples on the right.
  void sum_right(int64_t m) {
    const int64_t k = problem_.k, kp = at_.kp;
    for_classes(m, [&](int64_t begin, int64_t end) {
      for (int64_t y = begin; y < end; ++y) {
        std::fill(point_right_.begin() + begin_[y], point_right_.begin() + begin_[y + 1], right_[y]);
      }
    });
    std::vector<double> sums(kp + 4);
    sum_chunks(kp + 1, sums.data(), [&](int64_t begin, int64_t end, Scratch&, double* out) {
      for (int64_t row = begin; row < end; ++row) {
        if (!point_right_[row]) continue;
        for (int64_t i = 0; i < k; ++i) out[i] += double(rows_[row * k + i]);
        out[kp] += 1.0;
      }
    });
    std::copy_n(sums.data(), kp, right_sum_.data());
    right_examples_ = sums[kp];
  }

  void evaluate(const std::vector<double>& w, double b, std::vector<double>& out) {
    sum_chunks(at_.size, out.data(), [&](int64_t begin, int64_t end, Scratch& scratch, double* sum) {
      add_rows(rows_.data() + begin * problem_.k, end - begin, at_, w.data(), b, scratch, sum);
    });
  }

  double linear(const std::vector<double>& w, double b) const {
    return dot(w.data(), right_sum_.data(), at_.kp) + b * right_examples_;
  }

  double penalty(const std::vector<double>& w, double b) const {
    return problem_.options.reg * (dot(w.data(), w.data(), at_.kp) + b * b);
  }

  // Gradient of L at (w_, b_) into step_; returns its length.
  double gradient() {
    const double reg = problem_.options.reg;
    const int64_t k = problem_.k;
    double square = 0.0;
    for (int64_t i = 0; i < k; ++i) step_[i] = right_sum_[i] - now_[at_.px + i] - 2.0 * reg * w_[i];
    step_[k] = right_examples_ - now_[at_.p] - 2.0 * reg * b_;
    for (double value : step_) square += value * value;
    return std::sqrt(square);
  }

  // One damped Newton step on L from (w_, b_) with `now_` evaluated there. False where no step could be made.
  bool newton(NodeResult& result) {
    const double reg = problem_.options.reg;
    const int64_t k = problem_.k, kp = at_.kp, d = k + 1;
    gradient();
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j <= i; ++j) matrix_[i * d + j] = now_[at_.h + i * kp + j];
      matrix_[i * d + i] += 2.0 * reg;
      matrix_[k * d + i] = now_[at_.sx + i];
    }
    matrix_[k * d + k] = now_[at_.s] + 2.0 * reg;
    if (!solve(matrix_.data(), step_.data(), d)) {
      // Only where rounding ate the penalty: features beyond 10^7. The gradient, scaled by a bound of the curvature.
      double bound = 2.0 * reg + now_[at_.s];
      for (int64_t i = 0; i < k; ++i) bound += now_[at_.h + i * kp + i];
      gradient();
      for (double& value : step_) value /= bound;
    }
    const double before = objective(w_, b_, now_);
    const double slack = 1e-13 * (1.0 + std::fabs(linear(w_, b_)) + now_[at_.softplus] + penalty(w_, b_));
    double size = 1.0;
    for (int halving = 0; halving < 50; ++halving, size *= 0.5) {
      for (int64_t i = 0; i < k; ++i) trial_[i] = w_[i] + size * step_[i];
      const double trial_b = b_ + size * step_[k];
      evaluate(trial_, trial_b, next_);
      ++result.newton_steps;
      // Rounding of the two sums is allowed for: at the optimum a step changes nothing that could be seen.
      if (objective(trial_, trial_b, next_) >= before - slack) {
        w_.swap(trial_);
        b_ = trial_b;
        now_.swap(next_);
        note(2 * (trace_round_ / 2) + 1);
        return true;
      }
    }
    return false;
  }

  double objective(const std::vector<double>& w, double b, const std::vector<double>& at) const {
    return linear(w, b) - at[at_.softplus] - penalty(w, b);
  }

  void note(int64_t round) {
    trace_round_ = round;
    if (trace_ != nullptr) trace_->push_back({trace_node_, round, objective(w_, b_, now_)});
  }

  void converge(NodeResult& result) {
    for (int i = 0; i < kNewtonSteps && gradient() > kTolerance * scale_; ++i) {
      if (!newton(result)) return;
    }
  }

  void alternate(const int32_t* classes, int64_t m, int64_t least, int64_t most, NodeResult& result) {
    const TreeFitOptions& options = problem_.options;
    sum_right(m);
    evaluate(w_, b_, now_);
    note(0);
    bool tight = false;
    for (int64_t round = 0;; ++round) {
      const bool last = !options.discrete || round >= options.max_rounds;
      if (tight || last) {
        converge(result);
      } else {
        newton(result);  // one step is enough while the split still moves
      }
      result.unfinished = options.discrete && last;
      if (last) break;
      class_scores(m);
      previous_.assign(right_.begin(), right_.end());
      const int64_t count = rank(classes, m, least, most);
      if (count == 0 || count == m) {
        count_ = count;
        ++result.rounds;
        return;
      }
      if (previous_ == right_) {
        if (tight) break;
        tight = true;
        continue;
      }
      count_ = count;
      ++result.rounds;
      tight = false;
      sum_right(m);
      note(2 * (trace_round_ / 2) + 2);
    }
    result.objective = objective(w_, b_, now_);
    result.log_likelihood = result.objective + penalty(w_, b_);
    result.gradient_ratio = gradient() / scale_;
  }

  // Stable, left classes first; returns how many they are.
  int64_t partition(int32_t* classes, int64_t m) {
    moved_.clear();
    int64_t left = 0;
    for (int64_t i = 0; i < m; ++i) {
      if (right_[i]) {
        moved_.push_back(classes[i]);
      } else {
        classes[left++] = classes[i];
      }
    }
    std::copy(moved_.begin(), moved_.end(), classes + left);
    return left;
  }

  const Problem& problem_;
  const Layout at_;
  const bool shared_;
  Scratch own_;
  std::vector<float> rows_;                // [n, k] the node's examples, by class
  std::vector<int64_t> begin_;             // [m + 1] where a class begins in rows_
  std::vector<uint8_t> point_right_;       // [n]
  std::vector<uint8_t> right_, previous_;  // [m]
  std::vector<double> delta_;              // [m]
  std::vector<int32_t> order_, moved_;     // [m]
  std::vector<double> partials_;
  int64_t n_ = 0, count_ = 0;
  std::vector<double> w_, trial_, right_sum_;  // [kp], zeros beyond k
  double b_ = 0.0, right_examples_ = 0.0, scale_ = 1.0;
  std::vector<double> now_, next_;  // label-free sums at (w_, b_) and at the trial
  std::vector<double> matrix_, step_;
  std::vector<TreeFitTrace>* trace_ = nullptr;
  int64_t trace_node_ = 0, trace_round_ = 0;
};

int64_t split(const double* delta, const int32_t* ids, int64_t m, int64_t least, int64_t most, int32_t* order,
              uint8_t* right) {
  int64_t positive = 0, zero = 0;
  for (int64_t i = 0; i < m; ++i) {
    positive += delta[i] > 0.0;
    zero += delta[i] == 0.0;
    order[i] = int32_t(i);
  }
  const int64_t wanted = std::clamp(m / 2, positive, positive + zero);
  const int64_t count = std::clamp(wanted, least, most);
  std::fill_n(right, m, uint8_t(0));
  if (count > 0 && count < m) {
    std::nth_element(order, order + count, order + m, [&](int32_t a, int32_t b) {
      return delta[a] != delta[b] ? delta[a] > delta[b] : ids[a] < ids[b];
    });
  }
  for (int64_t i = 0; i < count; ++i) right[order[i]] = 1;
  return count;
}

int64_t NodeFit::rank(const int32_t* classes, int64_t m, int64_t least, int64_t most) {
  return split(delta_.data(), classes, m, least, most, order_.data(), right_.data());
}

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument("fit_tree: " + message); }

void check(const float* x, const int64_t* y, int64_t n, int64_t k, int64_t num_classes, const TreeFitOptions& options) {
  const auto text = [](auto value) { return std::to_string(value); };
  if (n < 1) fail("z must have at least 1 row, got 0");
  if (k < 1) fail("z must have at least 1 column, got 0");
  if (n >= int64_t(1) << 31) fail("z must have less than 2^31 rows, got " + text(n));
  if (num_classes < 1 || num_classes > int64_t(1) << 30) {
    fail("num_classes must be in [1, 2^30], got " + text(num_classes));
  }
  if (!(options.reg > 0.0) || !is_finite(options.reg))
    fail("reg must be positive and finite, got " + text(options.reg));
  if (options.max_rounds < 0) fail("max_rounds must be at least 0, got " + text(options.max_rounds));
  std::atomic<int64_t> bad_row{n}, bad_label{n};
  const auto lower = [](std::atomic<int64_t>& to, int64_t value) {
    int64_t now = to.load();
    while (value < now && !to.compare_exchange_weak(now, value)) {
    }
  };
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float zero = 0.0f;  // stays 0 unless a value is nan or infinite
      for (int64_t i = 0; i < k; ++i) zero += x[row * k + i] * 0.0f;
      if (zero != 0.0f) lower(bad_row, row);
      if (y[row] < 0 || y[row] >= num_classes) lower(bad_label, row);
    }
  });
  if (bad_row < n) {
    const int64_t row = bad_row;
    const float* value = std::find_if(x + row * k, x + (row + 1) * k, [](float v) { return !is_finite(double(v)); });
    fail("z must be finite, got " + text(*value) + " in row " + text(row));
  }
  if (bad_label < n) {
    fail("y must be in [0, " + text(num_classes) + "), got " + text(y[bad_label]) + " in row " +
         text(bad_label.load()));
  }
}

}  // namespace

int64_t tree_num_leaves(int64_t num_classes) {
  int64_t leaves = 1;
  while (leaves < num_classes) leaves *= 2;
  return leaves;
}

int64_t tree_split(const double* delta, const int32_t* ids, int64_t m, int64_t least, int64_t most, uint8_t* right) {
  std::vector<int32_t> order(m);
  return split(delta, ids, m, least, most, order.data(), right);
}

void fit_tree(const float* x, const int64_t* y, int64_t n, int64_t k, int64_t num_classes,
              const TreeFitOptions& options, float* weights, float* bias, int64_t* leaf_class, double* exact,
              const std::function<void(const TreeFitLevel&)>& progress, std::vector<TreeFitTrace>* trace) {
  check(x, y, n, k, num_classes, options);
  Problem problem{
      x, k, tree_num_leaves(num_classes), options, std::vector<uint32_t>(n), std::vector<uint32_t>(num_classes + 1)};
  for (int64_t row = 0; row < n; ++row) ++problem.first[y[row] + 1];
  for (int64_t c = 0; c < num_classes; ++c) problem.first[c + 1] += problem.first[c];
  {
    std::vector<uint32_t> next(problem.first.begin(), problem.first.end() - 1);
    for (int64_t row = 0; row < n; ++row) problem.rows[next[y[row]]++] = uint32_t(row);
  }
  const int64_t leaves = problem.leaves;
  std::vector<int32_t> classes(num_classes);
  for (int64_t c = 0; c < num_classes; ++c) classes[c] = int32_t(c);
  std::fill_n(weights, k, 0.0f);
  bias[0] = 0.0f;
  if (exact != nullptr) std::fill_n(exact, k + 1, 0.0);

  // begin[i]: where the i-th node of the level begins in `classes`; padding takes no place.
  std::vector<int32_t> begin = {0, int32_t(num_classes)};
  for (int64_t level = 0, width = 1; width < leaves; ++level, width *= 2) {
    const int64_t half = leaves / width / 2;
    std::vector<NodeResult> results(width);
    const auto examples = [&](int64_t i) {
      int64_t count = 0;
      for (int32_t at = begin[i]; at < begin[i + 1] && count < kSharedNode; ++at) {
        count += problem.first[classes[at] + 1] - problem.first[classes[at]];
      }
      return count;
    };
    const auto fit = [&](NodeFit& fitter, int64_t i) {
      const int64_t node = width + i;
      std::fill_n(weights + node * k, k, 0.0f);
      bias[node] = 0.0f;
      double* exact_row = exact == nullptr ? nullptr : exact + node * (k + 1);
      if (exact_row != nullptr) std::fill_n(exact_row, k + 1, 0.0);
      results[i] = fitter.fit(node, classes.data() + begin[i], begin[i + 1] - begin[i], half, weights + node * k,
                              bias + node, exact_row, trace);
    };
    // The large ones first: later, at the same level, the threads would wait for each other.
    std::vector<uint8_t> done(width);
    for (int64_t i = 0; i < width; ++i) {
      if (trace == nullptr && examples(i) < kSharedNode) continue;
      NodeFit fitter(problem, trace == nullptr);
      fit(fitter, i);
      done[i] = 1;
    }
    parallel_for_shared(width, std::clamp<int64_t>(width / 256, 1, 64), [&](int64_t first, int64_t last) {
      NodeFit fitter(problem, false);
      for (int64_t i = first; i < last; ++i) {
        if (!done[i]) fit(fitter, i);
      }
    });
    std::vector<int32_t> next(2 * width + 1);
    TreeFitLevel now;
    now.level = level;
    for (int64_t i = 0; i < width; ++i) {
      const NodeResult& result = results[i];
      next[2 * i] = begin[i];
      next[2 * i + 1] = int32_t(begin[i + 1] - result.right_classes);
      now.log_likelihood += result.log_likelihood;
      now.objective += result.objective;
      if (!result.fitted) continue;
      ++now.nodes;
      now.rounds += result.rounds;
      now.most_rounds = std::max(now.most_rounds, result.rounds);
      now.newton_steps += result.newton_steps;
      now.gradient_ratio = std::max(now.gradient_ratio, result.gradient_ratio);
      now.unfinished += result.unfinished;
    }
    next[2 * width] = begin[width];
    begin.swap(next);
    if (progress) progress(now);
  }
  for (int64_t leaf = 0; leaf < leaves; ++leaf) {
    leaf_class[leaf] = begin[leaf + 1] > begin[leaf] ? classes[begin[leaf]] : -1;
  }
}

}  // namespace samplex
