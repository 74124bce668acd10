// Operations by number, for tests of records.
#pragma once

#include <cstdint>

#include "core/operation.h"

namespace pycomm::test {

// An operation all of whose fields follow from its number.
inline Operation numbered(std::uint32_t number) {
  Operation operation;
  operation.collective = Collective::all_reduce;
  operation.count = number;
  operation.offset = number;
  operation.details = number;
  operation.codec.k = number;
  return operation;
}

}  // namespace pycomm::test
