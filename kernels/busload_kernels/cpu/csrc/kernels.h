// What one instruction set offers the engine. Each kernels_<isa>.cpp compiles kernels_impl.h with its own flags.
#pragma once
#include "layout.h"

namespace busload {

// Work buffers of one thread.
struct ThreadScratch {
  uint8_t* wide;  // [kWideGroups][2] wide tiles: weights of one unit, unpacked
  float* gate;    // [row_block(ffn)][64]: gate and up of one group
};

struct RopeRow {
  const float* cosine;  // [head_dim / 2]
  const float* sine;
};

// Attention takes keys in spans of so many blocks, which share one maximum, and spans in segments, which are summed apart:
// see attend.h. Tiles are fetched one span ahead.
constexpr int kSpanBlocks = 4, kSegmentBlocks = 16, kSegmentTokens = kSegmentBlocks * kBlockTokens;

// Consecutive tokens of one request that attend together.
struct AttendJob {
  const BlModel* model;
  Queries queries;
  int row, count;          // rows of the step, count * (heads / kv_heads) <= kAttendRows
  int position;            // of the first
  int kv_head;
  int window;              // 0: all
  int segment;             // the only segment to do, its sums to go to `partial`; -1: all of them
  float* partial;          // [attend_sums]
  const int32_t* blocks;   // block table of the request
  const uint8_t* kv;       // cache of this layer: block b, this kv head at kv + b * block_bytes
  int64_t block_bytes;
  const uint8_t* next[kSpanBlocks];  // the first tiles of the job that probably follows; NULL: none
  Activations out;         // columns of this kv head's query heads are written
};
constexpr int kAttendRows = 32;
// Floats of the sums of `rows` rows over some keys.
constexpr int attend_sums(int head_dim, int rows) { return kAttendRows + 16 + rows * (head_dim + 16); }

struct Kernels {
  const char* name;
  // out[r * stride + i] = row r of `x` times output unit * 32 + i of the matrix, for i < 32; `add` accumulates.
  void (*linear)(const BlMatrix&, int unit, const Activations& x, int rows, float* out, int64_t stride, bool add,
                 const ThreadScratch&);
  // x = RMSNorm(x) * weight, quantised to row `row` of `out`.
  void (*norm_quantise)(const float* x, const float* weight, float eps, const Activations& out, int row);
  // x += RMSNorm(y) * weight, for architectures that also norm what a block adds.
  void (*norm_add)(float* x, const float* y, const float* weight, float eps, int cols);
  // activation(gate) * up of one 32-column group, quantised: gate_up is [rows][64].
  void (*gate)(const float* gate_up, int rows, int activation, const Activations& out, int group);
  // One row of QKV: bias, query and key norm, rotation in place; queries quantised for an int8 cache, key and value stored.
  // `tile` is the KV tile of kv head 0, the next head's follows it. Tokens whose values share lines (slot / 4) must not be
  // stored at the same time.
  void (*rotate_store)(const BlModel&, const BlLayer&, float* qkv, RopeRow, const Queries&, int row, uint8_t* tile,
                       int slot);
  void (*attend)(const AttendJob&);
  // What follows when all segments of a job have been done apart: `partials` holds the sums of each, from segment 0 on.
  void (*attend_join)(const AttendJob&, float* partials);
  // Index of the largest of n values, the first of equals.
  int32_t (*argmax)(const float* x, int n);
  // out[i] = exp(scale * (x[i] - peak)); returns the sum, added in a fixed order.
  double (*exponentials)(const float* x, float* out, int n, float scale, float peak);
};

// NULL when the path was not compiled for this architecture.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace busload
