// How operations fail: all ranks raise the same reason, and no rank uses another one's memory any
// more.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/p2p/engine.h"

namespace pycomm::cpu::p2p {

void Request::rethrow() {
  if (!error) return;
  *told = true;
  std::rethrow_exception(error);
}

// Ends all requests, after an abort.
void Engine::fail(const std::string& cause) {
  ended_ = true;
  retreat();
  if (node_.copies) node_.copies->finish();
  if (others_) others_->stop();
  const std::uint64_t word = node_.comm.decided_word();
  const auto group = node_.comm.report();
  while (!node_.requests.pending().empty()) {
    const RequestPtr request = node_.requests.pending().front();
    CollectiveError error = failure_of(word, *request, cause);
    error.group = group;
    if (request->envelope.channel == Channel::program) failed_(error);  // the first one counts
    request->error = std::make_exception_ptr(error);
    node_.requests.complete(request);
  }
  matcher_.clear();
  changed_.notify_all();
}

CollectiveError Engine::failure_of(std::uint64_t word, const Request& request,
                                   const std::string& cause) const {
  const Comm& comm = node_.comm;
  const std::string during = " during " + request.describe();
  const bool valid = is_abort_word(word, comm.peers().count());
  const Reason reason = valid ? reason_of(word) : Reason::malformed;
  const int culprit = valid ? rank_of(word) : -1;
  const int pid = valid ? comm.pid_of(culprit) : -1;
  std::string what = !valid                       ? kOverwritten
                     : reason == Reason::mismatch ? comm.disagreement(word)
                     : reason == Reason::timeout
                         ? timeout_text(word, culprit == comm.number(node_.rank()), pid)
                         : failure_text(reason, culprit, pid);
  if (what.empty()) what = failure_text(reason, culprit, pid);
  CollectiveError error(reason, culprit, pid, request.name(), request.number,
                        what + during + (cause.empty() ? "" : ": " + cause));
  error.completed = comm.completed();
  return error;
}

// Returns when no other rank uses this rank's buffers.
void Engine::retreat() {
  const auto& pending = node_.requests.pending();
  const auto exposed = [](const RequestPtr& request) {
    return request->exposed_at != kNotInWindow;
  };
  if (std::none_of(pending.begin(), pending.end(), exposed)) return;
  node_.comm.await_outside(&Control::p2p_in_peers_heaps, [this] { detach(); });
}

// Detaches the pages of all buffers that other ranks may use, each page once.
void Engine::detach() {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const RequestPtr& request : node_.requests.pending()) {
    const std::int64_t begin = request->exposed_at;
    if (begin == kNotInWindow) continue;
    ranges.emplace_back(begin / kPage * kPage, round_up(begin + request->envelope.bytes, kPage));
  }
  std::sort(ranges.begin(), ranges.end());
  std::int64_t done = 0;
  for (const auto& [begin, end] : ranges) {
    const std::int64_t from = std::max(begin, done);
    if (from < end) node_.window.detach(node_.rank(), {from, end - from});
    done = std::max(done, end);
  }
}

}  // namespace pycomm::cpu::p2p
