// Shared draws on the CPU: down the tree once, depth first, with the draws that pass a node sorted into its children.
// Stratified draws are sorted from the start.
// With several threads the subtrees below a level are separate tasks.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/philox_many.h"
#include "common/simd.h"
#include "common/workspace.h"
#include "sampler/tree_shared/tree_shared_cpu_rows.h"

namespace samplex::cpu {
namespace {

void tree_shared_node_scalar(const TreeTable& tree, int64_t node, TreeSharedNode& at) {
  tree_shared_any(tree, node, at);
}

using NodeBody = decltype(&tree_shared_node_scalar);

// A node some draws have come to.
struct Place {
  int64_t node, begin, end;  // the draws are order[begin, end)
  int level;
  double q;            // probability of the way to it
  double low;          // where its interval of [0, 1) begins; for stratified draws
  const double* mass;  // [tiles * 64] of the rows
};

class Descent {
 public:
  explicit Descent(const TreeSharedParams& p)
      : p_(p),
        body_(SX_SIMD_BODY(simd_level(), tree_shared_node)),
        tiles_((p.batch + kTile - 1) / kTile),
        rows_(tiles_ * kTile),
        width_((p.tree.dim + kTreeLanes - 1) / kTreeLanes * kTreeLanes),
        stride_((p.num_samples + 7) / 8 * 8),
        levels_(p.given != nullptr || p.tree.depth == 0 ? 0
                : p.stratified                          ? 2
                                                        : (p.tree.depth + 1) / 2 * 2),
        memory_(sizeof(double) * (rows_ * (1 + 2 * p.tree.depth) + levels_ * stride_) + sizeof(float) * rows_ * width_ +
                sizeof(int32_t) * 2 * p.num_samples) {
    root_ = static_cast<double*>(memory_.data());
    buffers_ = root_ + rows_;
    uniforms_ = buffers_ + 2 * p.tree.depth * rows_;
    x_ = reinterpret_cast<float*>(uniforms_ + levels_ * stride_);
    order_ = reinterpret_cast<int32_t*>(x_ + rows_ * width_);
    aside_ = order_ + p.num_samples;
    std::fill_n(x_, rows_ * width_, 0.0f);
    std::fill_n(root_, rows_, 0.0);
    for (int64_t b = 0; b < p.batch; ++b) {
      const float* row = p.x + b * p.tree.dim;
      float zero = 0.0f;  // stays 0 unless a value is nan or infinite
      for (int64_t c = 0; c < p.tree.dim; ++c) zero += 0.0f * row[c];
      if (zero != 0.0f) continue;
      float* column = x_ + b / kTile * width_ * kTile + b % kTile;
      for (int64_t c = 0; c < p.tree.dim; ++c) column[c * kTile] = row[c];
      root_[b] = 1.0;
      some_ = true;
    }
    for (int64_t i = 0; i < p.num_samples; ++i) order_[i] = int32_t(i);
    if (levels_ > 0) draw_uniforms();
    if (p.stratified && levels_ > 0) {
      for (int64_t i = 0; i < p.num_samples; ++i) uniforms_[i] = tree_stratum(i, uniforms_[i], p.num_samples);
    }
  }

  void run() {
    // If no row has a distribution, every node is 0 / 0.
    const Place root = {1, 0, p_.num_samples, 0, some_ || p_.tree.depth == 0 ? 1.0 : quiet_nan<double>(), 0.0, root_};
    const int threads = num_threads(), depth = p_.tree.depth;
    int cut = depth;  // the level whose subtrees are tasks
    if (threads > 1) {
      cut = 0;
      while (cut < depth && (1 << cut) < 4 * threads) ++cut;
    }
    std::vector<Place> tasks;
    std::vector<double> masses;  // of the tasks
    if (cut < depth) masses.reserve((size_t(1) << cut) * rows_);
    go(root, cut, buffers_, [&](Place at) {
      if (at.level == depth) return finish(at);
      masses.insert(masses.end(), at.mass, at.mass + rows_);
      at.mass = masses.data() + masses.size() - rows_;
      tasks.push_back(at);
    });
    parallel_for_shared(int64_t(tasks.size()), 1, [&](int64_t begin, int64_t end) {
      std::vector<double> own(2 * size_t(depth - cut) * rows_);
      for (int64_t i = begin; i < end; ++i) {
        go(tasks[i], depth, own.data(), [&](const Place& at) { finish(at); });
      }
    });
  }

