// SPDX-License-Identifier: Apache-2.0

//! `[supervision]` in `ballast.toml`: when the supervisor replaces a child.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A child sends a watchdog message three times in the watchdog's time. A shorter time would kill
/// healthy children of a busy machine.
const WATCHDOG_MIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct SupervisionConfig {
    /// A running child that is silent for this long is killed and started again.
    #[serde(with = "service::duration")]
    pub watchdog: Duration,
}

impl Default for SupervisionConfig {
    fn default() -> Self {
        Self { watchdog: Duration::from_secs(30) }
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SupervisionConfigError {
    #[error("`supervision.watchdog` is {watchdog:?}, it must be at least {WATCHDOG_MIN:?}")]
    Watchdog { watchdog: Duration },
}

impl SupervisionConfig {
    pub fn check(&self) -> Result<(), SupervisionConfigError> {
        match self.watchdog < WATCHDOG_MIN {
            true => Err(SupervisionConfigError::Watchdog { watchdog: self.watchdog }),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_shorter_than_a_second_is_refused() {
        assert_eq!(SupervisionConfig::default().check(), Ok(()));
        let short = SupervisionConfig { watchdog: Duration::from_millis(200) };
        let refused = short.check().unwrap_err().to_string();
        assert_eq!(refused, "`supervision.watchdog` is 200ms, it must be at least 1s");
    }
}
