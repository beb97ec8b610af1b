// One step of a decoder: embedding, layers, final norm and head, on all threads of a pool.
//
//   x -> norm -> q|k|v -> q/k norm, rope, KV write -> attention -> o -> (norm) -> + x
//     -> norm -> (gate|) up, activation -> down -> (norm) -> + x
//
// Activations are float32 between stages; a linear's input takes the form that its arithmetic wants. Threads share
// panels of the linears, rows of the norms and units of the attention, and meet between stages. It does not know
// Python, requests or sampling.
#pragma once

#include <chrono>

#include "attention.h"

namespace tokenstream {

enum NormKind : std::int32_t { kRmsNorm, kLayerNorm };
enum Activation : std::int32_t { kSilu, kGeluTanh };
enum KVKind : std::int32_t { kFloatKV, kBFloat16KV };

// weight [width], bias [width] or null; weight null: no norm.
struct Norm {
  const float* weight;
  const float* bias;
};

// Up to three weights that share an input, side by side, and the bias of all their columns or null.
struct Linear {
  Weight part[3];
  std::int32_t parts;
  const float* bias;

  int columns() const {
    int sum = 0;
    for (int i = 0; i < parts; ++i) sum += part[i].columns;
    return sum;
  }
};

struct Layer {
  Norm input_norm, q_norm, k_norm, after_attention, post_norm, after_mlp;
  Linear qkv, o, gate, up, down;  // gate.parts is 0 where there is none
  const float* cos;               // [positions][rotary / 2], or null where nothing is rotated
  const float* sin;
  std::int32_t window;  // keys that a row sees; 0 for all
  void* key;
  void* value;
};

struct Model {
  const Layer* layers;
  std::int32_t layer_count, hidden, heads, kv_heads, dim, rotary, block_size;
  NormKind norm_kind;
  Activation activation;
  KVKind kv_kind;
  float eps, scale, softcap, final_softcap, embedding_scale;
  Weight embedding;
  const float* positions;  // [positions][hidden], or null
  Norm norm;
  Linear head;
};

// One step's rows, as batch.py lays them out. head_rows: those whose logits are wanted.
struct Step {
  std::int32_t rows, sequences, heads;
  const std::int64_t* token_ids;
  const std::int64_t* positions;
  const std::int64_t* slots;
  const std::int32_t* query_start;
  const std::int32_t* context;
  const std::int32_t* block_table;
  std::int64_t table_stride;
  const std::int64_t* head_rows;
};

// Seconds that thread 0 spent in each kind of stage, waiting for the others included.
struct Seconds {
  double linear, attention, small, head;
};

constexpr int kOwnRows = 32;  // up to so many, every thread prepares all inputs for itself: cheaper than to meet

inline void norm_row(NormKind kind, const Norm& norm, float eps, const float* x, float* y, int width) {
  Floats shift = all(0.0f);
  if (kind == kLayerNorm) {
    Floats total = all(0.0f);
    for (int c = 0; c < width; c += kLanes) total = total + load(x + c, width - c);
    shift = all(sum(total) / static_cast<float>(width));
  }
  Floats squares = all(0.0f);
  for (int c = 0; c < width; c += kLanes) {
    Floats v = load(x + c, width - c);
    if (kind == kLayerNorm) {
      float lane[kLanes];
      store(lane, v - shift);
      v = load(lane, width - c);  // lanes behind the width are no part of the sum
    }
    squares = fma(v, v, squares);
  }
  const Floats scale = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps));
  for (int c = 0; c < width; c += kLanes) {
    Floats v = (load(x + c, width - c) - shift) * scale * load(norm.weight + c, width - c);
    if (norm.bias) v = v + load(norm.bias + c, width - c);
    store(y + c, v, width - c);
  }
}

