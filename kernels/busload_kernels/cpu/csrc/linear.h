// Linear layers: rows of quantised activations times one unit (32 outputs) of packed weights.
//
// Per group of 32 inputs the integer dot product is exact; then sum = dot * weight scale * activation scale + sum (which two
// are multiplied first is up to the instruction set), and where weights have offsets sum = weight offset * activation offset
// + sum. The order is the same in every variant below, so a row's result does not depend on how many other rows are in the
// step. Those two to four instructions for eight of the dot product are the limit for many rows.
#pragma once
#include <algorithm>

#include "kernels.h"

namespace {

using namespace busload;

// Bytes fetched ahead of the packed stream while few rows leave the arithmetic idle: 8 to 16 KB is worth a quarter of
// the time at batch 1; 2 KB nothing.
constexpr int kPrefetchAhead = 8192;

static_assert(kPanelRows % kWideRows == 0);

struct W4 {
  using Dot = DotNibbles;
  static constexpr int kBytes = kTile4Bytes, kLocality = 3;  // fetch to L1
  static constexpr bool kOffset = true;
  // Line of inputs 4 * step ..: steps 0-3 are low nibbles, 4-7 the high nibbles of the same bytes.
  static Line line(const uint8_t* tile, int step) {
    Line packed = load_line(tile + 64 * (step & 3));
    return step < 4 ? low_nibbles(packed) : high_nibbles(packed);
  }
  static F16 scale(const uint8_t* tile) { return load_half(tile + 256); }
  static F16 offset(const uint8_t* tile) { return load_half(tile + 288); }
};

struct W8 {
  using Dot = DotBytes;
  static constexpr int kBytes = kTile8Bytes, kLocality = 3;
  static constexpr bool kOffset = false;  // the bias of the bytes is in the integer sum
  static Line line(const uint8_t* tile, int step) { return load_line(tile + 64 * step); }
  static F16 scale(const uint8_t* tile) { return load_half(tile + 512); }
};

template <class Packed>
struct Wide {
  using Dot = typename Packed::Dot::Wide;
  static constexpr int kBytes = kWideBytes, kLocality = 2;  // to L2: L1 is full
  static constexpr bool kOffset = Packed::kOffset;
  static Line line(const uint8_t* tile, int step) { return load_line(tile + 64 * step); }
  static F16 scale(const uint8_t* tile) { return load((const float*)(tile + 512)); }
  static F16 offset(const uint8_t* tile) { return load((const float*)(tile + 576)); }

  // One group of both stripes of a unit.
  static void unpack(const uint8_t* tile, uint8_t* wide) {
    for (int step = 0; step < kSteps; step++) store_line(wide + 64 * step, Packed::Dot::widen(Packed::line(tile, step)));
    store((float*)(wide + 512), Packed::scale(tile));
    if constexpr (kOffset) store((float*)(wide + 576), Packed::offset(tile));
  }
};

struct Output {
  float* out;
  int64_t stride;
  bool add;
};

// Groups `first` .. `first + count` of the inputs.
struct Range {
  int first, count;
};

// Weights to fetch while a block computes: `bytes` per group.
struct Fetch {
  const uint8_t* from;
  int bytes;
};

// The share of one of `parts` blocks that together fetch `bytes` per group, so that memory is busy during all of them.
inline Fetch share_of(const uint8_t* from, int bytes, int groups, int part, int parts) {
  const int each = (bytes / parts + 63) / 64 * 64;
  const int64_t offset = (int64_t)part * each * groups;
  return offset < (int64_t)bytes * groups ? Fetch{from + offset, each} : Fetch{from, 0};
}

// Rows x Tiles block, within a panel: tiles of one group lie `between` bytes apart, groups `per_group`; `w` is the first of `groups`.
template <class Format, int Rows, int Tiles>
inline void block(const uint8_t* w, int64_t between, int64_t per_group, const Activations& x, Range groups, int row,
                  const Output& o, Fetch fetch) {
  using Dot = typename Format::Dot;
  const int64_t first = x.index(row, groups.first);
  const int8_t* q = x.q + first * kGroup;
  const float *scale = x.scale + first, *offset = x.offset + first;
  const int32_t* start = x.start + first;
  F16 result[Rows][Tiles];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
    for (int t = 0; t < Tiles; t++)
      result[r][t] = o.add ? load(o.out + (row + r) * o.stride + t * kTileRows) : splat(0);
  for (int g = 0; g < groups.count; g++) {
    for (int i = 0; i < fetch.bytes; i += 64) __builtin_prefetch(fetch.from + i, 0, Format::kLocality);
    fetch.from += fetch.bytes;
    typename Dot::Sum dots[Rows][Tiles];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
      for (int t = 0; t < Tiles; t++) dots[r][t] = Dot::start(start + r);
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; i++) {
      const int step = (i >> 1) + 4 * (i & 1);  // both nibbles of a line in turn
      Line line[Tiles];
#pragma GCC unroll 2
      for (int t = 0; t < Tiles; t++) line[t] = Format::line(w + t * between, step);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        int32_t word = load_word(q + r * kGroup + 4 * step);
#pragma GCC unroll 2
        for (int t = 0; t < Tiles; t++) Dot::step(dots[r][t], line[t], word);
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < Tiles; t++) {
      const SumScale weight_scale(Format::scale(w + t * between));
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
        result[r][t] = weight_scale.add(result[r][t], Dot::total(dots[r][t]), scale[r]);
      if constexpr (Format::kOffset) {
        const F16 weight_offset = Format::offset(w + t * between);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) result[r][t] = fma(weight_offset, splat(offset[r]), result[r][t]);
      }
    }
    w += per_group;
    q += x.stride * kGroup;
    scale += x.stride, offset += x.stride, start += x.stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
    for (int t = 0; t < Tiles; t++) store(o.out + (row + r) * o.stride + t * kTileRows, result[r][t]);
}

