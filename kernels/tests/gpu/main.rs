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
mod attention_bench;
#[cfg(feature = "cuda")]
mod attention_prefill;
#[cfg(feature = "cuda")]
mod bench;
#[cfg(feature = "cuda")]
mod cases;
#[cfg(feature = "cuda")]
mod checksum;
#[cfg(feature = "cuda")]
mod exact;
#[cfg(feature = "cuda")]
mod expert_products;
#[cfg(feature = "cuda")]
mod experts;
#[cfg(feature = "cuda")]
mod f32_linear;
#[cfg(feature = "cuda")]
mod fused;
#[cfg(feature = "cuda")]
mod fused_experts;
#[cfg(feature = "cuda")]
mod kv_write;
#[cfg(feature = "cuda")]
mod linear;
#[cfg(feature = "cuda")]
mod linear_bench;
#[cfg(feature = "cuda")]
mod linear_beside;
#[cfg(feature = "cuda")]
mod linear_sizes;
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
mod real_sizes;
#[cfg(feature = "cuda")]
mod repack;
#[cfg(feature = "cuda")]
mod routing;
#[cfg(feature = "cuda")]
mod shortlist;
#[cfg(feature = "cuda")]
#[path = "../shared/split_mix.rs"]
mod split_mix;
#[cfg(feature = "cuda")]
mod states;
#[cfg(feature = "cuda")]
mod throughput;
#[cfg(feature = "cuda")]
mod wgmma;
#[cfg(feature = "cuda")]
#[expect(clippy::unwrap_used, reason = "shared with tests whose panics are how they fail")]
#[path = "../shared/window_case.rs"]
mod window_case;
#[cfg(feature = "cuda")]
mod windows;

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
    let cases = if mode == "bench" { cases::BENCHES } else { cases::TESTS };
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
