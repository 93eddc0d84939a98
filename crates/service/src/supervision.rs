// SPDX-License-Identifier: Apache-2.0

//! The child's side of supervision: detects that the supervisor died, waits for a successor, and
//! stops without one.
//!
//! A child inherits one end of a socket pair (`BALLAST_LIVENESS_FD`). End of file on it means that
//! the supervisor is gone, for whatever reason. The child then offers itself to a successor on its
//! notify socket:
//!
//! ```text
//! child                                        successor (binds the same notify-<child>.sock)
//!   | ADOPT=1 ROLE=worker NAME=worker-0          |
//!   | ATTACH_TOKEN=...                           |
//!   | with one end of a new socket pair, and     |
//!   | the memory of its last log lines           |
//!   |------------------------------------------->|  checks SO_PASSCRED, keeps the end
//!   |<------------------------ one byte 'a' -----|
//!   | supervised again: same meaning of EOF      |
//! ```
//!
//! Without a successor within [`SUCCESSOR_WAIT`], the child requests its own [`Shutdown`].

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::watch;

use crate::env;
use crate::listen::{ListenError, fd_from_env};
use crate::{Notify, RunningClock, Shutdown, logging};

/// How long a child keeps working while it waits for a successor.
pub const SUCCESSOR_WAIT: Duration = Duration::from_secs(10);
/// How often a child without a supervisor offers itself.
pub const OFFER_PERIOD: Duration = Duration::from_millis(100);
/// A worker that requests use reports it this often.
pub const USE_REPORT_PERIOD: Duration = Duration::from_secs(2);
/// How long a successor may take to answer one offer.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// A supervisor's answer to an offer that it accepts.
pub const ADOPTED: u8 = b'a';

/// The wait for a successor. A process that was stopped meanwhile still waits for its successor
/// afterwards. A plain value.
#[derive(Debug)]
pub struct SuccessorWait {
    clock: RunningClock,
    deadline: Instant,
}

impl SuccessorWait {
    pub fn new(now: Instant) -> Self {
        Self { clock: RunningClock::new(now, 2 * ANSWER_WAIT), deadline: now + SUCCESSOR_WAIT }
    }

    /// Call it at least every 2 s: a longer gap counts as a pause.
    pub fn is_over(&mut self, now: Instant) -> bool {
        self.clock.advance(now) >= self.deadline
    }
}

/// The supervisor of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SupervisorState {
    /// The process was started by hand or by systemd.
    None,
    /// Supervisors are numbered from 0. The FD store of a new supervisor is empty, so a process
    /// that stored descriptors stores them again.
    Present { epoch: u32 },
    /// The supervisor is gone, and no successor has adopted this process yet.
    Lost,
}

/// Watches the supervisor of this process in a task of its own. The receiver shows the supervisor's
/// state.
///
/// If the parent expects watchdog messages (WATCHDOG_USEC), a second task sends them as long as the
/// runtime makes progress. A worker shows its `attach_token` to each successor. Call once, inside a
/// tokio runtime.
pub fn watch_supervisor(
    role: &str,
    name: &str,
    attach_token: Option<&[u8]>,
    notify: &Notify,
    shutdown: &Shutdown,
) -> Result<watch::Receiver<SupervisorState>, ListenError> {
    if let Some(interval) = watchdog_interval() {
        tokio::spawn(feed_watchdog(interval / 3, notify.clone()));
    }
    let Some(fd) = fd_from_env(env::LIVENESS_FD)? else {
        return Ok(watch::channel(SupervisorState::None).1);
    };
    let failed =
        |source| ListenError::Variable { variable: env::LIVENESS_FD, value: "taken".to_owned(), source };
    let liveness = StdUnixStream::from(fd);
    liveness.set_nonblocking(true).map_err(failed)?;
    let liveness = UnixStream::from_std(liveness).map_err(failed)?;
    let (state, receiver) = watch::channel(SupervisorState::Present { epoch: 0 });
    let mut message = format!("ADOPT=1\nROLE={role}\nNAME={name}");
    if let Some(token) = attach_token {
        let digits: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
        message.push_str("\nATTACH_TOKEN=");
        message.push_str(&digits);
    }
    let offer = AdoptionOffer { message, notify: notify.clone() };
    tokio::spawn(follow_supervisors(liveness, offer, state, shutdown.clone()));
    Ok(receiver)
}

fn watchdog_interval() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    match number(env::WATCHDOG_PID) {
        Some(pid) if pid != u64::from(std::process::id()) => None,
        _ => number(env::WATCHDOG_USEC).filter(|&usec| usec > 0).map(Duration::from_micros),
    }
}

async fn feed_watchdog(every: Duration, notify: Notify) {
    loop {
        tokio::time::sleep(every).await;
        if let Err(error) = notify.watchdog() {
            tracing::debug!(%error, "cannot send the watchdog message");
        }
    }
}

struct AdoptionOffer {
    message: String,
    notify: Notify,
}

async fn follow_supervisors(
    mut liveness: UnixStream,
    offer: AdoptionOffer,
    state: watch::Sender<SupervisorState>,
    shutdown: Shutdown,
) {
    for epoch in 1.. {
        wait_for_end_of_file(&mut liveness).await;
        state.send_replace(SupervisorState::Lost);
        if shutdown.is_requested() {
            return;
        }
        tracing::warn!(wait = ?SUCCESSOR_WAIT, "the supervisor is gone, waiting for a successor");
        match offer.find_successor().await {
            Some(adopted) => liveness = adopted,
            None => {
                tracing::warn!("no successor adopted this process, stopping");
                return shutdown.request();
            }
        }
        tracing::info!("adopted by a successor");
        if let Err(error) = offer.notify.repeat_status() {
            tracing::debug!(%error, "cannot repeat the status to the successor");
        }
        state.send_replace(SupervisorState::Present { epoch });
    }
}

/// Reads until end of file or an error.
async fn wait_for_end_of_file(liveness: &mut UnixStream) {
    let mut byte = [0u8; 1];
    while matches!(liveness.read(&mut byte).await, Ok(1)) {}
}

impl AdoptionOffer {
    async fn find_successor(&self) -> Option<UnixStream> {
        let mut wait = SuccessorWait::new(Instant::now());
        while !wait.is_over(Instant::now()) {
            if let Some(adopted) = self.offer_once().await {
                return Some(adopted);
            }
            tokio::time::sleep(OFFER_PERIOD).await;
        }
        None
    }

    async fn offer_once(&self) -> Option<UnixStream> {
        let (ours, theirs) = StdUnixStream::pair().ok()?;
        // A successor that writes crash reports needs the memory of the last log lines too.
        let tail = logging::tail_fd();
        let fds: Vec<_> =
            std::iter::once(theirs.as_raw_fd()).chain(tail.iter().map(AsRawFd::as_raw_fd)).collect();
        // Until a successor binds the path, the send fails at once.
        self.notify.try_send(&self.message, &fds).ok()?;
        drop(theirs);
        ours.set_nonblocking(true).ok()?;
        let mut ours = UnixStream::from_std(ours).ok()?;
        let mut answer = [0u8; 1];
        match tokio::time::timeout(ANSWER_WAIT, ours.read(&mut answer)).await {
            Ok(Ok(1)) if answer[0] == ADOPTED => Some(ours),
            _ => None,
        }
    }
}