// Rotate halves: x1 cos - x2 sin, x2 cos + x1 sin.
inline void rope(float* x, const float* cos, const float* sin, int rotary) {
  const int half_width = rotary / 2;
  for (int d = 0; d < half_width; d += kLanes) {
    const int n = half_width - d;
    const Floats a = load(x + d, n), b = load(x + half_width + d, n), c = load(cos + d, n), s = load(sin + d, n);
    store(x + d, a * c - b * s, n);
    store(x + half_width + d, b * c + a * s, n);
  }
}

inline Floats activate(Activation kind, Floats x) { return kind == kSilu ? silu(x) : gelu_tanh(x); }

// What a model's steps compute in, kept from one to the next.
class Workspace {
 public:
  Workspace(const Model& m, int threads) : m_(m), pool(threads) {}

  void reserve(int rows) {
    if (rows <= rows_) return;
    rows_ = round_up(rows, kOwnRows);
    const Layer& l = m_.layers[0];
    const auto size = [&](int width) { return static_cast<std::size_t>(rows_) * width; };
    x = std::make_unique<Aligned<float>>(size(m_.hidden));
    qkv = std::make_unique<Aligned<float>>(size(l.qkv.columns()) + kLanes);
    out = std::make_unique<Aligned<float>>(size(m_.hidden));
    normed = std::make_unique<InputMemory>(rows_, m_.hidden);
    attended = std::make_unique<InputMemory>(rows_, m_.heads * m_.dim);
    inner = std::make_unique<InputMemory>(rows_, l.down.part[0].depth);
    const int widest = std::max({m_.hidden, m_.heads * m_.dim, l.down.part[0].depth});
    if (own.empty())
      for (int i = 0; i < pool.count(); ++i) {
        own.push_back(std::make_unique<InputMemory>(kOwnRows, widest));
        unpacked.push_back(std::make_unique<Aligned<float>>(static_cast<std::size_t>(kMostColumns) * kPanel *
                                                             round_up(widest, kBlock)));
        scratch.push_back(std::make_unique<AttentionScratch>(shape(l)));
      }
  }

  AttentionShape shape(const Layer& l) const {
    return {m_.heads, m_.kv_heads, m_.dim, m_.block_size, l.window, m_.scale, m_.softcap};
  }

 private:
  const Model m_;
  int rows_ = 0;

 public:
  Pool pool;
  Barrier barrier;
  std::unique_ptr<Aligned<float>> x, qkv, out;  // [rows][hidden], [rows][columns], [rows][hidden]
  std::unique_ptr<InputMemory> normed, attended, inner;
  std::vector<std::unique_ptr<InputMemory>> own;  // [kOwnRows][widest] of each thread
  std::vector<std::unique_ptr<Aligned<float>>> unpacked;
  std::vector<std::unique_ptr<AttentionScratch>> scratch;
};

// One thread's view of a step; all threads run the same stages in the same order.
class Worker {
 public:
  Worker(const Model& m, const Step& s, Workspace& w, std::vector<Shares>& shares, const std::vector<Unit>& units,
         float* logits, int thread, Seconds* seconds)
      : m_(m), s_(s), w_(w), shares_(shares), units_(units), logits_(logits), thread_(thread), seconds_(seconds) {}

  void run() {
    mark_ = Clock::now();
    embed();
    for (int i = 0; i < m_.layer_count; ++i) {
      attention_half(m_.layers[i]);
      mlp_half(m_.layers[i]);
    }
    head();
  }

 private:
  using Clock = std::chrono::steady_clock;

  Range rows() const { return share(s_.rows, thread_, w_.pool.count()); }
  bool own() const { return s_.rows <= kOwnRows; }
  float* x(std::ptrdiff_t row) const { return w_.x->get() + row * m_.hidden; }

  void embed() {
    for (int row = rows().begin; row < rows().end; ++row) {
      float* to = x(row);
      read_column(m_.embedding, static_cast<int>(s_.token_ids[row]), to);
      const float* at = m_.positions ? m_.positions + s_.positions[row] * m_.hidden : nullptr;
      for (int c = 0; c < m_.hidden; ++c) to[c] = to[c] * m_.embedding_scale + (at ? at[c] : 0.0f);
    }
    meet(&Seconds::small);
  }

