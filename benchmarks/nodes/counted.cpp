// Counts what all-reduces between many nodes send, and how long that takes in a model. The core's own
// schedules run on links that only note what is posted and waited for; then all nodes' notes are
// played in the order of time. counted.py compiles this and describes the model.
//
// Usage: counted NODES BYTES MESSAGE [LATENCY BYTE]..., in seconds: those that a message takes of cores,
// and for each network the latency and those of a byte. Prints a line per algorithm and network.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "core/message.h"
#include "cpu/internode/stages.h"

namespace {

using namespace pycomm;
using cpu::Batch;

// A link that notes. Sizes are in the transfers; addresses are never used.
struct Notes {
  struct Act {
    std::int64_t waits_for = 0;  // a batch, or 0: it posts one
    Batch batch;
  };
  int node, nodes;
  std::vector<Act> acts;
  std::int64_t posted = 0;

  int rank() const { return node; }
  int size() const { return nodes; }
  std::int64_t post(const Batch& batch) {
    acts.push_back({0, batch});
    return ++posted;
  }
  void wait(std::int64_t batch, int = 0) {
    if (batch > 0) acts.push_back({batch, {}});
  }
};

struct Case {
  Operation operation;
  Nodes nodes;

  Range stripe() const { return stripe_of(operation, nodes, 0, 0, operation.count); }
  std::int64_t bytes(std::int64_t count) const { return count * size_of(operation.dtype); }
};

void post_handshakes(Notes& link, bool to_all) {
  Batch batch;
  for (int turn = 1; turn < (to_all ? link.size() : 2); ++turn) {
    const auto [to, from] = partners_at(turn, link.rank(), link.size());
    batch.sends.push_back({to_all ? to : from, nullptr, sizeof(Handshake)});
    batch.receives.push_back({to_all ? from : to, nullptr, sizeof(Handshake)});
  }
  link.post(batch);
}

// What cpu::PlainStages sends.
struct TwoShot {
  const Case& all;
  std::vector<Range> owned;
  std::int64_t tile;

  explicit TwoShot(const Case& all) : all(all), owned(owned_by_nodes(all.operation, all.nodes, 0)) {
    std::int64_t most = 0;
    for (const Range& range : owned) most = std::max(most, range.count);
    tile = cpu::transfer_bytes(all.bytes(most), all.nodes.count()) / all.bytes(1);
  }
  std::int64_t tiles() const { return ceil_div(owned.front().count, tile); }
  bool reduces() const { return true; }
  bool gathers() const { return !adds_everywhere(all.operation, all.nodes, 0); }
  void stage(std::int64_t) {}
  void reduce(std::int64_t) {}
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t) {}
  Batch staged(std::int64_t t) const { return batch(t, true); }
  Batch reduced(std::int64_t t) const { return batch(t, false); }
  Batch batch(std::int64_t t, bool contributions) const {
    Batch batch;
    const int here = all.nodes.here;
    for (int turn = 1; turn < all.nodes.count(); ++turn) {
      const auto [to, from] = partners_at(turn, here, all.nodes.count());
      const std::int64_t sent = bytes(t, contributions ? to : here);
      const std::int64_t received = bytes(t, contributions ? here : from);
      if (sent > 0) batch.sends.push_back({to, nullptr, sent});
      if (received > 0) batch.receives.push_back({from, nullptr, received});
    }
    return batch;
  }
  std::int64_t bytes(std::int64_t t, int node) const {
    return all.bytes(piece_at(owned[static_cast<std::size_t>(node)], tile, t).count);
  }
};

// What cpu::WholeStripes sends.
struct Whole {
  const Case& all;
  Batch transfers(int held) const {
    Batch batch;
    for (int i = 1; i < kRadix; ++i) {
      const BlockMessage message = message_at(i, held, all.nodes.here, all.nodes.count());
      const auto block =
          static_cast<std::int64_t>(sizeof(Handshake)) + all.bytes(all.stripe().count);
      if (message.blocks == 0) break;
      batch.sends.push_back({message.to, nullptr, message.blocks * block});
      batch.receives.push_back({message.from, nullptr, message.blocks * block});
    }
    return batch;
  }
};

// What cpu::PlainPieces sends.
struct Pieces {
  const Case& all;
  void combine(const RelayStep&, std::int64_t) {}
  Batch transfers(const RelayStep& sent, const RelayStep& received, std::int64_t) const {
    Batch batch;
    for (int j = 0; j < 2; ++j) {
      if (sent.to[j] >= 0)
        batch.sends.push_back({sent.to[j], nullptr, all.bytes(sent.piece.count)});
      if (received.from[j] >= 0) {
        batch.receives.push_back({received.from[j], nullptr, all.bytes(received.piece.count)});
      }
    }
    return batch;
  }
};

// One node's part.
Notes noted(const Case& all) {
  Notes link{all.nodes.here, all.nodes.count(), {}};
  const bool in_rounds = travels_in_rounds(all.operation, all.nodes, 0);
  post_handshakes(link, !in_rounds);
  if (relays(all.operation.algorithm)) {
    Pieces pieces{all};
    visit_steps(all.operation.algorithm, relayed(all.operation, all.nodes, all.stripe().count),
                [&](const auto& steps) { relay(link, steps, pieces); });
  } else if (in_rounds) {
    Whole blocks{all};
    disseminate(link, blocks);
  } else {
    TwoShot stages(all);
    exchange(link, stages);
  }
  link.wait(link.posted);
  return link;
}