 private:
  // Two levels of a draw share a Philox block, as in tree_draw.
  void draw_uniforms() {
    const PhiloxKey key = {uint64_t(p_.key[0]), uint64_t(p_.key[1])};
    const int pairs = int(levels_ / 2);
    parallel_for(stride_ / 8, 64, [&](int64_t begin, int64_t end) {
      uint32_t row[64] = {}, position[64];
      uint64_t bits[2][64];
      for (int64_t first = begin * 8; first < end * 8; first += 64) {
        const int count = int(std::min<int64_t>(64, end * 8 - first));
        for (int pair = 0; pair < pairs; ++pair) {
          for (int i = 0; i < count; ++i) position[i] = uint32_t(first + i) << 8 | uint32_t(pair);
          philox_many(key, row, position, count, bits[0], bits[1]);
          for (int half = 0; half < 2; ++half) {
            double* out = uniforms_ + (2 * pair + half) * stride_ + first;
            for (int i = 0; i < count; ++i) out[i] = uniform53_by_parts(bits[half][i]);
          }
        }
      }
    });
  }

  // Down from `at` to level `last`; `arrive` takes what comes there. `buffers` holds two sets of masses for each level
  // between.
  template <typename F>
  void go(const Place& at, int last, double* buffers, const F& arrive) {
    if (at.begin == at.end) return;
    if (at.level == last) return arrive(at);
    const float bias = bias_of(at.node);
    if (is_infinite(bias)) return pass(at, bias > 0, last, buffers, arrive);
    const bool leaves = at.level + 1 == p_.tree.depth;  // nothing reads the masses of a leaf
    if (!leaves) prefetch_children(at.node);
    TreeSharedNode node = {x_, at.mass, leaves ? nullptr : buffers, leaves ? nullptr : buffers + rows_, tiles_, width_,
                           0,  0};
    body_(p_.tree, at.node, node);
    const double total = node.sum_right + node.sum_left;
    double* const deeper = buffers + 2 * rows_;
    const double q_left = tree_shared_step(at.q, node.sum_left, total);
    const double q_right = tree_shared_step(at.q, node.sum_right, total);
    const TreeSplitMass mass = split_mass(at, node, q_left, q_right);
    const int64_t middle = p_.stratified ? split_strata(at, mass.left, mass.right) : sort_draws(at, mass);
    go({2 * at.node, at.begin, middle, at.level + 1, q_left, at.low, node.left}, last, deeper, arrive);
    go({2 * at.node + 1, middle, at.end, at.level + 1, q_right, at.low + mass.left, node.right}, last, deeper, arrive);
  }

  // A node that sends every row to one side: the masses stay, and so does what scoring it would give.
  template <typename F>
  void pass(const Place& at, bool right, int last, double* buffers, const F& arrive) {
    const double all = at.q == at.q ? 1.0 : 0.0;  // without a distribution every draw goes left, as in any node
    const TreeSharedNode node = {nullptr, nullptr, nullptr, nullptr, 0, 0, right ? all : 0.0, right ? 0.0 : all};
    // Only a given class can be on the other side: it has probability 0, or nan where there is no distribution.
    const double none = 0.0 * at.q, q_left = right ? none : at.q, q_right = right ? at.q : none;
    const TreeSplitMass mass = split_mass(at, node, q_left, q_right);
    const int64_t middle = p_.stratified ? split_strata(at, mass.left, mass.right) : sort_draws(at, mass);
    go({2 * at.node, at.begin, middle, at.level + 1, q_left, at.low, at.mass}, last, buffers, arrive);
    go({2 * at.node + 1, middle, at.end, at.level + 1, q_right, at.low + mass.left, at.mass}, last, buffers, arrive);
  }

