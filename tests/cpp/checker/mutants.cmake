# add_mutant(name header old new), of a header of core/

# A wait less.
add_mutant(ring_returns_while_it_is_read algorithms/ring.h "if (zero_copy) comm.wait(right, kUp, signalled);" "")
add_mutant(packets_without_meeting algorithms/packet.h "comm.await_announcements();" "")
add_mutant(reduce_scatter_returns_while_it_is_read algorithms/two_shot.h "comm.wait_all(kReduced, 1);" "")
add_mutant(multicast_does_not_wait_for_the_stage algorithms/multicast.h "comm.wait_all(kStaged, t + 1);" "")
add_mutant(multicast_has_one_slot algorithms/multicast.h "% 2" "% 1")
add_mutant(multicast_gathers_early algorithms/multicast.h "comm.wait_all(kReduced, t);" "")
add_mutant(tree_returns_while_it_is_read algorithms/tree.h
  "first.wait_children(first.down_channel(), first.pieces.count());" "")
add_mutant(reduce_returns_while_it_is_read algorithms/reduce.h
  "if (zero_copy && !is_root) comm.wait_all(kReduced, tiles);" "")
add_mutant(reduce_root_does_not_wait algorithms/reduce.h "comm.wait_all(kReduced, t);" "")
add_mutant(gather_root_does_not_wait algorithms/gather.h "comm.wait(r, kStaged, t + 1);" "")
add_mutant(scatter_does_not_wait algorithms/scatter.h "comm.wait(root, kStaged, t + 1);" "")
add_mutant(scatter_returns_while_it_is_read algorithms/scatter.h
  "if (zero_copy && is_root) comm.wait_all(kReduced, tiles);" "")
