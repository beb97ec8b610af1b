// The kernels as C functions, called by ctypes: pointers, sizes and structs. Callers check what they hand over.
#include "decoder.h"
#include "draw.h"
#include "pack.h"
#include "rope.h"

#define TOKENSTREAM_API extern "C" __attribute__((visibility("default")))

using namespace tokenstream;

// Whether vdpbf16ps is there.
TOKENSTREAM_API std::int32_t ts_has_dpbf16() {
#if defined(TOKENSTREAM_DPBF16)
  return 1;
#else
  return 0;
#endif
}

// The format that takes a kind's rows as they are, or with the least loss.
TOKENSTREAM_API std::int32_t ts_own_format(std::int32_t kind) { return own_format(static_cast<Kind>(kind)); }

TOKENSTREAM_API std::size_t ts_weight_bytes(const Weight* w) { return w->bytes(); }

// Write rows [first, first + count) into the panels of a weight whose memory `data` is zero. 0: a value is not finite.
TOKENSTREAM_API std::int32_t ts_pack(const Weight* w, std::uint8_t* data, std::int32_t first, std::int32_t count,
                                     std::int32_t kind, const std::uint8_t* rows, std::size_t row_bytes) {
  return pack_rows(*w, data, first, count, static_cast<Kind>(kind), rows, row_bytes);
}

// Columns [first, first + count) as float32 [count][depth].
TOKENSTREAM_API void ts_read_columns(const Weight* w, std::int32_t first, std::int32_t count, float* to) {
  for (int i = 0; i < count; ++i) read_column(*w, first + i, to + static_cast<std::size_t>(i) * w->depth);
}

TOKENSTREAM_API Workspace* ts_open(const Model* m, std::int32_t threads) { return new Workspace(*m, threads); }
TOKENSTREAM_API void ts_close(Workspace* w) { delete w; }

TOKENSTREAM_API void ts_forward(const Model* m, const Step* s, Workspace* w, float* logits, Seconds* seconds) {
  forward(*m, *s, *w, logits, seconds);
}

// y [rows][columns] = x [rows][depth] times a linear: for tests and measurements of a linear alone.
TOKENSTREAM_API void ts_linear(const Weight* w, const float* x, std::int32_t rows, float* y, std::int32_t threads) {
  InputMemory memory(rows, w->depth);
  const Inputs in = memory.view(w->depth);
  for (int r = 0; r < rows; ++r) {
    std::copy_n(x + std::ptrdiff_t{r} * w->depth, w->depth, in.row(r));
    prepare_row(in, r, static_cast<Arithmetic>(w->arithmetic));
  }
  Pool pool(threads);
  pool.run([&](int thread) {
    Aligned<float> unpacked(static_cast<std::size_t>(kMostColumns) * kPanel * in.stride);
    multiply_panels(*w, share(w->panels(), thread, threads), in, 0, rows, unpacked.get(),
                    [&](int row, int count, int panel, int columns, const float* sums) {
                      for (int r = 0; r < count; ++r)
                        for (int c = 0; c < columns; ++c)
                          store(y + static_cast<std::ptrdiff_t>(row + r) * w->columns + (panel + c) * kPanel,
                                load(sums + (r * columns + c) * kPanel), w->columns - (panel + c) * kPanel);
                    });
  });
}

// cos and sin of position * frequency, both float32 [positions][count]; see rope.h.
TOKENSTREAM_API void ts_rope_tables(const float* frequencies, std::int32_t count, std::int32_t positions, float* cos,
                                    float* sin) {
  for (int p = 0; p < positions; ++p)
    for (int i = 0; i < count; ++i) {
      const Angle a = angle(static_cast<float>(p) * frequencies[i]);
      cos[static_cast<std::size_t>(p) * count + i] = a.cos;
      sin[static_cast<std::size_t>(p) * count + i] = a.sin;
    }
}

// One layer's attention for a model whose other parts are computed elsewhere. q, out: [rows][heads][dim]; k, v: [rows]
// [kv_heads][dim]; sinks: [heads] or null. `step` needs no token ids, positions and head rows.
struct Attention {
  AttentionShape shape;
  KVKind kv_kind;
  const float* q;
  const float* k;
  const float* v;
  const float* sinks;
  void* key;
  void* value;
  float* out;
};

TOKENSTREAM_API Pool* ts_open_pool(std::int32_t threads) { return new Pool(threads); }
TOKENSTREAM_API void ts_close_pool(Pool* pool) { delete pool; }

