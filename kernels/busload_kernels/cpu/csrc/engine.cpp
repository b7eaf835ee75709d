// One engine step: token ids in, sampled token ids out. All threads walk through the same phases together; `share`
// splits each of them and ends it with a barrier.
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <vector>

#include "sample.h"
#include "team.h"

namespace busload {
namespace {

// Up to so many rows every thread norms and quantises for itself: cheaper than a barrier.
constexpr int kOwnRows = 4;

// So many rows are taken through all units of a matrix before the next: their activations stay in a core's L2 cache, and
// unpacking the weights once more for each block of rows costs little beside them.
constexpr int kBlockInputs = 3 << 17, kLeastBlock = 2;  // of panels
int row_block(int cols) { return std::max(kBlockInputs / cols / kPanelRows, kLeastBlock) * kPanelRows; }

// Segments of decoding rows whose sums can be kept apart in one step, counted per key-value head; rows beyond are done by
// one thread each.
constexpr int kPartials = 512;

struct Buffers {
  float *x, *last, *qkv, *branch, *cosine, *sine, *logits;
  Activations normed, attended, last_attended, gated;
  Queries queries;
  float* partials;          // [kPartials][attend_sums]
  int32_t* partials_done;   // [kPartials] of the same row and head, counted at the first one
  Activations* own;         // [threads], kOwnRows rows
  ThreadScratch* scratch;   // [threads]
  SampleScratch* sampling;  // [threads]
};

// Hands out 64-byte aligned pieces; from a null base it only counts.
struct Arena {
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* piece = base ? (T*)(base + used) : nullptr;
    used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

Activations take_activations(Arena& arena, int64_t rows, int cols) {
  Activations a{};
  a.cols = cols;
  a.stride = rows < kPanelRows ? (int)rows | 1 : kPanelRows;  // odd: groups a power of two apart would share cache sets
  const int64_t groups = panels(rows) * a.stride * (cols / kGroup);
  a.q = arena.take<int8_t>(groups * kGroup);
  a.scale = arena.take<float>(groups);
  a.offset = arena.take<float>(groups);
  a.start = arena.take<int32_t>(groups);
  return a;
}

// The one place that says which buffers a step needs; `bl_scratch_bytes` counts with it.
Buffers lay_out(Arena& arena, const BlModel& m, int threads, int64_t tokens, int64_t samples) {
  const int attended = m.heads * m.head_dim;
  const int64_t rows = std::max(tokens, samples);
  Buffers b{};
  b.own = arena.take<Activations>(threads);
  b.scratch = arena.take<ThreadScratch>(threads);
  b.sampling = arena.take<SampleScratch>(threads);
  for (int id = 0; id < threads; id++) {
    const Activations own = take_activations(arena, kOwnRows, m.hidden);
    const ThreadScratch scratch{arena.take<uint8_t>(kWideGroups * 2 * kWideBytes), arena.take<float>(std::min<int64_t>(rows, row_block(m.hidden)) * 2 * kUnitRows)};
    const SampleScratch sampling{arena.take<float>(m.vocab), arena.take<int32_t>(m.vocab)};
    if (arena.base) b.own[id] = own, b.scratch[id] = scratch, b.sampling[id] = sampling;
  }
  b.x = arena.take<float>(tokens * m.hidden);
  b.last = arena.take<float>(samples * m.hidden);
  b.branch = arena.take<float>(rows * m.hidden);
  b.qkv = arena.take<float>(tokens * m.layers[0].qkv.rows);
  b.cosine = arena.take<float>(m.num_ropes * tokens * m.head_dim / 2);
  b.sine = arena.take<float>(m.num_ropes * tokens * m.head_dim / 2);
  b.normed = take_activations(arena, rows, m.hidden);
  b.attended = take_activations(arena, tokens, attended);
  b.last_attended = take_activations(arena, samples, attended);
  b.gated = take_activations(arena, rows, m.ffn);
  b.queries.q = arena.take<int8_t>(tokens * attended);
  b.queries.scale = arena.take<float>(tokens * m.heads);
  b.queries.sum = arena.take<int32_t>(tokens * m.heads);
  b.queries.rotated = b.qkv, b.queries.width = m.layers[0].qkv.rows;
  b.partials = arena.take<float>((int64_t)kPartials * attend_sums(m.head_dim, m.heads / m.kv_heads));
  b.partials_done = arena.take<int32_t>(kPartials);
  b.logits = arena.take<float>(samples * m.output.rows);
  return b;
}

struct Row {
  int position, chunk;
};
struct Block {  // rows that attend together
  int row, count, chunk;
  int segment, segments;  // the only one of so many segments of the context; -1: all
  int partials;           // where the sums of the segments are kept
};

// What layers add to: `rows` rows of the hidden size.
struct Stream {
  float* x;
  int rows;
};

}  // namespace
}  // namespace busload

using namespace busload;

struct BlEngine {
  BlEngine(const BlModel& m, int threads, const Kernels* k) : model(m), kernels(k), team(threads), profile(threads) {
    layers.assign(m.layers, m.layers + m.num_layers);
    model.layers = layers.data();
    layer_bytes = m.kv_heads * kv_tile_bytes(m);
    block_bytes = bl_kv_block_bytes(&m);
  }
  ~BlEngine() {
    bl_unmap(kv, kv_bytes);
    bl_unmap(memory, memory_bytes);
  }

