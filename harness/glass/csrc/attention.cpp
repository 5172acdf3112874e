// Attention over a paged cache of keys and values, in one launch as on a card: the host reads no
// length, so a prefill never waits and a decode step can be captured.
#include "glass.h"

#include <c10/core/InferenceMode.h>
#include <torch/library.h>

namespace glass {
namespace {

struct Batch {
  at::Tensor query;  // [tokens, heads, head_size]
  at::Tensor out;    // [tokens, heads, value_size]
  at::Tensor keys;   // [slots, kv_heads, head_size], or one row for each token without a table
  at::Tensor values; // [slots, kv_heads, value_size]
  at::Tensor table;  // [requests, slots of each]; undefined: a sequence has its rows of `keys`
  at::Tensor places; // [sequences]: their rows in the table
  at::Tensor lengths, prefixes, added; // [sequences]; the last two are undefined for a decode step
  double scale;
  int64_t window; // most keys before a query's own, -1 for all
  bool is_causal;
};

int64_t entry(const at::Tensor& numbers, int64_t at) {
  return numbers[at].item<int64_t>();
}

void attend_now(const Batch& batch) {
  c10::InferenceMode off(false);
  const auto heads = batch.query.size(1), kv_heads = batch.keys.size(1);
  const bool is_decode = !batch.added.defined();
  int64_t begin = 0, count = 0;
  for (int64_t i = 0; i < batch.lengths.size(0); ++i, begin += count) {
    count = is_decode ? 1 : entry(batch.added, i);
    const auto prefix = is_decode ? entry(batch.lengths, i) - 1 : entry(batch.prefixes, i);
    const auto length = batch.table.defined() ? prefix + count : count;
    if (count == 0 || length <= 0)
      continue;
    at::Tensor keys, values;
    if (batch.table.defined()) {
      const auto slots =
          batch.table[entry(batch.places, i)].slice(0, 0, length).to(at::kLong);
      keys = batch.keys.index_select(0, slots);
      values = batch.values.index_select(0, slots);
    } else {
      keys = batch.keys.slice(0, begin, begin + count);
      values = batch.values.slice(0, begin, begin + count);
    }
    // [heads, rows, size], in float32
    const auto spread = [&](const at::Tensor& rows) {
      return rows.to(at::kFloat).transpose(0, 1).repeat_interleave(heads / kv_heads, 0);
    };
    const auto query = batch.query.slice(0, begin, begin + count).to(at::kFloat).transpose(0, 1);
    auto scores = at::matmul(query, spread(keys).transpose(1, 2)).mul_(batch.scale);
    const auto own = at::arange(length - count, length).unsqueeze(1), all = at::arange(length);
    if (batch.is_causal)
      scores.masked_fill_(all > own, -INFINITY);
    if (batch.window >= 0)
      scores.masked_fill_(all < own - batch.window, -INFINITY);
    const auto mixed = at::matmul(scores.softmax(-1), spread(values));
    batch.out.slice(0, begin, begin + count).copy_(mixed.transpose(0, 1));
  }
}

void attend(
    const at::Tensor& query, at::Tensor& out, const at::Tensor& keys, const at::Tensor& values,
    const std::optional<at::Tensor>& table, const at::Tensor& places, const at::Tensor& lengths,
    const std::optional<at::Tensor>& prefixes, const std::optional<at::Tensor>& added,
    double scale, int64_t window, bool is_causal) {
  const auto twin = [](const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? twin_of(*tensor) : at::Tensor();
  };
  std::vector<Access> accesses{access_of(query, false), access_of(out, true)};
  for (const auto& read : {keys, values, places, lengths})
    accesses.push_back(access_of(read, false));
  // a part of them is read: which part, only the job knows
  accesses[2].whole = accesses[3].whole = false;
  for (const auto& read : {table, prefixes, added})
    if (read && read->defined()) {
      accesses.push_back(access_of(*read, false));
      accesses.back().whole = accesses.back().whole && !(table && read->is_same(*table));
    }
  const Batch batch{twin_of(query), twin_of(out), twin_of(keys), twin_of(values), twin(table),
                    twin_of(places), twin_of(lengths), twin(prefixes), twin(added),
                    scale, window, is_causal};
  launch(current(), "attend", [batch] { attend_now(batch); }, std::move(accesses));
}

TORCH_LIBRARY_FRAGMENT(glass, m) {
  m.def(
      "attend(Tensor query, Tensor(a!) out, Tensor keys, Tensor values, Tensor? table, "
      "Tensor places, Tensor lengths, Tensor? prefixes, Tensor? added, float scale, int window, "
      "bool is_causal) -> ()");
}

TORCH_LIBRARY_IMPL(glass, PrivateUse1, m) {
  m.impl("attend", attend);
}

} // namespace
} // namespace glass
