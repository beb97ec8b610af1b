// One step of a Llama-shaped model in bf16: embedding, decoder layers, final norm and head, in one parallel region.
//
//   x -> norm -> q|k|v -> q/k norm, rope, KV write -> attention -> o, + x -> norm -> gate|up, silu -> down, + x
//
// Every value is rounded to bf16 where eager transformers rounds it. Threads share panels of the linears, rows of the
// norms and units of the attention, and meet between stages. It does not know torch, requests or sampling.
#pragma once

#include <omp.h>
#include <sched.h>

#include <chrono>
#include <cmath>

#include "attention_cpu.h"

namespace tokenstream {

// Where threads meet. Each spins for some microseconds, for stages are short; then it lets others run, for the cores are
// shared and the thread waited for may be on this one; and then it sleeps.
class Barrier {
 public:
  void wait(int threads) {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      phase_.notify_all();
      return;
    }
    for (int i = 0; i < kSpins + kYields; ++i) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      if (i < kSpins)
        _mm_pause();
      else
        sched_yield();
    }
    while (phase_.load(std::memory_order_acquire) == phase) phase_.wait(phase, std::memory_order_acquire);
  }

 private:
  static constexpr int kSpins = 50;
  static constexpr int kYields = 1000;

  alignas(kCacheLine) std::atomic<int> arrived_{0};
  alignas(kCacheLine) std::atomic<int> phase_{0};
};

constexpr int kLinears = 4;     // of a layer
constexpr int kOwnRows = 32;    // up to so many, every thread norms all rows for itself: cheaper than to meet

struct Layer {
  const bf16* input_norm;
  Packed qkv;
  const bf16* qkv_bias;  // or null
  const bf16* q_norm;    // or null, as k_norm
  const bf16* k_norm;
  Packed o;
  const bf16* post_norm;
  Packed gate_up;  // 16 columns of gate, 16 of up, and so on
  Packed down;
  bf16* key;  // [slots, kv_heads, dim]
  bf16* value;
  AttentionShape shape;
};

struct Model {
  const bf16* embedding;  // [vocabulary, hidden]
  const bf16* cos;        // [positions, dim / 2]
  const bf16* sin;
  std::vector<Layer> layers;
  const bf16* norm;
  Packed head;
  float eps;

  int hidden() const { return head.depth; }
};

// One step's rows. Shapes as in attention_cpu.h; head_rows: the rows whose logits are wanted.
struct Step {
  int rows;
  int sequences;
  const std::int64_t* token_ids;
  const std::int64_t* positions;
  const std::int64_t* slots;
  const std::int32_t* query_start;
  const std::int32_t* context;
  const std::int32_t* block_table;
  std::int64_t table_stride;
  const std::int64_t* head_rows;
  int heads;
};

// Seconds that thread 0 spent in each kind of stage, waiting for the others included.
struct Seconds {
  double linear, attention, small, head;
};

