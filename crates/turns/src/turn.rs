// SPDX-License-Identifier: Apache-2.0

//! Takes turns through a turn file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

use crate::page::{MappedPage, PAGE_BYTES};
use crate::policy::{
    HolderState, PROCESSES_MAX, Ticket, TurnBounds, WaitAction, Waiting, is_turn_over, keeps_turn,
};

#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    #[error("cannot open the turn file {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot lock a slot of the turn file {}", path.display())]
    Lock { path: PathBuf, source: io::Error },
    #[error(
        "{PROCESSES_MAX} processes use the turn file {}; run fewer workers on this device, or set `turns = false`",
        path.display()
    )]
    Full { path: PathBuf },
}

/// One process's access to the turns of a device. Cheap to clone; a process takes one turn at a
/// time.
#[derive(Clone)]
pub struct Turns {
    shared: Arc<SharedTurns>,
}

struct SharedTurns {
    page: MappedPage,
    /// Its lock on the byte of `slot` lives as long as this description: until the process ends.
    file: File,
    slot: usize,
    bounds: TurnBounds,
    start: Instant,
}

/// A turn, which ends when this value is dropped.
pub struct HeldTurn {
    shared: Arc<SharedTurns>,
    ticket: Ticket,
    since: Instant,
}

impl Turns {
    /// Opens the turn file, and creates it if it does not exist.
    pub fn open(path: &Path, bounds: TurnBounds) -> Result<Self, TurnError> {
        let open = || -> io::Result<(File, MappedPage)> {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(path)?;
            file.set_len(PAGE_BYTES)?;
            let page = MappedPage::new(&file)?;
            Ok((file, page))
        };
        let path = path.to_owned();
        let (file, page) = match open() {
            Ok(opened) => opened,
            Err(source) => return Err(TurnError::Open { path, source }),
        };
        for slot in 0..PROCESSES_MAX {
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock_of_slot(slot))) {
                Ok(_) => {
                    // An earlier process may have died with a ticket.
                    page.clear_slot(slot);
                    let shared = SharedTurns { page, file, slot, bounds, start: Instant::now() };
                    return Ok(Self { shared: Arc::new(shared) });
                }
                Err(Errno::EAGAIN | Errno::EACCES) => {}
                Err(error) => return Err(TurnError::Lock { path, source: error.into() }),
            }
        }
        Err(TurnError::Full { path })
    }

    /// Waits for a turn.
    pub fn take(&self) -> HeldTurn {
        let shared = &self.shared;
        let mut ticket = shared.page.take_ticket(shared.slot);
        let mut waiting = Waiting::new(shared.bounds, ticket);
        loop {
            let serving = shared.page.serving();
            match waiting.decide(serving, || shared.holder(serving), shared.start.elapsed()) {
                WaitAction::Compute => {
                    return HeldTurn { shared: shared.clone(), ticket, since: Instant::now() };
                }
                WaitAction::Wait(time) => shared.page.wait(serving, ticket, time),
                WaitAction::Skip => shared.page.serve(serving, serving.next()),
                WaitAction::ServeOwn => shared.page.serve(serving, ticket),
                WaitAction::TakeTicket => {
                    ticket = shared.page.take_ticket(shared.slot);
                    waiting = Waiting::new(shared.bounds, ticket);
                }
            }
        }
    }
}

impl SharedTurns {
    fn holder(&self, ticket: Ticket) -> HolderState {
        let Some(slot) = self.page.slot_with(ticket) else { return HolderState::Unknown };
        if let Some(rest) = self.page.resting(slot) {
            return HolderState::Resting(rest);
        }
        let mut lock = lock_of_slot(slot);
        // The kernel answers with the lock that stands in the way, or with "unlocked".
        match fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock)) {
            Ok(_) if i32::from(lock.l_type) == libc::F_UNLCK => HolderState::Dead,
            // An error says nothing about the holder: the bound of a turn holds.
            Ok(_) | Err(_) => HolderState::Alive,
        }
    }
}

fn lock_of_slot(slot: usize) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: slot as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}

impl HeldTurn {
    /// Whether another process waits and this turn has lasted long enough.
    pub fn is_over(&self) -> bool {
        is_turn_over(self.since.elapsed(), self.waiting())
    }

    /// Whether another process waits.
    pub fn is_awaited(&self) -> bool {
        self.waiting() > 0
    }

    /// Called after a step. Ends the turn, or keeps it for the next step if that is due soon and
    /// the turn is not over. `rest` is the host work between the last two steps.
    pub fn rest(self, rest: Duration) -> Option<Self> {
        if !keeps_turn(self.since.elapsed(), rest, self.waiting()) {
            return None;
        }
        self.shared.page.rest(self.shared.slot, self.ticket);
        Some(self)
    }

    /// Called before the next step. Returns `None` if another process has taken the turn meanwhile.
    pub fn resume(self) -> Option<Self> {
        self.shared.page.end_rest(self.shared.slot, self.ticket).then_some(self)
    }

    fn waiting(&self) -> u32 {
        self.shared.page.tickets_behind(self.ticket)
    }
}

impl Drop for HeldTurn {
    fn drop(&mut self) {
        self.shared.page.clear_slot(self.shared.slot);
        // Another ticket is served if this turn took too long.
        self.shared.page.serve(self.ticket, self.ticket.next());
    }
}