  BlModel model;
  std::vector<BlLayer> layers;
  const Kernels* kernels;
  Team team;
  Profile profile;
  uint8_t* kv = nullptr;
  int64_t kv_bytes = 0, layer_bytes, block_bytes;
  char* memory = nullptr;
  int64_t memory_bytes = 0;

  std::vector<Row> rows;
  std::vector<int> runs;                   // first rows of tokens whose values share lines of the cache; the end
  std::vector<Block> blocks, last_blocks;  // last: with rows that are continued

  bool make_room(int64_t tokens, int64_t samples, Buffers& buffers) {
    Arena count{nullptr};
    lay_out(count, model, team.size(), tokens, samples);
    if (count.used > memory_bytes) {
      bl_unmap(memory, memory_bytes);
      memory_bytes = count.used;
      memory = (char*)bl_map(memory_bytes);
      if (!memory) return memory_bytes = 0, false;
    }
    Arena arena{memory};
    buffers = lay_out(arena, model, team.size(), tokens, samples);
    return true;
  }

  // Which rows there are and which attend together; false when an index is out of range.
  bool describe(const BlStep& step) {
    const int group = model.heads / model.kv_heads, at_once = kAttendRows / group;
    const auto within = [](const int32_t* values, int64_t count, int64_t limit) {
      return std::all_of(values, values + count, [=](int32_t v) { return 0 <= v && v < limit; });
    };
    int partials = 0;
    rows.clear(), blocks.clear(), runs.clear();
    for (int c = 0; c < step.num_chunks; c++) {
      const int first = (int)rows.size(), count = step.chunk_tokens[c], start = step.chunk_start[c];
      if (count < 1 || start < 0) return false;
      for (int i = 0; i < count; i++) {
        if (i == 0 || (start + i) % 4 == 0) runs.push_back(first + i);
        rows.push_back({start + i, c});
      }
      const int segments = start / kSegmentTokens + 1;
      if (count == 1 && segments > 1 && partials + segments * model.kv_heads <= kPartials) {
        for (int s = 0; s < segments; s++) blocks.push_back({first, 1, c, s, segments, partials});
        partials += segments * model.kv_heads;
      } else {
        for (int i = 0; i < count; i += at_once) blocks.push_back({first + i, std::min(at_once, count - i), c, -1, 1, 0});
      }
      const int needed = (start + count - 1) / kBlockTokens + 1;
      if (step.chunk_blocks[c + 1] - step.chunk_blocks[c] < needed) return false;
      if (!within(step.blocks + step.chunk_blocks[c], needed, step.num_blocks)) return false;
    }
    for (int s = 0; s < step.num_samples; s++) {
      if (const BlLogprobs* logprobs = step.sampling[s].logprobs)
        if (logprobs->num_top < 0 || logprobs->num_top > model.vocab) return false;
      if (const BlShaping* shaping = step.sampling[s].shaping)
        if (!within(shaping->history, shaping->prompt_tokens + shaping->drawn_tokens, model.vocab) ||
            !within(shaping->bias_tokens, shaping->num_biases, model.vocab))
          return false;
    }
    const int64_t tokens = (int64_t)rows.size();
    runs.push_back((int)tokens);
    if (!within(step.tokens, tokens, model.vocab) || !within(step.sample_rows, step.num_samples, tokens)) return false;
    std::vector<bool> continued(tokens);
    for (int i = 0; i < step.num_samples; i++) continued[step.sample_rows[i]] = true;
    last_blocks.clear();
    for (const Block& block : blocks) {
      const auto first = continued.begin() + block.row, end = first + block.count;
      if (std::find(first, end, true) != end) last_blocks.push_back(block);
    }
    return true;
  }
};

namespace busload {
namespace {

// One step while it runs, shared by all threads.
struct Pass {
  BlEngine& engine;
  const BlStep& step;
  const Buffers& buffers;
  const BlModel& m = engine.model;
  const Kernels& k = *engine.kernels;
  Team& team = engine.team;
  const int tokens = (int)engine.rows.size();
  const Stream all{buffers.x, tokens}, last{buffers.last, step.num_samples};

