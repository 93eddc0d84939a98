// SPDX-License-Identifier: Apache-2.0

//! What a process does that waits for its turn. A plain value: it sees the served ticket, the state
//! of its holder, and the time.
//!
//! 1. The process whose ticket is served computes.
//! 2. A dead holder is skipped at once. A holder that computes for too long is skipped too: it is
//!    stopped, or it hangs.
//! 3. A holder that rests between two steps is skipped after [`REST_MAX`], as it has no work.
//! 4. A ticket that no process has yet may belong to one that is just taking it. It is skipped
//!    after [`UNKNOWN_MAX`].
//! 5. A process that was skipped itself (it was stopped) takes a new ticket.
//! 6. Tickets that are further apart than processes can be are nonsense: the counter is set anew.

use std::time::Duration;

#[cfg(test)]
mod simulation;

/// Processes of one device that may take turns: a page of 4 KiB has so many slots of 64 bytes
/// behind its counters.
pub const PROCESSES_MAX: usize = 62;

/// How often a waiting process looks whether the holder lives. Looking costs a system call.
pub const PROBE_PERIOD: Duration = Duration::from_millis(5);

/// Between taking a ticket and writing it down lie some instructions. On a busy machine the kernel
/// may interrupt a process there.
const UNKNOWN_MAX: Duration = Duration::from_millis(50);

/// How long a turn lasts while one other process waits: some decode steps. The GPU takes some
/// 0.3 ms to change from one process to another (H200), as much as an eighth of a decode step.
const TURN_TIME: Duration = Duration::from_millis(10);

/// A process with more host work than this between two steps passes its turn on after each step.
const REST_EXPECTED_MAX: Duration = Duration::from_micros(400);

/// A resting holder is expected to go on within [`REST_EXPECTED_MAX`].
pub const REST_MAX: Duration = Duration::from_micros(600);

/// Whether a turn that has lasted for `held` is over while `waiting` other processes wait.
pub fn is_turn_over(held: Duration, waiting: u32) -> bool {
    waiting > 0 && held >= TURN_TIME / waiting
}

/// Whether a process keeps its turn, which it has `held`, after a step. `rest` is the host work
/// between its last two steps.
pub fn keeps_turn(held: Duration, rest: Duration, waiting: u32) -> bool {
    rest <= REST_EXPECTED_MAX && !is_turn_over(held, waiting)
}

/// The number of a turn. Numbers wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u32);

impl Ticket {
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// Turns from `served` to this ticket; negative if it has been served or skipped.
    pub fn distance_from(self, served: Self) -> i32 {
        self.0.wrapping_sub(served.0).cast_signed()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnBounds {
    /// The longest turn. A micro-batch of 512 rows takes some 35 ms for an 8B model on an H200, and
    /// 0.4 s for a 70B model.
    pub turn_max: Duration,
}

impl Default for TurnBounds {
    fn default() -> Self {
        Self { turn_max: Duration::from_secs(1) }
    }
}

/// The state of the process that has the served ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolderState {
    Alive,
    Dead,
    /// Between two steps. The number counts its rests.
    Resting(u32),
    /// No process has written down that ticket.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitAction {
    /// It is this process's turn.
    Compute,
    /// Wait for a change, at most this long, then look again.
    Wait(Duration),
    /// Serve the next ticket in place of the holder, then look again.
    Skip,
    /// Take a new ticket: this one was skipped.
    TakeTicket,
    /// Serve this process's ticket now.
    ServeOwn,
}

/// A process that waits for its turn.
#[derive(Debug)]
pub struct Waiting {
    bounds: TurnBounds,
    ticket: Ticket,
    /// The ticket that was served at the last look, and since when.
    served: Option<(Ticket, Duration)>,
    /// The rest that the holder had at the last look, and since when.
    rest: Option<(u32, Duration)>,
}

impl Waiting {
    pub fn new(bounds: TurnBounds, ticket: Ticket) -> Self {
        Self { bounds, ticket, served: None, rest: None }
    }