// `block` with a row count known only at run time.
template <class Format, int Tiles, int MaxRows>
inline void block_rows(int rows, const uint8_t* w, int64_t between, int64_t per_group, const Activations& x, Range groups,
                       int row, const Output& o, Fetch fetch) {
  if constexpr (MaxRows > 1)
    if (rows < MaxRows) return block_rows<Format, Tiles, MaxRows - 1>(rows, w, between, per_group, x, groups, row, o, fetch);
  block<Format, MaxRows, Tiles>(w, between, per_group, x, groups, row, o, fetch);
}

// Few rows: straight from the packed stream, 16 outputs at a time; the tile stays in L1 for further passes. Unpacking
// it first would leave memory idle meanwhile.
constexpr int kDirectMax = 16;

template <class Format>
void linear_direct(const uint8_t* stripe, int64_t stripe_size, const Activations& x, int rows, const Output& o) {
  const int groups = x.cols / kGroup;
  for (int t = 0; t < kUnitRows / kTileRows; t++, stripe += stripe_size) {
    Output tile{o.out + t * kTileRows, o.stride, o.add};
    const int passes = (rows + kDirectRows - 1) / kDirectRows;
    for (int row = 0, pass = 0; row < rows; pass++) {
      int count = (rows - row + passes - pass - 1) / (passes - pass);  // equal passes: no lone last row
      block_rows<Format, 1, kDirectRows>(count, stripe, 0, Format::kBytes, x, {0, groups}, row, tile,
                                         share_of(stripe + kPrefetchAhead, Format::kBytes, groups, pass, passes));
      row += count;
    }
  }
}

// Brings what the next block adds to, or writes over: rows are too far apart for the hardware to see it coming.
inline void fetch_output(const Output& o, int row, int end) {
  for (; row < end; row++)
    for (int i = 0; i < kUnitRows; i += 16) __builtin_prefetch(o.out + row * o.stride + i, 1, 3);
}

// Many rows: unpacked to L1, as many groups as fit there, then blocks of rows, during which the next unit comes to L2.
template <class Format>
void linear_wide(const uint8_t* stripe, int64_t stripe_size, const Activations& x, int rows, const Output& o,
                 uint8_t* wide) {
  constexpr int tiles = kUnitRows / kTileRows;
  const int groups = x.cols / kGroup, pieces = (groups + kWideGroups - 1) / kWideGroups;
  const uint8_t* next = stripe + tiles * stripe_size;
  for (int piece = 0, done = 0; piece < pieces; piece++) {
    const Range range{done, (groups - done + pieces - piece - 1) / (pieces - piece)};
    for (int t = 0; t < tiles; t++)
      for (int g = 0; g < range.count; g++)
        Wide<Format>::unpack(stripe + t * stripe_size + (int64_t)(done + g) * Format::kBytes,
                             wide + (g * tiles + t) * kWideBytes);
    const int parts = (rows + kWideRows - 1) / kWideRows * (tiles / kWideTiles);
    for (int row = 0, part = 0; row < rows;) {
      const int left = std::min(rows, (row / kPanelRows + 1) * kPanelRows) - row;
      int count = left < kWideRows ? left : kWideRows;
      if (left > kWideRows && left < 2 * kWideRows) count = (left + 1) / 2;
      fetch_output(o, row + count, std::min(rows, row + count + kWideRows));
      for (int t = 0; t < tiles; t += kWideTiles, part++)
        block_rows<Wide<Format>, kWideTiles, kWideRows>(
            count, wide + t * kWideBytes, kWideBytes, tiles * kWideBytes, x, range, row,
            Output{o.out + t * kTileRows, o.stride, o.add || piece > 0},
            share_of(next, tiles * Format::kBytes, range.count, part, parts));
      row += count;
    }
    done += range.count;
    next += (int64_t)tiles * Format::kBytes * range.count;
  }
}

template <class Format>
void linear_unit(const BlMatrix& m, int unit, const Activations& x, int rows, const Output& o, const ThreadScratch& s) {
  const int64_t size = stripe_bytes(m);
  const uint8_t* stripe = m.data + unit * 2 * size;
  if (rows <= kDirectMax)
    linear_direct<Format>(stripe, size, x, rows, o);
  else
    linear_wide<Format>(stripe, size, x, rows, o, s.wide);
}

void linear(const BlMatrix& m, int unit, const Activations& x, int rows, float* out, int64_t stride, bool add,
            const ThreadScratch& s) {
  Output o{out, stride, add};
  if (m.format == BL_W4)
    linear_unit<W4>(m, unit, x, rows, o, s);
  else
    linear_unit<W8>(m, unit, x, rows, o, s);
}

}  // namespace
