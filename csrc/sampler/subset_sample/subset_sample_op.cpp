// Schema, checks and allocation of
//   subset_sample   -> ids [B, k] int64, distinct in each row
#include <algorithm>

#include "common/glue.h"
#include "common/philox.h"
#include "sampler/subset_sample/subset_sample_params.h"

namespace samplex {
namespace {

using glue::ScalarType;
using glue::Tensor;

constexpr const char* kOp = "subset_sample";
constexpr int64_t kWarp = 32, kWarpsOfBlock = 4, kMostTables = 4096;  // a full device has fewer warps at work

Tensor subset_sample(Tensor key, int64_t batch, int64_t num_samples, int64_t num_classes,
                     std::optional<Tensor> exclude) {
  glue::begin_op();
  glue::check_tensor(kOp, "key", key, {2}, "[2]", ScalarType::Long, key);
  glue::check_value(batch >= 0 && batch <= kPhiloxMaxRows, kOp, ": batch must be in [0, 2^32], got ", batch);
  glue::check_value(num_classes >= 1, kOp, ": num_classes must be at least 1, got ", num_classes);
  const int64_t most = std::min(num_classes - int64_t(exclude.has_value()), kPhiloxMaxDraws);
  glue::check_value(num_samples >= 0 && num_samples <= most, kOp, ": num_samples must be in [0, ", most,
                    "] to be distinct among ", num_classes, " classes", exclude ? " without the excluded one" : "",
                    ", got ", num_samples);
  SubsetSampleParams p = {};
  p.batch = batch;
  p.num_samples = num_samples;
  p.num_classes = num_classes;
  p.key = glue::in<int64_t>(key);
  if (exclude.has_value()) {
    glue::check_tensor(kOp, "exclude", *exclude, {batch}, "[B]", ScalarType::Long, key);
    p.exclude = glue::in<int64_t>(*exclude);
    if (glue::ids_on_host(key)) {
      for (int64_t b = 0; b < batch; ++b) {
        glue::check_index(p.exclude[b] >= -1 && p.exclude[b] < num_classes, kOp, ": exclude must be -1 or in [0, ",
                          num_classes, "), got ", p.exclude[b], " in row ", b);
      }
    }
  }
  Tensor ids = glue::empty(key, {batch, num_samples}, ScalarType::Long);
  if (batch == 0 || num_samples == 0) return ids;
  p.ids = glue::out<int64_t>(ids);
  p.slots = 1;
  while (p.slots < 2 * num_samples) p.slots *= 2;
  std::optional<Tensor> table;
  if (glue::backend_of(kOp, key) != Backend::kCpu) {
    p.tables = (std::min(batch, kMostTables) + kWarpsOfBlock - 1) / kWarpsOfBlock * kWarpsOfBlock;
    if (num_samples > kWarp) {
      table = glue::empty(key, {p.tables, p.slots}, ScalarType::Long);
      p.table = reinterpret_cast<unsigned long long*>(glue::out<int64_t>(*table));
    }
  }
  SX_RUN(kOp, key, launch_subset_sample, p);
  return ids;
}

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "subset_sample(Tensor key, SymInt batch, SymInt num_samples, SymInt num_classes, Tensor? exclude=None) -> Tensor",
      std::vector<at::Tag>{at::Tag::pt2_compliant_tag});
}

STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { m.impl("subset_sample", TORCH_BOX(&subset_sample)); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { m.impl("subset_sample", TORCH_BOX(&subset_sample)); }

}  // namespace
}  // namespace samplex