struct Costs {
  double latency, byte, message;
};

// All nodes' notes in the order of time. A node's core takes half of `message` to send a message and
// half to receive one; its link carries one message at a time in each direction.
class Play {
 public:
  Play(const std::vector<Notes>& notes, const Costs& costs)
      : notes_(notes), costs_(costs), nodes_(notes.size()) {}

  double run() {
    for (std::size_t m = 0; m < nodes_.size(); ++m) ready_.push({0, m});
    while (!ready_.empty()) {
      const std::size_t m = ready_.top().second;
      ready_.pop();
      act(m);
    }
    double last = 0;
    for (std::size_t m = 0; m < nodes_.size(); ++m) {
      if (nodes_[m].next != notes_[m].acts.size()) std::abort();  // nodes that wait for each other
      last = std::max(last, nodes_[m].now);
    }
    return last;
  }
  std::int64_t messages = 0, bytes = 0;  // the most that a node sends
  int chain = 0;                         // messages that follow one another

 private:
  struct Arrival {
    double time;
    int chain;
  };
  struct State {
    std::size_t next = 0;  // act
    double now = 0, link_out = 0, link_in = 0;
    int chain = 0;
    std::int64_t messages = 0, bytes = 0, waited = 0;
    std::vector<const Batch*> batches;
    std::size_t came = 0;  // receives of the awaited batch
  };
  using Way = std::int64_t;
  Way way(int from, int to) const { return std::int64_t{from} * notes_.front().nodes + to; }

  void act(std::size_t m) {
    State& mine = nodes_[m];
    if (mine.next == notes_[m].acts.size()) return;
    const Notes::Act& act = notes_[m].acts[mine.next];
    if (act.waits_for == 0) {
      mine.batches.push_back(&act.batch);
      for (const cpu::Transfer& transfer : act.batch.sends) send(static_cast<int>(m), transfer);
    } else {
      for (; mine.waited < act.waits_for; ++mine.waited, mine.came = 0) {
        const Batch& batch = *mine.batches[static_cast<std::size_t>(mine.waited)];
        for (; mine.came < batch.receives.size(); ++mine.came) {
          const Way way = this->way(batch.receives[mine.came].node, static_cast<int>(m));
          std::deque<Arrival>& line = lines_[way];
          if (line.empty()) {
            awaited_.insert(way);
            return;
          }
          mine.now = std::max(mine.now, line.front().time) + costs_.message / 2;
          mine.chain = std::max(mine.chain, line.front().chain);
          chain = std::max(chain, mine.chain);
          line.pop_front();
        }
      }
    }
    ++mine.next;
    ready_.push({mine.now, m});
  }

  void send(int from, const cpu::Transfer& transfer) {
    State& mine = nodes_[static_cast<std::size_t>(from)];
    State& theirs = nodes_[static_cast<std::size_t>(transfer.node)];
    const double carried = static_cast<double>(transfer.bytes) * costs_.byte;
    mine.now += costs_.message / 2;
    mine.link_out = std::max(mine.link_out, mine.now) + carried;
    theirs.link_in = std::max(theirs.link_in + carried, mine.link_out + costs_.latency);
    const Way way = this->way(from, transfer.node);
    lines_[way].push_back({theirs.link_in, mine.chain + 1});
    messages = std::max(messages, ++mine.messages);
    bytes = std::max(bytes, mine.bytes += transfer.bytes);
    if (awaited_.erase(way) > 0) {
      ready_.push({std::max(theirs.now, theirs.link_in), static_cast<std::size_t>(transfer.node)});
    }
  }

  const std::vector<Notes>& notes_;
  const Costs costs_;
  std::vector<State> nodes_;
  std::unordered_map<Way, std::deque<Arrival>> lines_;
  std::unordered_set<Way> awaited_;
  using Ready = std::pair<double, std::size_t>;
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6 || argc % 2 != 0) return 2;
  const int count = std::atoi(argv[1]);
  const std::int64_t bytes = std::atoll(argv[2]);
  for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
    Case all;
    all.operation = {Collective::all_reduce, algorithm, DType::f32, ReduceOp::sum, 0, bytes / 4};
    for (int m = 0; m < count; ++m) all.nodes.ranks.push_back({m});
    std::vector<Notes> notes;
    for (all.nodes.here = 0; all.nodes.here < count; ++all.nodes.here) notes.push_back(noted(all));
    for (int i = 4; i < argc; i += 2) {
      Play play(notes, {std::atof(argv[i]), std::atof(argv[i + 1]), std::atof(argv[3])});
      const double seconds = play.run();
      std::printf("%s %d %.9f %lld %d %lld\n", name_of(algorithm), i / 2 - 2, seconds,
                  static_cast<long long>(play.messages), play.chain,
                  static_cast<long long>(play.bytes));
    }
  }
}