template <class T>
void attend_step(const Attention& a, const Step& s, Pool& pool) {
  const AttentionShape& shape = a.shape;
  const PagedKV<T> kv{static_cast<T*>(a.key), static_cast<T*>(a.value), s.block_table, s.table_stride};
  const auto units = attention_units(shape, s.query_start, s.context, s.sequences);
  const std::ptrdiff_t kv_width = shape.kv_heads * shape.dim, width = shape.heads * shape.dim;
  Shares shares(pool.count());
  Barrier barrier;
  pool.run([&](int thread) {
    const Range rows = share(s.rows, thread, pool.count());
    for (int row = rows.begin; row < rows.end; ++row)
      write_kv(kv, shape, s.slots[row], a.k + row * kv_width, a.v + row * kv_width);
    barrier.wait(pool.count());
    AttentionScratch scratch(shape);
    for (int i; (i = shares.take(thread, static_cast<int>(units.size()))) >= 0;)
      attend(scratch, shape, kv, units[i], a.q, width, a.sinks, a.out, width);
  });
}

TOKENSTREAM_API void ts_attend(const Attention* a, const Step* s, Pool* pool) {
  if (a->kv_kind == kFloatKV)
    attend_step<float>(*a, *s, *pool);
  else
    attend_step<bf16>(*a, *s, *pool);
}

// What follows is of sampling: `rows` rows of `count` numbers, at least one; see draw.h. stride: from one row's first
// number to the next's. Rows without one lie without gaps.

namespace {

// of_row(row) for every row, on the pool's threads if each has enough to do to be worth waking.
template <class F>
void for_rows(Pool* pool, int rows, int count, F of_row) {
  constexpr std::int64_t enough = 1 << 19;  // numbers, of some tenths of a millisecond
  const int threads = pool->count();
  if (threads == 1 || std::int64_t{rows} * count < threads * enough) {
    for (int r = 0; r < rows; ++r) of_row(r);
    return;
  }
  Shares shares(threads);
  pool->run([&](int thread) {
    for (int r = shares.take(thread, rows); r >= 0; r = shares.take(thread, rows)) of_row(r);
  });
}

}  // namespace

TOKENSTREAM_API void ts_row_max(Pool* pool, std::int32_t rows, std::int32_t count, const float* scores,
                                std::int32_t stride, float* highest, std::int64_t* places) {
  for_rows(pool, rows, count, [&](int r) {
    const First first = row_max(scores + std::ptrdiff_t{r} * stride, count);
    highest[r] = first.value;
    places[r] = first.place;
  });
}

TOKENSTREAM_API void ts_weights(Pool* pool, std::int32_t rows, std::int32_t count, const float* scores,
                                std::int32_t stride, const float* highest, const float* temperature, float* weights) {
  for_rows(pool, rows, count, [&](int r) {
    weigh(scores + std::ptrdiff_t{r} * stride, count, highest[r], temperature[r], weights + std::ptrdiff_t{r} * count);
  });
}

// id_stride: that of `ids`, 0 where all rows have the same.
TOKENSTREAM_API void ts_race(Pool* pool, std::int32_t rows, std::int32_t count, const float* weights,
                             const std::int64_t* seeds, const std::int64_t* positions, const std::int32_t* ids,
                             std::int32_t id_stride, std::int64_t* places) {
  for_rows(pool, rows, count, [&](int r) {
    places[r] = race(weights + std::ptrdiff_t{r} * count, ids + std::ptrdiff_t{r} * id_stride, count,
                     Key(seeds[r], positions[r]));
  });
}

// The noise of `ts_race` alone, for tests.
TOKENSTREAM_API void ts_noise(std::int32_t rows, std::int32_t count, const std::int64_t* seeds,
                              const std::int64_t* positions, const std::int32_t* ids, float* noise) {
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < count; i += kLanes)
      store(noise + std::ptrdiff_t{r} * count + i, exponential(Key(seeds[r], positions[r]), load(ids + i, count - i)),
            count - i);
}

// ids [rows][wanted], logprobs the same.
TOKENSTREAM_API void ts_logprobs(Pool* pool, std::int32_t rows, std::int32_t count, const float* logits,
                                 std::int32_t stride, std::int32_t wanted, const std::int64_t* ids, float* logprobs) {
  for_rows(pool, rows, count, [&](int r) {
    log_softmax(logits + std::ptrdiff_t{r} * stride, count, ids + std::ptrdiff_t{r} * wanted, wanted,
                logprobs + std::ptrdiff_t{r} * wanted);
  });
}
