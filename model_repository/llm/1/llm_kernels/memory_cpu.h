// Memory that begins on a cache line. It does not know what is kept there.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace tokenstream {

constexpr int kCacheLine = 64;  // bytes

// `count` elements, not initialised.
template <class T>
class Aligned {
 public:
  explicit Aligned(std::size_t count)
      : memory_(static_cast<T*>(::operator new (count * sizeof(T), std::align_val_t{kCacheLine}))) {}
  T* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete (p, std::align_val_t{kCacheLine}); }
  };
  std::unique_ptr<T, Free> memory_;
};

}  // namespace tokenstream