  // The inputs that `fill(row, to)` gives, in the form of every part of the linears: this thread's own where rows are
  // few, else shared ones, for which the threads meet.
  template <class Fill>
  Inputs inputs(const InputMemory& shared, int width, std::initializer_list<const Linear*> linears, Fill fill) {
    const Inputs in = (own() ? *w_.own[thread_] : shared).view(width);
    const Range mine = own() ? Range{0, s_.rows} : rows();
    for (int row = mine.begin; row < mine.end; ++row) {
      float* to = in.row(row);
      fill(row, to);
      std::fill(to + width, to + in.stride, 0.0f);
      prepare(in, row, linears);
    }
    if (!own()) meet(&Seconds::small);
    return in;
  }

  static void prepare(const Inputs& in, int row, std::initializer_list<const Linear*> linears) {
    bool wanted[kArithmetics] = {};
    for (const Linear* linear : linears)
      for (int i = 0; i < linear->parts; ++i) wanted[linear->part[i].arithmetic] = true;
    for (int i = 0; i < kArithmetics; ++i)
      if (wanted[i]) prepare_row(in, row, static_cast<Arithmetic>(i));
  }

  Inputs normed(const Norm& norm, std::initializer_list<const Linear*> linears) {
    return inputs(*w_.normed, m_.hidden, linears, [&](int row, float* to) { norm_to(norm, x(row), to); });
  }

  void norm_to(const Norm& norm, const float* from, float* to) const {
    norm_row(m_.norm_kind, norm, m_.eps, from, to, m_.hidden);
  }

  static int units_of(const Weight& w) { return (w.panels() + kUnit - 1) / kUnit; }

  // A unit of a weight's panels, whose columns count from `column`: finish(row, count, first column, columns, width,
  // sums [count][width]).
  template <class Finish>
  void multiply_unit(const Weight& w, int unit, int column, const Inputs& in, int first, int rows, Finish& finish) {
    const Range panels{unit * kUnit, std::min((unit + 1) * kUnit, w.panels())};
    multiply_panels(w, panels, in, first, rows, w_.unpacked[thread_]->get(),
                    [&](int row, int count, int panel, int tiled, const float* sums) {
                      const int within = panel * kPanel, width = tiled * kPanel;
                      finish(row, count, column + within, std::min(width, w.columns - within), width, sums);
                    });
  }

  // All units of a linear that this thread takes; columns count from the first part's first.
  template <class Finish>
  void multiply(const Linear& linear, const Inputs& in, int rows, Finish finish) {
    int units = 0;
    for (int i = 0; i < linear.parts; ++i) units += units_of(linear.part[i]);
    Shares& shares = shares_[stage_++];
    const int step = block_rows(linear.part[0], rows), blocks = (rows + step - 1) / step;
    for (int item; (item = shares.take(thread_, units * blocks)) >= 0;) {
      const int first = item / units * step;
      int unit = item % units, column = 0, i = 0;
      for (; unit >= units_of(linear.part[i]); ++i) {
        unit -= units_of(linear.part[i]);
        column += linear.part[i].columns;
      }
      multiply_unit(linear.part[i], unit, column, in, first, std::min(step, rows - first), finish);
    }
  }

  // A finish that calls put(row, column, sum + bias, lanes) for every vector of sums; of the last one, lanes are fewer.
  template <class Put>
  static auto each_sum(const float* bias, Put put) {
    return [=](int row, int count, int column, int columns, int width, const float* sums) {
      for (int r = 0; r < count; ++r)
        for (int c = 0; c < columns; c += kLanes) {
          Floats v = load(sums + r * width + c);
          if (bias) v = v + load(bias + column + c, columns - c);
          put(row + r, column + c, v, columns - c);
        }
    };
  }

