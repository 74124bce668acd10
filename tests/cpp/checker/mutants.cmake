# add_mutant(name header old new), of a header of core/

# A wait less.
add_mutant(ring_returns_while_it_is_read ring.h "if (direct) comm.wait(right, kUp, signalled);" "")
add_mutant(packets_without_meeting packet.h "comm.meet();" "")
add_mutant(reduce_scatter_returns_while_it_is_read two_shot.h "comm.wait_all(kReduced, 1);" "")
add_mutant(tree_returns_while_it_is_read tree.h
  "first.wait_children(first.down_channel(), first.pieces.count());" "")
add_mutant(exchange_adds_what_has_not_come between.h "link.wait(staged[t % kTilesUnderWay]);" "")

# A step off.
add_mutant(ring_waits_for_the_step_before ring.h "signalled + 1 - tile.pieces" "signalled - tile.pieces")
add_mutant(two_shot_waits_for_the_stage_before two_shot.h "comm.wait_all(kStaged, t + 1);"
  "comm.wait_all(kStaged, t);")
add_mutant(broadcast_root_does_not_wait_long_enough broadcast.h
  "comm.wait_all(kReduced, t - kStagingSlots + 1);" "comm.wait_all(kReduced, t - kStagingSlots);")

# A slot less.
add_mutant(ring_has_one_slot ring.h "t % kStagingSlots" "0")
add_mutant(one_shot_has_one_slot one_shot.h "t % 2" "0")
add_mutant(shots_have_three_slots two_shot.h "t % kStagingSlots" "t % 3")
add_mutant(tree_lags_too_far tree.h "depth < kStagingSlots - 1 ? depth : kStagingSlots - 1" "depth + 1")
add_mutant(trees_share_slots tree.h "index * kStagingSlots + k % kStagingSlots" "k % kStagingSlots")
add_mutant(exchange_has_too_few_tiles between.h "kTilesUnderWay = 2 * kAhead + 1"
  "kTilesUnderWay = kAhead + 1")

# A flag early.
add_mutant(one_shot_announces_early one_shot.h "if (tiles.count() > 0) stage(0);
  comm.announce();" "comm.announce();
  if (tiles.count() > 0) stage(0);")
add_mutant(two_shot_signals_early two_shot.h "detail::reduce_owned(comm, chunks, t, true);
      comm.signal(kReduced);" "comm.signal(kReduced);
      detail::reduce_owned(comm, chunks, t, true);")

# A wrong child or place.
add_mutant(tree_loses_a_child layout.h "if (v + step < n) return v + step;"
  "if (v + step < n - 1) return v + step;")
add_mutant(parts_overlap layout.h "(index < longer ? index : longer)) * unit"
  "(index < longer ? index : longer - 1)) * unit")
add_mutant(stripes_share_a_slot stripes.h "owner * piece(), rest" "0, rest")
add_mutant(packed_stripe_has_gaps stripes.h "turn > s ? length" "turn >= s ? length")
add_mutant(scales_lie_on_payload coded.h "place.data + kStagingSlots * slot * payload"
  "place.data + slot * payload")
add_mutant(coded_slots_overflow coded.h "piece * ranks > slot" "piece * (ranks - 1) > slot")
add_mutant(result_lies_on_a_list topk.h "return list(ranks);" "return list(ranks - 1);")

# add_cpu_mutant(name source test old new), of cpu/: how operations that fail end, and how groups do.
add_cpu_mutant(enters_too_weakly comm interleavings "in_peers_heaps.exchange(1);"
  "in_peers_heaps.store(1, std::memory_order_release);")
add_cpu_mutant(does_not_retreat comm interleavings "if (!exposed_) return;" "return;")
add_cpu_mutant(last_reason_stays comm interleavings "abort.compare_exchange_strong(none, word);"
  "abort.exchange(word + none);")
add_cpu_mutant(takes_work_when_closed group close
  "if (closed_) check_usable();  // nobody would join" "// nobody would join")
