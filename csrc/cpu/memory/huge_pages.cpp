#include "cpu/memory/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string>

#include "core/layout.h"

namespace pycomm::cpu {
namespace {

// Smaller tensors come from memory that malloc keeps and reuses.
constexpr std::int64_t kLeastOutput = 4 << 20;

enum class Grant : std::uint8_t { unknown, always, on_request };

// Whether the system grants huge pages.
Grant grant() {
  static const Grant found = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    if (text.find("[always]") != std::string::npos) return Grant::always;
    return text.find("[madvise]") != std::string::npos ? Grant::on_request : Grant::unknown;
  }();
  return found;
}

bool exists(std::int64_t address, std::int64_t page) {
  unsigned char resident = 1;
  void* const begin = reinterpret_cast<void*>(address);
  return mincore(begin, static_cast<std::size_t>(page), &resident) != 0 || (resident & 1) != 0;
}

}  // namespace

void advise_huge_pages(void* data, std::int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr std::int64_t kHugePage = 2 << 20;
  const auto begin = reinterpret_cast<std::intptr_t>(data);
  const std::int64_t first = round_up(begin, kHugePage);
  const std::int64_t whole = (begin + bytes - first) / kHugePage * kHugePage;
  if (whole > 0) (void)madvise(reinterpret_cast<void*>(first), whole, MADV_HUGEPAGE);
#endif
}

void prepare_output(void* data, std::int64_t bytes) {
  if (bytes < kLeastOutput || grant() == Grant::always) return;
  static const std::int64_t page = sysconf(_SC_PAGESIZE);
  const std::int64_t begin = round_up(reinterpret_cast<std::intptr_t>(data), page);
  const std::int64_t pages = (reinterpret_cast<std::intptr_t>(data) + bytes - begin) / page;
  const std::int64_t last = begin + (pages - 1) * page, middle = begin + pages / 2 * page;
  if (exists(begin, page) && exists(middle, page) && exists(last, page)) return;
  if (grant() == Grant::on_request) return advise_huge_pages(data, bytes);
#if defined(MADV_POPULATE_WRITE)
  (void)madvise(reinterpret_cast<void*>(begin), static_cast<std::size_t>(pages * page),
                MADV_POPULATE_WRITE);
#endif
}

}  // namespace pycomm::cpu