  void operator()(int id) {
    engine.profile.begin(id);
    embed(id);
    end(id, kEmbed);
    for (int l = 0; l < m.num_layers - 1; l++) {
      write_keys(id, m.layers[l], l);
      attend(id, m.layers[l], l, engine.blocks);
      add_linear(id, all, m.layers[l].attention_output, buffers.attended, m.layers[l].post_attention_norm, kOutput);
      feed_forward(id, all, m.layers[l]);
    }
    const int l = m.num_layers - 1;
    write_keys(id, m.layers[l], l);
    if (step.num_samples) continue_rows(id, m.layers[l], l);
  }

  void end(int id, Phase phase) { engine.profile.end(id, phase, team.spun(id)); }
  const int32_t* table(int chunk) const { return step.blocks + step.chunk_blocks[chunk]; }
  float* row(float* base, int64_t index, int cols) const { return base + index * cols; }

  void embed(int id) {
    const int half = m.head_dim / 2;
    team.share(id, tokens, [&](int r) {
      float* x = row(buffers.x, r, m.hidden);
      bl_unpack_row(&m.embedding, step.tokens[r], x);
      for (int i = 0; i < m.hidden; i++) x[i] *= m.embedding_scale;
      for (int p = 0; p < m.num_ropes; p++)
        for (int i = 0; i < half; i++) {
          const double angle = (double)engine.rows[r].position * m.rope_frequencies[p * half + i];
          const int64_t at = ((int64_t)p * tokens + r) * half + i;
          buffers.cosine[at] = (float)cos(angle), buffers.sine[at] = (float)sin(angle);
        }
    });
  }

  static void copy_row(const Activations& from, int64_t row, const Activations& to, int64_t to_row) {
    for (int g = 0; g < from.cols / kGroup; g++) {
      const int64_t i = from.index(row, g), j = to.index(to_row, g);
      memcpy(to.q + j * kGroup, from.q + i * kGroup, kGroup);
      to.scale[j] = from.scale[i], to.offset[j] = from.offset[i], to.start[j] = from.start[i];
    }
  }

  // f(item, first, rows) for all items and rows: one block of whole panels after the other, as `cols` inputs allow.
  template <class F>
  void share_blocks(int id, int rows, int cols, int items, F f) {
    const int most = row_block(cols), blocks = (rows + most - 1) / most;
    team.share(id, blocks * items, [&](int i) {
      const int64_t block = i / items;
      const int first = (int)(panels(rows) * block / blocks) * kPanelRows;
      const int end = std::min(rows, (int)(panels(rows) * (block + 1) / blocks) * kPanelRows);
      f(i % items, first, end - first);
    });
  }

  // RMSNorm and quantisation.
  const Activations& norm(int id, const Stream& stream, const float* weight) {
    const bool own = stream.rows <= kOwnRows;
    const Activations& out = own ? buffers.own[id] : buffers.normed;
    auto one = [&](int r) { k.norm_quantise(row(stream.x, r, m.hidden), weight, m.norm_eps, out, r); };
    if (own)
      for (int r = 0; r < stream.rows; r++) one(r);
    else
      team.share(id, stream.rows, one);
    end(id, kNorm);
    return out;
  }

  // x += linear(in), by way of RMSNorm where the architecture has one there.
  void add_linear(int id, const Stream& stream, const BlMatrix& matrix, const Activations& in, const float* post_norm,
                  Phase phase) {
    float* out = post_norm ? buffers.branch : stream.x;
    share_blocks(id, stream.rows, matrix.cols, matrix.rows / kUnitRows, [&](int unit, int first, int count) {
      k.linear(matrix, unit, in.from_row(first), count, row(out, first, m.hidden) + unit * kUnitRows, m.hidden, !post_norm,
               buffers.scratch[id]);
    });
    if (post_norm)
      team.share(id, stream.rows, [&](int r) {
        k.norm_add(row(stream.x, r, m.hidden), row(out, r, m.hidden), post_norm, m.norm_eps, m.hidden);
      });
    end(id, phase);
  }