  // to[row][column] = sum + bias
  static auto keep(float* to, std::ptrdiff_t stride, const float* bias) {
    return each_sum(bias, [=](int row, int column, Floats v, int lanes) {
      store(to + row * stride + column, v, lanes);
    });
  }

  // x[row][column] += sum + bias
  auto add(const float* bias) {
    return each_sum(bias, [this](int row, int column, Floats v, int lanes) {
      store(x(row) + column, load(x(row) + column, lanes) + v, lanes);
    });
  }

  // x += the linear's output, normed where the model wants it.
  void add_output(const Linear& linear, const Inputs& in, const Norm& after) {
    if (!after.weight) {
      multiply(linear, in, s_.rows, add(linear.bias));
      return meet(&Seconds::linear);
    }
    multiply(linear, in, s_.rows, keep(w_.out->get(), m_.hidden, linear.bias));
    meet(&Seconds::linear);
    for (int row = rows().begin; row < rows().end; ++row) {
      float* from = w_.out->get() + static_cast<std::ptrdiff_t>(row) * m_.hidden;
      norm_to(after, from, from);
      for (int c = 0; c < m_.hidden; ++c) x(row)[c] += from[c];
    }
    meet(&Seconds::small);
  }

  void attention_half(const Layer& layer) {
    const int width = layer.qkv.columns(), attended = m_.heads * m_.dim;
    multiply(layer.qkv, normed(layer.input_norm, {&layer.qkv}), s_.rows, keep(w_.qkv->get(), width, layer.qkv.bias));
    meet(&Seconds::linear);
    const Inputs shared = w_.attended->view(attended);
    if (m_.kv_kind == kFloatKV)
      attend_all(layer, kv<float>(layer), shared);
    else
      attend_all(layer, kv<bf16>(layer), shared);
    const Inputs in = inputs(*w_.attended, attended, {&layer.o}, [&](int row, float* to) {
      if (shared.row(row) != to) std::copy_n(shared.row(row), attended, to);
    });
    add_output(layer.o, in, layer.after_attention);
  }

  template <class T>
  PagedKV<T> kv(const Layer& layer) const {
    return {static_cast<T*>(layer.key), static_cast<T*>(layer.value), s_.block_table, s_.table_stride};
  }

  template <class T>
  void attend_all(const Layer& layer, const PagedKV<T>& kv, const Inputs& out) {
    const AttentionShape shape = w_.shape(layer);
    const int width = layer.qkv.columns();
    for (int row = rows().begin; row < rows().end; ++row) {
      float* q = w_.qkv->get() + static_cast<std::ptrdiff_t>(row) * width;
      float* k = q + m_.heads * m_.dim;
      const std::ptrdiff_t at = s_.positions[row] * (m_.rotary / 2);
      for (int h = 0; h < m_.heads + m_.kv_heads; ++h) {
        float* v = q + h * m_.dim;
        const Norm& norm = h < m_.heads ? layer.q_norm : layer.k_norm;
        if (norm.weight) norm_row(kRmsNorm, norm, m_.eps, v, v, m_.dim);
        if (layer.cos) rope(v, layer.cos + at, layer.sin + at, m_.rotary);
      }
      write_kv(kv, shape, s_.slots[row], k, k + m_.kv_heads * m_.dim);
    }
    meet(&Seconds::small);
    Shares& shares = shares_[stage_++];
    for (int i; (i = shares.take(thread_, static_cast<int>(units_.size()))) >= 0;)
      attend(*w_.scratch[thread_], shape, kv, units_[i], w_.qkv->get(), width, nullptr, out.x, out.stride);
    meet(&Seconds::attention);
  }

