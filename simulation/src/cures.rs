// SPDX-License-Identifier: Apache-2.0

//! Faults that the fleet once had. Without a cure, the simulated drivers do what the event loops
//! did before it. So a test can show that the simulation finds each of these faults.

/// The cure of a known fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cure {
    /// Deadlines are on the running time of the supervisor, and its children's messages come first
    /// (docs/decisions/0027).
    WatchdogRunningTime,
    /// A weight-server waits for workers that may return weights (docs/decisions/0023).
    ReturnedWeights,
    /// A successor compares files, not names (docs/decisions/0024).
    FileIdentity,
    /// A request that crashes workers is refused (docs/decisions/0026).
    Quarantine,
    /// No crash is the last one (docs/decisions/0027).
    EndlessRestarts,
}

impl Cure {
    pub const ALL: [Self; 5] = [
        Self::WatchdogRunningTime,
        Self::ReturnedWeights,
        Self::FileIdentity,
        Self::Quarantine,
        Self::EndlessRestarts,
    ];

    /// How the violation begins that is found without this cure.
    pub fn found_as(self) -> &'static str {
        match self {
            Self::WatchdogRunningTime => "watchdog:",
            Self::ReturnedWeights => "I4:",
            Self::FileIdentity => "takeover:",
            Self::Quarantine => "quarantine:",
            Self::EndlessRestarts => "recovery: worker-",
        }
    }
}
