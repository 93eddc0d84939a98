// SPDX-License-Identifier: Apache-2.0

//! Tests and benches of the CUDA kernels as one executable, for a machine with a GPU and without
//! Rust.
//!
//! ```text
//! gpu tests [FILTER]   correctness; without a GPU, prints SKIPPED and succeeds
//! gpu small [FILTER]   the same on smaller shapes, for compute-sanitizer, which slows kernels down
//! gpu list [FILTER]    the names of the tests
//! gpu bench [FILTER]   times, as a share of the limiting memory bandwidth or arithmetic rate
//! ```

#![expect(clippy::print_stdout, reason = "an executable of its own: what it prints is its result")]

#[cfg(feature = "cuda")]
mod around;
#[cfg(feature = "cuda")]
mod attention;
#[cfg(feature = "cuda")]
mod bench;
#[cfg(feature = "cuda")]
mod checksum;
#[cfg(feature = "cuda")]
mod exact;
#[cfg(feature = "cuda")]
mod experts;
#[cfg(feature = "cuda")]
mod fused;
#[cfg(feature = "cuda")]
mod kv_write;
#[cfg(feature = "cuda")]
mod linear;
#[cfg(feature = "cuda")]
mod loading;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod models;
#[cfg(feature = "cuda")]
mod ops;
#[cfg(feature = "cuda")]
mod quantize;
#[cfg(feature = "cuda")]
mod random;
#[cfg(feature = "cuda")]
mod repack;
#[cfg(feature = "cuda")]
mod shortlist;

#[cfg(feature = "cuda")]
mod throughput;

#[cfg(feature = "cuda")]
fn main() -> anyhow::Result<()> {
    use cuda::{Device, DeviceSelector, OpenDriverError, Stream};
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let mode = arguments.next().unwrap_or_else(|| "tests".to_owned());
    let filter = arguments.next().unwrap_or_default();
    let driver = match cuda::open_driver() {
        Err(error @ (OpenDriverError::NoDriver | OpenDriverError::NoDevice)) => {
            println!("SKIPPED: every test of the CUDA kernels: {error}");
            return Ok(());
        }
        driver => driver?,
    };
    let device = Device::open(driver, DeviceSelector::Ordinal(0))?;
    let stream = Stream::new(&device)?;
    let gpu = TestGpu { device, stream, small: mode == "small" };
    match mode.as_str() {
        memory::ONE => return memory::one(&gpu, &filter),
        "list" => {}
        _ => println!("{} ({})", gpu.device.name(), gpu.device.uuid()),
    }
    let cases: &[(&str, TestFn)] = match mode.as_str() {
        "bench" => &[
            ("attention", attention::bench),
            ("throughput", throughput::bench),
            ("sampled", throughput::sampled),
            ("shortlist", shortlist::bench),
            ("memory", memory::bench),
            ("linear", linear::bench),
            ("experts", experts::bench),
            ("around", around::bench),
            ("checksum", checksum::bench),
            ("repack", repack::bench),
            ("loading", loading::bench),
        ],
        _ => &[
            ("checksum: pieces hash as on the host", checksum::pieces_hash_as_on_the_host),
            ("repack: tiles are those of the host, and back", repack::tiles_are_those_of_the_host),
            ("loading: parts become tensors", loading::parts_become_tensors_and_their_checksums),
            ("loading: parts out of turn", loading::parts_out_of_turn_and_out_of_place_are_refused),
            ("quantize: activations are those of the host", quantize::activations_are_those_of_the_host),
            ("linear: every method gives the canonical bits", linear::every_method_gives_the_canonical_bits),
            ("linear: a row alone is the row in any batch", linear::a_row_alone_is_the_row_in_any_batch),
            ("linear: matrices of one launch", linear::matrices_of_one_launch),
            ("linear: products match the naive kernel", linear::products_match_the_naive_kernel),
            ("linear: floats are near the reference", linear::floats_are_near_the_reference),
            ("linear: embeddings are those of the host", linear::embeddings_are_decoded_as_on_the_host),
            ("ops: norms are those of the reference", ops::norms_are_those_of_the_reference),
            ("ops: gates are those of the reference", ops::gates_are_those_of_the_reference),
            ("ops: rotations are those of the reference", ops::rotations_are_those_of_the_reference),
            ("ops: gathered rows are the wanted ones", ops::gathered_rows_are_the_wanted_ones),
            ("ops: the best of a row is that of the host", ops::the_best_of_a_row_is_that_of_the_host),
            ("ops: what is written is read", ops::what_is_written_is_read),
            ("shortlist: lists are those of the host", shortlist::they_are_those_of_the_host),
            ("shortlist: single rows are read", shortlist::single_rows_are_read),
            ("ops: replayed steps are those run one by one", ops::replayed_steps_are_those_run_one_by_one),
            ("attention: caches hold the bytes of the host", kv_write::caches_hold_the_bytes_of_the_host),
            ("attention: it is that of the reference", attention::it_is_that_of_the_reference),
            (
                "attention: long contexts, extreme scores",
                attention::it_survives_long_contexts_and_extreme_scores,
            ),
            (
                "attention: long contexts match the naive kernel",
                attention::long_contexts_match_the_naive_kernel,
            ),
            ("attention: the range of each type", attention::it_has_the_range_of_its_type),
            (
                "attention: chunks, batch neighbours and blocks change nothing",
                attention::it_depends_on_neither_chunks_nor_batch_neighbours_nor_blocks,
            ),
            ("attention: the cache grows", attention::the_cache_grows_as_it_is_written),
            ("fused: rounded rows are those of single ops", fused::rounded_rows_are_those_of_single_ops),
            ("fused: attention blocks are those", fused::attention_blocks_are_those_of_single_ops),
            ("experts: they are those of the reference", experts::they_are_those_of_the_reference),
            ("exact: every way gives the same logits", exact::every_way_gives_the_same_logits),
            ("models: goldens", models::goldens),
            ("models: transcripts", models::transcripts),
        ],
    };
    let mut failed = 0;
    for (name, case) in cases.iter().filter(|(name, _)| name.contains(&filter)) {
        if mode == "list" {
            println!("{name}");
            continue;
        }
        let start = std::time::Instant::now();
        let result = case(&gpu);
        let seconds = start.elapsed().as_secs_f32();
        match result {
            Ok(()) => println!("ok      {name} ({seconds:.2} s)"),
            Err(error) => {
                failed += 1;
                println!("FAILED  {name} ({seconds:.2} s): {error:#}");
            }
        }
    }
    anyhow::ensure!(failed == 0, "{failed} failed");
    Ok(())
}

#[cfg(feature = "cuda")]
type TestFn = fn(&TestGpu) -> anyhow::Result<()>;

#[cfg(feature = "cuda")]
struct TestGpu {
    device: kernels::cuda::Device,
    stream: kernels::cuda::Stream,
    /// Whether tests use small shapes.
    small: bool,
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("SKIPPED: every test of the CUDA kernels: built without the feature cuda");
}