// y = bf16(weight * bf16(x / sqrt(mean(x^2) + eps))): rows [range) of x and y [rows, width].
inline void rms_norm(bf16* y, const bf16* x, std::ptrdiff_t x_stride, std::ptrdiff_t y_stride, const bf16* weight,
                     int width, float eps, Range range) {
  for (int row = range.begin; row < range.end; ++row) {
    const bf16* from = x + row * x_stride;
    bf16* to = y + row * y_stride;
    __m512 squares = _mm512_setzero_ps();
    for (int c = 0; c < width; c += kLanes) {
      const __m512 v = load(from + c, lanes(width - c));
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
    for (int c = 0; c < width; c += kLanes) {
      const __mmask16 m = lanes(width - c);
      const __m512 v = rounded(_mm512_mul_ps(load(from + c, m), scale));
      store(to + c, _mm512_mul_ps(v, load(weight + c, m)), m);
    }
  }
}

// x = bf16(bf16(x * cos) + bf16(rotate_half(x) * sin)) in place, x [dim]; cos and sin [dim / 2] serve both halves.
inline void rope(bf16* x, const bf16* cos, const bf16* sin, int dim) {
  const int half = dim / 2;
  for (int d = 0; d < half; d += kLanes) {
    const __mmask16 m = lanes(half - d);
    const __m512 a = load(x + d, m), b = load(x + half + d, m), c = load(cos + d, m), s = load(sin + d, m);
    store(x + d, _mm512_sub_ps(rounded(_mm512_mul_ps(a, c)), rounded(_mm512_mul_ps(b, s))), m);
    store(x + half + d, _mm512_add_ps(rounded(_mm512_mul_ps(b, c)), rounded(_mm512_mul_ps(a, s))), m);
  }
}

// Rows of the residual stream and of what lies between stages.
struct Activations {
  bf16* x;         // [rows, hidden]
  bf16* normed;    // [rows, hidden], and the head's rows behind the last layer
  bf16* qkv;       // [rows, (heads + 2 kv_heads) dim]
  bf16* attended;  // [rows, heads dim]
  bf16* inner;     // [rows, intermediate]
};

// One thread's view of a step; all threads run the same stages in the same order.
class Worker {
 public:
  Worker(const Model& model, const Step& step, const Activations& a, const std::vector<Unit>& units,
         std::vector<std::atomic<int>>& counters, std::vector<Panels>& panels, Barrier& barrier,
         AttentionScratch& scratch, bf16* own, int thread, int threads, Seconds* seconds)
      : model_(model),
        step_(step),
        a_(a),
        units_(units),
        counters_(counters),
        panels_(panels),
        barrier_(barrier),
        scratch_(scratch),
        own_(own),
        thread_(thread),
        threads_(threads),
        seconds_(seconds),
        mark_(Clock::now()) {}

  void run(bf16* logits) {
    embed();
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer& layer = model_.layers[i];
      const Packed& following = i + 1 < model_.layers.size() ? model_.layers[i + 1].qkv : model_.head;
      attention_half(layer, counters_[i]);
      mlp_half(layer, following);
    }
    head(logits);
  }

 private:
  using Clock = std::chrono::steady_clock;

  void embed() {
    const int hidden = model_.hidden();
    for (int row = rows().begin; row < rows().end; ++row)
      std::memcpy(a_.x + static_cast<std::ptrdiff_t>(row) * hidden, model_.embedding + step_.token_ids[row] * hidden,
                  2 * static_cast<std::size_t>(hidden));
    if (own_) meet(&Seconds::small);  // else the same thread norms the same rows
  }

  // The rows of x, normed; where all threads see them, they have met.
  const bf16* normed(const bf16* weight) {
    const int hidden = model_.hidden();
    bf16* to = own_ ? own_ : a_.normed;
    rms_norm(to, a_.x, hidden, hidden, weight, hidden, model_.eps, own_ ? Range{0, step_.rows} : rows());
    if (!own_) meet(&Seconds::small);
    return to;
  }

  void attention_half(const Layer& layer, std::atomic<int>& counter) {
    const AttentionShape& s = layer.shape;
    const int hidden = model_.hidden();
    linear(layer.qkv, panels(), thread_, normed(layer.input_norm), step_.rows, start(layer.o),
           Store{a_.qkv, layer.qkv.columns, layer.qkv_bias});
    meet(&Seconds::linear);
    for (int row = rows().begin; row < rows().end; ++row) place(layer, row);
    meet(&Seconds::small);
    const PagedKV<bf16> kv{layer.key, layer.value, step_.block_table, step_.table_stride};
    attention(scratch_, s, kv, units_, counter, a_.qkv, layer.qkv.columns, nullptr, a_.attended);
    meet(&Seconds::attention);
    linear(layer.o, panels(), thread_, a_.attended, step_.rows, start(layer.gate_up), AddTo{a_.x, hidden});
    meet(&Seconds::linear);
  }

  void mlp_half(const Layer& layer, const Packed& following) {
    linear(layer.gate_up, panels(), thread_, normed(layer.post_norm), step_.rows, start(layer.down),
           SiluTimes{a_.inner, layer.down.depth});
    meet(&Seconds::linear);
    linear(layer.down, panels(), thread_, a_.inner, step_.rows, start(following), AddTo{a_.x, model_.hidden()});
    meet(&Seconds::linear);
  }

  // Norm and rotate a row's queries and keys; write its keys and values into its slot.
  void place(const Layer& layer, int row) {
    const AttentionShape& s = layer.shape;
    bf16* q = a_.qkv + static_cast<std::ptrdiff_t>(row) * layer.qkv.columns;
    bf16* k = q + s.heads * s.dim;
    if (layer.q_norm) {
      rms_norm(q, q, s.dim, s.dim, layer.q_norm, s.dim, model_.eps, {0, s.heads});
      rms_norm(k, k, s.dim, s.dim, layer.k_norm, s.dim, model_.eps, {0, s.kv_heads});
    }
    const std::ptrdiff_t at = step_.positions[row] * (s.dim / 2);
    for (int h = 0; h < s.heads + s.kv_heads; ++h) rope(q + h * s.dim, model_.cos + at, model_.sin + at, s.dim);
    const int width = s.kv_heads * s.dim;
    std::memcpy(layer.key + step_.slots[row] * width, k, 2 * width);
    std::memcpy(layer.value + step_.slots[row] * width, k + width, 2 * width);
  }

  void head(bf16* logits) {
    const int hidden = model_.hidden();
    const Range range = share(step_.heads, thread_, threads_);
    for (int i = range.begin; i < range.end; ++i) {
      const bf16* from = a_.x + step_.head_rows[i] * hidden;
      rms_norm(a_.normed + static_cast<std::ptrdiff_t>(i) * hidden, from, hidden, hidden, model_.norm, hidden,
               model_.eps, {0, 1});
    }
    meet(&Seconds::small);
    linear(model_.head, panels(), thread_, a_.normed, step_.heads, start(model_.layers[0].qkv),
           Store{logits, model_.head.columns, nullptr});
    meet(&Seconds::head);
  }

  Range rows() const { return share(step_.rows, thread_, threads_); }
  Panels& panels() { return panels_[linear_++]; }
  const bf16* start(const Packed& w) const { return w.panel(share(w.panels(), thread_, threads_).begin); }

  void meet(double Seconds::*kind) {
    barrier_.wait(threads_);
    if (thread_ || !seconds_) return;
    const auto now = Clock::now();
    seconds_->*kind += std::chrono::duration<double>(now - mark_).count();
    mark_ = now;
  }

  const Model& model_;
  const Step& step_;
  const Activations& a_;
  const std::vector<Unit>& units_;
  std::vector<std::atomic<int>>& counters_;
  std::vector<Panels>& panels_;  // one per linear of the step
  int linear_ = 0;
  Barrier& barrier_;
  AttentionScratch& scratch_;
  bf16* const own_;  // [rows, hidden] of this thread, or null
  const int thread_, threads_;
  Seconds* const seconds_;  // or null
  Clock::time_point mark_;
};

// logits: [step.heads, vocabulary]. `seconds` may be null.
inline void forward(const Model& model, const Step& step, const Activations& a, bf16* logits, int threads,
                    Seconds* seconds) {
  const AttentionShape& shape = model.layers[0].shape;
  const auto units = attention_units(shape, step.query_start, step.context, step.sequences, threads);
  std::vector<std::atomic<int>> counters(model.layers.size());
  std::vector<Panels> panels;
  for (std::size_t i = 0; i < kLinears * model.layers.size() + 1; ++i) panels.emplace_back(threads);
  std::vector<AttentionScratch> scratch;
  for (int i = 0; i < threads; ++i) scratch.emplace_back(shape);
  std::vector<Aligned<bf16>> own;
  for (int i = 0; i < threads && step.rows <= kOwnRows; ++i) own.emplace_back(step.rows * model.hidden());
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    // OpenMP may give fewer threads than asked for; the barrier must know.
    const int thread = omp_get_thread_num();
    Worker(model, step, a, units, counters, panels, barrier, scratch[thread], own.empty() ? nullptr : own[thread].get(),
           thread, omp_get_num_threads(), seconds)
        .run(logits);
  }
}

}  // namespace tokenstream
