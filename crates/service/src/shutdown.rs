// SPDX-License-Identifier: Apache-2.0

//! How every process stops: a request (SIGTERM, SIGINT, a lost supervisor), a drain with a
//! deadline, the exit.
//!
//! The first request starts the drain. A second signal or the deadline interrupts it. Nothing here
//! ends the process: `run` returns, and the exit code says what happened.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::hangup::{Hangup, HangupPolicy};

/// The request to stop, shared by all parts of a process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    drain: CancellationToken,
    force: CancellationToken,
    /// Counts the requests to reload the configuration.
    reloads: watch::Sender<u64>,
    /// Counts SIGINTs that are no request to stop.
    interrupts: watch::Sender<u64>,
}

/// SIGINT as an event, for a command that goes on after Ctrl-C.
#[derive(Debug)]
pub struct Interrupts(watch::Receiver<u64>);

impl Interrupts {
    /// Forgets those that came before.
    pub fn forget(&mut self) {
        self.0.mark_unchanged();
    }

    /// Resolves at the next one.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Why a drain ended before its work did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DrainInterrupted {
    #[error("running work did not end within {grace:?}")]
    Deadline { grace: Duration },
    #[error("a second signal asked to stop at once")]
    SecondSignal,
}

impl Shutdown {
    /// Listens to SIGTERM, SIGINT and SIGHUP. Must be called inside a tokio runtime.
    pub fn install() -> io::Result<Self> {
        let shutdown = Self::default();
        if let Some(policy) = HangupPolicy::at_start() {
            tokio::spawn(follow_hangups(signal(SignalKind::hangup())?, policy, shutdown.clone()));
        }
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let listener = shutdown.clone();
        tokio::spawn(async move {
            loop {
                let (received, is_interrupt) = tokio::select! {
                    received = terminate.recv() => (received, false),
                    received = interrupt.recv() => (received, true),
                };
                match received {
                    Some(()) if is_interrupt && listener.interrupts.receiver_count() > 0 => {
                        listener.interrupts.send_modify(|interrupts| *interrupts += 1);
                    }
                    None => return,
                    Some(()) if listener.drain.is_cancelled() => listener.force.cancel(),
                    Some(()) => listener.drain.cancel(),
                }
            }
        });
        Ok(shutdown)
    }

    /// Requests the drain, as the first signal does.
    pub fn request(&self) {
        self.drain.cancel();
    }

    pub fn is_requested(&self) -> bool {
        self.drain.is_cancelled()
    }

    /// Resolves when a stop is requested. The future is owned, so that it can move into spawned
    /// tasks and servers.
    pub fn requested(&self) -> impl Future<Output = ()> + Send + 'static {
        self.drain.clone().cancelled_owned()
    }

    /// The token behind [`Shutdown::requested`], for child tokens.
    pub fn token(&self) -> &CancellationToken {
        &self.drain
    }

    /// Resolves when a second signal asks not to wait for the drain.
    pub fn forced(&self) -> impl Future<Output = ()> + Send + 'static {
        self.force.clone().cancelled_owned()
    }

    /// Changes whenever SIGHUP asks to reload the configuration.
    pub fn reloads(&self) -> watch::Receiver<u64> {
        self.reloads.subscribe()
    }

    /// As long as this lives, SIGINT requests no stop.
    pub fn interrupts(&self) -> Interrupts {
        Interrupts(self.interrupts.subscribe())
    }

    /// Runs `drain` until it ends, the deadline passes, or a second signal arrives.
    pub async fn within<F: Future>(&self, grace: Duration, drain: F) -> Result<F::Output, DrainInterrupted> {
        tokio::select! {
            output = drain => Ok(output),
            () = tokio::time::sleep(grace) => Err(DrainInterrupted::Deadline { grace }),
            () = self.forced() => Err(DrainInterrupted::SecondSignal),
        }
    }
}

/// SIGHUP ends a command whose terminal was closed. In other processes it asks for a reload, which
/// only the supervisor knows.
async fn follow_hangups(mut hangups: Signal, policy: HangupPolicy, shutdown: Shutdown) {
    while let Some(()) = hangups.recv().await {
        match policy.meaning() {
            Hangup::TerminalClosed => shutdown.request(),
            Hangup::ReloadRequested if shutdown.reloads.receiver_count() > 0 => {
                shutdown.reloads.send_modify(|requests| *requests += 1);
            }
            Hangup::ReloadRequested => {
                tracing::warn!("SIGHUP ignored: this process reads its configuration at its start only");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_drain_ends_with_its_work_at_the_deadline_or_at_a_second_signal() {
        let shutdown = Shutdown::default();
        let grace = Duration::from_millis(10);
        assert_eq!(shutdown.within(Duration::from_secs(5), async { 3 }).await, Ok(3));
        let stuck = std::future::pending::<()>();
        assert_eq!(shutdown.within(grace, stuck).await, Err(DrainInterrupted::Deadline { grace }));
        shutdown.force.cancel();
        let stuck = std::future::pending::<()>();
        assert_eq!(shutdown.within(Duration::from_secs(5), stuck).await, Err(DrainInterrupted::SecondSignal));
    }

    #[tokio::test]
    async fn every_waiting_task_is_woken_by_the_request() {
        let shutdown = Shutdown::default();
        let waiting = tokio::spawn(shutdown.requested());
        assert!(!shutdown.is_requested());
        shutdown.request();
        waiting.await.unwrap();
        shutdown.requested().await;
        assert!(shutdown.is_requested());
    }
}
