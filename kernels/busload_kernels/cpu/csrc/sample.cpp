#include "sample.h"

#include <float.h>
#include <math.h>

#include <algorithm>
#include <functional>
#include <vector>

namespace busload {
namespace {

bool allowed(const uint32_t* mask, int token) { return mask[token / 32] >> token % 32 & 1; }

// The k-th largest of x. The k-th largest of the maxima of blocks is a lower bound, so few values are looked at twice.
float kth_largest(const float* x, int n, int k) {
  constexpr int kBlock = 16;
  std::vector<float> values;
  if (k * kBlock < n) {
    std::vector<float> peaks;
    for (int i = 0; i < n; i += kBlock) peaks.push_back(*std::max_element(x + i, x + std::min(n, i + kBlock)));
    std::vector<float> ranked = peaks;
    std::nth_element(ranked.begin(), ranked.begin() + k - 1, ranked.end(), std::greater<>());
    const float bound = ranked[k - 1];
    for (int i = 0; i < n; i += kBlock)
      if (peaks[i / kBlock] >= bound)
        std::copy_if(x + i, x + std::min(n, i + kBlock), std::back_inserter(values), [=](float v) { return v >= bound; });
  } else {
    values.assign(x, x + n);
  }
  std::nth_element(values.begin(), values.begin() + k - 1, values.end(), std::greater<>());
  return values[k - 1];
}

// The fewest most likely tokens with at least `share` of the mass, most likely first; returns how many.
int nucleus(const float* weights, int n, double share, int32_t* order) {
  double mass = 0;
  for (int i = 0; i < n; i++) mass += weights[i];
  const double wanted = share * mass;
  int count = 0;
  for (int k = 256;; k *= 8) {
    const float bound = k < n ? kth_largest(weights, n, k) : 0;
    double found = 0;
    count = 0;
    for (int i = 0; i < n; i++)
      if (weights[i] >= bound) order[count++] = i, found += weights[i];
    if (found >= wanted || k >= n) break;
  }
  std::stable_sort(order, order + count, [&](int32_t a, int32_t b) { return weights[a] > weights[b]; });
  double sum = 0;
  for (int i = 0; i < count; i++)
    if ((sum += weights[order[i]]) >= wanted) return i + 1;
  return count;
}

// Log-softmax of `logits` for the drawn token and the most likely ones.
void report(const Kernels& kernels, const float* logits, int vocab, int32_t drawn, BlLogprobs& out, const SampleScratch& s) {
  const float peak = logits[kernels.argmax(logits, vocab)];
  const double normaliser = peak + log(kernels.exponentials(logits, s.weights, vocab, 1, peak));
  out.drawn = (float)(logits[drawn] - normaliser);
  if (!out.num_top) return;
  const float bound = kth_largest(logits, vocab, out.num_top);
  int32_t* end = s.order;
  for (int i = 0; i < vocab; i++)
    if (logits[i] >= bound) *end++ = i;
  std::partial_sort(s.order, s.order + out.num_top, end, [=](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  for (int i = 0; i < out.num_top; i++) {
    out.top_tokens[i] = s.order[i];
    out.top[i] = (float)(logits[s.order[i]] - normaliser);
  }
}

}  // namespace

int32_t draw(const Kernels& kernels, float* logits, int vocab, const BlSampling& how, const SampleScratch& s) {
  std::vector<float> raw;  // the model's own logits, where they are still needed once others have taken their place
  if (how.logprobs && (how.shaping || how.mask)) raw.assign(logits, logits + vocab);
  if (how.shaping) shape(logits, *how.shaping, s);
  const int32_t token = sample(kernels, logits, vocab, how, s);
  if (how.logprobs && token >= 0) report(kernels, raw.empty() ? logits : raw.data(), vocab, token, *how.logprobs, s);
  return token;
}

void shape(float* logits, const BlShaping& how, const SampleScratch& s) {
  for (int64_t i = 0; i < how.num_biases; i++) {
    float& logit = logits[how.bias_tokens[i]];
    logit = (float)(logit + how.biases[i]);
  }
  // How often each token of the history was drawn, and -1 once its logit is done.
  int32_t* counts = s.order;
  const int32_t *drawn = how.history + how.prompt_tokens, *end = drawn + how.drawn_tokens;
  for (const int32_t* token = how.history; token < end; token++) counts[*token] = 0;
  for (const int32_t* token = drawn; token < end; token++) counts[*token]++;
  for (const int32_t* token = how.history; token < end; token++) {
    int32_t& count = counts[*token];
    if (count < 0) continue;
    double x = logits[*token];
    x = x > 0 ? x / how.repetition_penalty : x * how.repetition_penalty;
    x -= how.frequency_penalty * count + how.presence_penalty * (count > 0);
    logits[*token] = (float)x;
    count = -1;
  }
}

int32_t sample(const Kernels& kernels, float* logits, int vocab, const BlSampling& how, const SampleScratch& s) {
  int32_t best = kernels.argmax(logits, vocab);
  if (best >= 0 && how.mask) {
    for (int i = 0; i < vocab; i++)
      if (!allowed(how.mask, i)) logits[i] = -FLT_MAX;
    best = kernels.argmax(logits, vocab);
  }
  if (best < 0 || how.temperature == 0) return best;
  kernels.exponentials(logits, s.weights, vocab, (float)(1 / how.temperature), logits[best]);
  if (how.mask)
    for (int i = 0; i < vocab; i++)
      if (!allowed(how.mask, i)) s.weights[i] = 0;
  if (how.min_p > 0)  // weights are relative to the most likely token's
    for (int i = 0; i < vocab; i++)
      if (s.weights[i] < how.min_p) s.weights[i] = 0;
  if (0 < how.top_k && how.top_k < vocab) {
    const float bound = kth_largest(logits, vocab, (int)how.top_k);  // tokens as likely as the k-th all stay
    for (int i = 0; i < vocab; i++)
      if (logits[i] < bound) s.weights[i] = 0;
  }
  int count = vocab;
  const bool cut = how.top_p < 1;
  if (cut) count = nucleus(s.weights, vocab, how.top_p, s.order);
  auto token = [&](int i) { return cut ? s.order[i] : i; };
  double total = 0;
  for (int i = 0; i < count; i++) total += s.weights[token(i)];
  const double target = uniform(how.seed, how.index) * total;
  double sum = 0;
  int32_t last = best;
  for (int i = 0; i < count; i++) {
    const float weight = s.weights[token(i)];
    if (weight > 0) last = token(i);
    if ((sum += weight) > target) return last;
  }
  return last;  // rounding: the last token with any weight is the one meant
}

double uniform(uint64_t seed, uint64_t index) {
  uint64_t counter[4] = {index + 1, index == UINT64_MAX, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; round++) {
    const __uint128_t a = (__uint128_t)counter[0] * 0xD2E7470EE14C6C93u, b = (__uint128_t)counter[2] * 0xCA5A826395121157u;
    const uint64_t next[4] = {(uint64_t)(b >> 64) ^ counter[1] ^ key[0], (uint64_t)b,
                              (uint64_t)(a >> 64) ^ counter[3] ^ key[1], (uint64_t)a};
    std::copy(next, next + 4, counter);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  return (double)(counter[0] >> 11) * 0x1p-53;
}

}  // namespace busload

extern "C" double bl_uniform(uint64_t seed, uint64_t index) { return busload::uniform(seed, index); }
