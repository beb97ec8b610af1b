// What a draw has of floating point: a row's largest, its weights, exponential noise, log-probabilities. One row each.
//
// Lanes are 16 and sums have one order, so that a seeded draw and a reported logprob are the same on every processor.
// It does not know what the stages between (top-k, top-p, penalties) keep.
#pragma once

#include <limits>

#include "math.h"

namespace tokenstream {

struct First {
  float value;
  std::int32_t place;
};

// The largest of `count` numbers, and of equals the first; NaN is larger than all. at(i): numbers i to i + 15, of which
// those behind the last may be anything.
template <class At>
First first_largest(int count, At at) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  constexpr int stretch = 512;  // only the one that holds the largest is searched for its place
  const auto numbers = [&](int i) {
    return i + kLanes <= count ? at(i) : where_less(counting(), all(count - i), at(i), all(lowest));
  };
  float best = lowest;
  int from = 0;
  for (int start = 0; start < count && best == best; start += stretch) {
    Floats most = all(lowest), nans = all(0.0f);
    for (int i = start; i < std::min(start + stretch, count); i += kLanes) {
      const Floats x = numbers(i);
      most = larger(x, most);  // not for NaN
      nans = where_less(all(0x7f800000), bits(magnitude(x)), all(1.0f), nans);
    }
    if (any_less(all(0.0f), nans))
      best = std::numeric_limits<float>::quiet_NaN();
    else if (any_less(all(best), most))
      best = peak(most);
    else
      continue;
    from = start;
  }
  for (int i = from;; i += kLanes) {
    float lane[kLanes];
    store(lane, numbers(i));
    for (int j = 0; j < kLanes; ++j)
      if (lane[j] == best || lane[j] != lane[j]) return {lane[j], i + j};
  }
}

inline First row_max(const float* scores, int count) {
  return first_largest(count, [=](int i) { return load(scores + i, count - i); });
}

// e^x for x at most 0; 0 for NaN.
inline Floats weight(Floats x) { return exp(larger(x, all(-100.0f))); }

// weights = e^((score - highest) / temperature), 0 for NaN; none of `scores` is above `highest`.
inline void weigh(const float* scores, int count, float highest, float temperature, float* weights) {
  for (int i = 0; i < count; i += kLanes)
    store(weights + i, weight((load(scores + i, count - i) - all(highest)) / all(temperature)), count - i);
}

// Of the noise of one row: of (seed, position), by the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
struct Key {
  std::int32_t low, high;

  Key(std::int64_t seed, std::int64_t position) {
    const std::uint64_t step = 0x9e3779b97f4a7c15;
    const std::uint64_t key = mixed(mixed(static_cast<std::uint64_t>(seed)) + (static_cast<std::uint64_t>(position) + 1) * step);
    low = static_cast<std::int32_t>(key);
    high = static_cast<std::int32_t>(key >> 32);
  }

 private:
  static std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }
};

inline Ints all_bits(std::uint32_t x) { return all(static_cast<std::int32_t>(x)); }

// Exponential noise of token ids: `lowbias32` (Wellons, hash-prospector), the key's halves before and inside, makes
// the uniform u = (31 bits + 1/2) / 2^31; the noise is -ln(1 - u), never 0.
inline Floats exponential(Key key, Ints ids) {
  Ints h = ids * all_bits(0x9e3779b1) ^ all(key.low);
  h = h ^ right<16>(h);
  h = h * all_bits(0x7feb352d);
  h = (h ^ right<15>(h)) + all(key.high);
  h = h * all_bits(0x846ca68b);
  h = h ^ right<16>(h);
  const Floats uniform = (to_floats(h & all(0x7fffffff)) + all(0.5f)) * all(0x1p-31f);
  return all(0.0f) - log1p(all(0.0f) - smaller(uniform, 1.0f - 0x1p-24f));
}

// The place of the largest weight / noise, which is a draw in proportion to the weights.
inline std::int32_t race(const float* weights, const std::int32_t* ids, int count, Key key) {
  return first_largest(count, [=](int i) {
           return load(weights + i, count - i) / exponential(key, load(ids + i, count - i));
         }).place;
}

// Natural log-probabilities of the `wanted` ids of a row of logits; NaN where the largest logit is not finite. Each
// stretch has a sum of its own, so that what is rounded away does not grow with the row.
inline void log_softmax(const float* logits, int count, const std::int64_t* ids, int wanted, float* logprobs) {
  constexpr int stretch = 1024;
  const float highest = row_max(logits, count).value;
  Floats total = all(0.0f);
  for (int start = 0; start < count; start += stretch) {
    Floats part = all(0.0f);
    for (int i = start; i < std::min(start + stretch, count); i += kLanes) {
      const Floats e = weight(load(logits + i, count - i) - all(highest));
      part = part + where_less(counting(), all(count - i), e, all(0.0f));
    }
    total = total + part;
  }
  float lane[kLanes];
  store(lane, log1p(all(sum(total) - 1.0f)));
  const float unless_finite = highest - highest;  // 0 or NaN
  for (int i = 0; i < wanted; ++i) logprobs[i] = logits[ids[i]] - highest - lane[0] + unless_finite;
}

}  // namespace tokenstream