add_mutant(all_to_all_does_not_wait algorithms/all_to_all.h "comm.wait_all(kStaged, t);" "")
add_mutant(sharded_step_updates_before_all_are_done algorithms/sharded_step.h "comm.announce();" "comm.publish();")
add_mutant(sharded_step_takes_a_norm_too_early algorithms/sharded_step.h
  "comm.wait_all(kStaged, ++measured);
    comm.conclude_norm();" "++measured;
    comm.conclude_norm();")
add_mutant(sharded_step_takes_ratios_too_early algorithms/sharded_step.h
  "comm.wait_all(kStaged, ++measured);
    comm.conclude_ratios();" "comm.wait_all(kStaged, measured);
    comm.conclude_ratios();")
add_mutant(sharded_step_returns_before_all_have_published algorithms/sharded_step.h
  "comm.wait_all(kReduced, 1);" "")
add_mutant(sharded_step_tells_too_late_that_it_updates algorithms/sharded_step.h "comm.signal(kUpdating);
  comm.update();" "comm.update();
  comm.signal(kUpdating);")
add_node_mutant(exchange_adds_what_has_not_come core/algorithms/internode.h "link.wait(staged[t % kTilesUnderWay]);" "")
add_node_mutant(rounds_send_what_has_not_come core/algorithms/dissemination.h
  "link.wait(link.post(blocks.transfers(held)), hops++);" "link.post(blocks.transfers(held));")
add_node_mutant(relay_adds_what_has_not_come core/algorithms/relay.h "if (i >= 0) link.wait(batch);" "")
add_node_mutant(relay_returns_while_it_sends core/algorithms/relay.h "link.wait(last);" "")

# A step off.
add_mutant(ring_waits_for_the_step_before algorithms/ring.h "signalled + 1 - tile.pieces" "signalled - tile.pieces")
add_mutant(two_shot_waits_for_the_stage_before algorithms/two_shot.h "comm.wait_all(kStaged, t + 1);"
  "comm.wait_all(kStaged, t);")
add_mutant(broadcast_root_does_not_wait_long_enough algorithms/broadcast.h
  "comm.wait_all(kReduced, t - kStagingSlots + 1);" "comm.wait_all(kReduced, t - kStagingSlots);")
add_mutant(gather_does_not_wait_long_enough algorithms/gather.h
  "comm.wait(root, kReduced, t - kStagingSlots + 1);" "comm.wait(root, kReduced, t - kStagingSlots);")
add_mutant(scatter_root_does_not_wait_long_enough algorithms/scatter.h
  "comm.wait_all(kReduced, t - kStagingSlots + 1);" "comm.wait_all(kReduced, t - kStagingSlots);")

# A slot less.
add_mutant(ring_has_one_slot algorithms/ring.h "t % kStagingSlots" "0")
add_mutant(one_shot_has_one_slot algorithms/one_shot.h "t % 2" "0")
add_mutant(shots_have_three_slots algorithms/two_shot.h "t % kStagingSlots" "t % 3")
add_mutant(tree_lags_too_far algorithms/tree.h "depth < kStagingSlots - 1 ? depth : kStagingSlots - 1" "depth + 1")
add_mutant(trees_share_slots algorithms/tree.h "index * kStagingSlots + k % kStagingSlots" "k % kStagingSlots")
add_node_mutant(exchange_has_too_few_tiles core/algorithms/internode.h "kTilesUnderWay = 2 * kPipelineDepth + 1"
  "kTilesUnderWay = kPipelineDepth + 1")
add_node_mutant(relay_has_too_few_areas cpu/internode/relay.h "i % kStepsAhead * 2 + which) * piece_bytes_"
  "i % (kStepsAhead / 2) * 2 + which) * piece_bytes_")

add_mutant(gather_has_three_slots algorithms/gather.h "t % kStagingSlots" "t % 3")

# A flag early.
add_mutant(one_shot_announces_early algorithms/one_shot.h "if (tiles.count() > 0) stage(0);
  comm.announce();" "comm.announce();
  if (tiles.count() > 0) stage(0);")
add_mutant(two_shot_signals_early algorithms/two_shot.h "detail::reduce_owned(comm, chunks, t, true);
      comm.signal(kReduced);" "comm.signal(kReduced);
      detail::reduce_owned(comm, chunks, t, true);")

# A wrong child or place.
add_mutant(tree_loses_a_child layout.h "if (v + step < n) return v + step;"
  "if (v + step < n - 1) return v + step;")
add_mutant(parts_overlap layout.h "(index < longer ? index : longer)) * unit"
  "(index < longer ? index : longer - 1)) * unit")
add_mutant(packed_stripe_has_gaps algorithms/stripes.h "stripe > s ? length" "stripe >= s ? length")
add_mutant(scales_lie_on_payload algorithms/coded.h "location.data + kStagingSlots * slot * payload"
  "location.data + slot * payload")
add_mutant(coded_slots_overflow algorithms/coded.h "piece * ranks > slot" "piece * (ranks - 1) > slot")
add_mutant(result_lies_on_a_list codecs/topk.h "return list(ranks);" "return list(ranks - 1);")

# add_star_mutant(name old new), of the algorithm of docs/contributing/extending.md.
add_star_mutant(star_adds_what_has_not_come "comm.wait_all(kStaged, t + 1);" "")
add_star_mutant(star_copies_what_has_not_come "comm.wait(0, kReduced, t);" "")
add_star_mutant(star_has_one_slot "t % 2" "0")

# add_epoch_mutant(name header old new), of a header of core/: what happens after the last epoch.
add_epoch_mutant(epochs_do_not_wrap signal.h
  "static_cast<std::int32_t>(flag - target) >= 0" "flag >= target")
add_epoch_mutant(epochs_begin_with_0 operation.h "sequence + 1 == 0 ? 2 : sequence + 1" "sequence + 1")
add_epoch_mutant(epochs_begin_with_1 operation.h "sequence + 1 == 0 ? 2" "sequence + 1 == 0 ? 1")

# add_node_mutant(name file old new), of what is between nodes.
add_node_mutant(stripes_share_a_slot core/algorithms/stripes.h "owner * piece(), rest" "0, rest")
add_node_mutant(plain_transfers_share_a_place cpu/internode/stages.h
  "t % kTilesUnderWay * link_.size() + node" "node")
add_node_mutant(rounds_overwrite_a_block cpu/internode/stages.cpp "block(message.received)" "block(message.received - 1)")
add_node_mutant(rounds_add_in_another_order cpu/internode/stages.cpp "(m - link_.rank() + link_.size())" "(m + link_.size())")
add_node_mutant(encoded_transfers_share_a_place cpu/internode/stages.cpp "(t % kTilesUnderWay * kUses + " "(")
add_node_mutant(contribution_is_a_result cpu/internode/stages.cpp "area(t, Use::incoming, m), begin"
  "area(t, Use::result, m), begin")
add_node_mutant(lengths_are_not_waited_for cpu/internode/stages.cpp "link_.wait(link_.post(lengths));"
  "link_.post(lengths);")
add_node_mutant(topk_selects_from_a_part cpu/internode/aggregate.cpp
  "if (call_.feedback.residual == nullptr && operation_.codec.kind != CodecKind::topk) return;"
  "if (call_.feedback.residual == nullptr) return;")
add_node_mutant(aggregate_spreads_what_has_not_come cpu/internode/aggregate.h "stages_.gather(t);
    preflight_ = aggregate_.spread(t, finding_());" "preflight_ = aggregate_.spread(t, finding_());
    stages_.gather(t);")
add_node_mutant(residual_of_nobody cpu/internode/aggregate.cpp "  zero(state, operation_.count);" "")
add_node_mutant(blocks_go_by_rank cpu/internode/group.cpp "if (nodes_.in_order()) return" "if (true) return")
add_node_mutant(pieces_are_the_first cpu/internode/stages.cpp "return {range.begin + tiles[t].begin," "return {range.begin,")
add_node_mutant(sums_lie_in_another_segment cpu/internode/group.cpp "carried_call.output = sums + mine.begin;"
  "carried_call.output = sums;")
add_node_mutant(all_gather_forgets_a_node cpu/internode/group.cpp "if (m == nodes_.here) continue;
    gather_stripes" "if (m <= 1) continue;
    gather_stripes")
add_node_mutant(broadcast_stays_with_the_carriers cpu/internode/group.cpp "if (!from_here) gather_stripes" "if (false) gather_stripes")

# add_cpu_mutant(name source test file old new), of cpu/: how operations that fail end, and how groups do.
add_cpu_mutant(enters_too_weakly executor/comm interleavings cpu/executor/comm.cpp "in_peers_heaps.exchange(1);"
  "in_peers_heaps.store(1, std::memory_order_release);")
add_cpu_mutant(does_not_retreat faults/failing interleavings cpu/faults/failing.cpp "if (!exposed_) return;" "return;")
add_cpu_mutant(last_reason_stays faults/failing interleavings cpu/faults/failing.cpp "abort.compare_exchange_strong(none, word);"
  "abort.exchange(word + none);")
add_cpu_mutant(flags_do_not_wrap executor/comm interleavings core/signal.h
  "static_cast<std::int32_t>(flag - target) >= 0" "flag >= target")
add_cpu_mutant(tells_of_updates_before_it_retreats group/group interleavings cpu/group/group.cpp "  comm_.retreat();
  comm_.wait_for_kernels(kRetreatWithin);
  if (call.body != nullptr) call.body->note_failure(comm_);"
  "  if (call.body != nullptr) call.body->note_failure(comm_);
  comm_.retreat();
  comm_.wait_for_kernels(kRetreatWithin);")
add_cpu_mutant(tells_of_own_updates_only executor/comm interleavings cpu/executor/comm.cpp
  "if (reached(published(r, channel), started_[channel] + 1)) return true;"
  "if (r == rank_ && reached(published(r, channel), started_[channel] + 1)) return true;")
add_cpu_mutant(takes_work_when_closed group/group close cpu/group/group.cpp
  "if (closed_) check_usable();  // nobody would join" "// nobody would join")

add_cpu_mutant(goes_on_alone faults/decision interleavings cpu/faults/decision.cpp
  "outcome_ = comm.settle(made_ + 1, Outcome::failed);" "outcome_ = Outcome::failed;")
add_cpu_mutant(last_outcome_holds group/node_ranks interleavings cpu/group/node_ranks.cpp "while (settled >> 2 != number)" "while (true)")
# How survivors agree on a smaller group.
add_cpu_mutant(last_proposal_holds faults/shrink agreement cpu/faults/shrink.cpp
  "decision.compare_exchange_strong(none, mine)" "decision.exchange(mine) != mine")
add_cpu_mutant(absent_ranks_are_members faults/shrink agreement cpu/faults/shrink.cpp
  "(what == kArrived || what == kHasNoRoom) && " "")
add_cpu_mutant(the_dead_are_awaited faults/shrink agreement cpu/faults/shrink.cpp " && !comm_.gone(r)" "")
add_cpu_mutant(the_dead_are_to_propose faults/shrink agreement cpu/faults/shrink.cpp
  "said(r) == kArrived && !comm_.ended(r)" "said(r) == kArrived")
add_cpu_mutant(withdraws_before_it_says_so faults/shrink agreement cpu/faults/shrink.cpp "say(kWithdrawn);
    if (decision() == 0) return;" "if (decision() == 0) return say(kWithdrawn);
    say(kWithdrawn);")
add_cpu_mutant(says_too_weakly faults/shrink agreement cpu/faults/shrink.cpp "shrinking.store(said);"
  "shrinking.store(said, std::memory_order_release);")
add_cpu_mutant(withdrawn_members_stay faults/shrink agreement cpu/faults/shrink.cpp "== kWithdrawn) leave(smaller, r);"
  "== kNothing) leave(smaller, r);")

# add_ring_mutant(name old new), of cpu/p2p/ring.h.
# A memory order too weak.
add_ring_mutant(ring_publishes_relaxed "mailbox_.sender.sent.exchange(sent_);"
  "mailbox_.sender.sent.exchange(sent_, std::memory_order_relaxed);")
add_ring_mutant(ring_reads_relaxed "sender.sent.load(std::memory_order_acquire)"
  "sender.sent.load(std::memory_order_relaxed)")
add_ring_mutant(ring_gives_back_relaxed "mailbox_.receiver.taken.exchange(taken_);"
  "mailbox_.receiver.taken.exchange(taken_, std::memory_order_relaxed);")
add_ring_mutant(ring_takes_room_relaxed "receiver.taken.load(std::memory_order_acquire)"
  "receiver.taken.load(std::memory_order_relaxed)")
add_ring_mutant(ring_answers_relaxed "mailbox_.receiver.answered.exchange(answered + 1);"
  "mailbox_.receiver.answered.exchange(answered + 1, std::memory_order_relaxed);")
add_ring_mutant(ring_reads_answers_relaxed "answered.load(std::memory_order_acquire)"
  "answered.load(std::memory_order_relaxed)")
add_ring_mutant(ring_takes_answers_relaxed "answers_taken.store(taken + 1, std::memory_order_release)"
  "answers_taken.store(taken + 1, std::memory_order_relaxed)")
add_ring_mutant(ring_overwrites_answers_relaxed "answers_taken.load(std::memory_order_acquire)"
  "answers_taken.load(std::memory_order_relaxed)")
# A sleeper that is not seen.
add_ring_mutant(ring_publishes_late "mailbox_.sender.sent.exchange(sent_);"
  "mailbox_.sender.sent.store(sent_, std::memory_order_release);")
add_ring_mutant(ring_answers_late "mailbox_.receiver.answered.exchange(answered + 1);"
  "mailbox_.receiver.answered.store(answered + 1, std::memory_order_release);")
# A step off.
add_ring_mutant(ring_has_too_much_room "return kRingBytes - distance(" "return kRingBytes + 64 - distance(")
add_ring_mutant(ring_has_an_answer_more "== kAnswers) return false;" "== kAnswers + 1) return false;")
add_ring_mutant(ring_does_not_wrap "const std::int64_t first = std::min(bytes, kRingBytes - at);"
  "const std::int64_t first = bytes;")
add_ring_mutant(ring_gives_back_too_much "length_of(frame));
    mailbox_.receiver" "length_of(frame)) + 64;
    mailbox_.receiver")
add_ring_mutant(ring_publishes_before_it_writes "put(ring_, sent_, &frame, sizeof(frame));"
  "mailbox_.sender.sent.exchange(sent_ + static_cast<std::uint64_t>(length_of(frame)));
    put(ring_, sent_, &frame, sizeof(frame));")

# add_record_mutant(name header old new), of cpu/observe/record.h or cpu/observe/subject.h: a part is taken for the whole.
add_record_mutant(record_keeps_its_number record.h "number_.store(0, std::memory_order_relaxed);" "")
add_record_mutant(record_has_its_number_early record.h "number_.store(0, std::memory_order_relaxed);"
  "number_.store(number, std::memory_order_relaxed);")
add_record_mutant(record_is_looked_at_once record.h " && number_.load(std::memory_order_relaxed) == number" "")
add_record_mutant(subject_keeps_its_number subject.h "number_.store(0, std::memory_order_relaxed);" "")
add_record_mutant(subject_has_its_number_early subject.h "number_.store(0, std::memory_order_relaxed);"
  "number_.store(number, std::memory_order_relaxed);")
add_record_mutant(subject_is_looked_at_once subject.h " || number_.load(std::memory_order_relaxed) != number" "")

# add_heap_mutant(name file old new), of what decides when memory of a CUDA window is used again.
add_heap_mutant(heap_does_not_wait cpu/memory/device_heap.h "unused = wait_();" "unused = true;")
add_heap_mutant(heap_looks_before_it_waits cpu/memory/device_heap.h "device.synchronize();
  return device.failure().reason == Reason::none && group.abort_word() == 0;"
  "const bool unused = device.failure().reason == Reason::none && group.abort_word() == 0;
  device.synchronize();
  return unused;")
add_heap_mutant(heap_forgets_failures cpu/memory/device_heap.h "device.failure().reason == Reason::none && " "")
add_heap_mutant(heap_frees_after_a_failure cpu/memory/device_heap.h "if (!unused) {
      put_back(before);
      return {};
    }" "")
add_heap_mutant(heap_frees_what_is_released_meanwhile cpu/memory/device_heap.h
  "for (const Block& block : before) block.part->free.give(block.range);"
  "before.insert(before.end(), released_.begin(), released_.end());
    released_.clear();
    for (const Block& block : before) block.part->free.give(block.range);")
add_heap_mutant(heap_lets_others_take_what_it_frees cpu/memory/device_heap.h
  "for (const Block& block : before) block.part->free.give(block.range);
    return look();" "for (const Block& block : before) block.part->free.give(block.range);
    mutex_.unlock();
    mutex_.lock();
    return look();")
add_heap_mutant(heap_has_two_reclaimers cpu/memory/device_heap.h
  "const std::lock_guard one_at_a_time(reclaiming_);" "")
add_heap_mutant(heap_closes_beside_a_wait cpu/memory/device_heap.h "std::scoped_lock lock(reclaiming_, mutex_)"
  "std::lock_guard lock(mutex_)")
add_heap_mutant(heap_hands_out_when_closed cpu/memory/device_heap.h "closed_ ? std::nullopt : part.free.take(bytes)"
  "part.free.take(bytes)")
add_heap_mutant(operation_ends_while_its_tensor_is_read core/algorithms/two_shot.h "comm.wait_all(kReduced, 1);" "")
add_heap_mutant(operation_ends_before_others_have_passed core/algorithms/two_shot.h "comm.wait_all(kReduced, t);"
  "comm.wait_all(kReduced, t - 1);")
