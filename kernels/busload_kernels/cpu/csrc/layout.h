// How weights, activations and the KV cache lie in memory. All ISAs share these layouts, so files are packed once and
// every path can be checked against the portable one.
#pragma once
#include "abi.h"

namespace busload {

constexpr int kGroup = 32;      // inputs that share one scale, in weights and activations
constexpr int kTileRows = 16;   // outputs of one tile
constexpr int kUnitRows = 32;   // outputs a thread computes at once: two tiles
constexpr int kSteps = 8;       // lines of one tile: 4 inputs each

// A line is 64 bytes: 16 outputs x 4 consecutive inputs, the operand of one `vpdpbusd zmm` against 4 broadcast
// activations (or of two `vpmaddubsw ymm`).
//
// W4 tile, 16 outputs x 32 inputs: 4 lines of nibbles (low nibble of line s: inputs 4s..4s+3, high: 16+4s..), then
// fp16 scale[16], fp16 offset[16]. Weight = scale * nibble + offset. The nibble pairing is the one of GGUF's Q4_0 and
// Q4_1, so packing them only moves bytes.
constexpr int kTile4Bytes = 4 * 64 + 2 * kTileRows * 2;
// W8 tile: 8 lines of bytes (weight + 128), then fp16 scale[16]. Weight = scale * (byte - 128).
constexpr int kTile8Bytes = 8 * 64 + kTileRows * 2;
// Wide tile, what larger batches unpack a W4 or W8 tile to in L1: 8 lines of bytes, fp32 scale[16], fp32 offset[16].
constexpr int kWideBytes = 8 * 64 + 2 * kTileRows * 4;
constexpr int kWideGroups = 24;  // of two tiles each: 30 KB

// Tiles of one 16-output stripe follow each other by input group, stripes by output: a thread reads one forward stream.
inline int64_t tile_bytes(int format) { return format == BL_W4 ? kTile4Bytes : kTile8Bytes; }
inline int64_t stripe_bytes(const BlMatrix& m) { return tile_bytes(m.format) * (m.cols / kGroup); }

// Quantised activations: value = scale * q, |q| <= 127. `offset` is scale * sum(q), what a weight offset multiplies;
// `start` is what integer sums with W8 bytes begin from: -128 * sum(q), what the 128 in them adds too much, and what the
// instruction set wants besides (kSumStart). Rows come in panels. Those of one group in one panel lie together, so that a
// kernel steps through the groups with one pointer for all of its rows, over memory that is close enough for the caches.
constexpr int kPanelRows = 48;  // a multiple of the rows that any kernel computes at once
struct Activations {
  int8_t* q;       // [panels][cols / 32][stride][32]
  float* scale;    // [panels][cols / 32][stride]
  float* offset;   // [panels][cols / 32][stride]
  int32_t* start;  // [panels][cols / 32][stride]
  int cols;
  int stride;  // kPanelRows, or less for a single panel

  int64_t index(int64_t row, int group) const {
    return (row / kPanelRows * (cols / kGroup) + group) * stride + row % kPanelRows;
  }
  // From the first row of a panel on.
  Activations from_row(int64_t row) const {
    const int64_t i = index(row, 0);
    return {q + i * kGroup, scale + i, offset + i, start + i, cols, stride};
  }
};
inline int64_t panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// KV cache: [block][layer][kv head] of a tile for 32 tokens. An int8 tile: keys are lines of 16 tokens x 4 dims (byte = key + 128):
// [2][head_dim / 4][16][4]; values are lines of 16 dims x 4 tokens (signed): [8][head_dim / 16][16][4]. So QK and PV
// run like a linear layer. Then fp32 key scale[32], value scale[32]. An fp32 tile: keys [2][head_dim][16], values
// [32][head_dim].
constexpr int kBlockTokens = BL_BLOCK_TOKENS;
inline int64_t kv_tile_bytes(const BlModel& m) {
  const int64_t values = 2 * kBlockTokens * (int64_t)m.head_dim;
  return m.kv_format == BL_KV_FP32 ? 4 * values : values + 2 * kBlockTokens * 4;
}

// Rotated queries. For an int8 cache value = scale * q, |q| <= 127.
struct Queries {
  int8_t* q;     // [rows][heads][head_dim]
  float* scale;  // [rows][heads], attention scale and log2(e) included
  int32_t* sum;  // [rows][heads] sum of q, for the bias of the keys
  const float* rotated;  // for an fp32 cache: [rows][width], of which [heads][head_dim] are queries
  int width;
};

}  // namespace busload