  // Queries, keys and values of all rows; keys and values go to the cache.
  void write_keys(int id, const BlLayer& layer, int index) {
    const int half = m.head_dim / 2, width = layer.qkv.rows;
    uint8_t* kv = engine.kv + index * engine.layer_bytes;
    const Activations& normed = norm(id, all, layer.attention_norm);
    const int units = width / kUnitRows;
    share_blocks(id, tokens, m.hidden, units, [&](int unit, int first, int count) {
      for (int r = first + count * unit / units; r < first + count * (unit + 1) / units; r++) fetch_tile(kv, r);
      k.linear(layer.qkv, unit, normed.from_row(first), count, row(buffers.qkv, first, width) + unit * kUnitRows, width, false,
               buffers.scratch[id]);
    });
    end(id, kQkv);
    team.share(id, (int)engine.runs.size() - 1, [&](int run) {
      for (int r = engine.runs[run]; r < engine.runs[run + 1]; r++) {
        const int64_t angle = ((int64_t)layer.rope * tokens + r) * half;
        k.rotate_store(m, layer, row(buffers.qkv, r, width), {buffers.cosine + angle, buffers.sine + angle}, buffers.queries,
                       r, tile_of(kv, r), engine.rows[r].position % kBlockTokens);
      }
    });
    end(id, kRotate);
  }

  // Where row r's keys and values go: the tile of kv head 0.
  uint8_t* tile_of(uint8_t* kv, int r) const {
    const Row& at = engine.rows[r];
    return kv + table(at.chunk)[at.position / kBlockTokens] * engine.block_bytes;
  }

  // Brings the tiles that row r will be written to, and then read from, while the arithmetic is busy elsewhere.
  void fetch_tile(uint8_t* kv, int r) const {
    const uint8_t* tile = tile_of(kv, r);
    if (r > 0 && tile == tile_of(kv, r - 1)) return;
    for (int64_t i = 0; i < m.kv_heads * kv_tile_bytes(m); i += 64) __builtin_prefetch(tile + i, 1, 2);
  }

  void attend(int id, const BlLayer& layer, int index, const std::vector<Block>& blocks) {
    const uint8_t* kv = engine.kv + index * engine.layer_bytes;
    const int jobs = (int)blocks.size() * m.kv_heads;
    team.share(id, jobs, [&](int i) {
      AttendJob job = attend_job(layer, kv, blocks, i);
      if (i + 1 < jobs) first_tiles(attend_job(layer, kv, blocks, i + 1), job.next);
      k.attend(job);
      if (const Block& block = blocks[i / m.kv_heads]; block.segments > 1) {
        const int first = first_partial(block, job.kv_head);
        int32_t& done = buffers.partials_done[first];
        if (__atomic_add_fetch(&done, 1, __ATOMIC_ACQ_REL) < block.segments) return;
        done = 0;
        k.attend_join(job, partial(first));
      }
    });
    end(id, kAttend);
  }

  AttendJob attend_job(const BlLayer& layer, const uint8_t* kv, const std::vector<Block>& blocks, int index) const {
    const Block& block = blocks[index / m.kv_heads];
    const int head = index % m.kv_heads;
    return {&m, buffers.queries, block.row, block.count, engine.rows[block.row].position, head, layer.window, block.segment,
            block.segments > 1 ? partial(first_partial(block, head) + block.segment) : nullptr,
            table(block.chunk), kv, engine.block_bytes, {}, buffers.attended};
  }
  int first_partial(const Block& block, int head) const { return block.partials + head * block.segments; }
  float* partial(int index) const {
    return buffers.partials + index * (int64_t)attend_sums(m.head_dim, m.heads / m.kv_heads);
  }

  static void first_tiles(const AttendJob& job, const uint8_t** tiles) {
    const int oldest = job.window && job.position >= job.window ? (job.position - job.window + 1) / kBlockTokens : 0;
    const int first = std::max(oldest, job.segment * kSegmentBlocks);
    const int last = (job.position + job.count - 1) / kBlockTokens;
    for (int i = 0; i < kSpanBlocks && first + i <= last; i++)
      tiles[i] = job.kv + job.blocks[first + i] * job.block_bytes + job.kv_head * kv_tile_bytes(*job.model);
  }

