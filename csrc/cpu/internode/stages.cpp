#include "cpu/internode/stages.h"

namespace pycomm::cpu {

std::int64_t OwnedRanges::longest(const std::vector<Range>& owned) {
  std::int64_t most = 0;
  for (const Range& range : owned) most = std::max(most, range.count);
  return most;
}

Range OwnedRanges::piece(std::int64_t t, int node) const {
  const Range& range = owned[static_cast<std::size_t>(node)];
  const Tiles tiles{range.count, tile};
  if (t >= tiles.count()) return {range.begin, 0};
  return {range.begin + tiles[t].begin, tiles[t].count};
}

PlainStages::PlainStages(Link& link, const Operation& operation, Work work, Scratch& scratch)
    : link_(link),
      work_(std::move(work)),
      element_size_(size_of(operation.dtype)),
      transfer_bytes_(
          work_.reduces
              ? transfer_bytes(OwnedRanges::longest(work_.owned) * element_size_, link.size())
              : most_transfer_bytes(link.size())),
      ranges_{work_.owned, transfer_bytes_ / element_size_},
      loop_(reduce_loop(operation.dtype, operation.op, true)),
      incoming_(work_.reduces ? scratch.bytes(kTilesUnderWay * link.size() * transfer_bytes_)
                              : nullptr),
      sources_(static_cast<std::size_t>(link.size())) {}

Batch PlainStages::staged(std::int64_t t) const {
  Batch batch;
  const Range mine = piece(t, link_.rank());
  for (int turn = 1; turn < link_.size(); ++turn) {
    const auto [to, from] = partners_at(turn, link_.rank(), link_.size());
    const Range theirs = piece(t, to);
    if (theirs.count > 0) batch.sends.push_back(transfer(to, at(theirs), theirs));
    if (mine.count > 0) batch.receives.push_back(transfer(from, incoming(t, from), mine));
  }
  return batch;
}

void PlainStages::reduce(std::int64_t t) {
  const Range mine = piece(t, link_.rank());
  if (mine.count == 0) return;
  for (int m = 0; m < link_.size(); ++m) {
    sources_[static_cast<std::size_t>(m)] = m == link_.rank() ? at(mine) : incoming(t, m);
  }
  const Target here{at(mine), false};
  cpu::reduce(loop_, &here, 1, sources_.data(), link_.size(), mine.count, element_size_,
              link_.contributors());
}

Batch PlainStages::reduced(std::int64_t t) const {
  Batch batch;
  const Range mine = piece(t, link_.rank());
  for (int turn = 1; turn < link_.size(); ++turn) {
    const auto [to, from] = partners_at(turn, link_.rank(), link_.size());
    const Range theirs = piece(t, from);
    if (mine.count > 0 && gets_result(to)) batch.sends.push_back(transfer(to, at(mine), mine));
    if (theirs.count > 0 && gets_result(link_.rank())) {
      batch.receives.push_back(transfer(from, at(theirs), theirs));
    }
  }
  return batch;
}

WholeStripes::WholeStripes(Link& link, const Operation& operation, std::byte* stripe,
                           std::int64_t count, Scratch& scratch)
    : link_(link),
      stripe_(stripe),
      count_(count),
      element_size_(size_of(operation.dtype)),
      bytes_(count * element_size_),
      loop_(reduce_loop(operation.dtype, operation.op, true)),
      blocks_(scratch.bytes(link.size() * (Link::kHandshakeBytes + bytes_))) {
  link.write_handshake(block(0));
  copy({contribution(0), false}, stripe, bytes_);
}

Batch WholeStripes::transfers(int held) const {
  Batch batch;
  for (int i = 1; i < kRadix; ++i) {
    const BlockMessage message = message_at(i, held, link_.rank(), link_.size());
    if (message.blocks == 0) break;
    const std::int64_t bytes = message.blocks * (Link::kHandshakeBytes + bytes_);
    batch.sends.push_back({message.to, block(0), bytes});
    batch.receives.push_back({message.from, block(message.received), bytes});
  }
  return batch;
}

void WholeStripes::reduce() {
  std::vector<const void*> contributions;
  for (int m = 0; m < link_.size(); ++m) {
    const int i = (m - link_.rank() + link_.size()) % link_.size();
    link_.read_handshake(m, block(i));
    contributions.push_back(contribution(i));
  }
  link_.check_announcements();
  const Target here{stripe_, false};
  cpu::reduce(loop_, &here, 1, contributions.data(), link_.size(), count_, element_size_,
              link_.contributors());
}

TileRanges tile_ranges_of(const Operation& operation, const StripeInterleave& interleave,
                          int nodes) {
  TileRanges tile_ranges{interleave.length * interleave.stripes, first_element(operation),
                         operation.count, 1};
  if (operation.codec.kind == CodecKind::topk || relays(operation.algorithm)) {
    tile_ranges.periods_per_tile = std::max<std::int64_t>(tile_ranges.periods(), 1);
  } else {
    const std::int64_t piece_bytes = kOwnedElements * payload_size(operation.codec);
    const std::int64_t transfer = transfer_bytes(tile_ranges.periods() * piece_bytes, nodes);
    tile_ranges.periods_per_tile = std::max<std::int64_t>(transfer / piece_bytes, 1);
  }
  return tile_ranges;
}

RangeOwners::RangeOwners(std::vector<Range> owned, const Codec& codec)
    : ranges_{std::move(owned), 0} {
  const std::int64_t bytes = OwnedRanges::longest(ranges_.owned) * payload_size(codec);
  const auto nodes = static_cast<int>(ranges_.owned.size());
  const std::int64_t elements = transfer_bytes(bytes, nodes) / payload_size(codec);
  ranges_.tile = elements / block_of(codec) * block_of(codec);
}

EncodedAreas::EncodedAreas(const Codec& codec, std::int64_t elements)
    : staging(CodedStaging::in(0, codec)),
      scaled(is_scaled(codec)),
      bytes(elements * staging.payload + (elements >> staging.shift) * 4) {
  staging.slot = elements / kStagingSlots;
}

void EncodedAreas::add_transfers(std::vector<Transfer>& transfers, int node, const Location& area,
                                 std::int64_t elements) const {
  if (elements == 0) return;
  const Encoded encoded = staging[area];
  const std::int64_t payload = elements * staging.payload;
  const std::int64_t scales = scaled ? ceil_div(elements, staging.block) * 4 : 0;
  if (encoded.payload + payload == reinterpret_cast<std::byte*>(encoded.scales)) {
    transfers.push_back({node, encoded.payload, payload + scales});
    return;
  }
  transfers.push_back({node, encoded.payload, payload});
  if (scaled) {
    transfers.push_back({node, reinterpret_cast<std::byte*>(encoded.scales), scales});
  }
}

template <class Owners>
BlockStages<Owners>::BlockStages(Link& link, CodedComm<Link>& coded, const EncodedAreas& layout,
                                 const Owners& owners, Scratch& scratch)
    : link_(link),
      coded_(coded),
      layout_(layout),
      owners_(owners),
      areas_(scratch.bytes(kTilesUnderWay * kUses * link.size() * layout.bytes)) {}

template <class Owners>
Location BlockStages<Owners>::area(std::int64_t t, Use use, int node) const {
  const std::int64_t index =
      (t % kTilesUnderWay * kUses + static_cast<int>(use)) * link_.size() + node;
  const int writer = use == Use::contribution ? link_.rank() : node;
  return {areas_ + index * layout_.bytes, writer, 0};
}

// Encodes the parts of all owners, including this node's own, so that no node has a more exact copy:
// coded_.copy() to a slot encodes.
template <class Owners>
void BlockStages<Owners>::stage(std::int64_t t) {
  for (int m = 0; m < link_.size(); ++m) {
    const Location to = area(t, Use::contribution, m);
    owners_.each_run(t, m, [&](const Chunk& run, std::int64_t begin) {
      coded_.copy(coded_.at(to, begin), coded_.at(coded_.input(), run.input), run.count);
    });
  }
}

template <class Owners>
Batch BlockStages<Owners>::staged(std::int64_t t) const {
  Batch batch;
  const std::int64_t mine = elements(t, link_.rank());
  for (int turn = 1; turn < link_.size(); ++turn) {
    const auto [to, from] = partners_at(turn, link_.rank(), link_.size());
    layout_.add_transfers(batch.sends, to, area(t, Use::contribution, to), elements(t, to));
    layout_.add_transfers(batch.receives, from, area(t, Use::incoming, from), mine);
  }
  return batch;
}

// If it is gathered, the encoded result replaces this node's own contribution.
template <class Owners>
void BlockStages<Owners>::reduce(std::int64_t t) {
  const int me = link_.rank();
  const Location own = area(t, Use::contribution, me);
  owners_.each_run(t, me, [&](const Chunk& run, std::int64_t begin) {
    const auto from = [&](int m) {
      return coded_.at(m == me ? own : area(t, Use::incoming, m), begin);
    };
    const auto to = [&](int i) {
      return gathers() && i == 0 ? coded_.at(own, begin) : coded_.at(coded_.output(), run.output);
    };
    coded_.reduce(gathers() ? 2 : 1, to, link_.size(), from, run.count, true);
  });
}

template <class Owners>
Batch BlockStages<Owners>::reduced(std::int64_t t) const {
  Batch batch;
  const int me = link_.rank();
  for (int turn = 1; turn < link_.size(); ++turn) {
    const auto [to, from] = partners_at(turn, me, link_.size());
    layout_.add_transfers(batch.sends, to, area(t, Use::contribution, me), elements(t, me));
    layout_.add_transfers(batch.receives, from, area(t, Use::result, from), elements(t, from));
  }
  return batch;
}

template <class Owners>
void BlockStages<Owners>::gather(std::int64_t t) {
  for (int m = 0; m < link_.size(); ++m) {
    if (m == link_.rank()) continue;
    const Location from = area(t, Use::result, m);
    owners_.each_run(t, m, [&](const Chunk& run, std::int64_t begin) {
      coded_.copy(coded_.at(coded_.output(), run.output), coded_.at(from, begin), run.count);
    });
  }
}

template class BlockStages<CyclicOwners>;
template class BlockStages<RangeOwners>;

ListStages::ListStages(Link& link, TopkComm<Link>& coded, std::vector<std::int64_t>& lengths)
    : link_(link), coded_(coded), lengths_(lengths) {
  lengths_.resize(static_cast<std::size_t>(2 * link.size()));
}

void ListStages::stage(std::int64_t) {
  for (int m = 0; m < link_.size(); ++m) {
    coded_.stage(m);
  }
}

Batch ListStages::staged(std::int64_t) { return with_lengths(false); }

void ListStages::reduce(std::int64_t) { coded_.reduce(); }

Batch ListStages::reduced(std::int64_t) { return with_lengths(true); }

void ListStages::meanwhile(std::int64_t) { coded_.gather(link_.rank()); }

void ListStages::gather(std::int64_t) {
  for (int m = 0; m < link_.size(); ++m) {
    if (m != link_.rank()) coded_.gather(m);
  }
}

// The transfers of this rank's lists to the others (or of its result to all), and of their lists to
// this rank. A long list takes several batches: posts all but the last one and returns that.
Batch ListStages::with_lengths(bool result) {
  const int me = link_.rank();
  std::int64_t* const sent = lengths_.data();
  std::int64_t* const received = sent + link_.size();
  Batch lengths;
  for (int m = 0; m < link_.size(); ++m) {
    if (m == me) continue;
    sent[m] = coded_.list_bytes(result ? me : m, result);
    lengths.sends.push_back({m, reinterpret_cast<std::byte*>(sent + m), sizeof(sent[m])});
    lengths.receives.push_back({m, reinterpret_cast<std::byte*>(received + m), sizeof(sent[m])});
  }
  link_.wait(link_.post(lengths));
  std::vector<Batch> batches(1);
  const auto add = [&](std::vector<Transfer> Batch::* way, int node, std::byte* list,
                       std::int64_t bytes) {
    const Tiles pieces{bytes, kMostTileBytes};
    for (std::int64_t i = 0; i < pieces.count(); ++i) {
      if (i == static_cast<std::int64_t>(batches.size())) batches.emplace_back();
      const Range piece = pieces[i];
      (batches[static_cast<std::size_t>(i)].*way)
          .push_back({node, list + piece.begin, piece.count});
    }
  };
  for (int turn = 1; turn < link_.size(); ++turn) {
    const auto [to, from] = partners_at(turn, me, link_.size());
    const int owner = result ? from : me;
    if (received[from] < 0 || received[from] > coded_.room(owner, result)) {
      link_.blame(from, "a list of " + std::to_string(received[from]) +
                            " bytes does not fit into its area");
    }
    add(&Batch::sends, to, coded_.list(me, result ? me : to, result), sent[to]);
    add(&Batch::receives, from, coded_.list(from, owner, result), received[from]);
  }
  for (std::size_t i = 0; i + 1 < batches.size(); ++i) link_.post(batches[i]);
  return batches.back();
}

}  // namespace pycomm::cpu
