// SPDX-License-Identifier: Apache-2.0

//! The names of all tests and benches.

use super::{
    TestGpu, around, attention, attention_bench, attention_prefill, checksum, exact, expert_products,
    experts, f32_linear, fused, kv_write, linear, linear_bench, linear_beside, linear_sizes, loading, memory,
    models, ops, quantize, real_sizes, repack, routing, shortlist, states, throughput, wgmma,
};

type TestFn = fn(&TestGpu) -> anyhow::Result<()>;

pub(crate) const BENCHES: &[(&str, TestFn)] = &[
    ("attention", attention_bench::bench),
    ("throughput", throughput::bench),
    ("floats", throughput::floats),
    ("sampled", throughput::sampled),
    ("profiled", throughput::profiled),
    ("shortlist", shortlist::bench),
    ("memory", memory::bench),
    ("linear", linear_bench::bench),
    ("experts", experts::bench),
    ("routing", routing::bench),
    ("around", around::bench),
    ("checksum", checksum::bench),
    ("repack", repack::bench),
    ("loading", loading::bench),
];

pub(crate) const TESTS: &[(&str, TestFn)] = &[
    ("checksum: pieces hash as on the host", checksum::pieces_hash_as_on_the_host),
    ("repack: tiles are those of the host, and back", repack::tiles_are_those_of_the_host),
    ("loading: parts become tensors", loading::parts_become_tensors_and_their_checksums),
    ("loading: parts are read in place", loading::parts_that_kernels_read_in_place_become_the_same),
    ("loading: parts out of turn", loading::parts_out_of_turn_and_out_of_place_are_refused),
    ("quantize: activations are those of the host", quantize::activations_are_those_of_the_host),
    ("quantize: f16 sums are those of the host", quantize::f16_sums_are_those_of_the_host),
    ("linear: every method gives the canonical bits", linear::every_method_gives_the_canonical_bits),
    ("linear: extreme blocks on wgmma", wgmma::extreme_blocks_give_the_same_bits_on_wgmma),
    ("linear: a row alone is the row in any batch", linear_sizes::a_row_alone_is_the_row_in_any_batch),
    ("linear: repeated products are equal", linear_sizes::repeated_products_are_equal),
    ("linear: products beside each other", linear_beside::products_beside_each_other),
    ("linear: matrices of one launch", linear::matrices_of_one_launch),
    ("linear: products match the naive kernel", linear::products_match_the_naive_kernel),
    ("linear: floats are near the reference", linear::floats_are_near_the_reference),
    ("linear: F32 sums have their order", f32_linear::sums_have_the_canonical_order),
    ("linear: embeddings are those of the host", linear::embeddings_are_decoded_as_on_the_host),
    ("ops: norms are those of the reference", ops::norms_are_those_of_the_reference),
    ("ops: gates are those of the reference", ops::gates_are_those_of_the_reference),
    ("ops: rotations are those of the reference", ops::rotations_are_those_of_the_reference),
    ("ops: gathered rows are the wanted ones", ops::gathered_rows_are_the_wanted_ones),
    ("ops: the best of a row is that of the host", ops::the_best_of_a_row_is_that_of_the_host),
    ("ops: what is written is read", ops::what_is_written_is_read),
    ("ops: words arrive on both sides", ops::words_arrive_on_both_sides),
    ("shortlist: lists are those of the host", shortlist::they_are_those_of_the_host),
    ("shortlist: single rows are read", shortlist::single_rows_are_read),
    ("ops: replayed steps are those run one by one", ops::replayed_steps_are_those_run_one_by_one),
    ("attention: caches hold the bytes of the host", kv_write::caches_hold_the_bytes_of_the_host),
    ("attention: it is that of the reference", attention::it_is_that_of_the_reference),
    ("attention: long contexts, extreme scores", attention::it_survives_long_contexts_and_extreme_scores),
    ("attention: long contexts match the naive kernel", attention::long_contexts_match_the_naive_kernel),
    (
        "attention: rows that fill the device",
        attention::rows_that_fill_the_device_have_the_bits_of_single_rows,
    ),
    ("attention: the range of each type", attention::it_has_the_range_of_its_type),
    (
        "attention: chunks, batch neighbours and blocks change nothing",
        attention::it_depends_on_neither_chunks_nor_batch_neighbours_nor_blocks,
    ),
    ("attention: long runs", attention_prefill::long_runs_have_the_bits_of_short_ones),
    ("attention: the cache grows", attention::the_cache_grows_as_it_is_written),
    ("fused: rounded rows are those of single ops", fused::rounded_rows_are_those_of_single_ops),
    ("fused: residual sums are those", fused::residual_sums_are_those_of_single_ops),
    ("fused: attention blocks are those", fused::attention_blocks_are_those_of_single_ops),
    ("fused: decode attention is that", fused::decode_attention_is_that_of_single_ops),
    ("experts: they are those of the reference", experts::they_are_those_of_the_reference),
    ("experts: rows take the experts of the host", routing::rows_take_the_experts_of_the_host),
    (
        "experts: products on wgmma have the canonical bits",
        expert_products::products_on_wgmma_have_the_canonical_bits,
    ),
    ("experts: repeated products on wgmma are equal", expert_products::repeated_products_on_wgmma_are_equal),
    ("exact: every way gives the same logits", exact::every_way_gives_the_same_logits),
    ("exact: equal sequences at real sizes", real_sizes::equal_sequences_give_equal_logits),
    ("models: goldens", models::goldens),
    ("models: transcripts", models::transcripts),
    ("models: states and labels", states::states_and_labels_are_those_of_the_host),
];
