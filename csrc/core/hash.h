// One number for several, the same in every process.
#pragma once

#include <initializer_list>

#include "common.h"

namespace pycomm {

// FNV-1a over whole words, with a mix (of splitmix64) after each one, so that every bit counts.
constexpr std::uint64_t hash_of(std::initializer_list<std::uint64_t> words) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::uint64_t word : words) {
    hash = (hash ^ word) * 0x100000001b3;
    hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ hash >> 27) * 0x94d049bb133111eb;
    hash ^= hash >> 31;
  }
  return hash;
}

}  // namespace pycomm
