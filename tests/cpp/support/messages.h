// Sends and receives of bytes between the ranks of a test.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/group/group.h"

namespace pycomm::test {

using cpu::p2p::Envelope;
using cpu::p2p::kAnySource;
using cpu::p2p::Options;
using cpu::p2p::RequestPtr;
using Bytes = std::vector<std::byte>;

inline Envelope envelope(int peer, int tag, std::int64_t bytes) {
  return {peer, tag, Element::u8, bytes};
}

// A message's content, which no other message has.
inline Bytes content(int source, int number, std::int64_t bytes) {
  Bytes data(static_cast<std::size_t>(bytes));
  std::uint32_t state = static_cast<std::uint32_t>(source * 7919 + number * 104729 + 1);
  for (std::byte& byte : data) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::byte>(state >> 24);
  }
  return data;
}

inline void send(cpu::Group& group, const Bytes& data, int to, int tag = 0) {
  group.send(data.data(), envelope(to, tag, static_cast<std::int64_t>(data.size())));
}
inline Bytes recv(cpu::Group& group, std::int64_t bytes, int from, int tag = 0) {
  Bytes data(static_cast<std::size_t>(bytes));
  group.recv(data.data(), envelope(from, tag, bytes));
  return data;
}
inline RequestPtr isend(cpu::Group& group, const Bytes& data, int to, int tag = 0) {
  return group.isend(data.data(), envelope(to, tag, static_cast<std::int64_t>(data.size())));
}
inline RequestPtr irecv(cpu::Group& group, Bytes& data, int from, int tag = 0) {
  return group.irecv(data.data(), envelope(from, tag, static_cast<std::int64_t>(data.size())));
}

inline void must(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

inline CollectiveError error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CollectiveError& error) {
    return error;
  }
  throw std::runtime_error("a CollectiveError was expected");
}

}  // namespace pycomm::test
