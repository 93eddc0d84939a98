// SPDX-License-Identifier: Apache-2.0

//! Times of work in graphs: launches cost the host nothing there, as in a worker's steps.

use kernels::cuda::Event;

use crate::TestGpu;

/// Seconds of one call of `work`, the best of several replays of `calls` calls, which are given
/// their number.
pub(crate) fn time(
    gpu: &TestGpu,
    calls: usize,
    mut work: impl FnMut(usize) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    // Loads modules and raises limits, which a capture must not do.
    work(0)?;
    gpu.stream.synchronize()?;
    let graph = gpu.stream.capture::<anyhow::Error>(|| (0..calls).try_for_each(&mut work))?;
    let (start, end) = (Event::timed(&gpu.device)?, Event::timed(&gpu.device)?);
    // SAFETY: `work` allocates nothing (a capture would refuse it), so what it uses was there
    // before; it is borrowed by `work` until this function ends, and each replay has ended before
    // the next and before that.
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
