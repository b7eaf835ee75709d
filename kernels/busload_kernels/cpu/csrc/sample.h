// Drawing one token from logits as the reference executor does it: bias and penalties, temperature, min-p (Nguyen et al.
// 2024), top-k, then top-p (Holtzman et al. 2019).
#pragma once
#include "kernels.h"

namespace busload {

struct SampleScratch {
  float* weights;  // [vocab]
  int32_t* order;  // [vocab]
};

// Shapes the logits where that is asked for and draws; with log-probabilities if they are asked for. Token id, or -1 when
// the logits are not all finite.
int32_t draw(const Kernels&, float* logits, int vocab, const BlSampling&, const SampleScratch&);

// Bias; then the repetition penalty (Keskar et al. 2019) on all tokens of the history; then frequency and presence
// penalty (OpenAI API reference) on the drawn ones. Only the logits of those tokens are touched.
void shape(float* logits, const BlShaping&, const SampleScratch&);

// Token id, or -1 when the logits are not all finite. Tokens that the mask leaves out get the lowest logit there is.
int32_t sample(const Kernels&, float* logits, int vocab, const BlSampling&, const SampleScratch&);

// In [0, 1): Philox4x64-10 (Salmon et al. 2011) of key (seed, 0) at counter index + 1, top 53 bits of the first word;
// the first number of numpy's Generator(Philox(key=seed, counter=index)).
double uniform(uint64_t seed, uint64_t index);

}  // namespace busload
