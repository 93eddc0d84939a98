// SPDX-License-Identifier: Apache-2.0

//! The progress bar of a measurement. It asks a counter from time to time, so that the measured
//! requests do nothing for it.

use std::time::Duration;

use crate::progress_bar::{ProgressBar, ProgressUnit, WorkProgress};

const INTERVAL: Duration = Duration::from_millis(200);

/// Shows how far the work is. `counted` is a counter that goes on; `total` is what the work adds to
/// it, or `None` if that is not known.
pub(super) async fn with_progress<T>(
    unit: ProgressUnit,
    total: Option<u64>,
    counted: impl Fn() -> u64,
    work: impl Future<Output = T>,
) -> T {
    let (before, mut bar) = (counted(), ProgressBar::start());
    let mut work = std::pin::pin!(work);
    loop {
        if let Ok(outcome) = tokio::time::timeout(INTERVAL, &mut work).await {
            bar.clear();
            return outcome;
        }
        let done = counted().saturating_sub(before);
        let total = total.unwrap_or(done);
        bar.show(WorkProgress { name: "measuring".to_owned(), unit, done, total });
    }
}

/// The same for the output tokens of streams.
pub(super) async fn with_token_progress<T>(total: u64, work: impl Future<Output = T>) -> T {
    with_progress(ProgressUnit::Tokens, Some(total), loadgen::received_tokens, work).await
}
