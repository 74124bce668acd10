#include "cpu/internode/stages.h"

namespace pycomm::cpu {

PlainPart::PlainPart(Link& link, const Operation& operation, Work work, Scratch& scratch)
    : link_(link),
      work_(std::move(work)),
      element_size_(size_of(operation.dtype)),
      parcel_bytes_(parcel_bytes(largest_bytes(), link.size())),
      loop_(reduce_loop(operation.dtype, operation.op, true)),
      tiles_(ceil_div(largest_bytes(), parcel_bytes_)),
      incoming_(scratch.bytes(kTilesUnderWay * link.size() * parcel_bytes_)),
      sources_(static_cast<std::size_t>(link.size())) {}

// Of what one machine owns.
std::int64_t PlainPart::largest_bytes() const {
  std::int64_t most = 0;
  for (const Range& owned : work_.owned) most = std::max(most, owned.count * element_size_);
  return most;
}

Range PlainPart::piece(std::int64_t t, int machine) const {
  const Range& owned = work_.owned[static_cast<std::size_t>(machine)];
  const Tiles tiles = cut(owned);
  if (t >= tiles.count()) return {owned.begin, 0};
  const Range tile = tiles[t];
  return {owned.begin + tile.begin, tile.count};
}

Round PlainPart::staged(std::int64_t t) const {
  Round round;
  const Range mine = piece(t, link_.rank());
  for (int m = 0; m < link_.size(); ++m) {
    if (m == link_.rank()) continue;
    const Range theirs = piece(t, m);
    if (theirs.count > 0) round.sends.push_back(parcel(m, at(theirs), theirs));
    if (mine.count > 0) round.receives.push_back(parcel(m, incoming(t, m), mine));
  }
  return round;
}

void PlainPart::reduce(std::int64_t t) {
  const Range mine = piece(t, link_.rank());
  if (mine.count == 0) return;
  for (int m = 0; m < link_.size(); ++m) {
    sources_[static_cast<std::size_t>(m)] = m == link_.rank() ? at(mine) : incoming(t, m);
  }
  const Target here{at(mine), false};
  cpu::reduce(loop_, &here, 1, sources_.data(), link_.size(), mine.count, element_size_,
              link_.contributors());
}

Round PlainPart::reduced(std::int64_t t) const {
  Round round;
  const Range mine = piece(t, link_.rank());
  for (int m = 0; m < link_.size(); ++m) {
    if (m == link_.rank()) continue;
    const Range theirs = piece(t, m);
    if (mine.count > 0) round.sends.push_back(parcel(m, at(mine), mine));
    if (theirs.count > 0) round.receives.push_back(parcel(m, at(theirs), theirs));
  }
  return round;
}

Stretches stretches_of(const Operation& operation, const Cycles& cycles, int machines) {
  Stretches stretches{cycles.length * cycles.stripes, first_element(operation), operation.count, 1};
  if (operation.codec.kind == CodecKind::topk) {
    stretches.turns_per_tile = std::max<std::int64_t>(stretches.turns(), 1);
  } else {
    const std::int64_t turn_bytes = kOwnedElements * payload_size(operation.codec);
    const std::int64_t parcel = parcel_bytes(stretches.turns() * turn_bytes, machines);
    stretches.turns_per_tile = std::max<std::int64_t>(parcel / turn_bytes, 1);
  }
  return stretches;
}

CodedStaging BlocksPart::staging(const Codec& codec, const Stretches& stretches) {
  CodedStaging staging = CodedStaging::in(0, codec);
  staging.slot = stretches.turns_per_tile * kOwnedElements / kStagingSlots;
  return staging;
}

BlocksPart::BlocksPart(Link& link, CodedComm<Link>& coded, const Operation& operation,
                       const Stretches& stretches, Scratch& scratch)
    : link_(link),
      coded_(coded),
      staging_(staging(operation.codec, stretches)),
      scaled_(is_scaled(operation.codec)),
      region_bytes_(kStagingSlots * staging_.slot * staging_.payload +
                    (kStagingSlots * staging_.slot >> staging_.shift) * 4),
      stretches_(stretches),
      turns_{link, first_element(operation), kOwnedElements},
      regions_(scratch.bytes(kTilesUnderWay * 3 * link.size() * region_bytes_)) {}

Place BlocksPart::region(std::int64_t t, Use use, int machine) const {
  const std::int64_t index =
      (t % kTilesUnderWay * 3 + static_cast<int>(use)) * link_.size() + machine;
  const int writer = use == Use::contribution ? link_.rank() : machine;
  return {regions_ + index * region_bytes_, writer, 0};
}

template <class Visit>
std::int64_t BlocksPart::each_run(std::int64_t t, int owner, Visit visit) const {
  const std::int64_t first = t * stretches_.turns_per_tile;
  const std::int64_t end = std::min(first + stretches_.turns_per_tile, stretches_.turns());
  // A stripe's turns are counted as the whole's are, but may begin with the next one.
  const std::int64_t before = stretches_.first_turn() - turns_.offset / turns_.cycle();
  std::int64_t elements = 0;
  for (std::int64_t turn = first; turn < end; ++turn) {
    const Chunk chunk = turns_(before + turn, owner);
    visit(Range{chunk.input, chunk.count}, elements);
    elements += chunk.count;
  }
  return elements;
}

std::int64_t BlocksPart::elements(std::int64_t t, int owner) const {
  return each_run(t, owner, [](const Range&, std::int64_t) {});
}

void BlocksPart::add_parcels(std::vector<Parcel>& parcels, int machine, const Place& region,
                             std::int64_t elements) const {
  if (elements == 0) return;
  const Encoded encoded = staging_[region];
  const std::int64_t payload = elements * staging_.payload;
  const std::int64_t scales = scaled_ ? ceil_div(elements, staging_.block) * 4 : 0;
  if (encoded.payload + payload == reinterpret_cast<std::byte*>(encoded.scales)) {
    parcels.push_back({machine, encoded.payload, payload + scales});
    return;
  }
  parcels.push_back({machine, encoded.payload, payload});
  if (scaled_) {
    parcels.push_back({machine, reinterpret_cast<std::byte*>(encoded.scales), scales});
  }
}

// Of every part, this machine's own as well: nobody has a better copy.
void BlocksPart::stage(std::int64_t t) {
  for (int m = 0; m < link_.size(); ++m) {
    const Place to = region(t, Use::contribution, m);
    each_run(t, m, [&](const Range& run, std::int64_t begin) {
      coded_.copy(coded_.at(to, begin), coded_.at(coded_.input(), run.begin), run.count);
    });
  }
}

Round BlocksPart::staged(std::int64_t t) const {
  Round round;
  const std::int64_t mine = elements(t, link_.rank());
  for (int m = 0; m < link_.size(); ++m) {
    if (m == link_.rank()) continue;
    add_parcels(round.sends, m, region(t, Use::contribution, m), elements(t, m));
    add_parcels(round.receives, m, region(t, Use::incoming, m), mine);
  }
  return round;
}

// The result takes the place of the own contribution.
void BlocksPart::reduce(std::int64_t t) {
  const int me = link_.rank();
  const Place own = region(t, Use::contribution, me);
  each_run(t, me, [&](const Range& run, std::int64_t begin) {
    const auto from = [&](int m) {
      return coded_.at(m == me ? own : region(t, Use::incoming, m), begin);
    };
    const auto to = [&](int i) {
      return i == 0 ? coded_.at(own, begin) : coded_.at(coded_.output(), run.begin);
    };
    coded_.reduce(2, to, link_.size(), from, run.count, true);
  });
}

Round BlocksPart::reduced(std::int64_t t) const {
  Round round;
  const int me = link_.rank();
  for (int m = 0; m < link_.size(); ++m) {
    if (m == me) continue;
    add_parcels(round.sends, m, region(t, Use::contribution, me), elements(t, me));
    add_parcels(round.receives, m, region(t, Use::result, m), elements(t, m));
  }
  return round;
}

void BlocksPart::gather(std::int64_t t) {
  for (int m = 0; m < link_.size(); ++m) {
    if (m == link_.rank()) continue;
    const Place from = region(t, Use::result, m);
    each_run(t, m, [&](const Range& run, std::int64_t begin) {
      coded_.copy(coded_.at(coded_.output(), run.begin), coded_.at(from, begin), run.count);
    });
  }
}

ListsPart::ListsPart(Link& link, TopkComm<Link>& coded, std::vector<std::int64_t>& lengths)
    : link_(link), coded_(coded), lengths_(lengths) {
  lengths_.resize(static_cast<std::size_t>(2 * link.size()));
}

void ListsPart::stage(std::int64_t) {
  for (int m = 0; m < link_.size(); ++m) {
    coded_.stage(m);
  }
}

Round ListsPart::staged(std::int64_t) { return with_lengths(false); }

void ListsPart::reduce(std::int64_t) { coded_.reduce(); }

Round ListsPart::reduced(std::int64_t) { return with_lengths(true); }

void ListsPart::meanwhile(std::int64_t) { coded_.gather(link_.rank()); }

void ListsPart::gather(std::int64_t) {
  for (int m = 0; m < link_.size(); ++m) {
    if (m != link_.rank()) coded_.gather(m);
  }
}

// The lists that this rank has written for the others, or for all, and theirs. Returns the last of
// their rounds.
Round ListsPart::with_lengths(bool result) {
  const int me = link_.rank();
  std::int64_t* const sent = lengths_.data();
  std::int64_t* const received = sent + link_.size();
  Round lengths;
  for (int m = 0; m < link_.size(); ++m) {
    if (m == me) continue;
    sent[m] = coded_.list_bytes(result ? me : m, result);
    lengths.sends.push_back({m, reinterpret_cast<std::byte*>(sent + m), sizeof(sent[m])});
    lengths.receives.push_back({m, reinterpret_cast<std::byte*>(received + m), sizeof(sent[m])});
  }
  link_.wait(link_.post(lengths));
  std::vector<Round> rounds(1);
  const auto add = [&](std::vector<Parcel> Round::* way, int machine, std::byte* list,
                       std::int64_t bytes) {
    const Tiles pieces{bytes, kMostTileBytes};
    for (std::int64_t i = 0; i < pieces.count(); ++i) {
      if (i == static_cast<std::int64_t>(rounds.size())) rounds.emplace_back();
      const Range piece = pieces[i];
      (rounds[static_cast<std::size_t>(i)].*way)
          .push_back({machine, list + piece.begin, piece.count});
    }
  };
  for (int m = 0; m < link_.size(); ++m) {
    if (m == me) continue;
    const int owner = result ? m : me;
    if (received[m] < 0 || received[m] > coded_.room(owner, result)) {
      link_.blame(m, "a list of " + std::to_string(received[m]) + " bytes does not fit its place");
    }
    add(&Round::sends, m, coded_.list(me, result ? me : m, result), sent[m]);
    add(&Round::receives, m, coded_.list(m, owner, result), received[m]);
  }
  for (std::size_t i = 0; i + 1 < rounds.size(); ++i) link_.post(rounds[i]);
  return rounds.back();
}

}  // namespace pycomm::cpu
