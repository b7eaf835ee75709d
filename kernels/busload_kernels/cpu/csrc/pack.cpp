// Packing GGUF tensor rows into tiles (layout.h), and back. Block formats: ggml-common.h and ggml-quants.c of ggml.
//
// Q4_0, Q4_1, Q5_0 and Q8_0 are kept bit by bit: Q4_0's (nibble - 8) * d is scale d and offset -8 d, exact in fp16; whole
// numbers of up to 8 bits with one scale per 32 are a W8 tile as they are. Q4_K keeps its nibbles; its scale d * sc and
// offset -dmin * m are rounded to fp16 (2^-11 relative). All else is dequantised and quantised to int8 with one fp16 scale
// per 32, a relative error of about 0.5% of the weights (root mean square); of Q6_K, which has two scales per 32, at least
// the half with the larger one is kept. tests/kernels/cpu/test_packing.py measures each type.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "layout.h"

namespace {

using namespace busload;

enum Type { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

struct Shape {
  int type, elements, bytes;  // of one block
};
constexpr Shape kShapes[] = {{F32, 1, 4},     {F16, 1, 2},      {Q4_0, 32, 18},   {Q4_1, 32, 20},   {Q5_0, 32, 22},  {Q5_1, 32, 24},
                             {Q8_0, 32, 34},  {Q4_K, 256, 144}, {Q5_K, 256, 176}, {Q6_K, 256, 210}, {BF16, 1, 2}};

const Shape* shape_of(int type) {
  for (const Shape& shape : kShapes)
    if (shape.type == type) return &shape;
  return nullptr;
}

float float_of(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = half & 0x7fff;
  if (size < 0x0400) {  // below the smallest normal number
    const float value = (float)size * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (size < 0x7c00 ? (size << 13) + (112u << 23) : (size << 13) | 0x7f800000u);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

uint16_t half_of(float value) {  // to the nearest, ties to even
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  const float size = fabsf(value);
  if (!(size < 65520.f)) return sign | (isnan(value) ? 0x7e00 : 0x7c00);
  if (size < 0x1p-14f) return sign | (uint16_t)nearbyintf(ldexpf(size, 24));
  int exponent;
  const float fraction = frexpf(size, &exponent);  // [0.5, 1)
  return sign | (uint16_t)(((exponent + 13) << 10) + (int)nearbyintf(ldexpf(fraction, 11)));  // a carry moves the exponent up
}

float half_at(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return float_of(half);
}

// 6-bit scale and minimum of the j-th 32 of a 256-block of Q4_K and Q5_K: 12 bytes hold 8 of each.
void scale_and_minimum(const uint8_t* s, int j, int* scale, int* minimum) {
  *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
  *minimum = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6 << 4);
}

bool finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// 32 nibbles with one scale and offset.
struct Nibbles {
  uint8_t value[32];
  uint16_t scale, offset;
};

Nibbles nibbles_of(int type, const uint8_t* row, int64_t group) {
  Nibbles n;
  if (type == Q4_K) {
    const uint8_t* block = row + group / 8 * 144;
    const int j = group % 8;
    int scale, minimum;
    scale_and_minimum(block + 4, j, &scale, &minimum);
    n.scale = half_of(half_at(block) * (float)scale);
    n.offset = half_of(-half_at(block + 2) * (float)minimum);
    for (int i = 0; i < 32; i++) n.value[i] = block[16 + 32 * (j / 2) + i] >> 4 * (j % 2) & 15;
    return n;
  }
  const uint8_t* block = row + group * (type == Q4_0 ? 18 : 20);
  memcpy(&n.scale, block, 2);
  if (type == Q4_0)
    n.offset = half_of(-8 * half_at(block));
  else
    memcpy(&n.offset, block + 2, 2);
  const uint8_t* bytes = block + (type == Q4_0 ? 2 : 4);
  for (int i = 0; i < 16; i++) n.value[i] = bytes[i] & 15, n.value[i + 16] = bytes[i] >> 4;
  return n;
}

// 32 whole numbers with one scale, exactly what the file has.
struct Wholes {
  int8_t value[32];
  uint16_t scale;
};

bool is_wholes(int type) { return type == Q4_0 || type == Q5_0 || type == Q8_0; }

Wholes wholes_of(int type, const uint8_t* row, int64_t group) {
  Wholes w;
  const uint8_t* block = row + group * (type == Q8_0 ? 34 : type == Q5_0 ? 22 : 18);
  memcpy(&w.scale, block, 2);
  if (type == Q8_0) {
    memcpy(w.value, block + 2, 32);
    return w;
  }
  uint32_t high = 0;  // bit i: the fifth bit of value i
  if (type == Q5_0) memcpy(&high, block + 2, 4);
  const uint8_t* low = block + (type == Q5_0 ? 6 : 2);
  const int middle = type == Q5_0 ? 16 : 8;
  for (int i = 0; i < 16; i++) {
    w.value[i] = (int8_t)(((low[i] & 15) | (high >> i & 1) << 4) - middle);
    w.value[i + 16] = (int8_t)((low[i] >> 4 | (high >> (i + 16) & 1) << 4) - middle);
  }
  return w;
}

// 32 values dequantised, of types that are neither kept as nibbles nor as whole numbers.
void floats_of(int type, const uint8_t* row, int64_t group, float* out) {
  switch (type) {
    case F32: memcpy(out, row + group * 128, 128); return;
    case F16:
      for (int i = 0; i < 32; i++) out[i] = half_at(row + group * 64 + 2 * i);
      return;
    case BF16:
      for (int i = 0; i < 32; i++) {
        const uint8_t* p = row + group * 64 + 2 * i;
        const uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
        memcpy(out + i, &bits, 4);
      }
      return;
    case Q5_1: {
      const uint8_t *block = row + group * 24, *low = block + 8;
      const float scale = half_at(block), minimum = half_at(block + 2);
      uint32_t high;
      memcpy(&high, block + 4, 4);
      for (int i = 0; i < 32; i++) out[i] = scale * (float)((low[i % 16] >> 4 * (i / 16) & 15) | (high >> i & 1) << 4) + minimum;
      return;
    }
    case Q5_K: {
      const uint8_t *block = row + group / 8 * 176, *high = block + 16, *low = block + 48 + 32 * (group % 8 / 2);
      const int j = group % 8, shift = 4 * (j % 2);
      int scale, minimum;
      scale_and_minimum(block + 4, j, &scale, &minimum);
      const float unit = half_at(block) * (float)scale, least = half_at(block + 2) * (float)minimum;
      for (int i = 0; i < 32; i++) out[i] = unit * (float)((low[i] >> shift & 15) | (high[i] >> j & 1) << 4) - least;
      return;
    }
    case Q6_K: {  // halves of 128: 32 values each from low and high nibbles of two runs of 32 bytes
      const uint8_t* block = row + group / 8 * 210;
      const int half = group % 8 / 4, quarter = group % 4;
      const uint8_t *low = block + 64 * half + 32 * (quarter % 2), *high = block + 128 + 32 * half;
      const int8_t* scales = (const int8_t*)block + 192 + 8 * half + 2 * quarter;
      const float unit = half_at(block + 208);
      const int shift = 4 * (quarter / 2);
      for (int i = 0; i < 32; i++) {
        const int q = (low[i] >> shift & 15) | (high[i] >> 2 * quarter & 3) << 4;
        out[i] = unit * (float)scales[i / 16] * (float)(q - 32);
      }
      return;
    }
    default: {
      const Nibbles n = nibbles_of(type, row, group);
      const float scale = float_of(n.scale), offset = float_of(n.offset);
      for (int i = 0; i < 32; i++) out[i] = scale * (float)n.value[i] + offset;
    }
  }
}

void put_nibbles(const Nibbles& n, uint8_t* tile, int output) {
  uint8_t pairs[16];
  for (int i = 0; i < 16; i++) pairs[i] = (uint8_t)(n.value[i] | n.value[i + 16] << 4);
  for (int line = 0; line < 4; line++) memcpy(tile + 64 * line + 4 * output, pairs + 4 * line, 4);
  memcpy(tile + 256 + 2 * output, &n.scale, 2);
  memcpy(tile + 288 + 2 * output, &n.offset, 2);
}

void put_wholes(const Wholes& w, uint8_t* tile, int output) {
  uint8_t bytes[32];
  for (int i = 0; i < 32; i++) bytes[i] = (uint8_t)(w.value[i] + 128);
  for (int line = 0; line < 8; line++) memcpy(tile + 64 * line + 4 * output, bytes + 4 * line, 4);
  memcpy(tile + 512 + 2 * output, &w.scale, 2);
}

// The step that keeps the half of a Q6_K group with the larger scale as it is, -32..31 times 4; the other half is rounded.
float q6_step(const uint8_t* row, int64_t group) {
  const uint8_t* block = row + group / 8 * 210;
  const int8_t* scales = (const int8_t*)block + 192 + 2 * (group % 8);
  return half_at(block + 208) * (float)(abs(scales[0]) > abs(scales[1]) ? scales[0] : scales[1]) / 4;
}

// Quantised with `step`, or one that fits where it is 0 or too coarse for fp16. False when the values are not finite or too
// large for an fp16 scale.
bool put_floats(const float* x, float step, uint8_t* tile, int output) {
  float peak = 0, check = 0;
  for (int i = 0; i < 32; i++) peak = std::max(peak, fabsf(x[i])), check += x[i] * 0.f;  // 0 times inf or nan is nan
  if (!(check == 0)) return false;
  Wholes w;
  w.scale = half_of(step);
  if (!(fabsf(float_of(w.scale)) * 128.1f >= peak)) w.scale = half_of(peak / 127);
  if (!finite(w.scale)) return false;
  const float unit = float_of(w.scale);  // the rounded scale: small ones are coarse in fp16
  const float inverse = unit != 0 ? 1 / unit : 0;
  for (int i = 0; i < 32; i++) {
    const float steps = std::clamp(x[i] * inverse, -128.f, 127.f);
    w.value[i] = (int8_t)((int)(steps + 128.5f) - 128);  // to the nearest: no call of a rounding function
  }
  put_wholes(w, tile, output);
  return true;
}

uint8_t* tile_at(uint8_t* packed, int format, int64_t cols, int64_t row, int64_t group) {
  return packed + (row / kTileRows * (cols / kGroup) + group) * tile_bytes(format);
}

bool is_nibbles(int type) { return type == Q4_0 || type == Q4_1 || type == Q4_K; }

}  // namespace

extern "C" {

int64_t bl_packed_bytes(int32_t format, int64_t rows, int64_t cols) {
  return (rows + kUnitRows - 1) / kUnitRows * 2 * (cols / kGroup) * tile_bytes(format);
}

int32_t bl_packed_format(int32_t type) { return !shape_of(type) ? -1 : is_nibbles(type) ? BL_W4 : BL_W8; }

int32_t bl_pack_rows(int32_t type, const uint8_t* source, int64_t cols, const int32_t* row_map, int64_t count, int64_t first,
                     int32_t format, uint8_t* packed) {
  const Shape* shape = shape_of(type);
  if (!shape || (format == BL_W4 && !is_nibbles(type))) return -1;
  for (int64_t i = 0; i < count; i++) {
    const uint8_t* row = source + row_map[i] * (cols / shape->elements * shape->bytes);
    const int output = (int)((first + i) % kTileRows);
    for (int64_t g = 0; g < cols / kGroup; g++) {
      uint8_t* tile = tile_at(packed, format, cols, first + i, g);
      if (format == BL_W4) {
        const Nibbles n = nibbles_of(type, row, g);
        if (!finite(n.scale) || !finite(n.offset)) return -2;
        put_nibbles(n, tile, output);
      } else if (is_wholes(type)) {
        const Wholes w = wholes_of(type, row, g);
        if (!finite(w.scale)) return -2;
        put_wholes(w, tile, output);
      } else {
        float x[32];
        floats_of(type, row, g, x);
        if (!put_floats(x, type == Q6_K ? q6_step(row, g) : 0, tile, output)) return -2;
      }
    }
  }
  return 0;
}

void bl_unpack_row(const BlMatrix* m, int64_t row, float* out) {
  const int output = (int)(row % kTileRows);
  for (int64_t g = 0; g < m->cols / kGroup; g++, out += kGroup) {
    const uint8_t* tile = tile_at((uint8_t*)m->data, m->format, m->cols, row, g);
    if (m->format == BL_W4) {
      const float scale = half_at(tile + 256 + 2 * output), offset = half_at(tile + 288 + 2 * output);
      for (int i = 0; i < 32; i++)
        out[i] = scale * (float)(tile[64 * (i / 4 % 4) + 4 * output + i % 4] >> 4 * (i / 16) & 15) + offset;
    } else {
      const float scale = half_at(tile + 512 + 2 * output);
      for (int i = 0; i < 32; i++) out[i] = scale * (float)(tile[64 * (i / 4) + 4 * output + i % 4] - 128);
    }
  }
}

}  // extern "C"
