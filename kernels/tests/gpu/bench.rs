// SPDX-License-Identifier: Apache-2.0

//! Measures work in CUDA graphs. As in a worker's steps, launches then cost the host nothing.

use kernels::cuda::Event;

use crate::TestGpu;

/// Returns the seconds of one call of `work`: the best of several replays, each of `calls` calls.
/// Each call receives its number.
pub(crate) fn time(
    gpu: &TestGpu,
    calls: usize,
    mut work: impl FnMut(usize) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    // The first call loads modules and raises limits, which is not allowed during a capture.
    work(0)?;
    gpu.stream.synchronize()?;
    let graph = gpu.stream.capture::<anyhow::Error>(|| (0..calls).try_for_each(&mut work))?;
    let (start, end) = (Event::timed(&gpu.device)?, Event::timed(&gpu.device)?);
    // SAFETY: `work` allocates nothing, because a capture would refuse it. So all memory that it
    // uses existed before, and `work` borrows that memory until this function ends. Each replay
    // ends before the next one and before the function.
    let launch = || unsafe { graph.launch() };
    launch()?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        start.record(&gpu.stream)?;
        launch()?;
        end.record(&gpu.stream)?;
        end.synchronize()?;
        best = best.min(f64::from(end.milliseconds_since(&start)?) / 1e3);
    }
    Ok(best / calls as f64)
}