  // Both are adjacent: on their way from memory while this node is scored.
  void prefetch_children(int64_t node) const {
    const int64_t bytes = p_.tree.stride * (p_.tree.dtype == DType::kBFloat16 ? 2 : 4);
    const char* first = static_cast<const char*>(p_.tree.nodes) + 2 * node * bytes;
    for (int64_t at = 0; at < 2 * bytes; at += 64) __builtin_prefetch(first + at);
  }

  static bool is_infinite(float x) { return x == negative_infinity<float>() || x == -negative_infinity<float>(); }

  float bias_of(int64_t node) const {
    if (p_.tree.dtype == DType::kBFloat16) return to_acc(tree_node<BFloat16>(p_.tree, node)[p_.tree.dim]);
    return tree_node<float>(p_.tree, node)[p_.tree.dim];
  }

  // What a draw at a node chooses its child by. In strata: the probabilities of the ways to the children.
  struct TreeSplitMass {
    double right, left;
  };
  TreeSplitMass split_mass(const Place& at, const TreeSharedNode& node, double q_left, double q_right) const {
    if (p_.base.prefix != nullptr) {
      return {tree_shared_mixed(p_, q_right, 2 * at.node + 1, at.level + 1),
              tree_shared_mixed(p_, q_left, 2 * at.node, at.level + 1)};
    }
    if (p_.stratified) return {q_right, q_left};
    return {node.sum_right, node.sum_left};
  }

  // Draws that go left first; where the others begin.
  int64_t sort_draws(const Place& at, const TreeSplitMass& mass) {
    int64_t left = at.begin, others = at.begin;
    const auto sort = [&](const auto& goes_right) {
      for (int64_t i = at.begin; i < at.end; ++i) {
        const int32_t draw = order_[i];
        const bool right = goes_right(draw);
        order_[left] = draw;
        aside_[others] = draw;
        left += !right;
        others += right;
      }
    };
    if (p_.given != nullptr) {
      const int shift = p_.tree.depth - 1 - at.level;
      sort([&](int32_t draw) {
        const int64_t leaf = leaf_of(p_.tree, p_.given[draw]);
        return leaf >= 0 && (leaf >> shift & 1) != 0;
      });
    } else {
      const double* u = uniforms_ + at.level * stride_;
      const double total = mass.right + mass.left;
      sort([&](int32_t draw) { return u[draw] * total < mass.right; });
    }
    std::copy(aside_ + at.begin, aside_ + others, order_ + left);
    return left;
  }

  // The same for stratified draws, which are in order already.
  int64_t split_strata(const Place& at, double q_left, double q_right) const {
    const double* places = uniforms_;
    return std::partition_point(places + at.begin, places + at.end,
                                [&](double place) { return !tree_stratum_right(place, at.low, q_left, q_right); }) -
           places;
  }

  void finish(const Place& at) {
    const float log_q =
        tree_shared_log(p_.base.prefix == nullptr ? at.q : tree_shared_mixed(p_, at.q, at.node, p_.tree.depth));
    const int64_t id = class_at(p_.tree, at.node - (int64_t(1) << p_.tree.depth));
    for (int64_t i = at.begin; i < at.end; ++i) {
      const int32_t draw = order_[i];
      const bool known = p_.given != nullptr ? leaf_of(p_.tree, p_.given[draw]) >= 0 : id >= 0;
      p_.log_q[draw] = known ? log_q : quiet_nan<float>();
      if (p_.ids != nullptr) p_.ids[draw] = id < 0 ? 0 : id;  // padding: only if no row has a distribution
    }
  }

  const TreeSharedParams& p_;
  const NodeBody body_;
  const int64_t tiles_, rows_, width_;  // rows: up to the next whole tile
  const int64_t stride_, levels_;       // of the uniforms
  const Workspace memory_;
  double* root_;             // [rows] masses at the root: 1, or 0 for a row without a distribution
  double* buffers_;          // [depth, 2, rows]
  double* uniforms_;         // [levels, stride]
  float* x_;                 // see TreeSharedNode
  int32_t *order_, *aside_;  // [m]
  bool some_ = false;        // a row has a distribution
};

}  // namespace

void launch_tree_shared(const TreeSharedParams& p) { Descent(p).run(); }

}  // namespace samplex::cpu