  void feed_forward(int id, const Stream& stream, const BlLayer& layer) {
    const Activations& normed = norm(id, stream, layer.ffn_norm);
    const ThreadScratch& scratch = buffers.scratch[id];
    share_blocks(id, stream.rows, m.hidden, m.ffn / kGroup, [&](int group, int first, int count) {
      for (int part = 0; part < 2; part++)
        k.linear(layer.gate_up, 2 * group + part, normed.from_row(first), count, scratch.gate + part * kUnitRows,
                 2 * kUnitRows, false, scratch);
      k.gate(scratch.gate, count, m.activation, buffers.gated.from_row(first), group);
    });
    end(id, kGateUp);
    add_linear(id, stream, layer.down, buffers.gated, layer.post_ffn_norm, kDown);
  }

  // The last layer from its attention on, and what follows, only for the rows that are continued.
  void continue_rows(int id, const BlLayer& layer, int index) {
    attend(id, layer, index, engine.last_blocks);
    team.share(id, last.rows, [&](int s) {
      memcpy(row(last.x, s, m.hidden), row(buffers.x, step.sample_rows[s], m.hidden), m.hidden * sizeof(float));
      copy_row(buffers.attended, step.sample_rows[s], buffers.last_attended, s);
    });
    add_linear(id, last, layer.attention_output, buffers.last_attended, layer.post_attention_norm, kOutput);
    feed_forward(id, last, layer);
    const int count = step.num_samples, width = m.output.rows;
    const Activations& normed = norm(id, last, m.final_norm);
    team.share(id, width / kUnitRows, [&](int unit) {
      k.linear(m.output, unit, normed, count, buffers.logits + unit * kUnitRows, width, false, buffers.scratch[id]);
    });
    end(id, kHead);
    team.share(id, count, [&](int s) {
      float* logits = row(buffers.logits, s, width);
      if (step.logits) memcpy(row(step.logits, s, m.vocab), logits, (size_t)m.vocab * sizeof(float));
      step.sampled[s] = draw(k, logits, m.vocab, step.sampling[s], buffers.sampling[id]);
    });
    end(id, kSample);
  }
};

const Kernels* find_kernels(const char* isa) {
  const Kernels* all[] = {avx512_kernels(), avx2_kernels(), portable_kernels()};
  for (const Kernels* k : all)
    if (k && bl_isa_runs(k->name) && (!*isa || !strcmp(isa, k->name))) return k;
  return nullptr;
}

}  // namespace
}  // namespace busload

extern "C" {

BlEngine* bl_create(const BlModel* model, int32_t threads, const char* isa) {
  const Kernels* kernels = find_kernels(isa);
  if (!kernels) return nullptr;
  try {
    return new BlEngine(*model, threads, kernels);
  } catch (const std::exception&) {  // no memory, no thread
    return nullptr;
  }
}

void bl_destroy(BlEngine* engine) { delete engine; }

const char* bl_isa(const BlEngine* engine) { return engine->kernels->name; }

int32_t bl_profile(BlEngine* engine, double* seconds) {
  if (seconds) engine->profile.take(seconds);
  return Profile::kOn ? kPhases : 0;
}

const char* bl_phase_name(int32_t phase) { return kPhaseNames[phase]; }

int64_t bl_kv_block_bytes(const BlModel* m) { return m->num_layers * m->kv_heads * kv_tile_bytes(*m); }

int32_t bl_kv_reserve(BlEngine* engine, int64_t max_blocks) {
  bl_unmap(engine->kv, engine->kv_bytes);
  engine->kv_bytes = max_blocks * engine->block_bytes;
  engine->kv = (uint8_t*)bl_map(engine->kv_bytes);
  return engine->kv ? 0 : (engine->kv_bytes = 0, -1);
}

int32_t bl_kv_release_from(BlEngine* engine, int64_t num_blocks) {
  const int64_t begin = (num_blocks * engine->block_bytes + 4095) / 4096 * 4096;
  if (begin >= engine->kv_bytes) return 0;
  return madvise(engine->kv + begin, engine->kv_bytes - begin, MADV_DONTNEED);
}

int64_t bl_scratch_bytes(const BlModel* model, int32_t threads, int64_t tokens, int64_t samples) {
  Arena arena{nullptr};
  lay_out(arena, *model, threads, tokens, samples);
  return arena.used;
}

int32_t bl_step(BlEngine* engine, const BlStep* step) {
  try {
    if (step->num_blocks * engine->block_bytes > engine->kv_bytes || !engine->describe(*step)) return -2;
    Buffers buffers;
    if (engine->rows.empty()) return 0;
    if (!engine->make_room(engine->rows.size(), step->num_samples, buffers)) return -1;
    memset(buffers.partials_done, 0, kPartials * sizeof(int32_t));
    Pass pass{*engine, *step, buffers};
    engine->team.run(pass);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"
