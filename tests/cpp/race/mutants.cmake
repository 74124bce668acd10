# add_race_mutant(part test name file old new), of a file of csrc/

# A barrier less.
add_race_mutant(plain "all-reduce" goes_on_before_the_flag_has_come cuda/comm.cuh
  "failed_ = __syncthreads_or(stop) != 0 || failed_;" "failed_ = stop || failed_;")

# A release, an acquire or a scope less.
add_race_mutant(plain "all-reduce" signals_relaxed cuda/comm.cuh
  ".store(signalled_[channel], ::cuda::std::memory_order_release);"
  ".store(signalled_[channel], ::cuda::std::memory_order_relaxed);")
add_race_mutant(plain "all-reduce" publishes_relaxed cuda/comm.cuh
  ".store(sequence_, ::cuda::std::memory_order_release);"
  ".store(sequence_, ::cuda::std::memory_order_relaxed);")
add_race_mutant(plain "all-reduce" never_acquires cuda/comm.cuh "(void)word.load(::cuda::std::memory_order_acquire);" "")
add_race_mutant(plain "all-reduce" flags_are_for_one_device cuda/failing.cuh "thread_scope_system" "thread_scope_device")
add_race_mutant(plain "all-reduce" fences_for_one_device cuda/comm.cuh
  "for (int r = threadIdx.x; r < size(); r += blockDim.x) {
      if (r == rank() || failed_) continue;
      shared_word<std::uint32_t>(window(r) + layout_.flag(lane_, channel, rank()))
          .store(signalled_[channel], ::cuda::std::memory_order_release);"
  "__threadfence();
    for (int r = threadIdx.x; r < size(); r += blockDim.x) {
      if (r == rank() || failed_) continue;
      shared_word<std::uint32_t>(window(r) + layout_.flag(lane_, channel, rank()))
          .store(signalled_[channel], ::cuda::std::memory_order_relaxed);")

add_race_mutant(plain "packets" packets_release_nothing cuda/packets.cuh
  "if (item_ == 0) __threadfence_system();  // releases" "// releases")
add_race_mutant(plain "packets" packets_acquire_nothing cuda/packets.cuh
  "if (item_ == 0) __threadfence_system();  // acquires" "// acquires")

# A slot less.
add_race_mutant(plain "all-reduce" operations_share_announcements cuda/layout.h
  "((parity & 1u) * ranks + from) * static_cast<std::int64_t>(sizeof(Announcement))"
  "((parity & 0u) * ranks + from) * static_cast<std::int64_t>(sizeof(Announcement))")
add_race_mutant(plain "all-reduce" operations_share_staging cuda/layout.h "(parity & 1u) * half_bytes()" "(parity & 0u) * half_bytes()")
add_race_mutant(plain "all-reduce" one_shot_on_a_device_has_one_slot core/algorithms/one_shot.h "t % 2" "0")
add_race_mutant(plain "collectives" shots_on_a_device_have_three_slots core/algorithms/two_shot.h "t % kStagingSlots" "t % 3")
add_race_mutant(plain "all-reduce" ring_on_a_device_has_one_slot core/algorithms/ring.h "t % kStagingSlots" "0")

# A wait less.
add_race_mutant(plain "all-reduce" ring_on_a_device_returns_while_it_is_read core/algorithms/ring.h
  "if (zero_copy) comm.wait(right, kUp, signalled);" "")

# In the kernels of compression.
add_race_mutant(coded "two-shot" draws_before_all_have_read cuda/random_run.cuh "__syncwarp();  // all threads have read the previous words" "")
add_race_mutant(coded "two-shot" reads_random_words_too_early cuda/random_run.cuh "  }
  __syncwarp();" "  }")
add_race_mutant(coded "two-shot" finds_the_largest_too_early cuda/codecs/loops.cuh
  "of_warp[threadIdx.x / 32] = value;
  __syncthreads();" "of_warp[threadIdx.x / 32] = value;")
add_race_mutant(coded "two-shot" writes_over_the_largest cuda/codecs/loops.cuh
  "__syncthreads();  // all threads have read the previous values" "")
add_race_mutant(coded "two-shot" writes_over_scales_of_runs cuda/codecs/runs.cuh
  "__syncwarp();  // all lanes have read the scales that may have been there" "")
add_race_mutant(coded "two-shot" writes_over_scales_of_the_rest cuda/codecs/loops.cuh
  "__syncwarp();  // all lanes have read the scales that may have been there" "")
add_race_mutant(coded "top-k" counts_in_bins_that_are_not_empty cuda/codecs/topk_select.cu "bins[i] = 0;
  __syncthreads();" "bins[i] = 0;")
add_race_mutant(coded "top-k" finds_tiles_before_all_entries_are_written cuda/codecs/topk_select.cu
  "__syncwarp();  // all lanes have written their entries" "")
add_race_mutant(coded "top-k" reads_indices_before_all_are_copied cuda/codecs/topk_reader.cuh
  "words[w] = source[w];
    __syncthreads();" "words[w] = source[w];")
add_race_mutant(coded "top-k" copies_indices_before_all_are_written cuda/codecs/topk_lists.cu
  "__syncthreads();  // all bits are set" "")
add_race_mutant(coded "ring" takes_the_next_tensor_too_early cuda/codecs/bucket.cuh "  __syncthreads();
  for (int i" "  for (int i")

# In the kernels of optimizers.
add_race_mutant(optim "lamb" takes_a_ticket_before_its_part_is_seen cuda/optim/ticket.cuh "  __threadfence();
  if (atomicAdd" "  if (atomicAdd")
add_race_mutant(optim "lamb" goes_on_before_all_parts_are_seen cuda/optim/ticket.cuh "  __threadfence();
  atomicExch" "  atomicExch")
add_race_mutant(optim "adamw" resets_a_ticket_by_a_store cuda/optim/ticket.cuh "atomicExch(ticket, 0u);" "*ticket = 0;")
add_race_mutant(optim "lamb" lanes_do_not_wait_for_the_ticket cuda/optim/sums.cuh "__syncwarp();  // unlike" "// unlike")
add_race_mutant(optim "adamw" writes_a_scale_that_is_being_read cuda/optim/numbers.cuh "__syncwarp();  // all of them" "// all of them")
add_race_mutant(sharded "adamw" lanes_meet_without_a_fence cuda/optim/sharded_step.cuh "      __threadfence();
      atomicAdd(tickets" "      atomicAdd(tickets")
add_race_mutant(sharded "adamw" lanes_meet_without_acquiring cuda/optim/sharded_step.cuh
  "(void)came.load(::cuda::std::memory_order_acquire);" "")