  void mlp_half(const Layer& layer) {
    const int width = layer.down.part[0].depth;
    const Inputs shared = w_.inner->view(width);
    const Inputs in = normed(layer.post_norm, {&layer.gate, &layer.up});
    if (layer.gate.parts)
      multiply_gated(layer, in, shared);
    else
      multiply(layer.up, in, s_.rows, each_sum(layer.up.bias, [&](int row, int column, Floats v, int lanes) {
                 store(shared.row(row) + column, activate(m_.activation, v), lanes);
               }));
    meet(&Seconds::linear);
    const Inputs down = inputs(*w_.inner, width, {&layer.down}, [&](int row, float* to) {
      if (shared.row(row) != to) std::copy_n(shared.row(row), width, to);
    });
    add_output(layer.down, down, layer.after_mlp);
  }

  // inner[row][column] = activation(gate) * up: a thread computes the same panels of both, one after the other.
  void multiply_gated(const Layer& layer, const Inputs& in, const Inputs& out) {
    const Weight &gate = layer.gate.part[0], &up = layer.up.part[0];
    const int units = units_of(gate);
    Shares& shares = shares_[stage_++];
    const int step = block_rows(gate, s_.rows), blocks = (s_.rows + step - 1) / step;
    const auto active = each_sum(layer.gate.bias, [&](int row, int column, Floats v, int lanes) {
      store(out.row(row) + column, activate(m_.activation, v), lanes);
    });
    const auto times = each_sum(layer.up.bias, [&](int row, int column, Floats v, int lanes) {
      float* to = out.row(row) + column;
      store(to, load(to, lanes) * v, lanes);
    });
    for (int item; (item = shares.take(thread_, units * blocks)) >= 0;) {
      const int first = item / units * step, unit = item % units, count = std::min(step, s_.rows - first);
      multiply_unit(gate, unit, 0, in, first, count, active);
      multiply_unit(up, unit, 0, in, first, count, times);
    }
  }

  void head() {
    if (!s_.heads) return;  // of a part of a prompt
    const Inputs in = w_.normed->view(m_.hidden);
    const Range mine = share(s_.heads, thread_, w_.pool.count());
    for (int i = mine.begin; i < mine.end; ++i) {
      float* to = in.row(i);
      norm_to(m_.norm, x(s_.head_rows[i]), to);
      prepare(in, i, {&m_.head});
    }
    meet(&Seconds::small);
    const std::ptrdiff_t vocabulary = m_.head.columns();
    const float cap = m_.final_softcap;
    multiply(m_.head, in, s_.heads, each_sum(m_.head.bias, [=, this](int row, int column, Floats v, int lanes) {
               if (cap > 0) v = all(cap) * tanh(v * all(1.0f / cap));
               store(logits_ + row * vocabulary + column, v, lanes);
             }));
    meet(&Seconds::head);
  }

  void meet(double Seconds::*kind) {
    w_.barrier.wait(w_.pool.count());
    if (thread_ || !seconds_) return;
    const auto now = Clock::now();
    seconds_->*kind += std::chrono::duration<double>(now - mark_).count();
    mark_ = now;
  }

  static constexpr int kUnit = 4;  // panels that a thread takes at a time

  const Model& m_;
  const Step& s_;
  Workspace& w_;
  std::vector<Shares>& shares_;
  const std::vector<Unit>& units_;
  float* const logits_;
  const int thread_;
  Seconds* const seconds_;  // or null
  Clock::time_point mark_;
  int stage_ = 0;
};

constexpr int kStages = 5;  // of a layer, that are shared out

// logits: float32 [step.heads][vocabulary]. `seconds` may be null.
inline void forward(const Model& m, const Step& s, Workspace& w, float* logits, Seconds* seconds) {
  w.reserve(std::max(s.rows, s.heads));
  const auto units = attention_units(w.shape(m.layers[0]), s.query_start, s.context, s.sequences);
  std::vector<Shares> shares;
  for (int i = 0; i < kStages * m.layer_count + 1; ++i) shares.emplace_back(w.pool.count());
  w.pool.run([&](int thread) { Worker(m, s, w, shares, units, logits, thread, seconds).run(); });
}

}  // namespace tokenstream