    /// Decides after a look at the file. `now` never decreases. `holder` is called only if the
    /// answer matters.
    pub fn decide(
        &mut self,
        serving: Ticket,
        holder: impl FnOnce() -> HolderState,
        now: Duration,
    ) -> WaitAction {
        let ahead = self.ticket.distance_from(serving);
        if ahead == 0 {
            return WaitAction::Compute;
        }
        if ahead < 0 {
            // A ticket that was just taken is not far behind.
            let is_nonsense = self.served.is_none() && ahead < -(PROCESSES_MAX as i32);
            return if is_nonsense { WaitAction::ServeOwn } else { WaitAction::TakeTicket };
        }
        if ahead as usize > PROCESSES_MAX {
            return WaitAction::ServeOwn;
        }
        let since = match self.served {
            Some((ticket, since)) if ticket == serving => since,
            _ => now,
        };
        self.served = Some((serving, since));
        let holder = holder();
        self.rest = match (holder, self.rest) {
            (HolderState::Resting(rest), Some((last, since))) if rest == last => Some((rest, since)),
            (HolderState::Resting(rest), _) => Some((rest, now)),
            _ => None,
        };
        let since = self.rest.map_or(since, |(_, since)| since);
        let held = now.saturating_sub(since);
        let bound = match holder {
            HolderState::Dead => return WaitAction::Skip,
            HolderState::Alive => self.bounds.turn_max,
            HolderState::Resting(_) => REST_MAX,
            HolderState::Unknown => UNKNOWN_MAX,
        };
        if held >= bound { WaitAction::Skip } else { WaitAction::Wait(PROBE_PERIOD.min(bound - held)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: TurnBounds = TurnBounds { turn_max: Duration::from_secs(1) };

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn alive() -> HolderState {
        HolderState::Alive
    }

    #[test]
    fn the_served_process_computes_and_the_others_wait() {
        for ticket in [0, 7, u32::MAX] {
            let own = Ticket(ticket);
            let mut waiting = Waiting::new(BOUNDS, own.next());
            assert_eq!(waiting.decide(own, alive, ms(0)), WaitAction::Wait(PROBE_PERIOD));
            assert_eq!(waiting.decide(own.next(), alive, ms(1)), WaitAction::Compute);
        }
    }

    #[test]
    fn a_dead_holder_is_skipped_at_once_and_an_unknown_one_after_a_while() {
        let mut waiting = Waiting::new(BOUNDS, Ticket(9));
        assert_eq!(waiting.decide(Ticket(8), || HolderState::Dead, ms(0)), WaitAction::Skip);
        let unknown = || HolderState::Unknown;
        let mut waiting = Waiting::new(BOUNDS, Ticket(9));
        assert_eq!(waiting.decide(Ticket(8), unknown, ms(0)), WaitAction::Wait(PROBE_PERIOD));
        assert_eq!(waiting.decide(Ticket(8), unknown, ms(47)), WaitAction::Wait(ms(3)));
        assert_eq!(waiting.decide(Ticket(8), unknown, ms(50)), WaitAction::Skip);
    }

    #[test]
    fn a_turn_is_bounded_and_each_turn_anew() {
        let mut waiting = Waiting::new(BOUNDS, Ticket(10));
        assert_eq!(waiting.decide(Ticket(8), alive, ms(100)), WaitAction::Wait(PROBE_PERIOD));
        assert_eq!(waiting.decide(Ticket(8), alive, ms(1099)), WaitAction::Wait(ms(1)));
        assert_eq!(waiting.decide(Ticket(8), alive, ms(1100)), WaitAction::Skip);
        assert_eq!(waiting.decide(Ticket(9), alive, ms(1100)), WaitAction::Wait(PROBE_PERIOD));
        assert_eq!(waiting.decide(Ticket(9), alive, ms(2099)), WaitAction::Wait(ms(1)));
    }

    #[test]
    fn a_holder_that_rests_for_too_long_is_skipped() {
        let resting = |number| move || HolderState::Resting(number);
        let micros = Duration::from_micros;
        let mut waiting = Waiting::new(BOUNDS, Ticket(9));
        assert_eq!(waiting.decide(Ticket(8), resting(1), micros(0)), WaitAction::Wait(REST_MAX));
        assert_eq!(waiting.decide(Ticket(8), resting(1), micros(500)), WaitAction::Wait(micros(100)));
        assert_eq!(waiting.decide(Ticket(8), resting(2), micros(700)), WaitAction::Wait(REST_MAX));
        assert_eq!(waiting.decide(Ticket(8), alive, micros(1000)), WaitAction::Wait(PROBE_PERIOD));
        assert_eq!(waiting.decide(Ticket(8), resting(3), micros(5000)), WaitAction::Wait(REST_MAX));
        assert_eq!(waiting.decide(Ticket(8), resting(3), micros(5600)), WaitAction::Skip);
    }

    #[test]
    fn a_turn_lasts_some_steps_and_less_if_many_wait() {
        let short = Duration::from_micros(80);
        assert!(keeps_turn(ms(5000), short, 0), "no process waits");
        assert!(keeps_turn(ms(9), short, 1));
        assert!(!keeps_turn(ms(10), short, 1));
        assert!(keeps_turn(ms(2), short, 4));
        assert!(!keeps_turn(ms(3), short, 4));
        assert!(!keeps_turn(ms(1), ms(1), 0), "others may compute meanwhile");
    }

    #[test]
    fn a_skipped_process_takes_a_new_ticket() {
        let mut waiting = Waiting::new(BOUNDS, Ticket(8));
        assert_eq!(waiting.decide(Ticket(9), alive, ms(0)), WaitAction::TakeTicket);
    }

    #[test]
    fn a_damaged_counter_stops_no_process() {
        let mut waiting = Waiting::new(BOUNDS, Ticket(1000));
        assert_eq!(waiting.decide(Ticket(1), alive, ms(0)), WaitAction::ServeOwn);
        assert_eq!(waiting.decide(Ticket(5000), alive, ms(0)), WaitAction::ServeOwn);
        let nearest = Ticket(1000 - PROCESSES_MAX as u32);
        assert_eq!(waiting.decide(nearest, alive, ms(0)), WaitAction::Wait(PROBE_PERIOD));
    }
}
