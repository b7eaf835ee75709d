// The C interface between Python (ctypes, ../library.py mirrors these structs) and the engine. Pointers are borrowed:
// the caller keeps weights, norms and tables alive as long as the engine.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { BL_W4 = 0, BL_W8 = 1 };              // packed weight formats, see layout.h
enum { BL_KV_INT8 = 0, BL_KV_FP32 = 1 };     // of the KV cache
enum { BL_SILU = 0, BL_GELU_TANH = 1 };     // activation of the gate

typedef struct {
  const uint8_t* data;  // packed tiles, 64-byte aligned
  int32_t rows;         // outputs, padded to a multiple of 32
  int32_t cols;         // inputs, a multiple of 32
  int32_t format;
  int32_t reserved;
} BlMatrix;

typedef struct {
  BlMatrix qkv;               // queries, keys, values on top of each other; heads laid out for rotation by halves
  BlMatrix attention_output;
  BlMatrix gate_up;           // 32 gate rows, 32 up rows, 32 gate rows, ...
  BlMatrix down;
  const float* attention_norm;       // [hidden]
  const float* ffn_norm;             // [hidden]
  // What only some architectures have; NULL otherwise.
  const float* qkv_bias;             // [qkv rows]
  const float* query_norm;           // [head_dim]
  const float* key_norm;             // [head_dim]
  const float* post_attention_norm;  // [hidden]
  const float* post_ffn_norm;        // [hidden]
  int32_t window;                    // tokens a query sees, itself included; 0: all
  int32_t rope;                      // which row of rope_frequencies
} BlLayer;

typedef struct {
  int32_t num_layers, hidden, ffn, heads, kv_heads, head_dim, vocab, num_ropes, activation, kv_format;
  float norm_eps, attention_scale, embedding_scale, reserved2;
  const float* rope_frequencies;  // [num_ropes][head_dim / 2] radians per position
  const BlLayer* layers;
  BlMatrix embedding, output;
  const float* final_norm;  // [hidden]
} BlModel;

// What changes logits before the draw, for requests that ask for it.
typedef struct {
  double frequency_penalty, presence_penalty, repetition_penalty;
  const int32_t* history;      // [prompt_tokens + drawn_tokens] all tokens of the request; both 0 without penalties
  int64_t prompt_tokens, drawn_tokens;
  const int32_t* bias_tokens;  // [num_biases] each token once
  const double* biases;
  int64_t num_biases;
} BlShaping;

// Log-probabilities that go with a draw: of the softmax of the model's own logits, before bias, penalties and temperature.
typedef struct {
  int32_t* top_tokens;  // [num_top] out: the most likely tokens, most likely first, of equals the lower id first
  float* top;           // [num_top] out: theirs
  int32_t num_top;      // 0 .. vocab
  float drawn;          // out: that of the drawn token
} BlLogprobs;

typedef struct {
  double temperature;  // 0: greedy
  double top_p;
  double min_p;        // 0: all tokens
  uint64_t seed;
  uint64_t index;      // tokens the request has drawn before: with the seed it fixes the draw
  int64_t top_k;       // 0: all tokens
  const BlShaping* shaping;  // NULL: none
  BlLogprobs* logprobs;      // NULL: not asked for
  const uint32_t* mask;      // [(vocab + 31) / 32] token t may be drawn if bit t % 32 of word t / 32 is set; NULL: all may
} BlSampling;

typedef struct {
  int32_t num_chunks;
  int32_t num_samples;
  const int32_t* tokens;        // of all chunks, one after the other
  const int32_t* chunk_tokens;  // [num_chunks] how many of them each chunk has, at least 1
  const int32_t* chunk_start;   // [num_chunks] position of the first
  const int32_t* chunk_blocks;  // [num_chunks + 1] where the chunk's block table begins in `blocks`; then where all end
  const int32_t* blocks;        // KV block ids, BL_BLOCK_TOKENS positions each
  int64_t num_blocks;           // usable blocks of the cache
  const int32_t* sample_rows;   // [num_samples] index into `tokens` of the tokens that are continued
  const BlSampling* sampling;   // [num_samples]
  int32_t* sampled;             // [num_samples] out: token ids; -1: the logits are not all finite
  float* logits;                // [num_samples][vocab] out, or NULL
} BlStep;

typedef struct BlEngine BlEngine;

#define BL_BLOCK_TOKENS 32

// `isa`: "portable", "avx2", "avx512", or "" for the best this CPU runs. NULL when the ISA cannot run here, memory is
// short or a thread cannot start.
BlEngine* bl_create(const BlModel* model, int32_t threads, const char* isa);
void bl_destroy(BlEngine*);
const char* bl_isa(const BlEngine*);
int32_t bl_isa_runs(const char* isa);  // 1 when this CPU has all that the named path needs

// KV cache: address space for max_blocks, committed when first written, in huge pages (blocks lie anywhere, and a page
// walk per tile costs more than the tile): at most 2 MB more than the blocks need. Release gives blocks >= n back.
int32_t bl_kv_reserve(BlEngine*, int64_t max_blocks);
int32_t bl_kv_release_from(BlEngine*, int64_t num_blocks);
int64_t bl_kv_block_bytes(const BlModel*);

// Scratch memory of one step of `tokens` tokens of which `samples` are continued.
int64_t bl_scratch_bytes(const BlModel*, int32_t threads, int64_t tokens, int64_t samples);

// One engine step. 0; -1: scratch memory is short; -2: a token, block or row index is out of range, or a block table
// is too short.
int32_t bl_step(BlEngine*, const BlStep*);

// How many phases a step has when BL_PROFILE was compiled in, else 0. `seconds`, unless NULL: [threads][phases][2] since
// the last call: CPU time of the work, and time that the thread waited or had no core. Names are for phases below that count.
int32_t bl_profile(BlEngine*, double* seconds);
const char* bl_phase_name(int32_t phase);

// Packing. `type` is the ggml tensor type of `source`, one row after the other; source row row_map[i] goes to row
// first + i of the packed matrix of `format`. Rows never packed stay as they are: zero, from bl_map. -1: unknown type, or
// one that BL_W4 does not hold. -2: values that are not finite, or beyond 127 times the largest fp16.
int64_t bl_packed_bytes(int32_t format, int64_t rows, int64_t cols);
int32_t bl_packed_format(int32_t type);
int32_t bl_pack_rows(int32_t type, const uint8_t* source, int64_t cols, const int32_t* row_map, int64_t count,
                     int64_t first, int32_t format, uint8_t* packed);
// Back to fp32: row `row` of a packed matrix.
void bl_unpack_row(const BlMatrix* matrix, int64_t row, float* out);

void* bl_map(int64_t bytes);  // zeroed, 2 MB aligned, huge pages asked for; NULL when refused
void bl_unmap(void* address, int64_t bytes);

// Bytes per second that `threads` threads read (copy = 0) or read plus write (copy = 1) over `buffer`, within about
// `seconds`; 0 when a thread cannot start.
double bl_bandwidth(uint8_t* buffer, int64_t bytes, int32_t threads, double seconds, int32_t copy);

// The draw of one sample, in [0, 1): see sample.h.
double bl_uniform(uint64_t seed, uint64_t index);

#ifdef __cplusplus
}
#endif
