// SPDX-License-Identifier: Apache-2.0

//! `[supervision]` in `ballast.toml`: when the supervisor replaces a child, and where it reports
//! crashes.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A child sends a watchdog message three times in the watchdog's time. A shorter time would kill
/// healthy children of a busy machine.
const WATCHDOG_MIN: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct SupervisionConfig {
    /// A running child that is silent for this long is killed and started again.
    #[serde(with = "service::duration")]
    pub watchdog: Duration,
    /// The directory of the crash reports. Without it, none are written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crash_reports: Option<PathBuf>,
}

impl Default for SupervisionConfig {
    fn default() -> Self {
        Self { watchdog: Duration::from_secs(30), crash_reports: None }
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
        let short =
            SupervisionConfig { watchdog: Duration::from_millis(200), ..SupervisionConfig::default() };
        let refused = short.check().unwrap_err().to_string();
        assert_eq!(refused, "`supervision.watchdog` is 200ms, it must be at least 1s");
    }
}
