// Hashes of several words or of text, the same in every process.
#pragma once

#include <initializer_list>
#include <string_view>

#include "core/types.h"

namespace pycomm {

inline constexpr std::uint64_t kHashOfNothing = 0xcbf29ce484222325;

// A step of FNV-1a on a whole word, followed by splitmix64's mixing, so that every input bit
// affects the result.
constexpr std::uint64_t add_to_hash(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x100000001b3;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111eb;
  return hash ^ hash >> 31;
}

constexpr std::uint64_t hash_of(std::initializer_list<std::uint64_t> words) {
  std::uint64_t hash = kHashOfNothing;
  for (const std::uint64_t word : words) hash = add_to_hash(hash, word);
  return hash;
}

constexpr std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = kHashOfNothing;
  for (const char c : text) hash = add_to_hash(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace pycomm
