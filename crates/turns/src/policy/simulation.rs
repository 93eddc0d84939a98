// SPDX-License-Identifier: Apache-2.0

//! Simulation of the policy: processes that take turns at random times, flood, stop, continue and
//! die. A failure prints its seed.
//!
//! 1. While no process stops, at most one computes, and turns have the order of the tickets.
//! 2. A process that wants a turn gets one within the turns before it, whatever the others do.

use proptest::prelude::*;

use super::*;

const PROCESSES: usize = 6;
const BOUNDS: TurnBounds = TurnBounds { turn_max: Duration::from_millis(100) };
const STEPS_PER_SEED: u32 = 4_000;

#[derive(Debug)]
enum ProcessState {
    Idle,
    Waiting { waiting: Waiting, ticket: Ticket, look_at: Duration, since: Duration },
    Computing { ticket: Ticket, ends_at: Duration },
}

struct SimulatedProcess {
    state: ProcessState,
    stopped_until: Duration,
    is_dead: bool,
    turns: u32,
}

struct TurnSimulation {
    random: u64,
    now: Duration,
    next: Ticket,
    serving: Ticket,
    processes: Vec<SimulatedProcess>,
    faults: bool,
    longest_wait: Duration,
}

impl TurnSimulation {
    fn new(seed: u64, faults: bool) -> Self {
        let process = || SimulatedProcess {
            state: ProcessState::Idle,
            stopped_until: Duration::ZERO,
            is_dead: false,
            turns: 0,
        };
        Self {
            random: seed | 1,
            now: Duration::ZERO,
            next: Ticket(u32::MAX - 500),
            serving: Ticket(u32::MAX - 500),
            processes: (0..PROCESSES).map(|_| process()).collect(),
            faults,
            longest_wait: Duration::ZERO,
        }
    }

    /// xorshift64*
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }

    fn holder(&self) -> HolderState {
        let has_ticket = |process: &&SimulatedProcess| match &process.state {
            ProcessState::Idle => false,
            ProcessState::Waiting { ticket, .. } | ProcessState::Computing { ticket, .. } => {
                *ticket == self.serving
            }
        };
        match self.processes.iter().find(has_ticket) {
            None => HolderState::Unknown,
            Some(process) if process.is_dead => HolderState::Dead,
            Some(_) => HolderState::Alive,
        }
    }

    fn take_ticket(&mut self, since: Duration) -> ProcessState {
        let ticket = self.next;
        self.next = ticket.next();
        ProcessState::Waiting { waiting: Waiting::new(BOUNDS, ticket), ticket, look_at: self.now, since }
    }

    /// Lets a process act until it waits or computes.
    fn act(&mut self, index: usize) {
        loop {
            let process = &self.processes[index];
            if process.is_dead || process.stopped_until > self.now {
                return;
            }
            let state = std::mem::replace(&mut self.processes[index].state, ProcessState::Idle);
            let (state, is_done) = self.advance(index, state);
            self.processes[index].state = state;
            if is_done {
                return;
            }
        }
    }

    fn advance(&mut self, index: usize, state: ProcessState) -> (ProcessState, bool) {
        match state {
            // Process 0 floods: it wants its next turn at once.
            ProcessState::Idle if index == 0 || self.below(8) == 0 => (self.take_ticket(self.now), false),
            ProcessState::Idle => (ProcessState::Idle, true),
            ProcessState::Computing { ticket, ends_at } if ends_at <= self.now => {
                if self.serving == ticket {
                    self.serving = ticket.next();
                }
                (ProcessState::Idle, index != 0)
            }
            computing @ ProcessState::Computing { .. } => (computing, true),
            ProcessState::Waiting { mut waiting, ticket, look_at, since } => {
                // Another ticket than the last seen one wakes its own process only.
                if look_at > self.now && self.serving != ticket {
                    return (ProcessState::Waiting { waiting, ticket, look_at, since }, true);
                }
                let holder = self.holder();
                match waiting.decide(self.serving, || holder, self.now) {
                    WaitAction::Compute => {
                        self.longest_wait = self.longest_wait.max(self.now - since);
                        self.processes[index].turns += 1;
                        let ends_at = self.now + Duration::from_millis(1 + self.below(5));
                        (ProcessState::Computing { ticket, ends_at }, true)
                    }
                    WaitAction::Wait(time) => {
                        let look_at = self.now + time;
                        (ProcessState::Waiting { waiting, ticket, look_at, since }, true)
                    }
                    WaitAction::Skip => {
                        self.serving = self.serving.next();
                        (ProcessState::Waiting { waiting, ticket, look_at: self.now, since }, false)
                    }
                    WaitAction::TakeTicket => {
                        assert!(self.faults, "no process was skipped");
                        (self.take_ticket(self.now), false)
                    }
                    WaitAction::ServeOwn => panic!("the counters are valid"),
                }
            }
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(1);
        for index in 0..PROCESSES {
            self.act(index);
        }
        if self.faults {
            let victim = self.below(PROCESSES as u64) as usize;
            match self.below(400) {
                0 => {
                    let stopped = Duration::from_millis(self.below(500));
                    self.processes[victim].stopped_until = self.now + stopped;
                }
                1 => self.processes[victim].is_dead = true,
                2..=10 => {
                    // A new process takes the slot of a dead one.
                    let process = &mut self.processes[victim];
                    if process.is_dead {
                        (process.is_dead, process.state) = (false, ProcessState::Idle);
                    }
                }
                _ => {}
            }
        } else {
            let computing = |p: &&SimulatedProcess| matches!(p.state, ProcessState::Computing { .. });
            assert!(self.processes.iter().filter(computing).count() <= 1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn processes_take_turns_and_none_waits_longer_than_the_turns_before_it(seed in any::<u64>()) {
        let mut simulation = TurnSimulation::new(seed, false);
        (0..STEPS_PER_SEED).for_each(|_| simulation.step());
        // Five turns of at most 5 ms, seen at steps of 1 ms.
        prop_assert!(simulation.longest_wait <= Duration::from_millis(30), "{:?}", simulation.longest_wait);
        prop_assert!(simulation.processes.iter().all(|process| process.turns > 100));
    }

    #[test]
    fn stopped_and_dead_processes_delay_the_others_by_a_bounded_time(seed in any::<u64>()) {
        let mut simulation = TurnSimulation::new(seed, true);
        (0..STEPS_PER_SEED).for_each(|_| simulation.step());
        // Each of the five others may be stopped in its turn, and this one for half a second.
        let bound = (BOUNDS.turn_max + UNKNOWN_MAX) * PROCESSES as u32 + Duration::from_millis(600);
        prop_assert!(simulation.longest_wait <= bound, "{:?}", simulation.longest_wait);
        prop_assert!(simulation.processes.iter().map(|process| process.turns).sum::<u32>() > 100);
    }
}
